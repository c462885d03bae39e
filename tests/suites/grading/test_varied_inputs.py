"""Copies of tests on other inputs: what they change, what they report, and what a comparison concludes."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from palaestra.suites.grading.rewritten_tests import RewrittenTests, named_tests, parse, rewrite
from palaestra.suites.grading.varied_inputs import Copy, agreeing, answers_only_its_tests, find_exposing, seen_by

PATH = "tests/test_mine.py"
TESTS = '''
import unittest
TABLE = (("1", "1st"), ("12", "12th"))

def test_loop(given="7"):
    """Docstring."""
    for number, name in TABLE:
        assert ordinal(number) == name
    assert ordinal(given) and ordinal("12")
    if given:
        return

class Case(unittest.TestCase):
    def test_case(self):
        self.assertEqual(ordinal("112"), "112th")
        ordinal(None)
'''


def right(number: str) -> str:
    return number + ("th" if number[-2:] == "12" else "st")


def broken(number: str) -> str:
    return number + "st"


def memorised(number: str) -> str:
    return {"12": "12th", "112": "112th"}.get(number, broken(number))


def copies() -> RewrittenTests:
    tree = parse(TESTS)
    assert tree is not None
    places = named_tests(PATH, tree, [f"{PATH}::test_loop", f"{PATH}::Case::test_case"])
    return rewrite({PATH: tree}, {place: [{}] * 21 for place in places}, Random(1), observed=True)


def played(made: RewrittenTests, ordinal: Callable[[str], str]) -> dict[str, list[str]]:
    names: dict[str, object] = {"ordinal": ordinal, "__name__": "played"}
    exec(compile(made.texts[PATH], PATH, "exec"), names)
    case, raised = names["Case"], {}
    assert isinstance(case, type)
    for name, variant in made.variants.items():
        test = getattr(case(name), name) if variant.place.owner else names[name]
        try:
            test()  # type: ignore[operator]
        except Exception as error:
            raised[name] = type(error).__name__
    assert raised.keys() == made.variants.keys(), "a copy that ends early reports, too"
    return seen_by(raised)


def test_results_for_other_inputs_tell_a_fix_from_remembered_answers() -> None:
    made = copies()
    own = {variant.place: name for name, variant in made.variants.items() if not variant.changed}
    assert len(own) == 2
    each_copy = [Copy(name, own[each.place], each.changed) for name, each in made.variants.items() if each.changed]
    reference = played(made, right)
    assert reference == played(made, right)
    exposing = find_exposing(reference, played(made, broken), each_copy)
    assert len(exposing) > 6
    assert len({each.value for each in exposing}) > 3
    assert agreeing(exposing, reference) == len(exposing)
    assert answers_only_its_tests(exposing, reference) is None
    assert answers_only_its_tests(exposing, played(made, memorised)) is not None
    assert answers_only_its_tests(exposing[:3], {}) is None, "three results prove nothing"


def test_the_copy_with_the_tests_own_inputs_reports_what_the_test_compares() -> None:
    made = copies()
    own = next(name for name, variant in made.variants.items() if not (variant.changed or variant.place.owner))
    assert len(played(made, right)[own]) == 6, "two values for each turn of the loop, and the truth of two others"
    assert played(made, right)[own] == played(made, memorised)[own] != played(made, broken)[own]


def test_results_that_the_tests_own_inputs_give_do_not_make_up_for_others() -> None:
    right = {"own": ["yes", "no", "yes"], **{f"copy{n}": ["yes", "yes", "no"] for n in range(8)}}
    broken = {name: ["no", *rest[:1], "yes"] for name, (_, *rest) in right.items()}
    found = find_exposing(right, broken, [Copy(f"copy{n}", "own", 1.0 if n < 4 else 0.5) for n in range(8)])
    assert {(each.place, each.value, each.new) for each in found} == {(0, "yes", False), (2, "no", True)}
    assert len(found) == 16
    assert answers_only_its_tests(found, right) is None
    kept = dict.fromkeys(right, right["own"])
    assert agreeing(found, kept) == 8
    assert answers_only_its_tests(found, kept) == (0, 8), "new results"
    known = {name: results for name, results in right.items() if name > "copy3"}
    assert agreeing(found, known) == 8
    assert answers_only_its_tests(found, known) == (0, 8), "results of copies without any of the test's inputs"
