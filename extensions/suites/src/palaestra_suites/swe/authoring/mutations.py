"""Make procedural bugs: small changes to Python source that a person might make by mistake.

Procedural bug injection follows SWE-smith (arXiv 2504.21798). Changes are found in the syntax tree and applied to the
text, inside functions only, never in tests, docstrings or comments. A finder is a function that yields every change of
one kind in a function; its docstring describes this kind.

Invariant: outside the changed span the file keeps its text byte for byte, and the result compiles.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from palaestra_suites.python_source import ParsedSource, SourceEdit, apply_edits

_COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.Div: ("/", "*"),
}


@dataclass(frozen=True, slots=True)
class Mutation:
    """Replace the bytes `start`..`end` of the UTF-8 file at `path` with `replacement`.

    `function` is the qualified name of the enclosing function, and `line` the first line of the change (1-based).
    """

    path: str
    kind: str
    start: int
    end: int
    replacement: str
    function: str
    line: int


@dataclass(frozen=True, slots=True)
class Proposal:
    """New text for a span, proposed by a finder."""

    kind: str
    start: int
    end: int
    replacement: str


@dataclass(frozen=True, slots=True)
class Scope:
    """One function of a source."""

    source: ParsedSource
    node: ast.FunctionDef | ast.AsyncFunctionDef
    qualname: str

    def walk(self) -> Iterator[ast.AST]:
        """Yield the nodes of this function in source order, without nested functions, lambdas and classes."""
        for statement in self.node.body:
            yield from _walk(statement)


def find_mutations(source: str, path: str) -> list[Mutation]:
    """Return every mutation of a module in the order of the text. For a test file, the list is empty.

    Each result compiles. Raises SyntaxError for a source that is not valid Python.
    """
    if _is_test(path):
        return []
    parsed = ParsedSource(source)
    found = {}
    for scope in scopes(parsed):
        for finder in _FINDERS:
            for change in finder(scope):
                mutation = _mutation(parsed, path, scope, change)
                if _changes_and_compiles(parsed, mutation):
                    found[mutation.start, mutation.end, mutation.replacement] = mutation
    return sorted(found.values(), key=lambda mutation: (mutation.start, mutation.end, mutation.kind))


def apply_mutation(source: str, mutation: Mutation) -> str:
    """Return the text after the mutation."""
    return apply_edits(source, [SourceEdit(mutation.start, mutation.end, mutation.replacement)])


def _mutation(source: ParsedSource, path: str, scope: Scope, change: Proposal) -> Mutation:
    line = source.line_of(change.start)
    return Mutation(path, change.kind, change.start, change.end, change.replacement, scope.qualname, line)


def _changes_and_compiles(source: ParsedSource, mutation: Mutation) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            changed = apply_mutation(source.text, mutation)
            compile(changed, mutation.path, "exec", dont_inherit=True)
            return changed != source.text
    except (SyntaxError, ValueError):
        return False


def _is_test(path: str) -> bool:
    pure = PurePosixPath(path)
    directories = {"test", "tests", "testing"}.intersection(pure.parts[:-1])
    return (
        bool(directories) or pure.name == "conftest.py" or pure.stem.startswith("test_") or pure.stem.endswith("_test")
    )


def scopes(source: ParsedSource) -> Iterator[Scope]:
    """Yield every function and method of a module in source order."""
    yield from _scopes(source, source.tree, "")


def _scopes(source: ParsedSource, node: ast.AST, prefix: str) -> Iterator[Scope]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Scope(source, child, prefix + child.name)
            yield from _scopes(source, child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.ClassDef):
            yield from _scopes(source, child, f"{prefix}{child.name}.")
        else:
            yield from _scopes(source, child, prefix)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _walk(child)


def flip_comparison(scope: Scope) -> Iterator[Proposal]:
    """Turn `a < b` into `a <= b`, `==` into `!=`, `in` into `not in` and so on."""
    for node in scope.walk():
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            old, new = _COMPARISONS[type(node.ops[0])]
            yield from _operator(scope, "flip_comparison", node.left, node.comparators[0], old, new)


def swap_arithmetic(scope: Scope) -> Iterator[Proposal]:
    """Turn `a + b` into `a - b` and so on, but not next to a string, where `-` would be a type error."""
    for node in scope.walk():
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC and not _stringy(node.left, node.right):
            old, new = _ARITHMETIC[type(node.op)]
            yield from _operator(scope, "swap_arithmetic", node.left, node.right, old, new)


def swap_boolean(scope: Scope) -> Iterator[Proposal]:
    """Turn `a and b` into `a or b`, and vice versa."""
    for node in scope.walk():
        if isinstance(node, ast.BoolOp) and len(node.values) == 2:
            old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            yield from _operator(scope, "swap_boolean", node.values[0], node.values[1], old, new)


def off_by_one(scope: Scope) -> Iterator[Proposal]:
    """Add one to a small integer."""
    for node in scope.walk():
        if isinstance(node, ast.Constant) and type(node.value) is int and 0 <= node.value <= 1000:
            start, end = scope.source.span(node)
            if scope.source.cut(start, end) == str(node.value):
                yield Proposal("off_by_one", start, end, str(node.value + 1))


def negate_condition(scope: Scope) -> Iterator[Proposal]:
    """Turn `if x:` into `if not x:`, and vice versa. `flip_comparison` handles comparisons."""
    for node in scope.walk():
        if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Compare):
            start, end = scope.source.span(node.test)
            if isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not):
                yield Proposal("negate_condition", start, end, scope.source.of(node.test.operand))
            elif isinstance(node.test, ast.Name | ast.Attribute | ast.Call):
                yield Proposal("negate_condition", start, end, f"not {scope.source.cut(start, end)}")


def swap_arguments(scope: Scope) -> Iterator[Proposal]:
    """Swap the first two positional arguments of a call."""
    for node in scope.walk():
        if not isinstance(node, ast.Call) or len(node.args) < 2:
            continue
        first, second = node.args[:2]
        if isinstance(first, ast.Starred) or isinstance(second, ast.Starred):
            continue
        (start, middle), (again, end) = scope.source.span(first), scope.source.span(second)
        one, two = scope.source.cut(start, middle), scope.source.cut(again, end)
        if ast.dump(first) != ast.dump(second) and _called_name(node) != "isinstance":
            yield Proposal("swap_arguments", start, end, two + scope.source.cut(middle, again) + one)


def change_default(scope: Scope) -> Iterator[Proposal]:
    """Change the default of a parameter: a Boolean is inverted, None becomes False, an integer grows by one, and a
    string becomes empty."""
    arguments = scope.node.args
    for node in (*arguments.defaults, *(default for default in arguments.kw_defaults if default is not None)):
        if isinstance(node, ast.Constant) and (new := _other_default(node.value)) is not None:
            start, end = scope.source.span(node)
            yield Proposal("change_default", start, end, new)


def wrong_name(scope: Scope) -> Iterator[Proposal]:
    """Replace a use of a parameter with the next parameter in the signature."""
    arguments = scope.node.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    names = [name for name in names if name not in ("self", "cls")]
    for node in scope.walk():
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names and len(names) > 1:
            start, end = scope.source.span(node)
            yield Proposal("wrong_name", start, end, names[(names.index(node.id) + 1) % len(names)])


def drop_branch(scope: Scope) -> Iterator[Proposal]:
    """Remove the `else` or last `elif` of an `if`."""
    for node in scope.walk():
        if isinstance(node, ast.If) and node.orelse and not _is_elif_chain(node):
            start, end = scope.source.span(node.body[-1])[1], scope.source.span(node.orelse[-1])[1]
            yield Proposal("drop_branch", start, end, "")


def fix_condition(scope: Scope) -> Iterator[Proposal]:
    """Make the condition of an `if` without an `else` always true or always false."""
    for node in scope.walk():
        if isinstance(node, ast.If) and not node.orelse and not isinstance(node.test, ast.Constant):
            start, end = scope.source.span(node.test)
            for value in ("False", "True"):
                yield Proposal("fix_condition", start, end, value)


def remove_statement(scope: Scope) -> Iterator[Proposal]:
    """Remove a statement, or replace it with `pass`. The statement calls a function, assigns to a parameter or an
    element, or assigns in place (`+=`)."""
    for body in _bodies(scope):
        for statement in body:
            if isinstance(statement, ast.AugAssign) or _is_call(statement) or _rebinds(statement, scope):
                start, end = scope.source.span(statement)
                if len(body) == 1 or not _whole_lines(scope, start, end):
                    yield Proposal("remove_statement", start, end, "pass")
                else:
                    first, last = _line_bounds(scope, start, end)
                    yield Proposal("remove_statement", first, last, "")


def return_early(scope: Scope) -> Iterator[Proposal]:
    """Turn `return x` into `return None`."""
    for node in scope.walk():
        if isinstance(node, ast.Return) and node.value is not None:
            start, end = scope.source.span(node.value)
            if not (isinstance(node.value, ast.Constant) and node.value.value is None):
                yield Proposal("return_early", start, end, "None")


def break_loop(scope: Scope) -> Iterator[Proposal]:
    """Turn `continue` into `break`, and vice versa."""
    for node in scope.walk():
        if isinstance(node, ast.Continue | ast.Break):
            start, end = scope.source.span(node)
            yield Proposal("break_loop", start, end, "break" if isinstance(node, ast.Continue) else "continue")


_FINDERS: tuple[Callable[[Scope], Iterator[Proposal]], ...] = (
    break_loop,
    change_default,
    drop_branch,
    fix_condition,
    flip_comparison,
    negate_condition,
    off_by_one,
    remove_statement,
    return_early,
    swap_arguments,
    swap_arithmetic,
    swap_boolean,
    wrong_name,
)

KINDS = tuple(finder.__name__ for finder in _FINDERS)
"""Every kind of mutation, named after its finder."""


def _called_name(call: ast.Call) -> str:
    """Return the name of the called function, without its prefix."""
    function = call.func
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def _operator(scope: Scope, kind: str, left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[Proposal]:
    """Yield a proposal that replaces the operator between two operands. Yield nothing if the operator does not occur
    exactly once between them, or if a comment does."""
    start, end = scope.source.span(left)[1], scope.source.span(right)[0]
    between = scope.source.cut(start, end)
    pattern = rf"(?<![\w<>=!*/]){re.escape(old)}(?![\w<>=*/])".replace(r"\ ", r"\s+")
    found = list(re.finditer(pattern, between))
    if len(found) == 1 and "#" not in between:
        offset = start + len(between[: found[0].start()].encode())
        yield Proposal(kind, offset, offset + len(found[0].group().encode()), new)


def _stringy(*nodes: ast.expr) -> bool:
    return any(
        isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))
        for node in nodes
    )


def _other_default(value: object) -> str | None:
    if value is None:
        return "False"
    if isinstance(value, bool):
        return str(not value)
    if isinstance(value, int):
        return str(value + 1) if value >= 0 else None
    return "''" if isinstance(value, str) and value else None


def _is_elif_chain(node: ast.If) -> bool:
    """Return whether an `elif` follows that is itself followed by an `elif` or `else`."""
    return len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If) and bool(node.orelse[0].orelse)


def _bodies(scope: Scope) -> Iterator[list[ast.stmt]]:
    yield scope.node.body
    for node in scope.walk():
        for field in ("body", "orelse", "finalbody"):
            value = getattr(node, field, None)
            if isinstance(value, list) and value:
                yield value


def _is_call(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)


def _rebinds(statement: ast.stmt, scope: Scope) -> bool:
    """Return whether the statement assigns to a parameter or an element, so that every name stays bound without it."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return False
    target = statement.targets[0]
    parameters = {argument.arg for argument in (*scope.node.args.args, *scope.node.args.kwonlyargs)}
    return isinstance(target, ast.Subscript) or (isinstance(target, ast.Name) and target.id in parameters)


def _whole_lines(scope: Scope, start: int, end: int) -> bool:
    """Return whether the span covers whole lines, apart from blanks."""
    first, last = _line_bounds(scope, start, end)
    return not scope.source.cut(first, start).strip() and not scope.source.cut(end, last).strip()


def _line_bounds(scope: Scope, start: int, end: int) -> tuple[int, int]:
    data = scope.source.data
    newline = data.find(b"\n", end)
    return data.rfind(b"\n", 0, start) + 1, len(data) if newline < 0 else newline + 1
