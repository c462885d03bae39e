"""A hundred megabytes of output: the end of it is there, what was dropped is counted, and nobody's memory grows."""

from __future__ import annotations

import asyncio
import gc
import os
import re
from pathlib import Path

import pytest

from palaestra_slots.processes.registry import ProcessRegistry
from palaestra_slots.processes.session import Watch
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import SlotSpec
from processes.scenes import OnBackend
from sandbox.processes import descendants

pytestmark = pytest.mark.slots

SIZE = 100_000_000
GROWTH_BYTES = 16 << 20
"""Allowed to us and to all processes of the slot server together; what is kept of the output is far less."""


def resident_bytes(pids: list[int]) -> int:
    found = (re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text()) for pid in pids)
    return sum(int(match[1]) << 10 for match in found if match is not None)


def test_a_flood_keeps_its_tail_and_costs_no_memory(on_backend: OnBackend) -> None:
    async def scene(backend: LocalBackend) -> None:
        slot = await backend.create(SlotSpec(), "t")
        async with ProcessRegistry() as registry:
            await registry.wait((await registry.spawn(slot, "seq 100000", task_id="t")).id)
            ours = [os.getpid(), backend.server_pid, *(process.pid for process in descendants(backend.server_pid))]
            gc.collect()
            before = resident_bytes(ours)
            command = f"yes 0123456 | head -c {SIZE}; echo THE END; exit 3"
            session = await registry.spawn(slot, command, task_id="t", watch=Watch(patterns=("THE END",)))
            ended = await registry.wait(session.id, 100)
            event = await asyncio.to_thread(registry.notifications.completion_queue.get, True, 20)
            gc.collect()
            assert event["type"] == "watch_match"
            assert re.fullmatch(r"THE END( \(\d+ bytes came too fast to be searched\))?", event["output"])
            assert resident_bytes(ours) - before < GROWTH_BYTES
            assert (ended["exit_code"], ended["output_total_bytes"]) == (3, SIZE + 8)
            assert ended["output"].endswith("0123456\nTHE END\n")
            polled = await registry.poll(session.id, since=0)
            kept = SIZE + 8 - polled["lost_bytes"]
            assert 200_000 <= kept < 1 << 20
            log = await registry.read_log(session.id, limit=1)
            assert (log["output"], log["total_lines"]) == ("THE END", 25_000)
            assert log["full_output_bytes"] == (await slot.stat(log["full_output_path"])).size  # type: ignore[union-attr]

    on_backend(scene)
