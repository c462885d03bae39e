"""Parse software-engineering tasks from dataset rows in any of the common schemas.

- *SWE-smith*: `patch` introduces the bug, so the reference solution is its reverse; the repository has the tests. A row
  without `base_commit` refers to the branch with the name of its `instance_id`.
- *SWE-bench* (also SWE-rebench): `patch` is the fix, and `test_patch` adds the tests.
- *oracle*: the row names a commit and tests, without a patch.

Rows of SWE-bench Pro, SWE-Gym, SWE-bench-Live and SWE-rebench are SWE-bench rows with further columns, which
`published_columns.py` translates.

Invariant: a `SweRow` can be graded. It names at least one test that must start to pass, and its test files lie inside
the repository. `docs/environments/swe_smith_oracle.md` lists every column.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path, PurePosixPath

from palaestra.envs.datasets import read_rows
from palaestra_slots.core.errors import TaskError
from palaestra_slots.core.exits import plural
from palaestra_slots.core.types import JSON
from palaestra_slots.images.task_files import RowFields
from palaestra_suites.grading.harness import FAILED, Status, TestRun
from palaestra_suites.swe import unified_diff
from palaestra_suites.swe.install_recipe import install_of
from palaestra_suites.swe.languages import PYTHON, language_of_files
from palaestra_suites.swe.published_columns import published
from palaestra_suites.swe.row_recipe import RowRecipe, language_of, parser_name, recipe_of
from palaestra_suites.toolchain.toolchain import Install

_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_FUNCTION = re.compile(r"\w+(?:\[.*\])?")
_UNITTEST = re.compile(r"(\w+) \(([\w.]+)\)")
_NODE_ID = re.compile(r"[^\s:]+::")
_PROGRESS = re.compile(r"\[(?: *\d{1,3}%\])?")
_PYTEST_FILES = (".py", ".pyx", ".rst", ".txt", ".md")
"""The endings of files that pytest collects tests from: doctests may be in documents."""
_log = logging.getLogger(__name__)
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")


class RowKind(StrEnum):
    """The schema of a row, which decides what `patch` means."""

    SMITH = "swe-smith"
    BENCH = "swe-bench"
    ORACLE = "oracle"


class TestNames(StrEnum):
    """The form in which a row names its tests. Sources: `swebench.harness.log_parsers` (5.0.2), and SWE-rebench's log
    parsers."""

    __test__ = False

    PYTEST = "pytest"
    """Node ids. A node id that was cut at a space (`path::test[a`) stands for all node ids that begin with it."""
    FUNCTIONS = "functions"
    """Functions (`test_a`) in the files of `test_patch`, as sympy's runner prints them."""
    UNITTEST = "unittest"
    """`test_a (module.Class)` or the first line of a docstring, as Django's runner prints them."""
    LOG = "log"
    """As the row's log parser prints them, for rows in other languages than Python."""


_REPOSITORIES = {"django/django": TestNames.UNITTEST, "sympy/sympy": TestNames.FUNCTIONS}
"""Source: `MAP_REPO_TO_PARSER` of `swebench.harness.log_parsers`."""
_PARSERS = {"django": TestNames.UNITTEST, "sympy": TestNames.FUNCTIONS, "pytest": TestNames.PYTEST}
"""Words in the names of log parsers. SWE-bench names some parsers after the repository; those repositories use
pytest."""
for _repository in ("astroid", "flask", "marshmallow", "matplotlib", "pvlib", "pydicom", "pylint", "requests", "scikit",
                    "seaborn", "sphinx", "sqlfluff", "xarray", "astropy"):  # fmt: skip
    _PARSERS[_repository] = TestNames.PYTEST


@dataclass(frozen=True, slots=True)
class RowVerdict:
    """The result of a row's tests as (passed, named) counts. `not_passed` maps failing tests to their status."""

    fail_to_pass: tuple[int, int]
    pass_to_pass: tuple[int, int]
    complete: bool
    not_passed: Mapping[str, Status]

    @property
    def resolved(self) -> bool:
        """Whether every named test passed, in a session that ended by itself."""
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
    """The bug of a SWE-smith row, or the reference solution; empty for a row without one."""
    test_patch: str = ""
    names: TestNames = TestNames.PYTEST
    on_branch: bool = False
    """Whether `base_commit` is a SWE-smith branch. If the tip of such a branch lacks the named tests, its parent is
    used."""
    install: Install = field(default_factory=Install)
    recipe: RowRecipe | None = None
    """How the tests of a row in another language run, or None for Python."""
    repo_path: str | None = None
    image_name: str = ""
    created_at: str = ""

    @property
    def modules(self) -> frozenset[str]:
        """The names of the modules and directories that the patch changes."""
        return frozenset(
            name.removesuffix(".py") for file in unified_diff.parse(self.patch) for name in file.path.split("/")
        )

    @property
    def node_ids(self) -> tuple[str, ...]:
        """Every named test once: those that must start to pass, then those that must keep passing."""
        return tuple(dict.fromkeys((*self.fail_to_pass, *self.pass_to_pass)))

    @property
    def test_files(self) -> tuple[str, ...]:
        """The files of the named tests, sorted. Names without a file refer to the files of `test_patch`; if none of
        these is Python, the modules in the names of Django's runner tell the files."""
        if self.names is TestNames.PYTEST:
            return tuple(sorted({node_id.split("::", 1)[0] for node_id in self.node_ids}))
        changed = [file.path for file in unified_diff.parse(self.test_patch) if file.new_path is not None]
        if self.recipe is not None:
            language = self.recipe.language
            found = [path for path in changed if path.endswith(language.suffixes) and language.is_test(path)]
            return tuple(sorted(set(found).union(self.recipe.files)))
        modules = {path for path in changed if path.endswith(".py")}
        if not modules and self.names is TestNames.UNITTEST:  # `test_patch` changes only data of tests
            modules = {path for name in self.node_ids if (path := _unittest_file(name))}
        return tuple(sorted(modules))

    @property
    def excused(self) -> frozenset[Status]:
        """The statuses that SWE-bench accepts for tests that must keep passing, although code under test can cause
        them: a call of `pytest.xfail`, and a skip in the log of Django's runner. pytest's log does not name skipped
        tests."""
        return frozenset(_EXCUSED.get(self.names, ()))

    def verdict(self, run: TestRun) -> RowVerdict:
        """Judge a run of this row's tests: a test that fails as expected counts as passed."""
        wrong = {name: status for name, status in self._statuses(run) if status not in RIGHT}
        return self._verdict(run, wrong)

    def official(self, run: TestRun) -> RowVerdict:
        """Judge a run of this row's tests as SWE-bench does.

        The log of a session that crashed lists no test. SWE-bench also rejects a log without a failed test if the test
        command failed. Source: `swebench.harness.grading` (5.0.2).
        """
        ended = replace(run, complete=run.exit_status is not None)
        failed = bool(run.collect_errors) or not FAILED.isdisjoint(run.statuses.values())
        if not ended.complete or (run.exit_status and not failed):
            return self._verdict(ended, dict.fromkeys(self.node_ids, Status.MISSING))
        # Only pytest's log names expected failures.
        named = self.names in (TestNames.PYTEST, TestNames.LOG)
        right = RIGHT | (self.excused if self.names is TestNames.PYTEST else frozenset())
        right = right if named else frozenset({Status.PASSED})
        kept = right | self.excused
        wrong = {
            name: status
            for name, status in self._statuses(run)
            if status not in (right if name in self.fail_to_pass else kept)
        }
        return self._verdict(ended, wrong)

    def _statuses(self, run: TestRun) -> Iterator[tuple[str, Status]]:
        return ((name, run.statuses.get(name, Status.MISSING)) for name in self.node_ids)

    def _verdict(self, run: TestRun, wrong: Mapping[str, Status]) -> RowVerdict:
        return RowVerdict(
            fail_to_pass=(_without(self.fail_to_pass, wrong), len(self.fail_to_pass)),
            pass_to_pass=(_without(self.pass_to_pass, wrong), len(self.pass_to_pass)),
            complete=run.complete,
            not_passed=wrong,
        )

    def expected(self, run: TestRun) -> TestRun:
        """Return `run`, a run on the prepared workspace, with one change: in tests that must keep passing, the statuses
        `excused` count as expected failures."""
        excused = {name for name in self.pass_to_pass if run.statuses.get(name) in self.excused}
        return replace(run, statuses={**run.statuses, **dict.fromkeys(excused, Status.XFAILED)})


RIGHT = frozenset({Status.PASSED, Status.XFAILED})
"""The statuses of tests that count as passed. Source: `test_passed` of `swebench.harness.grading` (5.0.2)."""

_EXCUSED = {
    TestNames.PYTEST: (Status.XFAIL_CALLED,),
    TestNames.UNITTEST: (Status.SKIPPED,),
    TestNames.LOG: (Status.SKIPPED,),
}


def _unittest_file(name: str) -> str:
    """Return the file of a test in the form `test_a (module.Class)` or `test_a (module.Class.test_a)`, or an empty
    string: a line of a docstring tells no file."""
    match = _UNITTEST.fullmatch(name)
    if match is None:
        return ""
    owner = match[2].removesuffix(f".{match[1]}")
    return f"tests/{owner.rpartition('.')[0].replace('.', '/')}.py" if "." in owner else ""


def _without(names: tuple[str, ...], bad: Mapping[str, Status]) -> int:
    return sum(name not in bad for name in names)


def load_rows(
    source: str | Path, *, split: str = "train", fields: Mapping[str, str] | None = None, repo_root: Path | None = None
) -> Iterator[SweRow | TaskError]:
    """Yield the rows of a dataset, with an error in place of each bad one; see `datasets.read_rows`.

    A `repo_path` is relative to the folder of the source, and must be in this folder or, if the user names one, in
    `repo_root`.
    """
    for number, raw in read_rows(source, split=split, fields=fields):
        try:
            if isinstance(raw, TaskError):
                yield TaskError(f"row {number}: {raw}")
            else:
                yield _locate(parse_row(raw, number), Path(source), repo_root)
        except TaskError as error:
            yield error


def _locate(row: SweRow, source: Path, root: Path | None) -> SweRow:
    if row.repo_path is None:
        return row
    folder = (source if source.is_dir() else source.parent).resolve()
    place = (folder / row.repo_path).resolve()  # an absolute path stays as it is
    allowed = [*([folder] if source.exists() else []), *([] if root is None else [root.resolve()])]
    if not any(place.is_relative_to(each) for each in allowed):
        raise TaskError(
            f"{row.instance_id}: its repository {row.repo_path} is not in the folder of the data set. Copy it there, "
            "or name the folder of the repositories with the setting repo_root: rows cannot name other folders"
        )
    return replace(row, repo_path=str(place))


def parse_row(raw: Mapping[str, JSON], number: int = 0) -> SweRow:
    """Parse one row. `number` is its position in the file. Raises a `TaskError` that names the row and the column."""
    name = str(raw.get("instance_id") or f"row {number}")
    try:
        return _parse(RowFields(published(raw)))
    except ValueError as problem:  # a TaskError or DiffError
        raise TaskError(f"row {number} ({name}): {problem}") from problem


def _parse(row: RowFields) -> SweRow:
    kind = _row_kind(row)
    instance_id = row.required("instance_id")
    if kind is not RowKind.ORACLE:
        unified_diff.parse(row.required("patch"))
    if kind is RowKind.BENCH:
        unified_diff.parse(row.required("test_patch"))
    text = row.optional("text")
    on_branch = kind is RowKind.SMITH and not row.optional("base_commit")
    commit = instance_id if on_branch else row.required("base_commit")
    language = _language(row)
    names = _test_name_form(row) if language == PYTHON else TestNames.LOG
    fail_to_pass = _node_ids(row, "FAIL_TO_PASS", names, required=True)
    pass_to_pass = _node_ids(row, "PASS_TO_PASS", names, required=False)
    return SweRow(
        kind=kind,
        instance_id=instance_id,
        repo=_matching(_REPO, row.required("repo"), "repo must be owner/name"),
        base_commit=_matching(_REVISION, commit, "bad base_commit"),
        problem_statement=row.optional("problem_statement") or text or row.required("problem_statement"),
        text=text,
        patch=row.optional("patch"),
        test_patch=row.optional("test_patch"),
        names=names,
        on_branch=on_branch,
        fail_to_pass=fail_to_pass,
        pass_to_pass=pass_to_pass,
        install=install_of(row) if language == PYTHON else Install(editable=True),
        recipe=None if language == PYTHON else recipe_of(row, language),
        repo_path=row.optional("repo_path") or None,
        image_name=_image_name(row),
        created_at=row.optional("created_at"),
    )


def _language(row: RowFields) -> str:
    patches = (row.optional("test_patch"), row.optional("patch"))
    changed = [[file.path for file in unified_diff.parse(patch)] for patch in patches if patch]
    tested = changed[0] if row.optional("test_patch") else []
    names = (*_tests(row, "FAIL_TO_PASS"), *_tests(row, "PASS_TO_PASS"))
    if any(name.partition("::")[0].endswith(_PYTEST_FILES) for name in names if "::" in name):
        return PYTHON
    named = row.optional("language") or row.optional("repo_language") or parser_name(row)
    decisive = tested if language_of_files(tested) else [path for paths in changed for path in paths]
    if not named and any(map(_UNITTEST.fullmatch, names)) and any(path.endswith(".py") for path in decisive):
        return PYTHON
    tests = next((paths for paths in changed if language_of_files(paths)), [])
    language = language_of(row, tests, names)
    if language == PYTHON and row.optional("test_patch") and not any(path.endswith(".py") for path in changed[0]):
        kinds = sorted({PurePosixPath(path).suffix for path in changed[0]} - {""})
        raise TaskError(
            f"its tests are in {', '.join(kinds) or 'files without an ending'}, and no column names their language"
        )
    return language


def _image_name(row: RowFields) -> str:
    columns = ("image_name", "docker_image", "image_url", "image", "dockerhub_tag")
    return next((found for name in columns if (found := row.optional(name))), "")


def _test_name_form(row: RowFields) -> TestNames:
    """Return the form in which the row names its tests. The row's log parser decides, or else the form of the names.
    Raises `TaskError` for an unknown log parser."""
    parser = parser_name(row)
    if parser:
        for word, found in _PARSERS.items():
            if word in parser:
                return found
        raise TaskError(f"log_parser {parser!r} does not read Python tests; known parsers: {', '.join(_PARSERS)}")
    if row.optional("test_patch") and (known := _REPOSITORIES.get(row.optional("repo"))):
        return known
    tests = (*_tests(row, "FAIL_TO_PASS"), *_tests(row, "PASS_TO_PASS"))
    if any(_NODE_ID.match(test) for test in tests) or not row.optional("test_patch"):
        return TestNames.PYTEST
    return TestNames.FUNCTIONS if all(_FUNCTION.fullmatch(test) for test in tests) else TestNames.UNITTEST


def _tests(row: RowFields, column: str) -> tuple[str, ...]:
    """Return the tests that a column names, without pytest's progress marks (`[100%]`, or `[` of `[ 50%]`): some
    published rows contain one, because their log parser took it for the name of a test."""
    return tuple(name for name in row.texts(column) if not _PROGRESS.fullmatch(name))


def _row_kind(row: RowFields) -> RowKind:
    if row.optional("kind"):
        return RowKind(row.optional("kind"))
    if row.optional("test_patch"):
        return RowKind.BENCH
    return RowKind.SMITH if row.optional("patch") else RowKind.ORACLE


def _matching(pattern: re.Pattern[str], value: str, complaint: str) -> str:
    """Return the value if it may become part of a path or an argument of git: no traversal, no leading dash. Raises
    `TaskError`."""
    if not pattern.fullmatch(value) or ".." in value:
        raise TaskError(f"{complaint}: {value!r}")
    return value


def _node_ids(row: RowFields, column: str, names: TestNames, *, required: bool) -> tuple[str, ...]:
    node_ids = _tests(row, column)
    if dropped := len(row.texts(column)) - len(node_ids):
        name = row.optional("instance_id")
        _log.warning("%s: left out of %s: %s, which is no test", name, column, plural(dropped, "progress mark"))
    if required and not node_ids:
        raise TaskError(f"{row.key(column)} is missing or empty: the task needs a test that fails")
    for node_id in node_ids if names is TestNames.PYTEST else ():
        path, separator, _ = node_id.partition("::")
        if not separator or path.startswith("/") or ".." in path.split("/"):
            raise TaskError(f"{row.key(column)}: {node_id!r} is not a pytest node id (path::test)")
    return node_ids
