"""Finding the text that a model meant: each strategy, ambiguity, and that nothing else changes."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from palaestra.tools.patching.fuzzy_match import STRATEGIES, Ambiguous, NoMatch, replace

CODE = """\
class Cart:
    def total(self):
        amount = 0
        for item in self.items:
            amount += item.price
        return amount

    def clear(self):
        self.items = []
"""


def test_there_are_nine_strategies_from_exact_to_block_anchor() -> None:
    names = [name for name, _ in STRATEGIES]
    assert (len(names), names[0], names[-1]) == (9, "exact", "block_anchor")


@pytest.mark.parametrize(
    ("strategy", "old", "new", "changed"),
    [
        ("exact", "+= item.price", "-= item.price", ("+=", "-=")),
        ("trailing_whitespace", "        amount = 0   \n", "        amount = 1\n", ("= 0", "= 1")),
        (
            "indentation",
            "def clear(self):\n    self.items = []",
            "def clear(self):\n    pass",
            ("self.items = []", "pass"),
        ),
        ("blank_edges", "\n\n        return amount\n\n\n", "\n        return -amount\n", ("n amount", "n -amount")),
        ("line_numbers", "7|\n8|    def clear(self):", "7|\n8|    def wipe(self):", ("clear", "wipe")),
        ("whitespace", "amount  =  0", "amount = 7", ("= 0", "= 7")),
        ("escapes", "amount = 0\\n        for item", "amount = 5\\n        for item", ("= 0", "= 5")),
    ],
)
def test_each_strategy_finds_its_kind_of_difference(
    strategy: str, old: str, new: str, changed: tuple[str, str]
) -> None:
    done = replace(CODE, old, new)
    assert (done.strategy, done.text, done.count) == (strategy, CODE.replace(*changed), 1)


def test_a_block_is_found_by_its_first_and_last_line() -> None:
    block = CODE[CODE.index("    def total") : CODE.index("\n\n    def clear")]
    done = replace(CODE, block.replace("item.price", "item.prize"), "    def total(self):\n        return 3")
    assert (done.strategy, done.text) == ("block_anchor", CODE.replace(block, "    def total(self):\n        return 3"))


def test_half_a_line_is_never_matched_loosely() -> None:
    for old in (
        "amount  = 0\nfor item in",
        "\n        amount =\n",
        "\n\namount = 0",
        "3|        amount =",
        "3|amount = 0",
    ):
        with pytest.raises(NoMatch):
            replace(CODE, old, "x")


def test_typographic_quotes_match_plain_ones() -> None:
    done = replace('x = "a"\ny = 1\n', "x = “a”", 'x = "b"')
    assert (done.text, done.strategy) == ('x = "b"\ny = 1\n', "typography")


def test_new_lines_take_over_tabs_at_every_depth() -> None:
    text = "def f():\n\tif a:\n\t\treturn 1\n\treturn 2\n"
    done = replace(text, "if a:\n    return 1\nreturn 2", "if a:\n    return 3\nelse:\n    return 4\nreturn 2")
    assert done.text == "def f():\n\tif a:\n\t\treturn 3\n\telse:\n\t\treturn 4\n\treturn 2\n"


def test_two_places_are_refused_with_their_lines() -> None:
    with pytest.raises(Ambiguous, match=r"2 times \(at lines 1, 3"):
        replace("a = 1\nb\na = 1\n", "a = 1", "a = 2")


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        ("}\n}\n}\n", "}\n}\n", "}\n#\n}\n"),
        ("  }\n  }\n  }\n", "}\n}\n", "}\n#\n}\n"),
        ("a  b\na  b\na  b\n", "a b\na b", "a b\n#\na b"),
        ("a\na\na", "\na\na\n", "\na\n#\na\n"),
        ("a\na\na", "1|a\n2|a", "1|a\n#\na"),
    ],
)
def test_places_that_overlap_are_two(text: str, old: str, new: str) -> None:
    with pytest.raises(Ambiguous, match=r"2 times \(at lines 1, 2"):
        replace(text, old, new)
    assert replace(text, old, new, replace_all=True).count == 1


def test_lines_of_the_right_depth_are_found_behind_such_of_another() -> None:
    done = replace("  }\n    }\n    }\n", "}\n}\n", "}\n#\n}\n")
    assert (done.text, done.strategy) == ("  }\n    }\n    #\n    }\n", "indentation")


def test_of_very_many_places_ten_are_named() -> None:
    with pytest.raises(Ambiguous, match=r"more than 10 times \(at lines 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, …"):
        replace("e e\n" * 1000, "e", "x")


def test_a_unique_exact_place_wins_over_loose_ones() -> None:
    assert replace("  a = 1\na = 1 # x\n", "\na = 1", "\na = 2").text == "  a = 1\na = 2 # x\n"


def test_replace_all_replaces_every_place() -> None:
    assert replace("a a a", "a", "b", replace_all=True) == replace("a a a", "a", "b", replace_all=True)
    assert replace("a a a", "a", "b", replace_all=True).text == "b b b"
    assert replace("x\n  a\ny\n    a\n", "a \n", "b\n", replace_all=True).text == "x\n  b\ny\n    b\n"


def test_a_block_is_never_guessed_for_several_places() -> None:
    block = "begin\n  one two three four\nend\n"
    with pytest.raises(Ambiguous):
        replace(block * 2, "begin\n  one two three fou\nend", "x", replace_all=True)


def test_a_block_that_differs_much_is_no_match() -> None:
    with pytest.raises(NoMatch):
        replace("begin\n  something else entirely\nend\n", "begin\n  one two three four\nend", "x")


def test_a_miss_shows_the_nearest_lines() -> None:
    with pytest.raises(NoMatch) as caught:
        replace(CODE, "    def totals(self, tax):\n        total = 0", "x")
    assert "2|    def total(self):" in str(caught.value)


@pytest.mark.parametrize(("text", "old"), [("", "a"), ("\n\n", "a"), ("abc", " \n"), ("abc", "3|"), ("a\n", "\\n")])
def test_hardly_any_text_is_a_plain_miss(text: str, old: str) -> None:
    with pytest.raises(NoMatch):
        replace(text, old, "x")


def test_the_last_line_without_its_end_is_found() -> None:
    assert replace("a\n  b", "b \n", "c\n").text == "a\n  c"


@pytest.mark.parametrize(
    ("old", "new", "after"),
    [
        ("b\nc\n", "B\nC\nD\n", "a\nB\r\nC\r\nD\r\nd\n"),
        ("b\nc", "B\r\nC", "a\nB\r\nC\r\nd\n"),
        ("b\nc\n", "", "a\nd\n"),
        ("a \nb\n", "A\nB\n", "A\nB\nc\r\nd\n"),
    ],
)
def test_in_a_file_of_mixed_line_ends_lines_keep_theirs(old: str, new: str, after: str) -> None:
    assert replace("a\nb\r\nc\r\nd\n", old, new).text == after


LINES = st.lists(st.text(alphabet="ab (){}=\t\\n", max_size=8), max_size=12).map("\n".join)


@given(before=LINES, old=LINES, after=LINES, new=LINES)
def test_an_exact_unique_place_is_replaced_and_nothing_else(before: str, old: str, after: str, new: str) -> None:
    text = before + "§" + old + "§" + after
    done = replace(text, "§" + old + "§", "§" + new + "§")
    assert done == type(done)(before + "§" + new + "§" + after, "exact", 1)


@given(text=LINES, old=LINES, new=LINES, replace_all=st.booleans())
def test_any_text_is_an_edit_or_a_refusal_and_keeps_lines_it_does_not_touch(
    text: str, old: str, new: str, replace_all: bool
) -> None:
    assume(old)
    try:
        done = replace(text, old, new, replace_all=replace_all)
    except (NoMatch, Ambiguous):
        return
    untouched = len(text.split("\n")) - done.count * len(old.split("\n"))
    kept = set(done.text.split("\n"))
    assert done.count >= 1
    assert sum(line in kept for line in text.split("\n")) >= untouched - done.count
