"""Find the tests of a verifier that pytest collects by default. Does no I/O.

Not covered: tests that a file defines in a condition, inherits or generates.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

from palaestra_suites.grading.falsified import Function, parse, tests_in


def default_tests(source: str) -> frozenset[str]:
    """Return the tests of a file that pytest collects by default, as `Class::test`."""
    tree = parse(source)
    return frozenset() if tree is None else frozenset(_default_tests(tree.body, ""))


def _default_tests(body: Sequence[ast.stmt], owner: str) -> Iterable[str]:
    yield from (
        f"{owner}{test.name}" for _, test in tests_in([each for each in body if isinstance(each, Function)], "")
    )
    for node in body:
        if isinstance(node, ast.ClassDef) and (node.name.startswith("Test") or _is_case(node)):
            yield from _default_tests(node.body, f"{owner}{node.name}::")


def _is_case(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).endswith("TestCase") for base in node.bases)
