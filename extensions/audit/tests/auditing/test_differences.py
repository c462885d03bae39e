"""Calls by which mutants are compared with a solution."""

from __future__ import annotations

import pytest

from palaestra_audit.differences import Call, calls_of, first_difference

SOURCE = (
    b"SMALL = {'and', 'or'}\n\n\ndef clamp(value, low=0):\n    return value\n\n\ndef title(text):\n    return text\n"
)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ("clamp(15, 0) should be 10, and clamp(value, low) is slow.", ["clamp(15, 0)"]),
        ("title('a) b') fails.", ["title('a) b')"]),
        ("reclamp(3) and nothing(1) are others; clamp(1, low=2) has a name.", []),
        ("clamp() is slow, title('a', 'b') has too many values, and clamp(3) is right.", ["clamp(3)"]),
        ("clamp([1, (2)], {'a': None})", ["clamp([1, 2], {'a': None})"]),
    ],
)
def test_calls_with_plain_values_are_read_from_the_prompt(asked: str, named: list[str]) -> None:
    assert [str(each) for each in calls_of(SOURCE, asked) if each.named] == named


def test_near_calls_change_one_value_or_take_a_word_of_the_code() -> None:
    near = {str(each) for each in calls_of(SOURCE, "clamp(15, 0) and title('war and peace')") if not each.named}
    assert {"clamp(16, 0)", "clamp(15, 1)", "title('')", "title('war or peace')"} <= near
    assert "clamp(16, 1)" not in near


def test_a_difference_that_the_prompt_names_comes_first() -> None:
    calls = [Call("f", [1], named=False), Call("f", [2], named=False), Call("f", [3], named=True)]
    assert first_difference(calls, ["1", "2", "3"], ["1", "2", "3"]) is None
    for wrong, number in (["1", "0", "3"], 1), (["1", "0", "0"], 2):
        found = first_difference(calls, ["1", "2", "3"], wrong)
        assert found is not None
        assert found[0] is calls[number]
