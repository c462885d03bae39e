"""Events of token-exact replies, put together."""

from __future__ import annotations

import itertools

import pytest

from palaestra_slots.core.types import JSON
from palaestra_tokens.http.token_stream import SGLangEvents

A, B = [-0.5, 1, None], [0.0, 2, None]


# Without the number of tokens, new tokens that begin with all tokens so far cannot be told from all tokens.
@pytest.mark.parametrize(("incremental", "counted"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize(
    "pieces",
    [[[A], [B]], [[B], [B]], [[A, B], [A, B]], [[B], [B], [B, B]], [[], [A], [A]], [[A], [A, B]], [[A], [], [A]]],
)
def test_the_events_of_sglang_have_all_tokens_or_only_the_new_ones(
    pieces: list[list[JSON]], incremental: bool, counted: bool
) -> None:
    whole = list(itertools.chain(*pieces))
    found, ids, total = SGLangEvents(), [], 0
    for number, piece in enumerate(pieces):
        total += len(piece)
        info: dict[str, JSON] = {"output_token_logprobs": piece if incremental else whole[:total]}
        info |= {"completion_tokens": total} if counted else {}
        info["finish_reason"] = {"type": "stop"} if number + 1 == len(pieces) else None
        ids += found.take({"meta_info": info})
    assert (ids, found.ended) == ([entry[1] for entry in whole], True)
    assert found.whole()["meta_info"]["output_token_logprobs"] == whole
