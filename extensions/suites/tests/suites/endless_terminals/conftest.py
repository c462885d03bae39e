"""Slots for terminal tasks, and a way to run a scenario in them."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from palaestra.envs.config.build import make_pool
from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra_slots.sandbox.pool import SlotPool

InPool = Callable[[Callable[[SlotPool], Awaitable[None]]], None]


@pytest.fixture
def in_pool() -> InPool:
    """Run a scenario with a pool of real slots."""

    def run(scenario: Callable[[SlotPool], Awaitable[None]]) -> None:
        async def main() -> None:
            async with make_pool(HermesAgentEnvConfig()) as pool:
                await scenario(pool)

        asyncio.run(main())

    return run
