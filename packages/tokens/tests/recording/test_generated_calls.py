"""Generated programs call the recording endpoint in three dialects: every sampled token is in a ledger, once."""

from __future__ import annotations

import asyncio
import os

import aiohttp
import pytest

from generated_client import play
from palaestra_tokens.recording import RecordingEndpoint

CALLS = int(os.environ.get("PALAESTRA_CALLS", "3000"))


async def played(rollouts: int, calls: int, at_once: int) -> int:
    """Play rollouts of at least this many calls each; return how many calls there were."""
    limit = asyncio.Semaphore(at_once)

    async def one(seed: int) -> int:
        async with limit:
            tally = await play(endpoint, session, seed, calls)
            assert not tally.problems, tally.problems[0]
            return tally.calls

    async with RecordingEndpoint() as endpoint, aiohttp.ClientSession() as session:
        return sum(await asyncio.gather(*(one(seed) for seed in range(rollouts))))


async def test_every_token_of_generated_calls_is_recorded_once() -> None:
    assert await played(12, 25, 4) >= 300


@pytest.mark.slow
async def test_thousands_of_generated_calls() -> None:
    assert await played(CALLS // 40, 40, 16) >= CALLS
