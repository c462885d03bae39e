"""Run the tests that a row names in any supported form, and find out why some could not run.

Invariant: correct work is never judged by tests that could not run. If the agent's tests could not be imported or
collected, or their session did not end, the same session on the prepared workspace decides. If the tests cannot run on
the prepared workspace either, `GraderError` is raised; otherwise the work broke them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from palaestra.core.errors import GraderError
from palaestra.sandbox.slot import Slot
from palaestra.suites.grading.django_tests import run_django
from palaestra.suites.grading.run_tests import Status, TestRun, run_files, run_tests
from palaestra.suites.grading.toolchain import Toolchain
from palaestra.suites.swe.swe_row import RIGHT, SweRow, TestNames

_MISSING_MODULE = re.compile(r"No module named '([\w.]+)'")


class _TestsCannotRun(GraderError):
    """Tests do not run on the prepared workspace."""

    certain = True


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
    if row.names is TestNames.UNITTEST:
        files = row.test_files
        return await run_django(slot, toolchain, repo_dir, files, names, timeout_s=timeout_s, watching=watching)
    if not any(map(is_loose, names)):
        return await run_tests(slot, toolchain, repo_dir, names, timeout_s=timeout_s, watching=watching)
    run = await run_files(slot, toolchain, repo_dir, row.test_files, timeout_s=timeout_s, watching=watching)
    found = {name: [run.statuses[test] for test in meant(name, run.statuses)] for name in names}
    statuses = {name: _worst(each) if each else Status.MISSING for name, each in found.items()}
    return replace(run, statuses={**run.statuses, **statuses})


def is_loose(name: str) -> bool:
    """Return whether a name is not a complete node id: it is a function without its file, or a node id that was cut at
    a space."""
    return "::" not in name or ("[" in name and not name.endswith("]"))


def meant(name: str, node_ids: Collection[str]) -> list[str]:
    """Return the node ids that a name stands for."""
    if not is_loose(name):
        return [name] if name in node_ids else []
    if "::" in name:
        return [each for each in node_ids if each == name or each.startswith(f"{name} ")]
    return [each for each in node_ids if each.rpartition("::")[2] == name or _function(each) == name]


def with_node_ids(row: SweRow, run: TestRun) -> SweRow:
    """Return the row with its names replaced by the node ids of `run` that they stand for."""

    def exact(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(each for name in names for each in _found(name, run) if "::" in each))

    failing, passing = exact(row.fail_to_pass), exact(row.pass_to_pass)
    return replace(row, names=TestNames.PYTEST, fail_to_pass=failing, pass_to_pass=passing)


def _found(name: str, run: TestRun) -> list[str]:
    shown = [node_id for node_id, names in run.known_as.items() if name in names]
    return shown or meant(name, run.statuses)


def _function(node_id: str) -> str:
    return node_id.partition("[")[0].rpartition("::")[2]


def _worst(statuses: Sequence[Status]) -> Status:
    """Return the first status that does not count as passed, or else the first status."""
    return next((status for status in statuses if status not in RIGHT), statuses[0])


def needs_comparison(run: TestRun, names: Collection[str]) -> bool:
    """Return whether tests could not run, so that the same tests on the prepared workspace must show the cause."""
    unclear = (Status.MISSING, Status.XFAIL_CALLED)
    return not run.complete or any(run.statuses.get(name, Status.MISSING) in unclear for name in names)


def compare(row: SweRow, run: TestRun, prepared: TestRun, files: Collection[str]) -> TestRun:
    """Correct the agent's run with the same session on the prepared workspace, whose files are `files`.

    A test that must keep passing and calls `pytest.xfail` in both sessions counts as expected to fail. Raises
    `GraderError` if tests could not run in either session.
    """
    if not prepared.complete:
        raise _TestsCannotRun(
            f"{row.instance_id}: its tests do not run on the prepared workspace:\n{prepared.output[-1500:]}"
        )
    statuses: dict[str, Status] = dict(run.statuses)
    for name in row.pass_to_pass:
        before, after = prepared.statuses.get(name, Status.MISSING), run.statuses.get(name, Status.MISSING)
        if after is Status.XFAIL_CALLED and before is after:
            statuses[name] = Status.XFAILED
        if after is Status.MISSING and before is Status.MISSING:
            raise _TestsCannotRun(f"{row.instance_id}: {name} does not run on the prepared workspace:{_why(prepared)}")
    missing = _missing(run.collect_errors) & _missing(prepared.collect_errors)
    if packages := [module for module in sorted(missing) if not _is_own(module, files, row)]:
        raise _TestsCannotRun(f"{row.instance_id}: {_not_installed(packages)}")
    return replace(run, statuses=statuses)


def name_missing_packages(run: TestRun, row: SweRow) -> str:
    """Return a sentence about the packages that tests import and that are not installed, or an empty string if there
    are none."""
    packages = [module for module in sorted(_missing(run.collect_errors)) if not _is_own(module, (), row)]
    return _not_installed(packages) if packages else ""


def _not_installed(packages: Sequence[str]) -> str:
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
