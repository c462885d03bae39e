"""The framing holds however the stream is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra.sandbox.slotd.protocol.frames import Decoder, Frame, Kind, ProtocolError, encode

json_fields = st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=20) | st.none(), max_size=3)
some_frames = st.lists(
    st.builds(Frame, st.sampled_from(Kind), st.integers(0, 2**32 - 1), json_fields, st.binary(max_size=200)), max_size=6
)


@given(some_frames, st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_frames_survive_any_cut(frames: list[Frame], cuts: list[int]) -> None:
    stream = b"".join(encode(frame.kind, frame.request, frame.fields, frame.data) for frame in frames)
    decoder, received, position, turn = Decoder(), [], 0, 0
    while position < len(stream):
        size = cuts[turn % len(cuts)]
        received += list(decoder.feed(stream[position : position + size]))
        position, turn = position + size, turn + 1
    assert received == frames


def test_names_that_are_not_unicode_survive() -> None:
    (frame,) = Decoder().feed(encode(Kind.REQUEST, 1, {"path": "caf\udce9"}))
    assert frame.fields["path"] == "caf\udce9"


def test_a_stream_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ProtocolError):
        list(Decoder().feed(b"HTTP/1.1 200 OK\r\n\r\n"))
