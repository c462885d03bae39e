"""A ring's part of a stream is the part of the stream that its cursors say."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from palaestra_slots.sandbox.slotd.exec.pipes import Ring


@given(st.lists(st.binary(max_size=40), max_size=30), st.integers(1, 50), st.integers(-60, 1200), st.integers(1, 100))
def test_reading_by_cursor(pieces: list[bytes], limit: int, cursor: int, size: int) -> None:
    ring = Ring(limit)
    for piece in pieces:
        ring.add(piece)
        assert len(ring._kept) <= 2 * limit
    whole = b"".join(pieces)
    start, data = ring.read(cursor, size)
    assert ring.total == len(whole)
    assert data == whole[start : start + size]
    assert ring.start <= max(0, len(whole) - limit)
    wanted = len(whole) + cursor if cursor < 0 else cursor
    assert start == min(max(wanted, ring.start), len(whole))
