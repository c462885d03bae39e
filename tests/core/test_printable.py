import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra.core.printable import StyledText, printable, spans

ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=())) | st.text(
    st.sampled_from("\x1b[]0;1m38\x07\\P a\r\n")
)


def test_colours_become_classes():
    assert list(spans("a\x1b[1;31mred\x1b[0m b\x1b[97;42mc\x1b[39;49md")) == [
        StyledText("a", ""),
        StyledText("red", "t-bold t-fg1"),
        StyledText(" b", ""),
        StyledText("c", "t-fg15 t-bg2"),
        StyledText("d", ""),
    ]


@pytest.mark.parametrize(
    ("sequence", "css"),
    [
        ("\x1b[38;5;9m", "t-fg9"),
        ("\x1b[38;5;200m", ""),
        ("\x1b[38;2;1;2;3;4m", "t-underline"),
        ("\x1b[48:5:4m", "t-bg4"),
        ("\x1b[38m", ""),
        ("\x1b[38;5m", ""),
        ("\x1b[;;m", ""),
        ("\x1b[8m", ""),
        ("\x1b[99999999999999999999m", ""),
    ],
)
def test_colours_beyond_the_sixteen_leave_the_text_plain(sequence, css):
    assert list(spans(f"{sequence}x")) == [StyledText("x", css)]


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[2J\x1b[Hclean", "clean"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b(Bascii", "ascii"),
        ("cut\x1b", "cut\u241b"),
        ("a\x00b\x08c\x7f", "a\u2400b\u2408c\u2421"),
        ("line\r\nnext\rover", "line\nnext\u240dover"),
        ("tab\there", "tab\there"),
        ("user\u202etxt.exe", "user\u27e8U+202E\u27e9txt.exe"),
        ("\x9b31m\ud800", "\ufffd31m\ufffd"),
    ],
)
def test_what_would_act_is_taken_out_or_shown(raw, shown):
    assert printable(raw) == shown


@given(ANY_TEXT)
def test_nothing_that_acts_survives(raw):
    shown = printable(raw)
    assert "".join(span.text for span in spans(raw)) == shown or "\r" in raw
    assert all(char in "\t\n" or unicodedata.category(char) not in {"Cc", "Cs"} for char in shown)


def test_a_megabyte_of_unfinished_sequences_takes_no_time():
    assert printable("\x1b]" * 500_000) == ""
    assert printable("\x1b[" * 500_000).count("\u241b") < 500_001
