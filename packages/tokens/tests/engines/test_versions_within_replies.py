"""Weights that another program changes while a request goes on: each token keeps the version that sampled it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import repeat

import pytest

from palaestra_slots.core.errors import EngineReplyError
from palaestra_slots.core.types import JSON
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engine import Sampled
from palaestra_tokens.engines.token_engine import SGLangEngine, VLLMEngine
from palaestra_tokens.ledger import record_rows, verify_ledger
from palaestra_tokens.serving.token_server import TokenLoopback
from palaestra_tokens.testing.fake_engine import ToyEngine, toy_tokenizer

REPLY = "a reply of some tokens"
TOKENIZER = toy_tokenizer([REPLY])
MESSAGES = [{"role": "user", "content": "hi"}]


class Updated(ToyEngine):
    """Samples with the weights `7`, and from the ends in `ends_at` on with the next ones."""

    def __init__(self, ends_at: Sequence[int]) -> None:
        super().__init__(TOKENIZER, repeat(REPLY))
        self.ends_at = ends_at

    async def generate(self, input_ids: Sequence[int], sampling: Mapping[str, JSON]) -> Sampled:
        sampled = await super().generate(input_ids, sampling)
        earlier = [(str(7 + number), end) for number, end in enumerate(self.ends_at)]
        return replace(sampled, policy_version=str(7 + len(self.ends_at)), earlier=earlier)


def client(kind: str, url: str) -> SGLangEngine | VLLMEngine:
    config = APIServerConfig(model_name="m", base_url=url if kind == "sglang" else f"{url}/v1")
    if kind == "sglang":
        return SGLangEngine(config, tokenizer=TOKENIZER)
    engine = VLLMEngine(config, tokenizer=TOKENIZER)
    engine._labelled = True  # as after an update of a server that labels its weights
    return engine


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("kind", ["sglang", "vllm"])
@pytest.mark.parametrize("ends_at", [(), (1,), (2, 3)])
async def test_each_token_has_the_version_that_sampled_it(kind: str, ends_at: tuple[int, ...], streams: bool) -> None:
    arrived: list[Sequence[int] | None] = []
    async with TokenLoopback(Updated(ends_at), TOKENIZER) as server:
        engine = client(kind, server.url)
        try:
            chat = engine.managed_server()
            asked: dict[str, JSON] = {"max_tokens": 40, **({"on_delta": arrived.append} if streams else {})}
            await chat.chat_completion(messages=MESSAGES, **asked)
        finally:
            await engine.aclose()
    assert bool(arrived) == streams
    record = chat.ledger.record()
    assert verify_ledger(record).ok
    (row,) = record_rows(record)
    (first, *_), *_ = row.versions
    found = [(start - first, version) for start, _, version in row.versions]
    assert found == [(start, str(7 + number)) for number, start in enumerate((0, *ends_at))]
    assert [stop for _, stop, _ in row.versions[:-1]] == [start for start, _, _ in row.versions[1:]]


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
@pytest.mark.parametrize("starts", [[1], [0, 3, 2], [0, 0], [2, 0]])
async def test_versions_that_do_not_follow_each_other_are_refused(kind: str, starts: list[int]) -> None:
    def spoil(reply: dict[str, JSON]) -> dict[str, JSON]:
        part = reply["meta_info"] if kind == "sglang" else reply["choices"][0]
        part["weight_versions"] = [{"version": "7", "start": start, "end": start + 1} for start in starts]
        return reply

    async with TokenLoopback(Updated(()), TOKENIZER, spoil=spoil) as server:
        engine = client(kind, server.url)
        try:
            with pytest.raises(EngineReplyError, match=re.escape(str(starts))):
                await engine.generate([1, 2, 3], {"max_tokens": 40})
        finally:
            await engine.aclose()


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_a_version_that_sampled_nothing_is_not_recorded(kind: str) -> None:
    async with TokenLoopback(Updated((2, 1000)), TOKENIZER) as server:
        engine = client(kind, server.url)
        try:
            sampled = await engine.generate([1, 2, 3], {"max_tokens": 40})
        finally:
            await engine.aclose()
    assert (sampled.policy_version, sampled.earlier) == ("8", [("7", 2)])
