"""The framing holds however the stream is cut, and a command's result survives it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra_slots.sandbox.slotd.protocol import frames
from palaestra_slots.sandbox.slotd.protocol.frames import Frame, FrameDecoder, FrameKind, ProtocolError, encode

json_fields = st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=20) | st.none(), max_size=3)
some_frames = st.lists(
    st.builds(Frame, st.sampled_from(FrameKind), st.integers(0, 2**32 - 1), json_fields, st.binary(max_size=200)),
    max_size=6,
)


@given(some_frames, st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_frames_survive_any_cut(sent: list[Frame], cuts: list[int]) -> None:
    stream = b"".join(encode(frame.kind, frame.request, frame.fields, frame.data) for frame in sent)
    decoder, received, position, turn = FrameDecoder(), [], 0, 0
    while position < len(stream):
        size = cuts[turn % len(cuts)]
        received += list(decoder.feed(stream[position : position + size]))
        position, turn = position + size, turn + 1
    assert received == sent


def test_names_that_are_not_unicode_survive() -> None:
    (frame,) = FrameDecoder().feed(encode(FrameKind.REQUEST, 1, {"path": "caf\udce9"}))
    assert frame.fields["path"] == "caf\udce9"


def test_a_stream_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ProtocolError):
        list(FrameDecoder().feed(b"HTTP/1.1 200 OK\r\n\r\n"))


seconds, small, large = st.floats(min_value=0, max_value=1e9), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
some_results = st.tuples(
    st.integers(-(2**31), 2**31 - 1), st.integers(0, 255), small, small, large, seconds, seconds, large
)


@given(some_results, st.binary(max_size=50))
def test_a_result_survives_before_the_output(
    result: tuple[int, int, int, int, int, float, float, int], output: bytes
) -> None:
    data = frames.encode_result(*result) + output
    assert frames.decode_result(data) == result
    assert data[frames.RESULT_SIZE :] == output


def test_the_flags_of_a_result_are_different_bits() -> None:
    flags = (
        frames.TIMEOUT, frames.CANCELLED, frames.SWEPT, frames.OOM,
        frames.BASH, frames.SH, frames.STATEFUL, frames.RESTARTED,
    )  # fmt: skip
    assert sum(flags) == 255
    assert len(set(flags)) == len(flags)
