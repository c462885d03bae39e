"""Rewrite test files so that knowing their source does not help: variants of every test under random names.

A variant means the same as its test, except where it is falsified (`negate_test.py`). Variants stand in random order
and, unless `moved` is false, at the end of their module or class. Their constants come from an encoded table, their
local variables have random names, and their assertions are written in a different form. Neither a hash nor a name
therefore shows which test a variant comes from, and a falsified variant looks like any other. Does no I/O.

Not covered: code that runs the variants and compares their meaning with tests that it knows.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from palaestra.suites.grading.negate_test import Falsification, Function, comparison, tests_in
from palaestra.suites.grading.python_source import ParsedSource, SourceEdit, apply_edits
from palaestra.suites.grading.varied_inputs import OBSERVER, end_with_results, note_results, share_of

TAMPERED = "EqualsEverything"
"""The exception that a watched comparison raises for an object that equals everything."""

_LETTERS = "bcdfghjkmnpqrstvwxz"
_WATCH = f"""
class {TAMPERED}(BaseException):
    pass
class WATCHED_Nothing:
    __hash__ = None
    def __eq__(self, other): return NotImplemented
WATCHED_nothing = WATCHED_Nothing()
def WATCHED(value):
    kind = type(value)
    if kind.__module__ in (__name__, "unittest.mock"):
        return value
    try:
        same, other = value == WATCHED_nothing, value != WATCHED_nothing
    except Exception:
        return value
    if same is True or other is False:
        raise {TAMPERED}(f"{{kind.__module__}}.{{kind.__qualname__}}")
    return value
"""
_TABLE = (
    "def {name}(i, t=__import__('ast').literal_eval(bytes(b ^ {key} for b in bytes.fromhex({data!r})).decode())):\n"
)
_TABLE += "    return {value}\n"


@dataclass(frozen=True, slots=True)
class TestPlace:
    """A test function: the path of its file, the prefix of its classes (`Class::`), and its name."""

    __test__ = False  # pytest: not a test class

    path: str
    owner: str
    name: str


Choice = Mapping[TestPlace, Sequence[Mapping[int, Falsification]]]
"""For each test, the variants to write. A variant maps each falsified site to its change; an empty mapping stands for a
variant that means the same as the test."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A copy of a test. `sites` are the numbers of the falsified sites; without falsified sites, the copy means the
    same as the test. `changed` is the share of its inputs that are changed (`varied_inputs.py`)."""

    place: TestPlace
    sites: tuple[int, ...]
    changed: float = 0.0


@dataclass(frozen=True, slots=True)
class RewrittenTests:
    """The texts of rewritten files by path, and the variant that each random name stands for. `further` are the texts
    of new files, which run after the others."""

    texts: Mapping[str, str]
    variants: Mapping[str, Variant]
    further: Mapping[str, str] = field(default_factory=dict)

    def origin(self, node_id: str) -> tuple[Variant, str] | None:
        """Return the variant of a reported node id, and the node id of the test that it is a copy of."""
        head, bracket, parameters = node_id.partition("[")
        path, _, rest = head.rpartition("::")
        variant = self.variants.get(rest)
        if variant is None:
            return None
        prefix = f"{path}::" if path else ""
        return variant, f"{prefix}{variant.place.name}{bracket}{parameters}"


def parse(source: str) -> ast.Module | None:
    """Return the tree of a file; None if it is not Python."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None


def named_tests(path: str, tree: ast.Module, names: Collection[str]) -> dict[TestPlace, Function]:
    """Return the test functions of a file whose name occurs in the node ids `names`, even if another class inherits the
    test. Of several functions with the same class and name, the last one counts."""
    wanted = {name.partition("[")[0].rpartition("::")[2] for name in names if not path or name.startswith(f"{path}::")}
    return {
        TestPlace(path, owner, function.name): function
        for owner, function in tests_in(tree.body, "")
        if function.name in wanted
    }


def names_used(tree: ast.Module) -> set[str]:
    """Return the names and attributes that a file refers to."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute)]
    return {node.id if isinstance(node, ast.Name) else node.attr for node in nodes}


def without_tests(source: str, named: Collection[str], *, keep: bool) -> str:
    """Return the source without the named tests (`Class::test`) or, with `keep`, without all other tests.

    A removed test is replaced by `pass`. With `keep`, the other lines keep their numbers, and a test stays if another
    part of the file refers to it.
    """
    parsed = ParsedSource(source)
    used = names_used(parsed.tree) if keep else set()
    edits = []
    for owner, function in tests_in(parsed.tree.body, ""):
        if (f"{owner}{function.name}" in named) is not keep and function.name not in used:
            first = min([function.lineno, *(each.lineno for each in function.decorator_list)])
            start, end = parsed.offset(first, function.col_offset), parsed.span(function)[1]
            lines = parsed.data.count(b"\n", start, end) if keep else 0
            edits.append(SourceEdit(start, end, "pass" + "\n" * lines))
    return apply_edits(source, edits)


def rewrite(
    trees: Mapping[str, ast.Module],
    chosen: Choice,
    random: Random,
    *,
    watched: bool = False,
    moved: bool = True,
    observed: bool = False,
) -> RewrittenTests:
    """Write the variants of every test in `chosen`.

    Falsifications refer to nodes of `trees`, which stay unchanged. Other tests are left out, unless the file refers to
    them. With `watched`, a comparison with an object that equals everything raises `TAMPERED`. `moved` puts variants at
    the end of their module or class. With `observed`, the first variant of each test reports its results, and the
    others do so for other inputs (`varied_inputs.py`).
    """
    texts: dict[str, str] = {}
    variants: dict[str, Variant] = {}
    for path, tree in trees.items():
        file = _File(path, chosen, random, watched=watched, moved=moved, observed=observed)
        texts[path] = file.rewritten(tree)
        variants |= file.variants
    return RewrittenTests(texts, variants)


class _File:
    """Rewrites one file."""

    def __init__(
        self,
        path: str,
        chosen: Choice,
        random: Random,
        *,
        watched: bool,
        moved: bool,
        observed: bool,
    ) -> None:
        self._path = path
        self._chosen = chosen
        self._random = random
        self._watch = self._fresh("w") if watched else ""
        self._observer = self._fresh("o") if observed else ""
        self._moved = moved
        self._constants = _Constants(self._fresh("k"), random)
        self.variants: dict[str, Variant] = {}

    def rewritten(self, tree: ast.Module) -> str:
        made = ast.Module(self._body(tree.body, "", names_used(tree)), [])
        place = _after_preamble(made.body)
        watch = _WATCH.replace("WATCHED", self._watch) if self._watch else ""
        observer = OBSERVER.replace("OBSERVER", self._observer) if self._observer else ""
        table = self._constants.table(f"{self._observer}.vary(t[i])" if self._observer else "t[i]")
        made.body[place:place] = ast.parse(watch + observer + table).body
        return ast.unparse(made)

    def _body(self, body: Sequence[ast.stmt], owner: str, used: set[str]) -> list[ast.stmt]:
        last = {test.name: test for _, test in tests_in([each for each in body if isinstance(each, Function)], "")}
        kept: list[ast.stmt] = []
        tests: list[ast.stmt] = []
        for node in body:
            if isinstance(node, ast.ClassDef):
                inner = self._body(node.body, f"{owner}{node.name}::", used)
                fields = {name: getattr(node, name) for name in node._fields}
                kept.append(type(node)(**{**fields, "body": inner or [ast.Pass()]}))
            elif isinstance(node, Function) and node.name in last:
                made = self._variants_of(node, owner) if last[node.name] is node else []
                (tests if self._moved else kept).extend(made)
                if not made and node.name in used:
                    kept.append(node)
            else:
                kept.append(node)
        self._random.shuffle(tests)
        return [*kept, *tests]

    def _variants_of(self, function: Function, owner: str) -> list[ast.stmt]:
        place = TestPlace(self._path, owner, function.name)
        made: list[ast.stmt] = []
        chosen = list(enumerate(self._chosen.get(place, ())))
        self._random.shuffle(chosen)  # now, because the table of constants shows the order
        for number, changes in chosen:
            memo: dict[int, object] = {}
            variant = copy.deepcopy(function, memo)
            for change in changes.values():
                setattr(memo[id(change.node)], change.field, copy.deepcopy(change.value))
            variant.name = self._fresh("test_")
            changed = share_of(number) if self._observer else 0.0
            self.variants[variant.name] = Variant(place, tuple(changes), changed)
            made.append(self._observing(variant, changed) if self._observer else self._varied(variant))
        return made

    def _observing(self, function: Function, changed: float) -> Function:
        note_results(function, self._observer)
        self._constants.hide(function, int(ast.get_docstring(function, clean=False) is not None))
        end_with_results(function, self._observer, self._fresh("s"), changed, self._fresh("e"))
        _rename_locals(function, self._fresh)
        return function

    def _varied(self, function: Function) -> Function:
        number = self._random.randrange(1000)
        if not any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(function)):
            function.body.append(comparison(number, number))
        if self._watch:
            _Watch(self._watch).visit(function)
        _rename_locals(function, self._fresh)
        _Restyle(self._random).visit(function)
        docstring = ast.get_docstring(function, clean=False) is not None
        self._constants.hide(function, 1 if docstring else 0)
        padding = ast.parse(f"{self._fresh('z')} = {self._random.randrange(1000)}").body
        function.body[docstring:docstring] = padding
        return function

    def _fresh(self, start: str) -> str:
        return start + "".join(self._random.choices(_LETTERS, k=9))


class _Constants(ast.NodeTransformer):
    """Replaces constants with calls that look them up in a table of the module."""

    def __init__(self, name: str, random: Random) -> None:
        self._name = name
        self._random = random
        self._values: list[object] = []

    def hide(self, function: Function, first: int) -> None:
        function.decorator_list = [self.visit(each) for each in function.decorator_list]
        function.body[first:] = [self.visit(each) for each in function.body[first:]]

    def table(self, value: str) -> str:
        """Return the source of the function that looks up constants in the table, or an empty string if there are no
        constants. `value` is what it returns: an expression with the entry `t[i]`."""
        key = self._random.randrange(1, 256)
        data = bytes(byte ^ key for byte in repr(tuple(self._values)).encode("utf-8", "surrogatepass")).hex()
        return _TABLE.format(name=self._name, key=key, data=data, value=value) if self._values else ""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        value = node.value
        plain = (
            type(value) in (str, int, float, bytes) and value == value and value not in (float("inf"), -float("inf"))
        )
        if not plain or (isinstance(value, str) and any("\ud800" <= each <= "\udfff" for each in value)):
            return node
        self._values.append(value)
        return ast.Call(ast.Name(self._name, ast.Load()), [ast.Constant(len(self._values) - 1)], [])

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node

    def visit_Match(self, node: ast.Match) -> ast.AST:
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_arguments(self, node: ast.arguments) -> ast.AST:
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        identity = any(isinstance(operator, ast.Is | ast.IsNot) for operator in node.ops)
        return node if identity else self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return node if isinstance(node.value, ast.Constant) else self.generic_visit(node)


class _Restyle(ast.NodeTransformer):
    """Rewrites randomly chosen assertions in a different form."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        plain = [type(each) for each in node.ops] in ([ast.Eq], [ast.NotEq])
        if plain and isinstance(node.comparators[0], ast.Constant) and self._random.random() < 0.5:
            node.left, node.comparators = node.comparators[0], [node.left]
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        self.generic_visit(node)
        if self._random.random() < 0.5:
            return node
        failed = ast.Raise(ast.Call(ast.Name("AssertionError", ast.Load()), [node.msg] if node.msg else [], []), None)
        return ast.If(ast.UnaryOp(ast.Not(), node.test), [failed], [])


def _rename_locals(function: Function, fresh: Callable[[str], str]) -> None:
    """Rename the local variables, except names that a parameter, an import or another construct also binds. A function
    with a class, or with calls such as `locals` or `eval`, is left unchanged."""
    fixed: set[str | None] = set()
    stored: set[str] = set()
    nodes = list(ast.walk(function))
    for node in nodes:
        if isinstance(node, ast.arg):
            fixed.add(node.arg)
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
            fixed.add(node.name)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            fixed.update(node.names)
        elif isinstance(node, ast.alias):
            fixed.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, Function | ast.ClassDef):
            fixed.add(node.name)
            if isinstance(node, ast.ClassDef):
                return
        elif isinstance(node, ast.MatchMapping):
            fixed.add(node.rest)
        elif isinstance(node, ast.Name):
            if node.id in ("locals", "vars", "eval", "exec", "dir"):
                return
            if not isinstance(node.ctx, ast.Load):
                stored.add(node.id)
    names = {name: fresh("v") for name in sorted(stored) if name not in fixed}
    for node in nodes:
        if isinstance(node, ast.Name) and node.id in names:
            node.id = names[node.id]


class _Watch(ast.NodeTransformer):
    """Wraps both sides of `==` and the arguments of unittest's equality assertions in calls that watch the values."""

    def __init__(self, name: str) -> None:
        self._name = name

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if all(isinstance(operator, ast.Eq) for operator in node.ops):
            node.left = self._watched(node.left)
            node.comparators = [self._watched(value) for value in node.comparators]
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name in ("assertEqual", "assertEquals", "assertDictEqual", "assertListEqual", "assertTupleEqual"):
            node.args = [value if isinstance(value, ast.Starred) else self._watched(value) for value in node.args]
        return node

    def _watched(self, value: ast.expr) -> ast.expr:
        fixed = isinstance(value, ast.Constant)
        return value if fixed else ast.Call(ast.Name(self._name, ast.Load()), [value], [])


def _after_preamble(body: Iterable[ast.stmt]) -> int:
    """Return the index after the docstring and the imports from `__future__`."""
    place = 0
    for index, node in enumerate(body):
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        if not (docstring or future):
            break
        place = index + 1
    return place
