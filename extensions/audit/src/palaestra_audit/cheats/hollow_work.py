"""Hollow work: what a reference solution leaves, with wrong results in the same form.

Work that is not done may fail a score for several reasons, so an attack on one of them decides nothing. Hollow work
fails only because of its results: it has the files, functions, names and nearly the length of the solution. Each change
to Python code comes with a twin, which changes the text in the same way but keeps the results, so that a check can
prove that the form of the change costs nothing. Does no I/O; the code is only parsed.
"""

from __future__ import annotations

import ast
import difflib
import io
import re
import string
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import TypeAlias

MOST_BYTES = 1 << 18
"""The maximum size of a file that is hollowed."""

_Insertion: TypeAlias = tuple[int, int, str]
"""A line, counted from 1, a column in UTF-8 bytes, and the text to insert there."""
_WRONG = "{wrong}"
"""In an insertion: `1` for wrong results, `0` for the twin."""


@dataclass(frozen=True, slots=True)
class Hollow:
    """Contents of files that hollow the work of a solution. `twin` changes the same files in the same way, but keeps
    the results; it is empty for files other than Python code. `prints` hollow work only prints other text. `helpers`
    means that only helpers return other values, which may be without effect: keys that are compared, for example."""

    what: str
    files: Mapping[str, bytes]
    twin: Mapping[str, bytes] = field(default_factory=dict)
    prints: bool = False
    helpers: bool = False


def hollows(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> Iterator[Hollow]:
    """Yield ways to hollow the files `after` of a solution, the preferred ones first. `before` has the contents of
    those files, as far as they exist, in the prepared workspace."""
    left = {path: data for path, data in after.items() if data != before.get(path) and len(data) <= MOST_BYTES}
    modules = [
        module
        for path, data in left.items()
        if is_code(path) and (module := parsed(path, before.get(path, b""), data)) is not None
    ]
    for change in (_ChangedValues, _NoValues, _NoCalls):
        files, twin, prints, helpers = {}, {}, True, True
        for module in modules:
            made = change(module)
            wrong, right = module.text(made.insertions, "1"), module.text(made.insertions, "0")
            if made.counts and wrong is not None and right is not None:
                files[module.path], twin[module.path] = wrong, right
                prints, helpers = prints and made.prints, helpers and made.helpers
        if files:
            yield Hollow(f"{change.what} {', '.join(files)}", files, twin, prints, helpers)
    texts = {path: text for path, data in left.items() if (text := _as_text(path, data))}
    for what, table in _TABLES.items():
        changed = {path: new for path, text in texts.items() if (new := text.translate(table)) != text}
        if changed:
            yield Hollow(f"{what} {', '.join(changed)}", {path: text.encode() for path, text in changed.items()})


def hollow_functions(module: Module) -> Iterator[Hollow]:
    """Yield ways to hollow one function at a time of those that a solution wrote or changed, if there are several.
    Results that are not plain data become None."""
    functions = [each for each in module.functions() if not each.name.startswith("__")]
    for function in functions if len(functions) > 1 else ():
        end = function.end_lineno or function.lineno
        made = _ChangedValues(replace(module, lines=frozenset(range(function.lineno, end + 1))))
        wrong = module.text(made.insertions, "1")
        # Besides the values, there is the line that defines how they change.
        if wrong is not None and len(made.insertions) > 1:
            files = without_objects({module.path: wrong})
            what = f"{made.what} {function.name} of {module.path}"
            yield Hollow(what, files, prints=made.prints, helpers=made.helpers)


def without_objects(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return hollow files in which results that are not plain data, such as a path or a parser, become None. Otherwise,
    they keep their values, and the files may be as right as those of the solution."""
    return {path: data.replace(_KEEPS.encode(), _DROPS.encode()) for path, data in files.items()}


def is_code(path: str) -> bool:
    """Return whether the attacks on code change the file at a path: a Python module that is neither a test nor a set-up
    file."""
    place = PurePosixPath(path)
    tested = any(part.startswith("test") for part in place.parts)
    return place.suffix == ".py" and not tested and place.name not in ("setup.py", "conftest.py")


_DIGITS = ("0123456789", "1234567898")  # makes no leading zero
_ROTATED = "".join(letters[1:] + letters[0] for letters in (string.ascii_lowercase, string.ascii_uppercase))
_TABLES = {
    "other digits in": str.maketrans(*_DIGITS),
    "other letters and digits in": str.maketrans(
        _DIGITS[0] + string.ascii_lowercase + string.ascii_uppercase, _DIGITS[1] + _ROTATED
    ),
}


def _as_text(path: str, data: bytes) -> str:
    try:
        return "" if path.endswith(".py") or b"\0" in data else data.decode()
    except UnicodeDecodeError:
        return ""


@dataclass(frozen=True, slots=True)
class Module:
    """A module of the solution, and its lines that the solution changed."""

    path: str
    source: bytes
    tree: ast.Module
    lines: frozenset[int]

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Yield the functions that the solution wrote or changed."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and self.changes(node):
                yield node

    def changes_helpers(self) -> bool:
        """Return whether the solution only changed functions with private names that the module itself uses."""
        used = {each.id for each in ast.walk(self.tree) if isinstance(each, ast.Name)}
        used |= {each.attr for each in ast.walk(self.tree) if isinstance(each, ast.Attribute)}
        names = {each.name for each in self.functions()}
        return bool(names) and all(re.match("_[^_]", each) and each in used for each in names)

    def changes(self, node: ast.stmt) -> bool:
        """Return whether the solution changed a line of this statement."""
        return not self.lines.isdisjoint(range(node.lineno, (node.end_lineno or node.lineno) + 1))

    def text(self, insertions: list[_Insertion], wrong: str) -> bytes | None:
        """Return the source with these insertions; None if the result is not valid Python."""
        lines = self.source.splitlines(keepends=True)
        # From the end, so that the places of the other insertions stay as they are.
        for line, column, text in sorted(insertions, key=lambda each: each[:2], reverse=True):
            old = lines[line - 1]
            lines[line - 1] = old[:column] + text.replace(_WRONG, wrong).encode() + old[column:]
        made = b"".join(lines)
        return made if _tree(made) is not None else None


def parsed(path: str, before: bytes, source: bytes) -> Module | None:
    """Return a module with the lines that differ from `before`; None if it is not valid Python in UTF-8."""
    tree = _tree(source)
    if tree is None or not _is_utf8(source):
        return None
    lines = {
        number
        for _, _, first, last in hunks(before.splitlines(), source.splitlines())
        for number in range(first + 1, max(last, first + 1) + 1)  # removed lines count as the line after them
    }
    return Module(path, source, tree, frozenset(lines))


def hunks(old: Sequence[bytes], new: Sequence[bytes]) -> list[tuple[int, int, int, int]]:
    """Return the ranges of each change in the old and in the new lines. If a comparison would take long, because many
    lines are alike, all lines between the equal ones at both ends are one change."""
    begin = next((place for place, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), None)
    begin = min(len(old), len(new)) if begin is None else begin
    most = min(len(old), len(new)) - begin
    end = next((place for place in range(most) if old[-1 - place] != new[-1 - place]), most)
    first, second = old[begin : len(old) - end], new[begin : len(new) - end]
    counts = Counter(second)
    if sum(counts[line] for line in first) > _MOST_PAIRS:
        return [(begin, len(old) - end, begin, len(new) - end)]
    # By default, difflib ignores frequent lines of files with 200 lines or more.
    changes = difflib.SequenceMatcher(None, first, second, autojunk=False).get_opcodes()
    return [(begin + a, begin + b, begin + c, begin + d) for tag, a, b, c, d in changes if tag != "equal"]


_MOST_PAIRS = 1_000_000
"""The most pairs of equal lines in two files that are compared line by line; a pass over them takes 0.1 s."""


def _is_utf8(source: bytes) -> bool:
    """Return whether Python reads the source as UTF-8, in which the places of its nodes are then counted."""
    try:
        source.decode()
        return source.isascii() or tokenize.detect_encoding(io.BytesIO(source).readline)[0].startswith("utf-8")
    except (SyntaxError, UnicodeDecodeError):
        return False


def _tree(source: bytes) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


class _Change:
    """The insertions of one kind of change. `counts` is False if the change does not change any result, `prints` is
    True if it only changes what functions print, and `helpers` if only helpers return other values."""

    what = ""
    prints = False
    helpers = False

    def __init__(self, module: Module) -> None:
        self.module = module
        self.insertions: list[_Insertion] = []
        for node in module.functions():
            self.change_function(node)
        for statement in module.tree.body if not self.insertions else ():
            if module.changes(statement):
                self.change_statement(statement)
        self.counts = bool(self.insertions)

    def change_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Change one function that the solution wrote or changed."""

    def change_statement(self, statement: ast.stmt) -> None:
        """Change one statement of a module in which no function was changed."""

    def wrap(self, node: ast.expr, before: str, after: str) -> None:
        """Insert text around an expression."""
        self.insertions.append((node.lineno, node.col_offset, before))
        self.insertions.append((node.end_lineno or node.lineno, node.end_col_offset or 0, after))


def _own_nodes(statements: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the nodes of statements, without those of functions and classes in them."""
    waiting: list[ast.AST] = list(statements)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        yield node
        waiting += ast.iter_child_nodes(node)


class _NoValues(_Change):
    """Functions return, and variables of the module are, None."""

    what = "None in place of the results of"
    _returns = False
    before, after = "((", f") if not {_WRONG} else None)"

    def change_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for each in _own_nodes(node.body):
            if isinstance(each, ast.Return | ast.Yield) and each.value is not None and not _is_empty(each.value):
                self.wrap(each.value, self.before, self.after)
                self._returns = True
            self.change_print(each)
        self.prints = bool(self.insertions) and not self._returns

    def change_statement(self, statement: ast.stmt) -> None:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        dunder = any(isinstance(each, ast.Name) and each.id.startswith("__") for each in targets)  # such as __all__
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None and not dunder:
            self.wrap(statement.value, self.before, self.after)
        for each in _own_nodes([statement]):
            self.change_print(each)

    def change_print(self, node: ast.AST) -> None:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            for value in node.args[:1]:
                if not isinstance(value, ast.Starred):
                    self.wrap(value, self.before, self.after)


def _is_empty(value: ast.expr) -> bool:
    """Return whether the result of a function has nothing to change: None, or the object itself, for chained calls."""
    if isinstance(value, ast.Constant):
        return value.value is None
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


_HELPER = "_changed"
_KEEPS = "if type(v) is dict else v\n"
_DROPS = "if type(v) is dict else None\n"
_DEFINITION = (
    f"{_HELPER} = lambda v: v if not {_WRONG} else not v if v is True or v is False else 0 if v is None else v + 1 "
    'if hasattr(v, "real") else v + "x" if type(v) is str else v + b"x" if type(v) is bytes else '
    f"type(v)(map({_HELPER}, v or [0])) if type(v) in (list, tuple, set) else "
    f"{{k: {_HELPER}(x) for k, x in (v or {{0: 0}}).items()}} {_KEEPS}"
)
"""A line that changes a value and keeps its type and length, so that code which uses the value still runs."""


class _ChangedValues(_NoValues):
    """Functions return, and variables of the module are, other values of the same type."""

    what = "wrong values of the right type in place of the results of"
    before, after = f"{_HELPER}((", "))"

    def __init__(self, module: Module) -> None:
        super().__init__(module)
        first = next((each for each in module.tree.body if not _is_opening(each)), None)
        if first is not None:
            line = min([first.lineno, *(each.lineno for each in getattr(first, "decorator_list", ()))])
            self.insertions.append((line, 0, _DEFINITION))
        self.helpers = module.changes_helpers()


def _is_opening(statement: ast.stmt) -> bool:
    """Return whether a statement must come first in its module: the docstring or an import from the future."""
    if isinstance(statement, ast.ImportFrom):
        return statement.module == "__future__"
    return _is_text(statement)


def _is_text(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


class _NoCalls(_Change):
    """Functions end at once."""

    what = "an early end of the functions of"

    def change_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        first = next((each for each in node.body if not _is_text(each)), None)
        if first is None or first.lineno == node.lineno or node.name == "__init__":
            return
        line = min([first.lineno, *(each.lineno for each in getattr(first, "decorator_list", ()))])
        indent = self.module.source.splitlines()[line - 1][: first.col_offset].decode()
        self.insertions.append((line, 0, f"{indent}if {_WRONG}: return\n"))
