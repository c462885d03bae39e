"""Finding the text that a model meant: each strategy, ambiguity, and that nothing else changes."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from golden_messages import raises
from palaestra.tools.patching.fuzzy_match import STRATEGIES, Ambiguous, NoMatch, replace
from palaestra_slots.core.types import JSON

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


def test_the_strategies_go_from_exact_to_loose() -> None:
    names = [name for name, _ in STRATEGIES]
    assert (len(names), names[0], names[-1]) == (8, "exact", "escapes")


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


STALE = [
    ("timeout = 600", "timeout = 300"),
    ("item.price", "item.prize"),
    ("return amount", "return amounts"),
    ("self.items = []", "self.items = {}"),
    ("amount = 0", "amount = 0.0"),
    ("def total(self)", "def total(self, tax)"),
    ("# keep", "# keep!"),
    ("x = 1", "x = l"),
]


@pytest.mark.parametrize(("real", "remembered"), STALE)
@pytest.mark.parametrize("place", ["context", "changed"])
def test_a_stale_memory_of_a_line_is_refused_and_shown(real: str, remembered: str, place: str) -> None:
    """A block whose first and last lines match, and most of the others, is not the block that the model quoted."""
    text = f"begin\n    {real}\n    y = 1\n    z = 2\nend\n"
    old = text.replace(real, remembered)
    new = old.replace("z = 2", "z = 3") if place == "context" else old.replace(remembered, "pass")
    with pytest.raises(NoMatch) as caught:
        replace(text, old, new)
    assert f"2|    {real}\n   old_string:     {remembered}" in str(caught.value)
    assert "y = 1" not in str(caught.value)


KEPT = [
    # file, old, new, after
    ('sep = "a  |  b"\nt = 1\n', 'sep = "a | b"\nt = 1', 'sep = "a | b"\nt = 2', 'sep = "a  |  b"\nt = 2\n'),
    ('sep = "a  |  b"; t = 1\n', 'sep = "a | b"; t = 1', 'sep = "a | b"; t = 2', 'sep = "a  |  b"; t = 2\n'),
    ("a  =  1\nbb =  2\n", "a = 1\nbb = 2", "a = 1\nbb = 3", "a  =  1\nbb =  3\n"),
    ("a  =  1\nbb =  2\n", "a = 1\nbb = 2", "a = 1\nnew = 0\nbb = 2", "a  =  1\nnew = 0\nbb =  2\n"),
    ("a  =  1\nbb =  2\n", "a = 1\nbb = 2", "bb = 2", "bb =  2\n"),
    ("x = 1  \ny = 2\n", "x = 1\ny = 2", "x = 1\ny = 3", "x = 1  \ny = 3\n"),
    ("\tx = 1\n\ty = 2\n", "    x = 1\n    y = 2", "    x = 1\n    y = 3", "\tx = 1\n\ty = 3\n"),
    ("say “hi” — now\nx = 1\n", 'say "hi" - now\nx = 1', 'say "hi" - now\nx = 2', "say “hi” — now\nx = 2\n"),
    ("say “hi” — now\n", 'say "hi" - now', 'say "hi" - later', "say “hi” — later\n"),
    ("f( a,  b )\ng()\n", "f( a, b )\ng()", "f( a, b )\nh()", "f( a,  b )\nh()\n"),
    ("if x:\n\tA  = 1\n\tB = 2\n", "if x:\n  A = 1\n  B = 2", "if x:\n  A = 1\n  if y:\n    B = 2", None),
    ("a\tb\nc\n", "a b\nc", "a  b\nc", "a  b\nc\n"),  # the model changes the white space itself
]


@pytest.mark.parametrize(("text", "old", "new", "after"), KEPT)
def test_what_old_and_new_share_stays_as_the_file_has_it(text: str, old: str, new: str, after: str | None) -> None:
    done = replace(text, old, new)
    assert done.text == (after or "if x:\n\tA  = 1\n\tif y:\n\t  B = 2\n")
    assert done.strategy != "exact"


WORDS = st.sampled_from(["a", "b", "c", "{", "}", "=", "1"])
SPACES = st.sampled_from(["", " ", "  ", "\t"])
LINE = st.lists(st.tuples(SPACES.filter(bool), WORDS), min_size=1, max_size=4)


@given(st.lists(LINE, min_size=1, max_size=5), st.lists(LINE, min_size=1, max_size=5), st.data())
def test_an_inexact_edit_writes_the_new_words_and_keeps_the_files_lines(
    lines: list[JSON], new_lines: list[JSON], data: st.DataObject
) -> None:
    real = ["".join(space + word for space, word in line) for line in lines]
    quoted = ["  " + " ".join(word for _, word in line) for line in lines]
    wanted = [
        data.draw(st.sampled_from(quoted)) if data.draw(st.booleans()) else " ".join(w for _, w in each)
        for each in new_lines
    ]
    text = "§\n" + "\n".join(real) + "\n§\n"
    try:
        done = replace(text, "§\n" + "\n".join(quoted) + "\n§", "§\n" + "\n".join(wanted) + "\n§")
    except Ambiguous:
        return
    assert [line.split() for line in done.text.split("\n")] == [*(["§"], *(line.split() for line in wanted), ["§"], [])]
    if wanted == quoted:
        assert done.text == text


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
    with raises(Ambiguous):
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
    with raises(Ambiguous):
        replace(text, old, new)
    assert replace(text, old, new, replace_all=True).count == 1


def test_lines_of_the_right_depth_are_found_behind_such_of_another() -> None:
    done = replace("  }\n    }\n    }\n", "}\n}\n", "}\n#\n}\n")
    assert (done.text, done.strategy) == ("  }\n    }\n    #\n    }\n", "indentation")


def test_of_very_many_places_ten_are_named() -> None:
    with raises(Ambiguous, "10"):
        replace("e e\n" * 1000, "e", "x")


def test_a_unique_exact_place_wins_over_loose_ones() -> None:
    assert replace("  a = 1\na = 1 # x\n", "\na = 1", "\na = 2").text == "  a = 1\na = 2 # x\n"


def test_replace_all_replaces_every_place() -> None:
    assert replace("a a a", "a", "b", replace_all=True) == replace("a a a", "a", "b", replace_all=True)
    assert replace("a a a", "a", "b", replace_all=True).text == "b b b"
    assert replace("x\n  a\ny\n    a\n", "a \n", "b\n", replace_all=True).text == "x\n  b\ny\n    b\n"


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
