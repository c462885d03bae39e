"""Waits: exponential, bounded, jittered, and what Retry-After says."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra_slots.core.retry import RetryPolicy, retry_after_s


@given(st.integers(1, 50), st.integers())
def test_waits_double_up_to_the_longest_with_jitter_below(failures: int, seed: int) -> None:
    policy = RetryPolicy(first_s=0.5, longest_s=60.0)
    full_s = min(60.0, 0.5 * 2.0 ** (failures - 1))
    assert full_s / 2 <= policy.wait_s(failures, None, random.Random(seed)) <= full_s


@given(st.floats(0, 1e6), st.integers())
def test_what_the_server_asks_for_is_waited_within_bounds(asked_s: float, seed: int) -> None:
    wait_s = RetryPolicy(first_s=0.5, longest_s=60.0).wait_s(1, asked_s, random.Random(seed))
    assert min(60.0, asked_s) <= wait_s <= min(60.0, asked_s) + 0.5


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("", None),
        ("3", 3.0),
        ("0.25", 0.25),
        ("-4", 0.0),
        ("soon", None),
        ("inf", None),
        ("nan", None),
        ("Thu, 01 Jan 1970 00:16:50 GMT", 10.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        ("Thu, 99 Jan 1970 00:00:00 GMT", None),
    ],
)
def test_retry_after_in_both_forms(header: str | None, seconds: float | None) -> None:
    assert retry_after_s(header, now=1000.0) == seconds


@given(st.text(max_size=40))
def test_any_retry_after_header_is_understood_or_ignored(header: str) -> None:
    seconds = retry_after_s(header, now=0.0)
    assert seconds is None or 0.0 <= seconds < 1e11
