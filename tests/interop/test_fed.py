"""Theirs to ours: a stock environment of the original runtime feeds `palaestra serve api`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from talking import Talk

from interop.answering import answering
from interop.batches import begin, delivered, take
from interop.peer import STOCK, THEIRS, PalaestraApi, flags, running, until
from palaestra_slots.core.types import JSON
from palaestra_tokens.tokenizers import Tokenizer


@pytest.mark.parametrize("size", [4, 16])
def test_a_stock_environment_is_taken_as_it_is(size: int, folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Our server is killed in between, too: what it has taken it still has, and the trainer need not register again."""

    async def scenario() -> list[JSON]:
        async with PalaestraApi(tmp_path) as server, Talk(server.url) as api, answering(tokenizer) as (_, url):
            await begin(api, 2 * size)
            argv = flags(url, folder, group_size=size, logprobs="true", rollout_server_url=server.url)
            async with running([THEIRS, STOCK, "serve", *argv], tmp_path):
                groups = await take(api)

                async def plenty() -> bool:
                    return bool((await api.get("/status"))["queue_size"] >= 4)

                await until(plenty, "two batches wait")
            await server.kill()
            await server.start()
            return [*groups, *await take(api), *await take(api)]

    groups = delivered(asyncio.run(scenario()))
    assert [len(group) for group in groups] == [size] * 6
    questions = {tokenizer.decode(group[0][0]).partition("assistant")[0] for group in groups}
    assert len(questions) == 6
    for tokens, masks, logprobs, score in (row for group in groups for row in group):
        assert len(tokens) == len(masks) == len(logprobs)
        assert all((mask == -100) == (logprob > 0) for mask, logprob in zip(masks, logprobs, strict=True))
        assert score in (0.0, 1.0)
