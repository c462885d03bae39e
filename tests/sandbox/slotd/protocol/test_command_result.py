"""How a command ended crosses the stream whole, and the bytes after it are found."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from palaestra.sandbox.slotd.protocol import command_result

seconds, small, large = st.floats(min_value=0, max_value=1e9), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
some_outcomes = st.tuples(
    st.integers(-(2**31), 2**31 - 1), st.integers(0, 255), small, small, large, seconds, seconds, large
)


@given(some_outcomes, st.binary(max_size=50))
def test_an_outcome_survives_before_the_output(
    outcome: tuple[int, int, int, int, int, float, float, int], output: bytes
) -> None:
    data = command_result.encode(*outcome) + output
    assert command_result.decode(data) == outcome
    assert data[command_result.SIZE :] == output


def test_flags_are_told_apart() -> None:
    flags = (
        command_result.TIMEOUT, command_result.CANCELLED, command_result.SWEPT, command_result.OOM,
        command_result.BASH, command_result.SH, command_result.STATEFUL, command_result.RESTARTED,
    )  # fmt: skip
    assert sum(flags) == 255
    assert len(set(flags)) == len(flags)
