"""One software-engineering task as a data set row describes it, whichever of the common schemas the row has.

Three schemas are understood. In a *SWE-smith* row `patch` introduces the bug, so the reference solution is its
reverse and the tests are in the repository already. In a *SWE-bench* row `patch` is the fix and `test_patch` brings the
tests. An *oracle* row names commit and tests and has no patch. Reading files is not done here (see `sources.py`).

Invariant: a `SweRow` that exists can be graded: it names at least one test that must start to pass, and every name is a
pytest node id inside the repository.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from palaestra.core.errors import TaskError
from palaestra.core.types import JSON
from palaestra.suites.swe import unified_diff

_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")


class RowKind(StrEnum):
    """Which schema a row follows; it decides what `patch` means."""

    SMITH = "swe-smith"
    BENCH = "swe-bench"
    ORACLE = "oracle"


@dataclass(frozen=True, slots=True)
class Install:
    """What the tests of a repository need.

    `requirements` are pinned and come from outside the workspace, read-only; `python_path` are directories of the
    repository that are importable; `pytest_args` go before the tests. `editable` asks for a virtual environment with
    the repository installed in it, made once per commit, which is how rows of the public data sets run.
    """

    requirements: tuple[str, ...] = ()
    python_path: tuple[str, ...] = ()
    pytest_args: tuple[str, ...] = ()
    editable: bool = False

    @classmethod
    def parse(cls, raw: JSON) -> Install:
        """From a row's `install` column. None is the default of public rows. Raises ValueError on another shape."""
        if raw is None:
            return cls(editable=True)
        if isinstance(raw, str):
            raw = json.loads(raw)
        if not isinstance(raw, Mapping) or set(raw) - {"requirements", "python_path", "pytest_args", "editable"}:
            raise ValueError("install must be an object with requirements, python_path, pytest_args, editable")
        lists = {key: _strings(raw.get(key) or []) for key in ("requirements", "python_path", "pytest_args")}
        return cls(**lists, editable=bool(raw.get("editable", False)))

    def to_json(self) -> dict[str, JSON]:
        """The column of a row that `parse` reads back."""
        return {
            "requirements": list(self.requirements),
            "python_path": list(self.python_path),
            "pytest_args": list(self.pytest_args),
            "editable": self.editable,
        }


@dataclass(frozen=True, slots=True)
class SweRow:
    """One task. `repo` is `owner/name`; `repo_path` is a local repository that stands in for it, if the row has one."""

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
        """The diff that turns the tree of `base_commit` into the tree the agent gets; empty when they are the same."""
        return self.patch if self.kind is RowKind.SMITH else ""

    @property
    def fix_patch(self) -> str:
        """The reference solution as a diff against the tree the agent gets; empty when the row has none."""
        if self.kind is RowKind.SMITH:
            return unified_diff.reverse(self.patch)
        return self.patch

    @property
    def node_ids(self) -> tuple[str, ...]:
        """Every named test once: those that must start to pass, then those that must go on passing."""
        return tuple(dict.fromkeys((*self.fail_to_pass, *self.pass_to_pass)))

    @property
    def test_files(self) -> tuple[str, ...]:
        """The files of the named tests, sorted."""
        return tuple(sorted({node_id.split("::", 1)[0] for node_id in self.node_ids}))


def parse_row(raw: Mapping[str, JSON], number: int = 0) -> SweRow:
    """Read one row. `number` is its place in its file, for messages. Raises `TaskError` naming row and column."""
    name = str(raw.get("instance_id") or f"row {number}")
    try:
        return _parse(raw)
    except (KeyError, ValueError, TypeError, RecursionError) as problem:
        what = f"column {problem.args[0]!r} is missing or empty" if isinstance(problem, KeyError) else str(problem)
        raise TaskError(f"row {number} ({name}): {what}") from problem


def _parse(raw: Mapping[str, JSON]) -> SweRow:
    kind = _kind(raw)
    instance_id = _required(raw, "instance_id")
    patch = str(raw.get("patch") or "")
    if kind is not RowKind.ORACLE:
        unified_diff.parse(_required(raw, "patch"))
    if kind is RowKind.BENCH:
        unified_diff.parse(_required(raw, "test_patch"))
    text = str(raw.get("text") or "")
    fallback = {"base_commit": instance_id} if kind is RowKind.SMITH else {}
    return SweRow(
        kind=kind,
        instance_id=instance_id,
        repo=_matching(_REPO, _required(raw, "repo"), "repo must be owner/name"),
        base_commit=_matching(_REVISION, _required({**fallback, **_present(raw)}, "base_commit"), "bad base_commit"),
        problem_statement=str(raw.get("problem_statement") or "") or text or _required(raw, "problem_statement"),
        text=text,
        patch=patch,
        test_patch=str(raw.get("test_patch") or ""),
        fail_to_pass=_node_ids(raw, "FAIL_TO_PASS", required=True),
        pass_to_pass=_node_ids(raw, "PASS_TO_PASS", required=False),
        install=Install.parse(raw.get("install")),
        repo_path=str(raw["repo_path"]) if raw.get("repo_path") else None,
        image_name=str(raw.get("image_name") or ""),
        created_at=str(raw.get("created_at") or ""),
    )


def _kind(raw: Mapping[str, JSON]) -> RowKind:
    if raw.get("kind"):
        return RowKind(raw["kind"])
    if raw.get("test_patch"):
        return RowKind.BENCH
    return RowKind.SMITH if raw.get("patch") else RowKind.ORACLE


def _present(raw: Mapping[str, JSON]) -> dict[str, JSON]:
    return {key: value for key, value in raw.items() if value}


def _required(raw: Mapping[str, JSON], column: str) -> str:
    value = raw.get(column)
    if not isinstance(value, str) or not value.strip():
        raise KeyError(column)
    return value


def _matching(pattern: re.Pattern[str], value: str, complaint: str) -> str:
    """A value that may become part of a path or an argument of git: no traversal, no leading dash."""
    if not pattern.fullmatch(value) or ".." in value:
        raise ValueError(f"{complaint}: {value!r}")
    return value


def _strings(value: JSON) -> tuple[str, ...]:
    """A list of strings, or the JSON text of one (the public sets hold both; Parquet readers give arrays)."""
    if isinstance(value, str):
        value = json.loads(value)
    items = list(value)
    if not all(isinstance(item, str) for item in items):
        raise ValueError("expected a list of strings")
    return tuple(items)


def _node_ids(raw: Mapping[str, JSON], column: str, *, required: bool) -> tuple[str, ...]:
    if raw.get(column) is None:
        if required:
            raise KeyError(column)
        return ()
    try:
        node_ids = _strings(raw[column])
    except (ValueError, TypeError) as problem:
        raise ValueError(f"column {column!r} is not a list of test names: {problem}") from None
    if required and not node_ids:
        raise ValueError(f"column {column!r} is empty: the task could not be failed")
    for node_id in node_ids:
        path, separator, _ = node_id.partition("::")
        if not separator or path.startswith("/") or ".." in path.split("/"):
            raise ValueError(f"column {column!r}: {node_id!r} is not a pytest node id (path::test)")
    return node_ids
