"""Parse a programming task from a dataset row: prompt, initial files, hidden tests and reference solution. No I/O.

The columns of a row are `id` (or `task_id` or `instance_id`), `prompt`, and `test` (or `tests` or `test_code`), which
is Python text. `entry_point` is the name that the tests use without importing it. `files` maps paths to texts.
`solution` maps paths to texts too, or is the text of `solution.py`. If it is missing, `canonical_solution` is used, the
continuation of `declaration` or of the prompt. Mappings may be JSON text, as in CSV.

Tests that are plain statements become one test. Invariant: the agent's prompt and files do not contain the tests,
unless these are very short, and the tests can run.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from keyword import iskeyword
from pathlib import PurePosixPath

from palaestra.envs.datasets import Row
from palaestra_slots.core.errors import TaskError
from palaestra_slots.images.task_files import RowFields
from palaestra_suites.grading.falsified import tests_in

MODULE = "solution"
"""The module that the tests import the entry point from, and that a solution without a path is written to."""

_IDS = ("id", "task_id", "instance_id")
_TESTS = ("test", "tests", "test_code")
_ONLY = "test_task"
_SHORTEST_LEAK = 40


@dataclass(frozen=True, slots=True)
class HiddenTests:
    """Tests as one Python text, with their names (`Class::test`)."""

    text: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ProgrammingTask:
    """One task. Paths are relative to the workspace; `suite` and `solution` never enter an agent's slot."""

    id: str
    prompt: str
    suite: HiddenTests
    files: Mapping[str, str] = field(default_factory=dict)
    solution: Mapping[str, str] | None = None

    def known_texts(self) -> list[str]:
        """Return the texts of the task's files and of the reference solution."""
        return [*self.files.values(), *(self.solution or {}).values()]


def parse_row(row: Row, number: int, prompt_field: str = "prompt") -> ProgrammingTask:
    """Return the task of a row. Raises a `TaskError` that names the row."""
    name = next((str(row[column]) for column in _IDS if row.get(column) not in (None, "")), f"row-{number}")
    try:
        return _parsed_task(RowFields(row), name, prompt_field)
    except TaskError as error:
        raise TaskError(f"row {number} ({name}): {error}") from None
    except (RecursionError, MemoryError):  # Python's parser and compiler may raise either
        raise TaskError(f"row {number} ({name}): its Python or JSON is nested too deeply to be read") from None


def _parsed_task(row: RowFields, name: str, prompt_field: str) -> ProgrammingTask:
    prompt, code = row.required(prompt_field), row.required(*_TESTS)
    files = _files(row, "files")
    entry_point = row.optional("entry_point")
    solution = _solution_files(row, prompt)
    known = {_module(path) for path in (*files, *(solution or {}))}
    suite = make_suite(code, entry_point, known, prompt)
    if entry_point:
        prompt = f"{prompt.rstrip()}\n\nWrite `{entry_point}` into the file {MODULE}.py of the working directory."
    if _contains(prompt, code) or any(_contains(text, code) for text in files.values()):
        raise TaskError("its prompt or its files contain its tests")
    return ProgrammingTask(name, prompt, suite, files, solution)


def _files(row: RowFields, column: str) -> dict[str, str]:
    value = row.decoded(column)
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(text, str) for text in value.values()):
        raise TaskError(f"{row.key(column)} must map paths to strings")
    for path in value:
        pure = PurePosixPath(path)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts:
            raise TaskError(f"{row.key(column)}: {path!r} is not a path inside the workspace")
    return dict(value)


def _solution_files(row: RowFields, prompt: str) -> dict[str, str] | None:
    value = row.values.get("solution")
    if isinstance(value, str) and value.strip() and not value.lstrip().startswith("{"):
        return {f"{MODULE}.py": value}
    if value:
        return _files(row, "solution")
    if body := row.optional("canonical_solution"):
        return {f"{MODULE}.py": f"{row.optional('declaration') or prompt}{body}"}
    return None


def _module(path: str) -> str:
    return PurePosixPath(path).parts[0].removesuffix(".py")


def _contains(text: str, tests: str) -> bool:
    """Return whether a text contains the tests, ignoring white space. Tests shorter than `_SHORTEST_LEAK` characters
    are not searched for."""
    wanted = "".join(tests.split())
    return len(wanted) >= _SHORTEST_LEAK and wanted in "".join(text.split())


def _gives_mock(decorator: ast.expr) -> bool:
    """Return whether a decorator of a test is `patch(…)` or `patch.object(…)` of unittest.mock without a replacement,
    which passes the mock as an argument (docs.python.org, unittest.mock)."""
    if not isinstance(decorator, ast.Call) or any(each.arg == "new" for each in decorator.keywords):
        return False
    *_, name = path = ast.unparse(decorator.func).split(".")
    return len(decorator.args) < (3 if name == "object" else 2) and "patch" in path[-2:] and name in ("patch", "object")


def make_suite(code: str, entry_point: str = "", known: Collection[str] = (), prompt: str = "") -> HiddenTests:
    """Return tests that the harness can run by name. Raises `TaskError`.

    `known` are modules of the workspace or the solution. Every other module that the tests import must be in the
    standard library or named in the prompt.
    """
    if entry_point and (not entry_point.isidentifier() or iskeyword(entry_point)):
        raise TaskError(f"its entry point {entry_point!r:.100} is not a name that Python can import")
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError) as error:
        raise TaskError(f"its tests are not Python: {error}") from None
    if not tests_in(tree.body, ""):
        tree = _as_one(tree, entry_point)
    if entry_point and not _imports(tree) & {MODULE}:
        tree.body.insert(_after_future(tree.body), ast.parse(f"from {MODULE} import {entry_point}").body[0])
    found = tests_in(tree.body, "")
    for _, function in found:
        wanted = [each.arg for each in function.args.args if each.arg != "self"]
        given = sum(_gives_mock(decorator) for decorator in function.decorator_list)
        if len(wanted) > len(function.args.defaults) + given:
            raise TaskError(f"its test {function.name} needs the fixture {wanted[0]}, but tests run without pytest")
    for module in sorted(_imports(tree) - {MODULE, *known} - sys.stdlib_module_names):
        if not re.search(rf"\b{re.escape(module)}\b", prompt):
            raise TaskError(f"its tests import {module}, which is neither in the standard library nor in the task")
    text = ast.unparse(ast.fix_missing_locations(tree))
    try:
        compile(text, "<tests>", "exec")
    except (SyntaxError, ValueError) as error:
        raise TaskError(f"its tests cannot be combined into one test: {error}") from None
    return HiddenTests(text, tuple(f"{owner}{function.name}" for owner, function in found))


def _as_one(tree: ast.Module, entry_point: str) -> ast.Module:
    """Make plain statements the body of one test, below the imports. If `check(candidate)` is defined but never called,
    add the call."""
    head = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    body = [node for node in tree.body if node not in head]
    checks = any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in body)
    called = any(isinstance(node, ast.Name) and node.id == "check" for node in ast.walk(tree))
    if checks and not called and entry_point:
        body += ast.parse(f"check({entry_point})").body
    if not any(isinstance(node, (ast.Assert, ast.Raise, ast.Call)) for each in body for node in ast.walk(each)):
        raise TaskError("its tests assert nothing")
    one = ast.parse(f"def {_ONLY}():\n    pass").body[0]
    assert isinstance(one, ast.FunctionDef)
    one.body = body
    return ast.Module([*head, one], [])


def _imports(tree: ast.Module) -> set[str]:
    """Return the top-level names of all imported modules."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def _after_future(body: list[ast.stmt]) -> int:
    return sum(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in body)
