"""Make a dataset row from a pinned bug: inject it, run the tests, and describe the failures.

PASS_TO_PASS has at most `MAX_PASS_TO_PASS` names, chosen by their hash so that every build names the same tests. All of
them are in the test files that the manifest pins with the bug.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from palaestra_slots.core.errors import TaskError
from palaestra_slots.core.types import JSON
from palaestra_suites.grading.harness import FailedTest, Status, TestRun
from palaestra_suites.python_source import SourceEdit, apply_edits
from palaestra_suites.swe import unified_diff
from palaestra_suites.swe.authoring.manifest import PinnedMutation, PinnedPackage
from palaestra_suites.swe.authoring.package_trial import PackageTrial
from palaestra_suites.swe.authoring.problem_statement import mentions, problem_statement
from palaestra_suites.swe.authoring.sdist import SourceFile
from palaestra_suites.swe.swe_row import RowKind
from palaestra_suites.toolchain.toolchain import Install

ROW_SCHEMA = "palaestra.swe-row/1"
MAX_PASS_TO_PASS = 200
BASE_TIMEOUT_S = 300.0
MUTATED_TIMEOUT_S = 60.0
_CREATED_AT = "2000-01-01T00:00:00+00:00"
_UNSEEN = FailedTest("AssertionError", "", "", 0)
_BROKEN = (Status.FAILED, Status.ERROR)


@dataclass(frozen=True, slots=True)
class Repository:
    """A package as a repository. `repo_path` is the path of the bare repository as rows name it, and `commit` is the
    only commit."""

    package: PinnedPackage
    files: Mapping[str, SourceFile]
    repo_path: str
    commit: str
    install: Install

    def text(self, path: str) -> str:
        return self.files[path].data.decode("utf-8")


@dataclass(frozen=True, slots=True)
class Flips:
    """The tests that fail with a bug (reported as failed, not missing), and those that keep passing."""

    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]


def flips(base: TestRun, mutated: TestRun, flaky: Sequence[str] = ()) -> Flips:
    """Return the tests that the bug breaks, and at most `MAX_PASS_TO_PASS` of the tests that keep passing. Flaky tests
    are left out. Raises `TaskError` if pytest did not finish with the bug."""
    stable = [name for name, status in base.statuses.items() if status is Status.PASSED and name not in set(flaky)]
    if not mutated.complete:
        raise TaskError("the tests do not finish with the bug")
    here = [name for name in stable if name in mutated.statuses]
    broken = tuple(sorted(name for name in here if mutated.statuses[name] in _BROKEN))
    passing = [name for name in here if mutated.statuses[name] is Status.PASSED]
    return Flips(broken, tuple(sorted(sorted(passing, key=_place)[:MAX_PASS_TO_PASS])))


def apply_pinned(repository: Repository, mutation: PinnedMutation) -> str:
    """Return the text of the file with the bug. Raises `TaskError` if the pinned text is not at the pinned position."""
    if mutation.path not in repository.files:
        raise TaskError(f"{mutation.id}: {repository.package.name} has no file {mutation.path}")
    data = repository.files[mutation.path].data
    if data[mutation.start : mutation.end].decode("utf-8", "replace") != mutation.before:
        raise TaskError(f"{mutation.id}: {mutation.path} does not contain {mutation.before!r} at byte {mutation.start}")
    return apply_edits(data.decode(), [SourceEdit(mutation.start, mutation.end, mutation.replacement)])


async def make_row(
    trial: PackageTrial, repository: Repository, mutation: PinnedMutation, base: TestRun
) -> dict[str, JSON]:
    """Run the pinned tests with the bug and make the row. Raises `TaskError` if no test detects the bug."""
    after = apply_pinned(repository, mutation)
    run = await trial.run(mutation.tests, timeout_s=MUTATED_TIMEOUT_S, changed={mutation.path: after})
    within = {name: status for name, status in base.statuses.items() if name.split("::", 1)[0] in set(mutation.tests)}
    found = flips(TestRun(within, complete=True), run, repository.package.flaky)
    if not found.fail_to_pass:
        raise TaskError(f"{mutation.id}: no test of {', '.join(mutation.tests)} detects the bug here")
    return row(repository, mutation, after, found, run)


def row(repository: Repository, mutation: PinnedMutation, after: str, found: Flips, run: TestRun) -> dict[str, JSON]:
    """Return one row: the columns of the SWE-smith schema, followed by Palaestra's columns. Raises `TaskError` if the
    problem statement contains the path of the changed file."""
    package = repository.package
    failures = {name: run.failures.get(name, _UNSEEN) for name in found.fail_to_pass}
    paths = {*(failure.path for failure in failures.values()), *(name.partition("::")[0] for name in failures)}
    texts = {path: repository.text(path) for path in sorted(paths) if path in repository.files}
    statement = problem_statement(package.name, failures, texts)
    if leaked := mentions(statement, [mutation.path]):
        raise TaskError(f"{mutation.id}: the problem statement names {leaked[0]!r}")
    return {
        "instance_id": f"pypi__{package.name}.{repository.commit[:8]}.{mutation.id}",
        "repo": f"pypi/{package.name}",
        "base_commit": repository.commit,
        "patch": unified_diff.between(mutation.path, repository.text(mutation.path), after),
        "problem_statement": statement,
        "FAIL_TO_PASS": list(found.fail_to_pass),
        "PASS_TO_PASS": list(found.pass_to_pass),
        "image_name": "",
        "created_at": _CREATED_AT,
        "schema": ROW_SCHEMA,
        "kind": RowKind.SMITH.value,
        "version": package.version,
        "repo_path": repository.repo_path,
        "install": repository.install.to_json(),
    }


def _place(node_id: str) -> str:
    return hashlib.sha256(node_id.encode()).hexdigest()
