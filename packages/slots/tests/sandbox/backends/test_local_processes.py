"""Background processes and terminals in local slots: output by cursor, input, signals, the end of the whole tree."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from golden_messages import raises
from palaestra_slots.core.errors import SlotLost, StaleLease
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Process, Slot, SlotSpec, TerminalSize
from sandbox.bodies import WithSlot

pytestmark = pytest.mark.slots


async def whole_output(process: Process) -> bytes:
    return b"".join([piece.data async for piece in process.output()])


async def read_until(process: Process, wanted: bytes) -> bytes:
    """What it wrote until `wanted` was in it."""
    data = b""
    async for piece in process.output():
        data += piece.data
        if wanted in data:
            return data
    raise AssertionError(f"ended without {wanted!r}: {data!r}")


def test_a_process_outlives_its_call_and_says_how_it_ended(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        process = await slot.spawn("echo out; echo err >&2; until [ -e go ]; do sleep 0.01; done; exit 5")
        assert await read_until(process, b"err\n") == b"out\nerr\n"
        status = await process.status()
        assert (status.running, status.exit_code) == (True, None)
        assert (await slot.execute(f"kill -0 {process.pid}; ps -o args= {process.pid}")).output.startswith(
            "/bin/bash -c"
        )
        await slot.write_text("go", "")
        status = await process.wait(20)
        assert (status.running, status.exit_code, status.output_total_bytes) == (False, 5, 8)
        assert status.duration_s > 0
        assert [found.process_id for found in await slot.processes()] == [process.process_id]
        await process.forget()
        assert await slot.processes() == []
        with pytest.raises(ProcessLookupError):
            await process.status()

    on_each_rung(body)


def test_death_by_signal_is_a_shell_status(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        process = await slot.spawn(["sleep", "1000"])
        await process.signal(signal.SIGTERM)
        assert (await process.wait(20)).exit_code == 143
        await process.signal(signal.SIGTERM)
        with pytest.raises(ValueError, match="99"):
            await process.signal(99)

    with_slot(body)


def test_input_arrives_and_ends(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        process = await slot.spawn('while read -r line; do echo "<$line>"; done; echo over')
        await process.write(b"one\n")
        assert await read_until(process, b"<one>\n")
        await process.write(b"two\n")
        await process.close_input()
        assert (await whole_output(process)).endswith(b"<two>\nover\n")
        with pytest.raises(BrokenPipeError):
            await process.write(b"more")
        await process.close_input()
        silent = await slot.spawn("cat; echo eof", stdin=False)
        assert await whole_output(silent) == b"eof\n"

    with_slot(body)


def test_large_input_waits_for_the_reader_and_for_nobody_else(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        process = await slot.spawn("until [ -e go ]; do sleep 0.01; done; wc -c")
        writing = asyncio.ensure_future(process.write(b"z" * 3_000_000))
        assert (await slot.execute("echo free")).output == "free\n"
        assert not writing.done()
        await slot.write_text("go", "")
        await asyncio.wait_for(writing, 20)
        await process.close_input()
        assert await whole_output(process) == b"3000000\n"

    with_slot(body)


def test_a_cancelled_write_and_a_cancelled_read_leave_the_process_usable(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        process = await slot.spawn("until [ -e go ]; do sleep 0.01; done; wc -c; read x; echo $x")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(process.write(b"z" * 1_000_000), 0.1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(process.read(wait_s=30), 0.05)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(process.wait(), 0.05)
        await slot.write_text("go", "")
        await process.close_input()
        data = await whole_output(process)
        assert 0 < int(data.split()[0]) < 1_000_000

    with_slot(body)


def test_output_is_read_by_cursor_as_often_as_wanted(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        process = await slot.spawn("printf 0123456789")
        await process.wait(20)
        assert (await process.read(0, max_bytes=4)).data == b"0123"
        assert (await process.read(4, max_bytes=4)).data == b"4567"
        assert (await process.read(0)).data == b"0123456789"
        tail = await process.read(-3)
        assert (tail.data, tail.start, tail.end, tail.lost) == (b"789", 7, 10, 0)
        past = await process.read(50)
        assert (past.data, past.end) == (b"", 10)
        assert (await process.read(10, wait_s=30)).data == b""

    with_slot(body)


def test_a_flood_is_bounded_spilled_and_holds_nobody_up(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        process = await slot.spawn("yes 0123456")
        other = await backend.create(SlotSpec(), "other")
        waits = []
        while (await process.status()).output_total_bytes < 20_000_000:
            started = time.monotonic()
            assert (await other.execute("echo ok")).output == "ok\n"
            waits.append(time.monotonic() - started)
        assert sorted(waits)[len(waits) // 2] < 0.25
        late = await process.read(0)
        assert late.lost == late.start > 1_000_000
        status = await process.kill()
        assert status.running is False
        assert status.full_output_path is not None
        spilled = await slot.read_bytes(status.full_output_path)
        assert len(spilled) == status.full_output_bytes == 4 << 20
        assert spilled == b"0123456\n" * (len(spilled) // 8)

    with_slot(body)


def test_several_at_once_each_with_its_own(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        processes = [await slot.spawn(f"read x; echo {number} $x; exit {number}") for number in range(8)]
        for process in reversed(processes):
            await process.write(f"to {process.process_id}\n".encode())
        outputs = await asyncio.gather(*(whole_output(process) for process in processes))
        assert outputs == [f"{i} to {process.process_id}\n".encode() for i, process in enumerate(processes)]
        assert [(await process.status()).exit_code for process in processes] == list(range(8))

    with_slot(body)


def test_killing_ends_the_whole_tree_and_no_other(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        bystander = await slot.spawn("sleep 2001 & wait")
        process = await slot.spawn(
            "trap '' TERM; sleep 1001 & setsid sleep 1002 & (setsid sh -c 'sleep 1003 & sleep 1004' &); echo all; wait"
        )
        await read_until(process, b"all\n")
        await slot.execute("until [ $(pgrep -fc 'sleep 100[1-4]') -ge 4 ]; do :; done", timeout_s=20)
        status = await process.kill(grace_s=0.1)
        assert (status.running, status.exit_code) == (False, 137)
        assert (await slot.execute("pgrep -fc 'sleep [1]00[1-4]'")).output == "0\n"
        assert (await bystander.status()).running is True
        assert (await process.kill()).exit_code == 137
        polite = await slot.spawn("trap 'echo bye; exit 3' TERM; echo up; while :; do sleep 0.01; done")
        await read_until(polite, b"up\n")
        assert (await polite.kill(grace_s=20)).exit_code == 3
        assert (await whole_output(polite)).endswith(b"bye\n")

    on_each_rung(body)


def test_one_that_ends_when_asked_leaves_nothing_behind(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        daemon = (await slot.execute("setsid sleep 2001 >/dev/null 2>&1 & echo $!")).output.strip()
        process = await slot.spawn("setsid sleep 1001 & (setsid sh -c 'trap \"\" TERM; sleep 1002' &); echo up; wait")
        await read_until(process, b"up\n")
        await slot.execute("until [ $(pgrep -fc 'sleep 100[12]') -ge 2 ]; do :; done", timeout_s=20)
        later = await slot.spawn("sleep 2002 & wait")
        status = await process.kill(grace_s=20)
        assert (status.running, status.exit_code) == (False, 143)
        assert (await slot.execute("pgrep -fc 'sleep [1]00[12]'")).output == "0\n"
        assert (await slot.execute(f"kill -0 {daemon} && echo lives")).output == "lives\n"
        assert (await later.status()).running
        assert (await process.kill(grace_s=20)).exit_code == 143

    on_each_rung(body)


def test_what_cannot_be_started_is_told_at_once(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        with pytest.raises(FileNotFoundError, match="not found"):
            await slot.spawn(["no-such-program"])
        with raises(FileNotFoundError):
            await slot.spawn("true", cwd="/no/such")
        await slot.write_text("script", "#!/bin/sh\n")
        with pytest.raises(PermissionError):
            await slot.spawn(["./script"])
        with pytest.raises(OSError, match="NUL"):
            await slot.spawn(["echo", "a\0b"])
        with pytest.raises(ValueError, match="program"):
            await slot.spawn([])
        assert await slot.processes() == []

    with_slot(body)


def test_processes_end_with_their_slot(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        process = await slot.spawn("sleep 1000")
        waiting = asyncio.ensure_future(process.wait())
        reading = asyncio.ensure_future(process.read(wait_s=30))
        await slot.execute("true")
        await backend.destroy(slot)
        for request in (waiting, reading):
            with pytest.raises(SlotLost):
                await request
        with pytest.raises(StaleLease):
            await process.status()

    with_slot(body)


def test_there_are_only_so_many_and_the_oldest_ended_gives_way(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        running = [await slot.spawn(["sleep", "1000"]) for _ in range(63)]
        ended = await slot.spawn("true")
        await ended.wait(20)
        running.append(await slot.spawn(["sleep", "1000"]))
        with pytest.raises(ProcessLookupError):
            await ended.status()
        with pytest.raises(BlockingIOError, match="64 background processes"):
            await slot.spawn("true")
        await running[0].kill()
        await slot.spawn("true")

    with_slot(body)


def test_a_terminal_is_one(on_each_rung: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        size = TerminalSize(30, 100)
        command = "tty; stty size; test -t 0 && test -t 2 && echo yes; echo $TERM; stat -c %U $(tty); exec cat"
        process = await slot.spawn(command, terminal=size)
        seen = await read_until(process, b"root\r\n")
        assert seen == b"/dev/pts/0\r\n30 100\r\nyes\r\nxterm-256color\r\nroot\r\n"
        await process.write(b"typed\n")
        await read_until(process, b"typed\r\ntyped\r\n")
        await process.close_input()
        assert (await process.wait(20)).exit_code == 0

    on_each_rung(body)


def test_a_terminal_tells_of_its_new_size_and_passes_signals(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        script = "trap 'stty size' WINCH; trap 'echo int' INT; echo up; while :; do sleep 0.01; done"
        process = await slot.spawn(script, terminal=TerminalSize())
        await read_until(process, b"up\r\n")
        await process.resize(TerminalSize(50, 132))
        await read_until(process, b"50 132\r\n")
        await process.write(b"\x03")
        await read_until(process, b"int\r\n")
        with pytest.raises(OSError, match="1000 rows"):
            await process.resize(TerminalSize(5000, 80))
        assert (await process.kill()).running is False
        plain = await slot.spawn("cat")
        with pytest.raises(OSError, match="no terminal"):
            await plain.resize(TerminalSize())

    with_slot(body)


def test_terminals_of_one_slot_are_apart_and_jobs_work_in_them(with_slot: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        first = await slot.spawn(["bash", "--norc", "-i"], env={"PS1": "% "}, terminal=TerminalSize())
        second = await slot.spawn("tty; cat", terminal=TerminalSize())
        await read_until(second, b"/dev/pts/1\r\n")
        await first.write(b"sleep 1000\n")
        await slot.execute("until pgrep sleep; do :; done", timeout_s=20)
        await first.write(b"\x1a")
        await read_until(first, b"Stopped")
        await first.write(b"jobs; kill %1; exit 4\nexit 4\n")  # the second counts where the job is still stopped
        assert (await first.wait(20)).exit_code == 4

    with_slot(body)
