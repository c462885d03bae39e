"""Whatever is killed, nothing stays: no process, no mount, no directory, no control group."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from golden_messages import raises
from palaestra_slots.core.errors import IsolationUnavailable, SandboxError, SlotEnded, SlotLost
from palaestra_slots.core.types import Limits
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Rung, Slot, SlotSpec
from palaestra_slots.sandbox.slotd.namespaced import cgroups
from programs import killed_after
from sandbox.bodies import WithSlot
from sandbox.processes import descendants, share_memory_with_inits, table

pytestmark = pytest.mark.slots

GONE_WITHIN_S = 2.0

CLIENT = """
import asyncio, os, sys
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import SlotSpec
async def main():
    async with LocalBackend() as backend:
        slots = [await backend.create(SlotSpec(), str(i)) for i in range(3)]
        for slot in slots:
            await slot.execute("setsid sleep 1000 >/dev/null 2>&1 &")
        await backend.seal(slots.pop())
        if sys.argv[1:]:
            child = os.fork()
            if child == 0:
                sys.stdin.read()
                os._exit(0)
            print(child)
        print("ready", flush=True)
        await slots[0].execute("sleep 1000", timeout_s=1000)
asyncio.run(main())
"""


def leftovers(pids: set[int]) -> list[str]:
    """What there still is of a server whose processes were `pids`."""
    found = [f"process {process}" for process in table() if process.pid in pids]
    for hierarchy in cgroups.find():
        with contextlib.suppress(FileNotFoundError):
            found += [f"group {name}" for name in os.listdir(hierarchy.parent) if _of(name, pids)]
    mounts = Path("/proc/self/mountinfo").read_text()
    return found + [f"mount {line}" for line in mounts.splitlines() if "/slots/" in line or "/skeleton" in line]


def _of(group: str, pids: set[int]) -> bool:
    return group.partition("-")[0] in {str(pid) for pid in pids}


def assert_gone(pids: set[int]) -> None:
    deadline = time.monotonic() + GONE_WITHIN_S
    while (found := leftovers(pids)) and time.monotonic() < deadline:
        os.sched_yield()
    assert found == []


@pytest.fixture
def client() -> subprocess.Popen[str]:
    """A process of ours with three slots, one of them sealed and one busy."""
    with killed_after([sys.executable, "-c", CLIENT], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        yield process


def test_a_killed_client_leaves_nothing(client: subprocess.Popen[str]) -> None:
    ours = {process.pid for process in descendants(client.pid)}
    assert len(ours) >= 6
    client.kill()
    client.wait()
    assert_gone(ours)


def test_a_child_that_a_killed_client_had_forked_keeps_nothing() -> None:
    program = [sys.executable, "-c", CLIENT, "fork"]
    with killed_after(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        child = int(client.stdout.readline())
        assert client.stdout.readline() == "ready\n"
        ours = {process.pid for process in descendants(client.pid)} - {child}
        assert len(ours) >= 6
        client.kill()
        client.wait()
        assert_gone(ours)
        assert any(process.pid == child for process in table())
        client.stdin.close()


@pytest.mark.parametrize("victim", ["slotd", "watcher"])
async def test_a_killed_server_leaves_nothing_and_its_calls_fail(victim: str) -> None:
    backend = LocalBackend()
    await backend.start()
    slot = await backend.create(SlotSpec(), "a")
    running = asyncio.ensure_future(slot.execute("setsid sleep 1000 & sleep 1000"))
    ours = {process.pid for process in descendants(backend.server_pid)} | {backend.server_pid}
    server = next(p.pid for p in descendants(backend.server_pid) if p.parent == backend.server_pid)
    await slot.read_bytes("/etc/hosts")
    os.kill(server if victim == "slotd" else backend.server_pid, signal.SIGKILL)
    with pytest.raises(SlotLost):
        await running
    with pytest.raises(SandboxError):
        await slot.execute("true")
    await backend.aclose()
    if victim == "watcher":
        async with LocalBackend():  # the next start removes what nobody was left to remove
            pass
    assert_gone(ours)


async def test_a_run_goes_on_after_its_server_died() -> None:
    async with LocalBackend() as backend:
        old = await backend.create(SlotSpec(), "old")
        snapshot = await backend.seal(await backend.create(SlotSpec(), "sealed"))
        os.kill(backend.server_pid, signal.SIGKILL)
        with pytest.raises(SlotLost):
            await old.execute("sleep 1000", timeout_s=1000)
        new = await backend.create(SlotSpec(), "new")
        assert new.epoch > old.epoch
        assert (await new.execute("echo on")).output == "on\n"
        with pytest.raises(SlotLost):
            await old.execute("true")
        with pytest.raises(SandboxError, match="layer-"):
            await backend.create(SlotSpec(), "fork", snapshot)
        await backend.destroy(old)


async def test_closing_leaves_nothing_and_can_be_repeated() -> None:
    backend = LocalBackend()
    await backend.start()
    await backend.start()
    for number in range(3):
        await (await backend.create(SlotSpec(), str(number))).execute("sleep 1000 &")
    ours = {process.pid for process in descendants(backend.server_pid)} | {backend.server_pid}
    await backend.aclose()
    assert leftovers(ours) == []
    await backend.aclose()


async def test_a_cancelled_create_leaves_no_slot() -> None:
    async with LocalBackend() as backend:
        for _ in range(5):
            creating = asyncio.ensure_future(backend.create(SlotSpec(), "x"))
            await asyncio.sleep(0)
            creating.cancel()
            with pytest.raises(asyncio.CancelledError):
                await creating
        assert [process for process in descendants(backend.server_pid) if process.name == "slot-init"] == []


async def test_destroying_ends_every_process_before_it_returns() -> None:
    async with LocalBackend() as backend:
        slot = await backend.create(SlotSpec(), "x")
        await slot.execute("for i in $(seq 50); do setsid sleep 1000 & done")
        await backend.destroy(slot)
        await backend.destroy(slot)
        assert [process.name for process in descendants(backend.server_pid)] == ["slotd"]


FILL = "mkdir {0}; cat /dev/zero > {0}/fill; cat /dev/zero > /tmp/fill{0}; : > {0}; mkdir {0}/d; : > {0}/d/x"


async def repeat(slot: Slot, command: str) -> int:
    """Run a command many times, with numbers; returns how often the kernel killed a process for lack of memory."""
    results = [await slot.execute(command.format(number), timeout_s=10) for number in range(300)]
    return sum(bool(result.metadata["oom"]) for result in results)


def test_a_slot_whose_memory_is_used_up_by_files_still_runs_commands(on_full: WithSlot) -> None:
    async def body(backend: LocalBackend, _: Slot) -> None:
        if all(hierarchy.version == 2 for hierarchy in cgroups.find() if "memory" in hierarchy.controllers):
            pytest.skip("in control groups of version 2, the first process shares the memory of its slot's commands")
        slot = await backend.create(SlotSpec(limits=Limits(memory_bytes=32 << 20, disk_bytes=24 << 20)), "greedy")
        assert await repeat(slot, FILL) > 50
        for entry in await slot.list_dir():
            await slot.remove(entry.path)
        assert (await slot.execute("echo on")).output == "on\n"

    on_full(body)


async def test_a_slot_whose_first_process_dies_for_its_commands_memory_can_still_be_sealed() -> None:
    """In control groups of version 2, the first process shares the memory of its slot's commands."""
    try:
        backend = LocalBackend(rung=Rung.FULL)
        await backend.start()
    except IsolationUnavailable as error:
        pytest.skip(str(error))
    async with backend:
        share_memory_with_inits()
        limits = Limits(memory_bytes=32 << 20, disk_bytes=24 << 20)
        slot = await backend.create(SlotSpec(limits=limits), "greedy")
        await slot.execute("echo kept > answer.txt")
        with raises(SlotEnded):
            await repeat(slot, FILL)
        with pytest.raises(SlotEnded):
            await slot.read_text("answer.txt")
        sealed = await backend.seal(slot)
        after = await backend.create(SlotSpec(), "after", sealed)
        assert await after.read_text("answer.txt") == "kept\n"


def inits() -> set[int]:
    """The first processes of the slots that this process has made."""
    ours = {process.pid for process in descendants(os.getpid())}
    return {process.pid for process in table() if process.name == "slot-init"} & ours


FLOOD = """
import os, signal, sys
number = getattr(signal, sys.argv[1])
while True:
    last = int(open('/proc/loadavg').read().split()[-1])
    for _ in range(300):
        for pid in range(last + 1, last + 4):
            try: os.kill(pid, number); last = pid
            except OSError: pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGSTOP", "SIGTSTP", "SIGKILL"])
@pytest.mark.parametrize("rung", [Rung.FULL, Rung.USERNS, Rung.CONFINED], ids=lambda rung: rung.label)
async def test_signals_to_each_next_process_hold_no_command_beyond_its_limit(rung: Rung, name: str) -> None:
    """They hit the children of the first process before these execute the programs of commands."""

    if rung is Rung.CONFINED and os.geteuid() != 0:
        pytest.skip("the commands run as the user of the first process, and stop it")
    backend = LocalBackend(rung=rung)
    try:
        await backend.start()
    except IsolationUnavailable as error:
        pytest.skip(str(error))
    async with backend:
        slot, other = [await backend.create(SlotSpec(), name) for name in ("flooded", "other")]
        await slot.write_text("flood.py", FLOOD)
        begin = f"for i in 1 2; do setsid python3 flood.py {name} </dev/null >/dev/null 2>&1 & done; sleep 0.3"
        await slot.execute(begin)
        for _ in range(12):
            begun = time.monotonic()
            assert (await slot.execute(":", timeout_s=0.5)).exit_code in {0, 124, 137}
            assert time.monotonic() - begun < 8
        assert (await other.execute("echo on")).output == "on\n"
        await backend.seal(slot)


@pytest.mark.slow
@pytest.mark.parametrize("rung", [Rung.FULL, Rung.USERNS, Rung.CONFINED], ids=lambda rung: rung.label)
async def test_a_slot_that_hangs_while_its_server_lives_was_ended_by_its_commands(rung: Rung) -> None:
    """However they did it: here, a signal from outside stands for a way that nobody knows yet."""
    backend = LocalBackend(rung=rung)
    try:
        await backend.start()
    except IsolationUnavailable as error:
        pytest.skip(str(error))
    async with backend:
        before = inits()
        slot = await backend.create(SlotSpec(), "hung")
        await slot.execute("echo kept > answer.txt")
        (own,) = inits() - before
        os.kill(own, signal.SIGSTOP)
        with pytest.raises(SlotEnded, match="stopped its first process"):
            await slot.execute(":", timeout_s=0.1)
        after = await backend.create(SlotSpec(), "after", await backend.seal(slot))
        assert await after.read_text("answer.txt") == "kept\n"


@pytest.mark.parametrize("rung", [Rung.FULL, Rung.USERNS, Rung.CONFINED], ids=lambda rung: rung.label)
async def test_a_slot_whose_first_process_is_killed_from_outside_is_lost_with_its_files(rung: Rung) -> None:
    if rung is Rung.CONFINED and os.geteuid() != 0:
        pytest.skip("a command could have killed it, because the slot has no user of its own")
    backend = LocalBackend(rung=rung)
    try:
        await backend.start()
    except IsolationUnavailable as error:
        pytest.skip(str(error))
    async with backend:
        before = inits()  # of the servers that other tests share
        slot = await backend.create(SlotSpec(limits=Limits(memory_bytes=64 << 20)), "killed")
        await slot.execute("python3 -c 'bytearray(1 << 30)'")  # at `full`, the kernel has killed a command
        (own,) = inits() - before
        os.kill(own, signal.SIGKILL)
        with pytest.raises(SlotLost) as lost:
            await repeat(slot, "sleep 5; : {0}")
        assert not isinstance(lost.value, SlotEnded)
        with raises(SlotLost):
            await backend.seal(slot)
