"""Stubs of tests keep names, marks and parameters, and nothing of the work."""

from __future__ import annotations

import ast

import pytest
from palaestra.suites.terminal_bench.stub_tests import default_tests, empty_tests, may_skip, same_outcomes

from palaestra.suites.grading.run_tests import Status

SOURCE = """
from __future__ import annotations
import os, shapes
from shapes import area
import pytest
CASES = [1, 2]
shapes.prepare()

@pytest.fixture
def test_data(): return area(1, 2)

@pytest.mark.parametrize("a", CASES)
def test_a(a: int, b=area(1, 1)): assert area(a, 1) == a

@pytest.mark.skipif(not os.environ, reason="")
async def test_b(): await area()

class TestC(shapes.Base):
    def helper(self): pass
    def test_d(self): assert area(1, 1)

class Odd(__import__("unittest").TestCase):
    def test_e(self): self.fail()
"""


@pytest.mark.parametrize("decorated", [True, False])
def test_nothing_of_the_work_is_left(decorated: bool) -> None:
    made = empty_tests(SOURCE, decorated=decorated)
    assert default_tests(made) == {"test_a", "test_b", "TestC::test_d", "Odd::test_e"}
    assert not {"shapes", "area"} & {getattr(node, "id", "") for node in ast.walk(ast.parse(made))}
    assert ("parametrize" in made, "skipif" in made) == (decorated, decorated)
    exec(compile(made, "stub", "exec"), {"__name__": "stub"})


def test_outcomes_are_repeated_by_name_and_parameter() -> None:
    statuses = {"test_a[1]": Status.PASSED, "test_a[2]": Status.FAILED, "TestC::test_d": Status.PASSED}
    made = same_outcomes({**statuses, "Odd::test_e": Status.ERROR})
    names: dict[str, object] = {}
    exec(compile(made, "stub", "exec"), names)
    assert "ids=['1', '2']" in made
    names["test_a"]("pass")  # type: ignore[operator]
    with pytest.raises(AssertionError):
        names["test_a"]("fail")  # type: ignore[operator]
    names["TestC"]().test_d()  # type: ignore[operator]
    with pytest.raises(AssertionError):
        names["Odd"]("test_e").test_e()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("source", "skips"),
    [
        ("import pytest\n@pytest.mark.skip\ndef test_a(): pass", False),
        ("import pytest\npytestmark = pytest.mark.skip", False),
        ("import pytest\ndef test_a(): pytest.skip('x')", True),
        ("def test_a(self): self.skipTest('x')", True),
        ("import pytest\npytest.importorskip('x')", True),
    ],
)
def test_marks_do_not_skip_in_the_code(source: str, skips: bool) -> None:
    assert may_skip(source) is skips
