"""Stubs of a verifier's tests show, without the work, which tests its script selects and rewards. Does no I/O.

Code under test can skip a test, drop it from the collection, or write a reward. Stubs have the names of the tests and
import nothing from the work. A run of the script over stubs therefore shows which tests must report (`empty_tests`),
and which reward the reported outcomes earn (`same_outcomes`).

Not covered: tests that a file defines in a condition, inherits or generates.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Mapping, Sequence

from palaestra.suites.grading.falsified import Function, parse, tests_in
from palaestra.suites.grading.run_tests import Status

_SKIPPING = frozenset({"skip", "skipTest", "SkipTest", "importorskip", "xfail"})
_IMPORTS = "import pytest, unittest\n"
_KNOWN = frozenset({*sys.stdlib_module_names, "pytest"}) - {"__future__"}
_ENDS = {Status.PASSED: "pass", Status.XPASSED: "pass", Status.SKIPPED: "skip", Status.XFAILED: "skip"}


def empty_tests(source: str, *, decorated: bool) -> str:
    """Return the test file with empty tests. If `decorated` is true, they keep their decorators. Raises
    `SyntaxError`."""
    kept = _emptied(ast.parse(source).body, decorated=decorated)
    return ast.unparse(ast.fix_missing_locations(ast.Module([*ast.parse(_IMPORTS).body, *kept], [])))


def same_outcomes(statuses: Mapping[str, Status]) -> str:
    """Return a file with tests of these names (`Class::test[parameter]`) that end as reported."""
    return _IMPORTS + _classes({tuple(name.split("::")): status for name, status in statuses.items()}, "")


def default_tests(source: str) -> frozenset[str]:
    """Return the tests of a file that pytest collects by default, as `Class::test`."""
    tree = parse(source)
    return frozenset() if tree is None else frozenset(_default_tests(tree.body, ""))


def may_skip(source: str) -> bool:
    """Return whether code of the file, other than decorators and marks of the module, may skip tests."""
    tree = parse(source)
    if tree is None:
        return True
    for node in ast.walk(tree):
        if isinstance(node, Function | ast.ClassDef):
            node.decorator_list = []
    body = [each for each in tree.body if not _marks_module(each)]
    names = {getattr(node, "attr", getattr(node, "id", "")) for top in body for node in ast.walk(top)}
    return not _SKIPPING.isdisjoint(names)


def _default_tests(body: Sequence[ast.stmt], owner: str) -> Iterable[str]:
    yield from (
        f"{owner}{test.name}" for _, test in tests_in([each for each in body if isinstance(each, Function)], "")
    )
    for node in body:
        if isinstance(node, ast.ClassDef) and (node.name.startswith("Test") or _is_case(node)):
            yield from _default_tests(node.body, f"{owner}{node.name}::")


def _tests(body: Sequence[ast.stmt]) -> list[Function]:
    return [test for _, test in tests_in([each for each in body if isinstance(each, Function)], "")]


def _is_case(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).endswith("TestCase") for base in node.bases)


def _marks_module(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "pytestmark"


def _emptied(body: Sequence[ast.stmt], *, decorated: bool) -> list[ast.stmt]:
    tests = _tests(body)
    kept: list[ast.stmt] = []
    for node in body:
        if isinstance(node, Function | ast.ClassDef) and not decorated:
            node.decorator_list = []
        if isinstance(node, ast.Import):
            names = [each for each in node.names if _is_known(each.name)]
            kept += [ast.Import(names)] if names else []
        elif isinstance(node, ast.ImportFrom):
            kept += [node] if not node.level and _is_known(node.module or "") else []
        elif isinstance(node, ast.Assign):
            kept += [node] if _is_plain(node.value) or (decorated and _marks_module(node)) else []
        elif isinstance(node, ast.ClassDef):
            inner = _emptied(node.body, decorated=decorated) or [ast.Pass()]
            node.bases = [ast.parse("unittest.TestCase", mode="eval").body] if _is_case(node) else []
            node.keywords, node.body = [], inner
            kept.append(node)
        elif isinstance(node, Function) and node in tests:
            kept.append(_empty(node))
    return kept


def _empty(test: Function) -> ast.stmt:
    """Return the test without its body, its annotations and its defaults. The result is never asynchronous, because
    that would need a plugin."""
    (made,) = ast.parse(f"def {test.name}(): pass").body
    assert isinstance(made, ast.FunctionDef)
    names = [*test.args.posonlyargs, *test.args.args, *test.args.kwonlyargs]
    made.args.args = [ast.arg(each.arg) for each in names]
    made.decorator_list = test.decorator_list
    return made


def _is_known(module: str) -> bool:
    return module.partition(".")[0] in _KNOWN


def _is_plain(value: ast.expr) -> bool:
    try:
        ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _classes(statuses: Mapping[tuple[str, ...], Status], indent: str) -> str:
    """Return the source text of these tests, each inside its classes."""
    text = ""
    own = {names[0]: status for names, status in statuses.items() if len(names) == 1}
    for name in dict.fromkeys(each.partition("[")[0] for each in own):
        found = {each.partition("[")[2][:-1]: status for each, status in own.items() if each.partition("[")[0] == name}
        text += _function(name, found, indent)
    for owner in dict.fromkeys(names[0] for names in statuses if len(names) > 1):
        base = "" if owner.startswith("Test") else "(unittest.TestCase)"
        inner = {names[1:]: status for names, status in statuses.items() if names[0] == owner and len(names) > 1}
        text += f"{indent}class {owner}{base}:\n{_classes(inner, indent + '    ')}"
    return text


def _function(name: str, statuses: Mapping[str, Status], indent: str) -> str:
    """Return the source of a test that ends with the given outcome for each parameter. An empty parameter stands for a
    test without parameters."""
    ends = [_ENDS.get(each, "fail") for each in statuses.values()]
    arguments, decorator = (["self"] if indent else []), ""
    start = f"end = {ends[0]!r}"
    if list(statuses) != [""]:
        arguments, start = [*arguments, "end"], "pass"
        decorator = f"{indent}@pytest.mark.parametrize('end', {ends!r}, ids={list(statuses)!r})\n"
    body = [start, "assert end != 'fail'", "if end == 'skip': raise unittest.SkipTest('skipped')"]
    lines = "".join(f"{indent}    {line}\n" for line in body)
    return f"{decorator}{indent}def {name}({', '.join(arguments)}):\n{lines}"
