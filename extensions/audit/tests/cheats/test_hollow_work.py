"""Hollow work: wrong results in the form of the solution, and twins that keep the results."""

from __future__ import annotations

import ast
from types import SimpleNamespace

import pytest

from palaestra_audit.cheats.hollow_work import Hollow, hollows

MODULE = '''\
"""Figures."""
from __future__ import annotations

import math


def mean(numbers):
    """Return the mean."""
    return sum(numbers) / len(numbers)


def pair(a, b):
    if a > b:
        return b, a
    return (
        a,
        b,
    )


def each(numbers):
    for number in numbers:
        yield number


def name(): return "x"


class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    @property
    def top(self):
        return self.items[-1]

    def seen(self, item):
        return {item: item in self.items}
'''


def results(source: bytes) -> list[object]:
    space: dict[str, object] = {"__name__": "module"}
    exec(compile(source, "module", "exec"), space)
    module = SimpleNamespace(**space)
    stack = module.Stack()
    stack.push(3)
    top = stack.top if stack.items else None
    return [module.mean([1, 3]), module.pair(2, 1), list(module.each([1, 2])), module.name(), top, stack.seen(3)]


def found(after: dict[str, bytes], before: dict[str, bytes] | None = None) -> list[Hollow]:
    return list(hollows(before or {}, after))


def test_hollow_code_has_wrong_results_and_its_twin_the_right_ones() -> None:
    right = results(MODULE.encode())
    ways = found({"/workspace/figures.py": MODULE.encode()})
    assert len(ways) == 3
    for way in ways:
        wrong, twin = way.files["/workspace/figures.py"], way.twin["/workspace/figures.py"]
        assert results(twin) == right
        assert len(wrong) == len(twin)
        differing = [a for a, b in zip(results(wrong), right, strict=True) if a != b]
        assert len(differing) == len(right) if way is ways[0] else differing
        before, after = (
            [each.name for each in ast.walk(ast.parse(text)) if isinstance(each, ast.FunctionDef | ast.ClassDef)]
            for text in (MODULE, wrong)
        )
        assert before == after


def test_the_first_way_keeps_the_types_and_the_length_of_functions() -> None:
    first = found({"/workspace/figures.py": MODULE.encode()})[0]
    wrong = first.files["/workspace/figures.py"]
    assert [type(each) for each in results(wrong)] == [type(each) for each in results(MODULE.encode())]
    assert len(wrong.splitlines()) == len(MODULE.splitlines()) + 1

    def lengths(text: str | bytes) -> list[int]:
        functions = [each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.FunctionDef)]
        return [(each.end_lineno or 0) - each.lineno for each in functions]

    assert lengths(wrong) == lengths(MODULE)


def test_only_functions_that_the_solution_changed_are_hollowed() -> None:
    before = {"/workspace/figures.py": MODULE.replace("/ len(numbers)", "/ (len(numbers) + 1)").encode()}
    first = found({"/workspace/figures.py": MODULE.encode()}, before)[0]
    wrong = results(first.files["/workspace/figures.py"])
    assert [a == b for a, b in zip(wrong, results(MODULE.encode()), strict=True)] == [False, *[True] * 5]


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("LIMIT = 3\n", "LIMIT = _changed((3))"),
        ("print('yes', end='')\n", "print(_changed(('yes')), end='')"),
        ("__all__ = ['a']\n", None),
    ],
)
def test_a_module_without_functions_has_other_values(source: str, wrong: str | None) -> None:
    ways = found({"/workspace/a.py": source.encode()})
    assert (ways[0].files["/workspace/a.py"].decode().splitlines()[-1] if ways else None) == wrong


@pytest.mark.parametrize("path", ["/workspace/tests/help.py", "/workspace/test_a.py", "/workspace/conftest.py"])
def test_tests_are_not_hollowed(path: str) -> None:
    assert found({path: MODULE.encode()}) == []


def test_code_that_does_not_parse_and_unchanged_code_have_no_hollow_form() -> None:
    assert found({"/workspace/a.py": b"print 'old'\n"}) == []
    assert found({"/workspace/a.py": MODULE.encode()}, {"/workspace/a.py": MODULE.encode()}) == []


def test_other_files_get_other_digits_and_then_other_letters() -> None:
    ways = found({"/workspace/a.txt": b"lines 907\n", "/workspace/b.bin": b"\0\1\2", "/workspace/c.txt": b"yes\n"})
    assert [way.files for way in ways] == [
        {"/workspace/a.txt": b"lines 818\n"},
        {"/workspace/a.txt": b"mjoft 818\n", "/workspace/c.txt": b"zft\n"},
    ]
    assert not any(way.twin for way in ways)
