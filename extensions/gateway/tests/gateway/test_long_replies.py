import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra_gateway.long_replies import platform_length, split_reply
from palaestra_gateway.platform import PlatformLimits

UNITS = ["characters", "utf16", "utf8"]
CHARACTERS = st.sampled_from(
    [*list("ab .\n`~"), "```", "\n```python\n", "\n```\n", "é", "é", "語", "😀", "👩\u200d👩\u200d👧"]
)


@pytest.mark.parametrize("unit", UNITS)
@given(parts=st.lists(CHARACTERS, max_size=400))
def test_no_message_is_too_long_and_nothing_is_lost(unit, parts):
    text = "".join(parts)
    limits = PlatformLimits(max_text=100, unit=unit)
    pieces = split_reply(text, limits)
    assert all(platform_length(piece, limits) <= 100 for piece in pieces)
    assert all(piece.encode("utf-8") for piece in pieces)
    letters = re.compile(r"[^\s`~]")
    kept = "".join(letters.findall("".join(pieces)))
    said = "".join(letters.findall(text))
    if "```" in text or "~~~" in text:  # a block that is reopened repeats its language
        rest = iter(kept)
        assert all(letter in rest for letter in said)
    else:
        assert kept == said


def test_a_short_reply_is_one_message_and_an_empty_one_none():
    assert split_reply("yes", PlatformLimits(100)) == ["yes"]
    assert split_reply(" \n", PlatformLimits(100)) == []


def test_a_code_block_is_closed_and_reopened_with_its_language():
    lines = [f"print({number})" for number in range(100)]
    text = "Look:\n```python\n" + "\n".join(lines) + "\n```\nThat is all."
    pieces = split_reply(text, PlatformLimits(300))
    assert len(pieces) > 2
    for piece in pieces:
        assert piece.count("```") % 2 == 0, piece
    assert all(piece.startswith("```python\n") for piece in pieces[1:-1])
    assert [line for piece in pieces for line in piece.splitlines() if line.startswith("print")] == lines


def test_cuts_are_at_paragraphs_lines_and_words_before_they_are_inside_words():
    text = "First paragraph, quite short.\n\n" + "Second one " * 10
    assert split_reply(text, PlatformLimits(100))[0] == "First paragraph, quite short.\n\n" or split_reply(
        text, PlatformLimits(100)
    )[0].endswith(" ")
    assert all(len(piece) >= 40 for piece in split_reply("word " * 100, PlatformLimits(100))[:-1])


def test_an_accent_stays_with_its_letter():
    text = "e\u0301" * 300
    for piece in split_reply(text, PlatformLimits(101)):
        assert not piece.startswith("\u0301")


def test_emoji_count_as_two_in_utf16():
    assert platform_length("😀a", PlatformLimits(100, unit="utf16")) == 3
    assert platform_length("😀a", PlatformLimits(100, unit="utf8")) == 5
    assert all(
        len(piece.encode("utf-16-le")) // 2 <= 100
        for piece in split_reply("😀" * 200, PlatformLimits(100, unit="utf16"))
    )
