"""One software-engineering task, parsed from a dataset row of any of the common schemas.

- *SWE-smith*: `patch` introduces the bug, so the reference solution is its reverse; the repository has the tests.
- *SWE-bench*: `patch` is the fix, and `test_patch` adds the tests.
- *oracle*: the row names a commit and tests, without a patch.

Invariant: a `SweRow` can be graded. It names at least one test that must start to pass, and every name is a pytest node
id inside the repository.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from palaestra.core.errors import TaskError
from palaestra.core.types import JSON
from palaestra.envs.datasets import read_rows
from palaestra.suites.grading.run_tests import Status, TestRun
from palaestra.suites.grading.toolchain import Install
from palaestra.suites.swe import unified_diff
from palaestra.suites.task_files import RowFields

_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")


class RowKind(StrEnum):
    """The schema of a row, which decides what `patch` means."""

    SMITH = "swe-smith"
    BENCH = "swe-bench"
    ORACLE = "oracle"


@dataclass(frozen=True, slots=True)
class RowVerdict:
    """The result of a row's tests as (passed, named) counts. `not_passed` maps the others to their status."""

    fail_to_pass: tuple[int, int]
    pass_to_pass: tuple[int, int]
    complete: bool
    not_passed: Mapping[str, Status]

    @property
    def resolved(self) -> bool:
        """Every named test passed, in a session that ended by itself."""
        return self.complete and not self.not_passed


@dataclass(frozen=True, slots=True)
class SweRow:
    """One task. `repo` is `owner/name`; `repo_path` is a local repository to use instead."""

    kind: RowKind
    instance_id: str
    repo: str
    base_commit: str
    problem_statement: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    text: str = ""
    patch: str = ""
    test_patch: str = ""
    install: Install = field(default_factory=Install)
    repo_path: str | None = None
    image_name: str = ""
    created_at: str = ""

    @property
    def bug_patch(self) -> str:
        """The diff from `base_commit` to the agent's tree; empty if they are the same."""
        return self.patch if self.kind is RowKind.SMITH else ""

    @property
    def fix_patch(self) -> str:
        """The reference solution as a diff against the agent's tree; empty if the row has none."""
        if self.kind is RowKind.SMITH:
            return unified_diff.reverse(self.patch)
        return self.patch

    @property
    def node_ids(self) -> tuple[str, ...]:
        """Every named test once: those that must start to pass, then those that must keep passing."""
        return tuple(dict.fromkeys((*self.fail_to_pass, *self.pass_to_pass)))

    @property
    def test_files(self) -> tuple[str, ...]:
        """The files of the named tests, sorted."""
        return tuple(sorted({node_id.split("::", 1)[0] for node_id in self.node_ids}))

    def verdict(self, run: TestRun) -> RowVerdict:
        """Judge a run of this row's tests."""
        bad = {name: run.statuses.get(name, Status.MISSING) for name in self.node_ids}
        return RowVerdict(
            fail_to_pass=(run.passed(self.fail_to_pass), len(self.fail_to_pass)),
            pass_to_pass=(run.passed(self.pass_to_pass), len(self.pass_to_pass)),
            complete=run.complete,
            not_passed={name: status for name, status in bad.items() if status is not Status.PASSED},
        )


def load_rows(
    source: str | Path, *, split: str = "train", fields: Mapping[str, str] | None = None
) -> Iterator[SweRow | TaskError]:
    """The rows of a dataset, with an error in place of each bad one; see `datasets.read_rows`.

    A relative `repo_path` is relative to the folder of the source.
    """
    for number, raw in read_rows(source, split=split, fields=fields):
        try:
            if isinstance(raw, TaskError):
                yield TaskError(f"row {number}: {raw}")
            else:
                yield _locate(parse_row(raw, number), Path(source))
        except TaskError as error:
            yield error


def _locate(row: SweRow, source: Path) -> SweRow:
    if row.repo_path is None or Path(row.repo_path).is_absolute():
        return row
    folder = source if source.is_dir() else source.parent
    return replace(row, repo_path=str((folder / row.repo_path).resolve()))


def parse_row(raw: Mapping[str, JSON], number: int = 0) -> SweRow:
    """Parse one row. `number` is its place in its file. Raises `TaskError` that names the row and the column."""
    name = str(raw.get("instance_id") or f"row {number}")
    try:
        return _parse(RowFields(raw))
    except ValueError as problem:  # a TaskError or DiffError
        raise TaskError(f"row {number} ({name}): {problem}") from problem


def _parse(row: RowFields) -> SweRow:
    kind = _kind(row)
    instance_id = row.required("instance_id")
    if kind is not RowKind.ORACLE:
        unified_diff.parse(row.required("patch"))
    if kind is RowKind.BENCH:
        unified_diff.parse(row.required("test_patch"))
    text = row.optional("text")
    smith_branch = kind is RowKind.SMITH and not row.optional("base_commit")
    commit = instance_id if smith_branch else row.required("base_commit")
    return SweRow(
        kind=kind,
        instance_id=instance_id,
        repo=_matching(_REPO, row.required("repo"), "repo must be owner/name"),
        base_commit=_matching(_REVISION, commit, "bad base_commit"),
        problem_statement=row.optional("problem_statement") or text or row.required("problem_statement"),
        text=text,
        patch=row.optional("patch"),
        test_patch=row.optional("test_patch"),
        fail_to_pass=_node_ids(row, "FAIL_TO_PASS", required=True),
        pass_to_pass=_node_ids(row, "PASS_TO_PASS", required=False),
        install=Install.parse(row.decoded("install")),
        repo_path=row.optional("repo_path") or None,
        image_name=row.optional("image_name"),
        created_at=row.optional("created_at"),
    )


def _kind(row: RowFields) -> RowKind:
    if row.optional("kind"):
        return RowKind(row.optional("kind"))
    if row.optional("test_patch"):
        return RowKind.BENCH
    return RowKind.SMITH if row.optional("patch") else RowKind.ORACLE


def _matching(pattern: re.Pattern[str], value: str, complaint: str) -> str:
    """A value that may become part of a path or an argument of git: no traversal, no leading dash."""
    if not pattern.fullmatch(value) or ".." in value:
        raise TaskError(f"{complaint}: {value!r}")
    return value


def _node_ids(row: RowFields, column: str, *, required: bool) -> tuple[str, ...]:
    node_ids = row.texts(column)
    if required and not node_ids:
        raise TaskError(f"{row.key(column)} is missing or empty: the task needs a test that fails")
    for node_id in node_ids:
        path, separator, _ = node_id.partition("::")
        if not separator or path.startswith("/") or ".." in path.split("/"):
            raise TaskError(f"{row.key(column)}: {node_id!r} is not a pytest node id (path::test)")
    return node_ids
