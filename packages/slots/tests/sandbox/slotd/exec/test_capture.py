"""The bounded capture equals cutting the whole stream."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from palaestra_slots.sandbox.slotd.exec.pipes import Capture


@given(st.lists(st.binary(max_size=30), max_size=30), st.integers(0, 100))
def test_head_and_tail_of_any_stream(pieces: list[bytes], limit: int) -> None:
    capture = Capture(limit)
    for piece in pieces:
        capture.add(piece)
    whole = b"".join(pieces)
    head, tail = capture.parts()
    assert capture.total == len(whole)
    assert capture.truncated == (len(whole) > limit)
    if capture.truncated:
        assert head == whole[: limit - limit // 2]
        assert tail == (whole[len(whole) - limit // 2 :] if limit > 1 else b"")
    else:
        assert head + tail == whole


def test_single_bytes_cost_no_more_than_the_bound() -> None:
    capture = Capture(1000)
    for _ in range(20_000):
        capture.add(b"x")
    assert len(capture._tail) <= 1025
    assert len(capture.parts()[1]) == 500
