"""Run the tests that a row names in any supported form, and find out why some could not run.

Invariant: correct work is never judged by tests that could not run. If the agent's tests could not be imported or
collected, or their session did not end, the same session on the prepared workspace decides. If the tests cannot run on
the prepared workspace either, `GraderError` is raised; otherwise the work broke them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from palaestra_slots.core.errors import GraderError
from palaestra_slots.core.exits import plural
from palaestra_slots.core.types import Label
from palaestra_slots.sandbox.slot import Slot
from palaestra_suites.grading.harness import Status, TestRun
from palaestra_suites.grading.repository_tests import run_django, run_files
from palaestra_suites.swe.command_tests import run_test_command
from palaestra_suites.swe.swe_row import SweRow, TestNames
from palaestra_suites.toolchain.toolchain import Toolchain

_PATH_PARAMETER = re.compile(r"([^\[]*)\[(/(?!/)[^*]*)\].*")
_LAST_LINE_FIRST = (Status.FAILED, Status.ERROR, Status.XFAIL_CALLED, Status.XFAILED, Status.PASSED, Status.XPASSED,
                    Status.SKIPPED, Status.MISSING)  # fmt: skip
_MISSING_MODULE = re.compile(r"No module named '([\w.]+)'")


async def run_row(
    slot: Slot,
    toolchain: Toolchain,
    row: SweRow,
    repo_dir: str,
    names: Sequence[str],
    *,
    timeout_s: float,
    watching: bool = False,
) -> TestRun:
    """Run these tests of a row. In the result, `statuses` lists each test under the name that the row uses. Raises
    `GraderError`."""
    if row.recipe is not None:
        return await run_test_command(slot, toolchain, row, repo_dir, names, timeout_s=timeout_s)
    if row.names is TestNames.UNITTEST:
        files = row.test_files
        return await run_django(slot, toolchain, repo_dir, files, names, timeout_s=timeout_s, watching=watching)
    run = await run_files(slot, toolchain, repo_dir, row.test_files, timeout_s=timeout_s, watching=watching)
    statuses, known_as = dict(run.statuses), dict[str, tuple[str, ...]]()
    for name, tests in meant(names, run.statuses):
        statuses[name] = _listed_status([run.statuses[test] for test in tests])
        for test in tests:
            known_as[test] = (*known_as.get(test, ()), name)
    return replace(run, statuses=statuses, known_as=known_as)


def meant(names: Iterable[str], node_ids: Collection[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each name with the node ids that it stands for: its own node id or, if there is none, those that a log
    parser of SWE-bench lists under this name."""
    printed: dict[str, list[str]] = {}
    for node_id in node_ids if not set(names) <= set(node_ids) else ():
        for shown in _printed(node_id):
            printed.setdefault(shown, []).append(node_id)
    for name in names:
        yield name, [name] if name in node_ids else printed.get(name) or _of_cut(name, node_ids)


def _of_cut(name: str, node_ids: Collection[str]) -> list[str]:
    """Return the node ids that begin with a name that was cut within its parameters."""
    return [test for test in node_ids if test.startswith(name)] if name.count("[") > name.count("]") else []


def _printed(node_id: str) -> set[str]:
    """Return the names under which a test may be listed: cut at a space, with the last part of a path as its parameter,
    with the value of a mouse button, and as a function. Source: `swebench.harness.log_parsers.python` (5.0.2)."""
    cut = node_id.split()[0]
    shown = {cut, cut.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3")}
    if (path := _PATH_PARAMETER.fullmatch(cut)) is not None:
        shown.add(f"{path[1]}[/{path[2].rpartition('/')[2]}]")
    function = node_id.rpartition("::")[2]
    return shown | {function, function.partition("[")[0]}


def with_node_ids(row: SweRow, run: TestRun) -> SweRow:
    """Return the row with its names replaced by the node ids of `run` that they stand for."""

    def exact(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(each for name in names for each in run_as.get(name, ())))

    run_as: dict[str, list[str]] = {}
    for node_id, names in run.known_as.items():
        for name in names:
            run_as.setdefault(name, []).append(node_id)

    failing, passing = exact(row.fail_to_pass), exact(row.pass_to_pass)
    return replace(row, names=TestNames.PYTEST, fail_to_pass=failing, pass_to_pass=passing)


def _listed_status(statuses: Sequence[Status]) -> Status:
    """Return the status of tests that a log lists under one name. The last line counts: failed tests come after passed
    ones, and the lines of skipped tests name no test."""
    return min(statuses, key=_LAST_LINE_FIRST.index, default=Status.MISSING)


def needs_comparison(row: SweRow, run: TestRun) -> bool:
    """Return whether tests could not run, so that the same tests on the prepared workspace must show the cause."""
    unclear = row.excused | {Status.MISSING}
    return not run.complete or any(run.statuses.get(name, Status.MISSING) in unclear for name in row.node_ids)


def compare(row: SweRow, run: TestRun, prepared: TestRun, files: Collection[str]) -> TestRun:
    """Correct the agent's run with the same session on the prepared workspace, whose files are `files`.

    A test that must keep passing and has the same excused status in both sessions counts as expected to fail. Raises
    `GraderError` if tests could not run in either session.
    """
    if not prepared.complete:
        prepared.check_ended(f"{row.instance_id}, on the prepared workspace")
        raise GraderError(
            f"{row.instance_id}: its tests do not run on the prepared workspace:\n{prepared.output[-1500:]}"
        )
    statuses: dict[str, Status] = dict(run.statuses)
    for name in row.pass_to_pass:
        before, after = prepared.statuses.get(name, Status.MISSING), run.statuses.get(name, Status.MISSING)
        if after in row.excused and before is after:
            statuses[name] = Status.XFAILED
        if after is Status.MISSING and before is Status.MISSING:
            raise GraderError(f"{row.instance_id}: {name} does not run on the prepared workspace:{_why(prepared)}")
    missing = _missing(run.collect_errors) & _missing(prepared.collect_errors)
    if packages := [module for module in sorted(missing) if not _is_own(module, files, row)]:
        raise GraderError(f"{row.instance_id}: {not_installed(packages)}")
    return replace(run, statuses=statuses)


def before_the_fix(row: SweRow, run: TestRun) -> TestRun:
    """Return a run on the prepared workspace in which a name that stands for several tests has passed if one of them
    has: the published log showed one of them, and another may be the bug itself."""
    passed: set[str] = set()
    for test, names in run.known_as.items():
        if run.statuses.get(test) is Status.PASSED:
            passed.update(names)
    kept = {name: Status.PASSED for name in row.pass_to_pass if name in passed}
    return replace(run, statuses={**run.statuses, **kept})


def excuses(row: SweRow, run: TestRun) -> list[Label]:
    """Return labels for what SWE-bench judges differently in the same run: tests that only one verdict accepts, and a
    test command that failed although no test failed."""
    official, guarded = row.official(run), row.verdict(run)
    if official.resolved == guarded.resolved or not guarded.complete:
        return []
    if len(official.not_passed) == len(row.node_ids):
        return [Label("command_failed", f"the tests passed, but their command has the exit status {run.exit_status}")]
    names = set(official.not_passed) ^ set(guarded.not_passed)
    first = min(names)
    evidence = f"{plural(len(names), 'test')} with another verdict, {first} first ({run.statuses.get(first)})"
    return [Label("tests_excused", evidence)]


def missing_packages(run: TestRun, row: SweRow) -> list[str]:
    """Return the modules that tests import, that are not installed, and that are not part of the repository."""
    return [module for module in sorted(_missing(run.collect_errors)) if not _is_own(module, (), row)]


def not_installed(packages: Sequence[str]) -> str:
    """Return a sentence about modules that tests import."""
    return (
        f"its tests import {', '.join(packages)}, which pip did not install; add packages with requirements or "
        "repo_requirements"
    )


def _why(run: TestRun) -> str:
    return "".join(f"\n{text[-1500:]}" for text in list(run.collect_errors.values())[:1]) or f"\n{run.output[-1500:]}"


def _missing(errors: Mapping[str, str]) -> set[str]:
    """Return the top-level modules that could not be imported."""
    return {found.partition(".")[0] for text in errors.values() for found in _MISSING_MODULE.findall(text)}


def _is_own(module: str, files: Collection[str], row: SweRow) -> bool:
    """Return whether a module belongs to the repository. If it does, the correct fix may add the missing part of the
    module."""
    parts = {part.removesuffix(".py") for path in files for part in path.split("/")}
    return module in parts or re.search(rf"\b{re.escape(module)}(?:/|\.py\b)", row.patch) is not None
