"""A desk to try tools at: a real local slot with the built-in tools bound to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import pytest

from palaestra.tools.registry.build import build_tool_registry
from palaestra.tools.runtime.runtime import ToolRuntime
from palaestra_slots.core.errors import IsolationUnavailable
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Slot, SlotSpec


class Desk:
    """One slot, and its tools as an agent calls them."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.tools = ToolRuntime(build_tool_registry(), self._slot, "task-1", timeout_s=30.0)

    async def _slot(self) -> Slot:
        return self.slot

    async def call(self, name: str, **arguments: JSON) -> JSON:
        """The reply to one call, as the model reads it."""
        return json.loads(await self.tools.handle(name, arguments))


Scenario: TypeAlias = Callable[[Desk], Awaitable[None]]
AtDesk: TypeAlias = Callable[[Scenario], None]


@pytest.fixture
def at_desk() -> AtDesk:
    """Run a scenario with a desk, in a slot of its own."""

    async def main(scenario: Scenario) -> None:
        async with LocalBackend() as backend:
            desk = Desk(await backend.create(SlotSpec(), "tools-test"))
            try:
                await scenario(desk)
            finally:
                await desk.tools.aclose()

    def run(scenario: Scenario) -> None:
        try:
            asyncio.run(main(scenario))
        except IsolationUnavailable as error:
            pytest.skip(str(error))

    return run
