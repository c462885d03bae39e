"""Text by cursor: whatever the pieces, together they are the whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from palaestra_slots.processes.process_output import readable

PARTS = ["a", "\n", "\r\n", "\r", "ä", "€", "😀", "\x1b[31m", "\x1b]0;title\x07", "\x1b[2K", "\t"]


@given(st.lists(st.sampled_from(PARTS), max_size=12), st.lists(st.integers(1, 7), max_size=40))
def test_pieces_of_any_size_make_the_whole_text(parts: list[str], sizes: list[int]) -> None:
    data = "".join(parts).encode()
    whole, held = readable(data, more=False)
    assert held == 0
    cursor = seen = 0
    text = ""
    for size in [*sizes, len(data)]:
        seen = min(len(data), seen + size)
        piece, held = readable(data[cursor:seen], more=seen < len(data))
        text += piece
        cursor = seen - held
    assert text == whole
    assert "\x1b" not in text
    assert "�" not in text


@given(st.binary(max_size=60))
def test_any_bytes_become_text_that_can_be_encoded(data: bytes) -> None:
    text, held = readable(data, more=False)
    text.encode()
    begun, left = readable(data, more=True)
    assert held == 0
    assert 0 <= left <= len(data)
    assert begun == "" or text.startswith(begun.rstrip("\r"))
