"""A programming task as a row of a data set: prompt, starting files, hidden tests, reference solution. Does no I/O.

Columns: `prompt`; `test` (or `tests`, `test_code`), Python; `entry_point`, the name that the tests use without
importing it; `files`, path to text; `solution`, path to text or the text of `solution.py`, or else
`canonical_solution`, which continues `declaration` or the prompt; `id` (or `task_id`). Mappings may come as JSON text,
as in CSV.

Tests that are plain statements become one test. Invariant: no task that can be made tells its tests to the agent, and
none has tests that cannot be run.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from keyword import iskeyword
from pathlib import PurePosixPath

from palaestra.core.errors import TaskError
from palaestra.core.types import JSON
from palaestra.envs.datasets import Row
from palaestra.suites.swe.negate_test import tests_in

MODULE = "solution"
"""What a task is written in that names no file."""

_IDS = ("id", "task_id", "instance_id")
_TESTS = ("test", "tests", "test_code")
_ONLY = "test_task"
_SHORTEST_LEAK = 40


@dataclass(frozen=True, slots=True)
class Suite:
    """Tests as one text of Python, and their names (`Class::test`)."""

    text: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ProgrammingTask:
    """One task. Paths are relative to the workspace; `suite` and `solution` never enter a slot that an agent has."""

    id: str
    prompt: str
    suite: Suite
    files: Mapping[str, str] = field(default_factory=dict)
    solution: Mapping[str, str] | None = None


def parse_row(row: Row, number: int, prompt_field: str = "prompt") -> ProgrammingTask:
    """The task of a row. Raises `TaskError` that names the row and what is wrong with it."""
    name = next((str(row[column]) for column in _IDS if row.get(column) not in (None, "")), f"row-{number}")
    try:
        return _parse(row, name, prompt_field)
    except TaskError as error:
        raise TaskError(f"row {number} ({name}): {error}") from None
    except (RecursionError, MemoryError):  # Python's parser and compiler say so in both ways
        raise TaskError(f"row {number} ({name}): its Python or JSON is nested too deeply to be read") from None


def _parse(row: Row, name: str, prompt_field: str) -> ProgrammingTask:
    prompt, code = _text(row, prompt_field), _text(row, *_TESTS)
    files = _files(row.get("files"), "files")
    entry_point = str(row.get("entry_point") or "")
    solution = _solution(row, prompt)
    known = {_module(path) for path in (*files, *(solution or {}))}
    suite = make_suite(code, entry_point, known, prompt)
    if entry_point:
        prompt = f"{prompt.rstrip()}\n\nWrite `{entry_point}` into the file {MODULE}.py of the working directory."
    if _tells(prompt, code) or any(_tells(text, code) for text in files.values()):
        raise TaskError("its prompt or its files hold its tests")
    return ProgrammingTask(name, prompt, suite, files, solution)


def _text(row: Row, *columns: str) -> str:
    for column in columns:
        if isinstance(value := row.get(column), str) and value.strip():
            return value
    raise TaskError(f"column {columns[0]!r} is missing or empty")


def _files(value: JSON, column: str) -> dict[str, str]:
    if value in (None, ""):
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if not isinstance(value, Mapping) or not all(isinstance(text, str) for text in value.values()):
        raise TaskError(f"column {column!r} must give texts by their paths")
    for path in value:
        pure = PurePosixPath(path)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts:
            raise TaskError(f"column {column!r}: {path!r} is not a path inside the workspace")
    return {str(path): text for path, text in value.items() if text is not None}


def _solution(row: Row, prompt: str) -> dict[str, str] | None:
    value = row.get("solution")
    if isinstance(value, str) and value.strip() and not value.lstrip().startswith("{"):
        return {f"{MODULE}.py": value}
    if value:
        return _files(value, "solution")
    if body := row.get("canonical_solution"):
        return {f"{MODULE}.py": f"{row.get('declaration') or prompt}{body}"}
    return None


def _module(path: str) -> str:
    return PurePosixPath(path).parts[0].removesuffix(".py")


def _tells(text: str, tests: str) -> bool:
    """Whether a text holds the tests, however they are laid out in it."""
    wanted = "".join(tests.split())
    return len(wanted) >= _SHORTEST_LEAK and wanted in "".join(text.split())


def make_suite(code: str, entry_point: str = "", known: Collection[str] = (), prompt: str = "") -> Suite:
    """Tests that the harness can run by their names. Raises `TaskError` for what are none.

    `known` are modules that the workspace has or is to have; others must be the standard library's, or in the prompt.
    """
    if entry_point and (not entry_point.isidentifier() or iskeyword(entry_point)):
        raise TaskError(f"its entry point {entry_point!r:.100} is no name that Python could import")
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
        if len(wanted) > len(function.args.defaults):
            raise TaskError(f"its test {function.name} asks for {wanted[0]}, and fixtures are pytest's")
    for module in sorted(_imports(tree) - {MODULE, *known} - sys.stdlib_module_names):
        if not re.search(rf"\b{re.escape(module)}\b", prompt):
            raise TaskError(f"its tests import {module}, which neither the standard library nor the task has")
    text = ast.unparse(ast.fix_missing_locations(tree))
    try:
        compile(text, "<tests>", "exec")
    except (SyntaxError, ValueError) as error:
        raise TaskError(f"its tests cannot be made one test: {error}") from None
    return Suite(text, tuple(f"{owner}{function.name}" for owner, function in found))


def _as_one(tree: ast.Module, entry_point: str) -> ast.Module:
    """Plain statements as the body of one test, below the imports. A `check(candidate)` that nobody calls is called."""
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
    """The top-level names of all modules that are imported, wherever."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def _after_future(body: list[ast.stmt]) -> int:
    return sum(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in body)
