import textwrap

import pytest

from golden_messages import check_message
from palaestra_suites.grading.harness import FailedTest
from palaestra_suites.swe.authoring.problem_statement import mentions, problem_statement

TESTS = textwrap.dedent("""
    import unittest
    from datetime import datetime
    import pytest
    PATTERN = "\\/"
    from pkg import Box, double, parse
    from .helpers import check

    LIMIT = 3

    def test_plain():
        assert double(2) == 4

    def test_flipped():
        assert "four" == parse("4", LIMIT)

    @pytest.mark.parametrize("text, number", [])
    def test_params(text, number):
        assert parse(text) == number

    def test_steps():
        box = Box(3)
        other = 1
        box["a"] = 1
        box.add("b")
        assert len(box.keys) == 2
        result = box.sorted()
        assert result == ["a", "b"]

    def test_raises():
        with pytest.raises(ValueError):
            parse("x")

    def test_dates():
        assert [datetime(2020, 1, 1)] == double([1])

    def test_block():
        try:
            parse("y")
        except ValueError as error:
            assert error.code == 5

    @pytest.mark.parametrize("text, number", [])
    def test_params_first(text, number):
        assert number == parse(text)

    def test_sum_on_the_right(text, number):
        assert number == text + parse(text)

    def test_result_on_the_right():
        expected = 3
        result = parse("3")
        assert expected == result

    def test_spread(numbers):
        numbers[0] *= -1
        assert parse(*numbers) == 2

    def test_fixture(machine):
        assert parse(machine) == 2

    class Timer:
        def __init__(self):
            self.time = 0

        def __call__(self):
            return self.time

    class TestBox(unittest.TestCase):
        Kind = Box

        def test_kind(self):
            box = self.Kind(1, timer=Timer())
            self.assertEqual(2, len(box.keys))

        def test_made_in_setup(self):
            self.assertEqual(2, parse(self.made))

    class TestCase(unittest.TestCase):
        def test_equal(self):
            self.assertEqual(double(3), 6)
            self.assertTrue(parse("1"))
""")


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(TESTS.split("\n"), 1) if text in line)


def statement(line: str, message: str, exception: str = "AssertionError", node: str = "t", **params: str) -> str:
    failure = FailedTest(exception, message, "tests/test_pkg.py", line_of(line), params)
    return problem_statement("pkg", {f"tests/test_pkg.py::{node}": failure}, {"tests/test_pkg.py": TESTS})


def test_a_comparison_becomes_call_expectation_and_result() -> None:
    text = statement("double(2)", "assert 5 == 4\n +  where 5 = double(2)")
    assert "```python\nfrom pkg import double\ndouble(2)\n```" in text
    check_message(text, "`4`", "`5`")
    assert text.startswith("# pkg: `double` gives a wrong result\n")


def test_an_expectation_on_the_left_is_understood() -> None:
    text = statement('"four" ==', "AssertionError: assert 'four' == 'five'".removeprefix("AssertionError: "))
    assert "from pkg import parse\nLIMIT = 3\nparse('4', LIMIT)" in text
    check_message(text, "`'four'`", "`'five'`")


def test_parameters_are_shown_by_their_values() -> None:
    text = statement("parse(text) == number", "assert 2 == 1", text="'one'", number="1")
    assert "parse('one')" in text
    check_message(text, "`1`", "`2`")


def test_the_steps_that_matter_are_shown_and_the_others_not() -> None:
    text = statement('["a", "b"]', "assert ['b', 'a'] == ['a', 'b']")
    assert "from pkg import Box\nbox = Box(3)\nbox['a'] = 1\nbox.add('b')\nbox.sorted()" in text
    assert "other" not in text
    assert "assert" not in text


@pytest.mark.parametrize(
    ("line", "shown", "expected"),
    [
        ("number == parse(text)", "parse('a')", "'ab'"),
        ("number == text + parse(text)", "'a' + parse('a')", "'ab'"),
        ("expected == result", "parse('3')", "3"),
    ],
)
def test_the_call_comes_first_on_whichever_side_the_test_has_it(line: str, shown: str, expected: str) -> None:
    params = {} if "result" in line else {"text": "'a'", "number": "'ab'"}
    text = statement(line, f"assert {expected} == 'x'", **params)
    assert f"\n{shown}\n```\n\nThis should give `{expected}`." in text


@pytest.mark.parametrize(
    ("line", "params"),
    [
        ("parse(*numbers)", {"numbers": "[-1, 2]"}),
        ("parse(machine)", {}),
        ("parse(machine)", {"machine": "<Machine at 0x7f>"}),
        ("parse(self.made)", {}),
    ],
)
def test_an_example_that_needs_the_test_is_left_out(line: str, params: dict[str, str]) -> None:
    text = statement(line, "assert 1 == 2", node="TestBox::test", **params)
    assert "```" not in text
    assert "numbers" not in text
    assert "machine" not in text


def test_classes_of_the_test_file_and_attributes_of_its_class_are_spelled_out() -> None:
    text = statement("len(box.keys))", "2 != 1", node="TestBox::test_kind")
    code = text.partition("```python\n")[2].partition("```")[0]
    assert code.startswith("from pkg import Box\nclass Timer:")
    assert code.endswith("box = Box(1, timer=Timer())\nlen(box.keys)\n")
    check_message(text, "`2`", "`1`")


def test_an_exception_that_should_come() -> None:
    text = statement('parse("x")', "DID NOT RAISE <class 'ValueError'>", "Failed")
    check_message(text, "`ValueError`")


def test_an_exception_that_should_not_come() -> None:
    text = statement("double(2)", "unsupported operand", "TypeError")
    check_message(text, "`TypeError: unsupported operand`")


def test_names_of_the_code_are_not_told() -> None:
    assert "secret_name" not in statement("double(2)", "name 'secret_name' is not defined", "NameError")


def test_a_block_that_explains_its_names_is_shown_whole() -> None:
    text = statement("error.code", "assert 4 == 5")
    assert "try:\n    parse('y')\nexcept ValueError as error:" in text


def test_a_spelled_out_value_is_not_what_was_done() -> None:
    text = statement("datetime(2020", "assert [1] == [2]")
    assert "double([1])\n```\n" in text
    check_message(text, "`[datetime(2020, 1, 1)]`", "`[2]`")


def test_what_differs_each_time_is_left_out() -> None:
    text = statement("double(2)", "assert '<f at 0x7f00aa11bb22> /tmp/tmpab12cd_9/x' == 4")
    assert "`'<f at …> /tmp/…/x'`" in text


def test_unittests_own_assertions() -> None:
    text = statement("double(3)", "7 != 6")
    assert "double(3)\n```\n" in text
    check_message(text, "`6`", "`7`")
    assert "This should give `True`" in statement('parse("1")', "False is not true")


def test_a_failure_without_a_place_is_told_all_the_same() -> None:
    text = problem_statement("pkg", {"t": FailedTest("ValueError", "bad", "", 0)}, {})
    assert "raises `ValueError: bad`" in text


def test_at_most_three_examples_and_the_same_text_each_time() -> None:
    failures = {
        f"tests/test_pkg.py::test_params[{number}]": FailedTest(
            "AssertionError",
            f"assert 0 == {number}",
            "tests/test_pkg.py",
            line_of("parse(text)"),
            {"text": f"'{number}'", "number": str(number)},
        )
        for number in range(10)
    }
    text = problem_statement("pkg", failures, {"tests/test_pkg.py": TESTS})
    assert text.count("```python") == 3
    assert "7 more cases" in text
    assert text == problem_statement("pkg", dict(reversed(failures.items())), {"tests/test_pkg.py": TESTS})


@pytest.mark.parametrize("secret", ["src/pkg/core.py", "core.py"])
def test_what_gives_the_place_away_is_noticed(secret: str) -> None:
    assert mentions(f"see {secret}", ["other", secret]) == (secret,)
