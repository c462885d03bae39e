"""Prompts know their checksum and their JSON, however they came to be."""

from __future__ import annotations

import json
import zlib
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra_tokens.engine import Sampled
from palaestra_tokens.ledger import Ledger, Piece, SegmentReason
from palaestra_tokens.ledger.ledger import LONG_PROMPT, Prompt, ids_json

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5)


def is_known(prompt: Prompt, ids: list[int]) -> bool:
    written = zlib.crc32(array("i", ids).tobytes()) if ids else 0
    same = list(prompt) == [prompt[at] for at in range(len(prompt))] == ids
    return same and prompt.checksum == written and json.loads(prompt.json()) == ids


@given(
    st.sampled_from([0, LONG_PROMPT - 4, LONG_PROMPT]),
    st.lists(st.tuples(IDS, IDS, IDS, st.booleans()), max_size=5),
)
def test_prompts_of_a_growing_segment(opening: int, turns: list[tuple[list[int], list[int], list[int], bool]]) -> None:
    ledger, known = Ledger(), list(range(opening))
    segment = ledger.open(SegmentReason.START)
    earlier = ledger.prompt(segment, [7])
    ledger.append(segment, known, [Piece(Sampled([], [], "stop"), 0)])
    for delta, before_abort, after, asked in turns:
        prompt = ledger.prompt(segment, delta)
        assert not asked or is_known(prompt, [*known, *delta])
        first = Piece(Sampled(before_abort, [-0.5] * len(before_abort), "abort"), prompt.checksum)
        prompt.grow(array("i", before_abort))
        assert not asked or is_known(prompt, [*known, *delta, *before_abort])
        second = Piece(Sampled(after, [-0.5] * len(after), "stop"), prompt.checksum)
        ledger.append(segment, delta, [first, second])
        known += [*delta, *before_abort, *after]
        assert is_known(earlier, [7])


def test_a_prompt_without_a_segment() -> None:
    assert is_known(Ledger().prompt(None, [1, 2]), [1, 2])


def test_parts_of_a_prompt() -> None:
    ledger = Ledger()
    segment = ledger.open(SegmentReason.START)
    ledger.append(segment, [1, 2], [Piece(Sampled([3], [-0.5], "stop"), 0)])
    prompt = ledger.prompt(segment, [4, 5])
    assert [prompt[0], prompt[2], prompt[3], prompt[-1], prompt[-3]] == [1, 3, 4, 5, 3]
    assert prompt[1:4] == [2, 3, 4]
    with pytest.raises(IndexError):
        prompt[5]


def test_any_ids_as_json() -> None:
    assert json.loads(ids_json((1, 2))) == json.loads(ids_json(array("i", [1, 2]))) == [1, 2]
    assert ids_json(Ledger().prompt(None, [])) == b"[]"
