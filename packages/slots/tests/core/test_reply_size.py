"""The size of replies as they are sent: JSON, in which control characters become six."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra_slots.core.reply_size import head_within, items_within, sent_chars, tail_within

TEXT = st.text(alphabet=st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from('\0\x01\x1b"\\\n\t')))


@given(TEXT)
def test_the_size_is_that_of_the_json(text: str) -> None:
    assert sent_chars(text) == len(json.dumps(text, ensure_ascii=False)) - 2


@given(TEXT, st.integers(0, 60))
def test_heads_and_tails_are_as_long_as_they_may_be(text: str, most: int) -> None:
    head, tail = head_within(text, most), tail_within(text, most)
    assert text.startswith(head)
    assert text.endswith(tail)
    assert max(sent_chars(head), sent_chars(tail)) <= most
    assert head == text or sent_chars(text[: len(head) + 1]) > most
    assert tail == text or sent_chars(text[-len(tail) - 1 :]) > most


@pytest.mark.parametrize(("items", "most", "count"), [([], 5, 0), (["a" * 99], 5, 1), (["a", "b", "c"], 11, 2)])
def test_at_least_one_item_fits(items: list[str], most: int, count: int) -> None:
    assert items_within(items, most) == count
