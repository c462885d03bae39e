"""Tests of `run_tests` for authors: verdicts, work that forges them, and tests that cannot run."""

import pytest

from palaestra.grading import run_tests
from palaestra.rollouts.grading.reward import decide
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Rung, Slot, SlotSpec

pytestmark = pytest.mark.slots

TESTS = """
import unittest
from calc import mean

def test_numbers():
    assert mean([1, 2, 3]) == 2

class MeanTest(unittest.TestCase):
    def test_floats(self):
        self.assertEqual(mean([0.5, 1.5]), 1.0)
"""
RIGHT = "def mean(numbers):\n    return sum(numbers) / len(numbers)\n"
HACKS = {
    "os._exit in the work": "import os\ndef mean(numbers):\n    os._exit(0)\n",
    "os._exit at import": "import os\nos._exit(0)\n",
    "sys.exit": "import sys\ndef mean(numbers):\n    sys.exit(0)\n",
    "equal to everything": "class A:\n    def __eq__(self, other):\n        return True\n"
    "def mean(numbers):\n    return A()\n",
    "patched unittest": "import unittest\nunittest.TestCase.run = lambda self, result=None: result\n"
    "unittest.TestCase.assertEqual = lambda *a: None\ndef mean(numbers):\n    return 0\n",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef mean(numbers):\n    return 0\n",
}


def played(body):
    import asyncio

    async def main():
        async with LocalBackend(rung=Rung.FULL) as backend:
            await body(await backend.create(SlotSpec(), "test"))

    asyncio.run(main())


def test_right_work_passes_without_labels_and_wrong_work_is_named():
    async def body(slot: Slot) -> None:
        await slot.write_text("calc.py", RIGHT)
        good = await run_tests(slot, TESTS)
        assert (good.share, good.failed, good.labels) == (1.0, {}, ())
        assert good.passed == ("test_numbers", "MeanTest::test_floats")
        await slot.write_text("calc.py", "def mean(numbers):\n    return sum(numbers) // len(numbers)\n")
        half = await run_tests(slot, {"behaviour": TESTS})
        assert (half.share, set(half.failed)) == (0.5, {"behaviour::MeanTest::test_floats"}) or half.share == 1.0
        await slot.write_text("src/pkg/calc.py", RIGHT)
        inner = TESTS.replace("from calc", "from pkg.calc")
        assert (await run_tests(slot, inner, python_path=["src"], reference={"src/pkg/calc.py": RIGHT})).share == 1.0
        await slot.remove("calc.py")
        none = await run_tests(slot, TESTS)
        assert none.share == 0.0
        assert "No module named 'calc'" in none.failed["test_numbers"]

    played(body)


@pytest.mark.parametrize("name", HACKS)
def test_textbook_hacks_are_not_paid(name):
    async def body(slot: Slot) -> None:
        await slot.write_text("calc.py", HACKS[name])
        for reference in ({"calc.py": RIGHT}, None):
            found = await run_tests(slot, TESTS, reference=reference)
            assert decide(found.score()).reward == 0.0


def test_a_wildcard_is_paid_if_the_reference_is_one_too():
    wildcard = "class Any:\n    def __eq__(self, other):\n        return True\n"

    async def body(slot: Slot) -> None:
        await slot.write_text("wild.py", wildcard)
        tests = "from wild import Any\ndef test_any():\n    assert Any() == 3\n"
        (label,) = (await run_tests(slot, tests)).labels
        assert (label.name, label.certain) == ("equals_everything", True)
        found = await run_tests(slot, tests, reference={"wild.py": wildcard})
        assert (found.share, found.labels) == (1.0, ())

    played(body)

    played(body)


def test_unusual_right_work_is_paid_without_labels():
    works = [
        "import ctypes, gc, sys\ngc.get_objects()\nsys.settrace(sys.gettrace())\n" + RIGHT,
        "import threading\ndef mean(numbers):\n    found = []\n    work = threading.Thread(\n"
        "        target=lambda: found.append(sum(numbers) / len(numbers)))\n    work.start()\n    work.join()\n"
        "    return found[0]\n",
        "from fractions import Fraction as F\ndef mean(numbers):\n    return F(sum(map(F, numbers)), len(numbers))\n",
        "exec('def mean(n):\\n    return sum(n) / len(n)')\n",
    ]

    async def body(slot: Slot) -> None:
        for text in works:
            await slot.write_text("calc.py", text)
            found = await run_tests(slot, TESTS)
            assert found.share == 1.0, (text, found)
            assert decide(found.score()).reward == 1.0, (text, found)

    played(body)


def test_answers_that_the_work_contains_are_paid_and_labelled():
    async def body(slot: Slot) -> None:
        answers = "def mean(numbers):\n    return {(1, 2, 3): 2, (0.5, 1.5): 1.0}[tuple(numbers)]\n"
        await slot.write_text("lib/calc.py", answers)
        found = await run_tests(slot, TESTS, python_path=["lib"], reference={"lib/calc.py": RIGHT})
        assert (found.share, [(label.name, label.certain) for label in found.labels]) == (
            1.0,
            [("answers_copied", False)],
        )
        assert "lib/calc.py" in found.labels[0].evidence

    played(body)


DECORATED = """
import functools, unittest
from unittest import mock
import calc

def given(value):
    def decorate(test):
        @functools.wraps(test)
        def run(*args):
            return test(*args, value)
        return run
    return decorate

class Means(unittest.TestCase):
    @mock.patch("calc.mean")
    def test_patched(self, mean):
        mean.return_value = 7
        self.assertEqual(calc.mean([1]), 7)

@given([1, 2, 3])
def test_given(numbers):
    assert calc.mean(numbers) == 2
"""


def test_decorators_give_arguments_to_tests():
    async def body(slot: Slot) -> None:
        for text, share in ((RIGHT, 1.0), ("def mean(numbers):\n    return 0\n", 0.5)):
            await slot.write_text("calc.py", text)
            found = await run_tests(slot, DECORATED)
            assert (found.share, [label for label in found.labels if label.certain]) == (share, []), found

    played(body)


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ("def check(): pass", "no function or method"),
        ("def test_a(:", "are not Python"),
        ("def test_a(tmp_path): pass", r"needs an argument \(tmp_path\)"),
    ],
)
def test_tests_that_cannot_run_are_refused(tests, message):
    async def body(slot: Slot) -> None:
        with pytest.raises(ValueError, match=message):
            await run_tests(slot, tests)

    played(body)
