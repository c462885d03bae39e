"""The processes of a sandbox that is paused while one of them starts."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from palaestra_e2b.processes import HostedProcess, OutputFollower, ProcessRequest, ProcessTable
from palaestra_e2b.wire_errors import RpcError
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.pool import SlotPool
from palaestra_slots.sandbox.slot import Slot

pytestmark = pytest.mark.slots
PAUSED = RpcError("unavailable", "it was paused")
REQUEST = ProcessRequest(["/bin/sh", "-c", "sleep 0.3; echo once"], "/", {}, {})


async def told(follower: OutputFollower) -> list[JSON | RpcError]:
    """Return the messages of a follower to the end of the process, or the error that ends the stream."""
    found = []
    while True:
        message = await asyncio.wait_for(follower.messages.get(), 20)
        found.append(message)
        if not isinstance(message, dict) or "end" in message:
            return found


@asynccontextmanager
async def starting() -> AsyncIterator[tuple[Slot, ProcessTable, asyncio.Task[HostedProcess]]]:
    """A slot, the table of its processes, and the start of one that has just begun."""
    async with SlotPool() as pool:
        slot, table = await pool.acquire("e2b"), ProcessTable()
        begun = asyncio.create_task(table.start(slot, REQUEST))
        await asyncio.sleep(0)
        yield slot, table, begun
        await pool.release(slot)


async def test_a_process_that_starts_during_a_pause_is_read_once_after_it() -> None:
    async with starting() as (slot, table, begun):
        await table.stand_still(PAUSED)
        assert begun.done(), "the pause waits for it, or it would wake up the sandbox"
        hosted = await begun
        assert await told(hosted.follow()) == [PAUSED]
        with pytest.raises(RpcError):
            await table.start(slot, REQUEST)
        table.go_on()
        output, end = await told(hosted.follow())
        assert output == {"data": {"stdout": base64.b64encode(b"once\n").decode()}}
        assert end["end"]["exitCode"] == 0


async def test_a_process_that_starts_while_its_sandbox_ends_fails() -> None:
    async with starting() as (_, table, begun):
        await table.aclose(PAUSED)
        assert await told((await begun).follow()) == [PAUSED]
        assert table.all() == []
