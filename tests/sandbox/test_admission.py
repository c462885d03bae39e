"""How many slots a machine carries, and a pool whose memory runs short."""

from __future__ import annotations

import asyncio
import resource
from pathlib import Path

import pytest

from palaestra.envs.config.build import make_pool
from palaestra.envs.config.command_line import CommandLine, Parsed
from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra_slots.core.errors import AcquireTimeout
from palaestra_slots.sandbox import admission
from palaestra_slots.sandbox.admission import (
    DEFAULT_SLOTS,
    RESERVE_BYTES,
    SLOT_BYTES,
    MemoryGauge,
    slot_limit,
    unchecked_slots,
)
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.pool import SlotPool, SlotPoolConfig
from palaestra_tokens.config import APIServerConfig

MUCH, MANY = 1 << 40, 1 << 20


def test_a_large_machine_carries_the_default() -> None:
    assert slot_limit(None, memory=MUCH, files=MANY).slots == DEFAULT_SLOTS == 512


def test_memory_limits_a_pool_without_a_wish() -> None:
    found = slot_limit(None, memory=RESERVE_BYTES + 100 * SLOT_BYTES, files=MANY)
    assert (found.slots, "1312 MiB" in found.reason) == (max(100, unchecked_slots()), True)
    assert slot_limit(None, memory=0, files=MANY).slots == unchecked_slots() >= 4


def test_a_wish_is_limited_by_open_files_alone() -> None:
    assert slot_limit(2000, memory=0, files=MANY).slots == 2000
    found = slot_limit(2000, memory=MUCH, files=4096)
    assert (found.slots, "4096 files" in found.reason) == (448, True)


def test_what_is_available_here() -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) << 10
    assert 0 < admission.available_memory() < total


def test_only_plenty_of_memory_is_remembered_for_a_moment() -> None:
    now, memory = [0.0], [MUCH]
    gauge = MemoryGauge(lambda: memory[0], lambda: now[0])
    assert gauge() == MUCH
    memory[0] = RESERVE_BYTES - 1
    assert gauge() == MUCH
    now[0] = 0.1
    assert gauge() == RESERVE_BYTES - 1
    memory[0] = RESERVE_BYTES
    assert gauge() == RESERVE_BYTES


def test_a_control_group_with_a_limit(tmp_path: Path) -> None:
    for name, text in (
        ("memory.max", "1000\n"),
        ("memory.current", "700\n"),
        ("memory.stat", "anon 5\ninactive_file 50\n"),
    ):
        (tmp_path / name).write_text(text)
    assert admission._left_in(str(tmp_path)) == 350
    (tmp_path / "memory.max").write_text("max\n")
    assert admission._left_in(str(tmp_path)) is None
    (tmp_path / "memory.max").write_text("9223372036854771712\n")
    assert admission._left_in(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("words", "slots"),
    [
        ([], None),
        (["--slots", "7"], 7),
        (["--env.tool_pool_size", "9"], 9),
        (["--slots", "7", "--env.tool_pool_size", "9"], 7),
    ],
)
def test_slots_and_its_older_name(words: list[str], slots: int | None) -> None:
    line = CommandLine("run", HermesAgentEnvConfig, APIServerConfig, command="process")
    parsed = line.parse(words)
    assert isinstance(parsed, Parsed)
    assert make_pool(parsed.env_config).config.max_slots == slots


@pytest.mark.slots
async def test_a_pool_short_of_memory_leases_again_when_a_slot_ends_or_memory_returns() -> None:
    memory = [MUCH]
    async with SlotPool(SlotPoolConfig(max_slots=200), LocalBackend(), memory=lambda: memory[0]) as pool:
        memory[0] = 0
        held = [await pool.acquire(f"t-{number}") for number in range(unchecked_slots())]
        with pytest.raises(AcquireTimeout, match="memory is short"):
            await pool.acquire("late", timeout_s=0.05)
        waiting = asyncio.ensure_future(pool.acquire("waits"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await pool.release(held.pop())
        held.append(await waiting)
        waiting = asyncio.ensure_future(pool.acquire("waits too"))
        await asyncio.sleep(0)
        memory[0] = MUCH
        held.append(await waiting)  # nothing was released
        for slot in held:
            await pool.release(slot)
        assert (pool.available_slots, pool.acquired_slots) == (200, 0)


@pytest.mark.slots
async def test_a_pool_opens_as_many_files_as_it_may() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        async with SlotPool(SlotPoolConfig(), LocalBackend()) as pool:
            assert pool.total_slots == pool.limit.slots > 4 * unchecked_slots()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
