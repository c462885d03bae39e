"""Commands that the client starts itself: reported like those that the server starts, and nothing stays open."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import signal
import time
from collections.abc import Iterator

import pytest

from palaestra_slots.core.errors import SlotLost, StaleLease
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import ExecutionResult, Limits, Slot, SlotSpec
from palaestra_slots.sandbox.slotd.exec import pipes
from palaestra_slots.sandbox.slotd.exec.supervisor import _KILL_PATIENCE_S
from sandbox.bodies import WithSlot
from sandbox.processes import descendants

pytestmark = pytest.mark.slots


@contextlib.contextmanager
def stopped_server(backend: LocalBackend) -> Iterator[None]:
    """The server does nothing meanwhile."""
    server = next(process.pid for process in descendants(backend.server_pid) if process.name == "slotd")
    os.kill(server, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server, signal.SIGCONT)


def leave_to_server(slot: Slot) -> None:
    """Have the server serve all requests."""
    slot.requests.slot_ended()  # type: ignore[attr-defined]


def told(result: ExecutionResult) -> object:
    """All that does not differ from run to run."""
    differing = {"duration_s", "cpu_s", "max_rss_bytes"}
    path = str(result.metadata.get("full_output_path", "")).rpartition("/")[0]
    metadata = {key: value for key, value in result.metadata.items() if key not in differing}
    output = re.sub(r"/\d+-\d+\.txt", "/N.txt", result.output)
    return result.success, output, result.error, {**metadata, "full_output_path": path}


def test_a_command_needs_no_server(on_full: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        with stopped_server(backend):
            result = await slot.execute("echo $A; pwd; exit 3", env={"A": "a"}, cwd="/tmp")
            assert (result.output, result.exit_code) == ("a\n/tmp\n", 3)
            assert (await slot.execute(["echo", "a b"])).output == "a b\n"
            read = await slot.execute("cat; echo 1 >&3", stdin=b"in", verdict=True)
            assert (read.output, read.verdict) == ("in", b"1\n")
            pieces: list[bytes] = []
            await slot.execute("seq 1 100000", on_output=pieces.append)
            assert len(b"".join(pieces)) == 588895
            async with await slot.shell(cwd="/tmp") as shell:
                await shell.run("A=$PWD; cd /")
                assert (await shell.run("echo $A $PWD; cat", stdin=b"in")).output == "/tmp /\nin"
            long = await slot.execute("seq 1 100000", max_output_bytes=100)
            assert long.metadata["output_total_bytes"] == 588895
            assert (await slot.execute(["tail", "-n", "1", long.metadata["full_output_path"]])).output == "100000\n"

    on_full(body)


def test_what_is_killed_is_dead_before_anybody_hears_of_it(on_full: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        async with await slot.shell() as shell:
            for run in (slot.execute, shell.run):
                late = await run("echo begun; sleep 100 & sleep 100", timeout_s=1.5)
                assert (late.output, late.metadata["timeout"]) == ("begun\n", True)
                given_up = asyncio.ensure_future(run("sleep 100"))
                await asyncio.sleep(0.05)
                given_up.cancel()
                assert isinstance((await asyncio.gather(given_up, return_exceptions=True))[0], asyncio.CancelledError)
                assert (await slot.execute("pgrep sleep")).output == ""

    on_full(body)


LATE = "sleep 100"
"""It runs out of its time; the others have enough of it on a machine that does much else."""

COMMANDS = [
    "true", "exit 3", "echo out; echo err >&2", "no-such", "kill -9 $$", "kill $$", "(", "", "cat", "echo \x01é",
    "printf '\\xff\\x00'", "seq 1 30000", "sleep 0.01; echo late", "readlink /proc/$$/fd/0", "ls /proc/$$/fd",
    "(sleep 0.1; echo daemon) & echo now", "yes | head -c 300000 | tail -c 5", "ulimit -a; id; umask", "env | sort",
    "ps -o ppid=,sid=,pgid= $$ | tr -s ' ' | grep -c \" 1 $$ $$\"", "echo $0 $- $PPID $SHLVL $_", LATE, "a\0b",
    ["echo", "a b"], ["no-such"], ["/workspace"], ["sh", "-c", "exit 7"], "echo " + "x" * 100_000 + " | wc -c",
]  # fmt: skip


def test_who_starts_a_command_makes_no_difference(on_full: WithSlot) -> None:
    async def body(backend: LocalBackend, _: Slot) -> None:
        here, there = [await backend.create(SlotSpec(), "test") for _ in range(2)]
        leave_to_server(there)
        for command in COMMANDS:
            time_s = 0.5 if command == LATE else 60
            for options in ({}, {"max_output_bytes": 10}, {"env": {"A": "1"}, "spill": False}):
                results = [await slot.execute(command, timeout_s=time_s, **options) for slot in (here, there)]  # type: ignore[arg-type]
                for result in results:
                    result.metadata.pop("swept")  # a matter of time
                assert told(results[0]) == told(results[1]), command
        for wrong in (
            {"cwd": "nowhere"},
            {"cwd": "a\0b"},
            {"env": {"A": "a\0b"}},
            {"env": {"": "a"}},
            {"timeout_s": 0},
        ):
            said = []
            for slot in (here, there):
                try:
                    said.append(told(await slot.execute("pwd", **wrong)))  # type: ignore[arg-type]
                except (OSError, ValueError) as error:
                    said.append((type(error), str(error)))
            assert said[0] == said[1], wrong

    on_full(body)


def test_a_daemon_goes_on_writing_to_a_pipe_that_nobody_reads(on_full: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.execute(": > turns; (while :; do head -c 300000 /dev/zero; echo >> turns; done) & echo")
        for _ in range(200):
            if len(await slot.read_bytes("turns")) > 3:
                break
            await asyncio.sleep(0.05)
        else:
            pytest.fail("it stands still")

    on_full(body)


def test_nothing_stays_open_after_commands(on_full: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.execute("true")
        async with await slot.shell() as shell:
            await shell.run("true")
        await asyncio.sleep(0.1)
        before = sorted(os.listdir("/proc/self/fd"))
        async with await slot.shell() as shell:
            await shell.run("sleep 0.1 & exit")
            await shell.run("kill -9 $$")
            await shell.run("sleep 9", timeout_s=0.1)
        await asyncio.gather(*(slot.execute(f"sleep 0.0{n % 5}; seq 1 {n * 1000}") for n in range(40)))
        for command in ("kill -9 $$", "sleep 9", ["no-such"]):
            await slot.execute(command, timeout_s=0.1)
        await asyncio.sleep(0.1)
        assert sorted(os.listdir("/proc/self/fd")) == before

    on_full(body)


def test_many_commands_at_once_are_no_more_than_an_init_takes(on_full: WithSlot) -> None:
    """The socket to it holds some two hundred orders."""

    async def body(backend: LocalBackend, _: Slot) -> None:
        here, there = [await backend.create(SlotSpec(), "test") for _ in range(2)]
        leave_to_server(there)
        for slot in (here, there):
            results = await asyncio.gather(*(slot.execute("cat", stdin=b"%d" % n) for n in range(400)))
            assert [result.output for result in results] == [f"{n}" for n in range(400)]

    on_full(body)


def test_a_frozen_slots_shell_goes_on_at_the_next_call(on_full: WithSlot) -> None:
    async def body(_: LocalBackend, slot: Slot) -> None:
        async with await slot.shell() as shell:
            await shell.run("A=1")
            for run in (shell.run, slot.execute):
                frozen, result = await asyncio.gather(slot.freeze(), run("echo ${A:-0}", timeout_s=5))
                assert frozen >= 1
                assert result.success
                assert await slot.freeze() >= 1
                assert (await run("echo ${A:-0}", timeout_s=5)).success
            assert (await shell.run("echo $A")).output == "1\n"

    on_full(body)


def test_what_the_kernel_killed_is_told_whoever_started_it(on_full: WithSlot) -> None:
    async def body(backend: LocalBackend, _: Slot) -> None:
        slot = await backend.create(SlotSpec(limits=Limits(memory_bytes=64 << 20)), "test")
        hungry = "exec python3 -c 'b\"x\" * (200 << 20)'"
        async with await slot.shell() as shell:
            for run in (slot.execute, shell.run):
                result = await run(hungry)
                assert (result.exit_code, result.metadata["oom"]) == (137, True)
                result = await run("kill -9 $$")
                assert (result.exit_code, result.metadata["oom"]) == (137, False)
            assert (await shell.run("echo on")).output == "on\n"

    on_full(body)


def test_a_forked_child_holds_up_no_command(on_full: WithSlot) -> None:
    async def body(_: LocalBackend, slot: Slot) -> None:
        shell = await slot.shell()
        await shell.run("true")
        running = asyncio.ensure_future(slot.execute("sleep 0.3; echo done"))
        await asyncio.sleep(0.2)
        before = len(os.listdir("/proc/self/fd"))
        told, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(tell, b"%d" % len(os.listdir("/proc/self/fd")))
            signal.pause()
            os._exit(0)
        try:
            kept = int(await asyncio.to_thread(os.read, told, 100)) - 2
            assert before - kept > 8  # a root, a line, a shell, a command
            assert (await slot.execute("echo fine", timeout_s=5)).output == "fine\n"
            assert (await shell.run("echo fine")).output == "fine\n"
            assert (await running).output == "done\n"
        finally:
            os.kill(pid, signal.SIGKILL)
            await asyncio.to_thread(os.waitpid, pid, 0)

    on_full(body)


def test_a_forked_child_keeps_nothing_of_commands(on_full: WithSlot) -> None:
    """Neither what a daemon still writes to nor the file of what is too long, which is a file of the slot."""

    def opened() -> set[str]:
        found = set()
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"/proc/self/fd/{fd}"))
        return found

    async def body(backend: LocalBackend, slot: Slot) -> None:
        before = opened()
        await slot.execute("sleep 1000 & disown")
        written, end = asyncio.Event(), "the end"

        def look(data: bytes) -> None:
            if end.encode() in data:
                written.set()

        long = asyncio.ensure_future(slot.execute(f"yes | head -c 100000; echo {end}; sleep 1000", on_output=look))
        await asyncio.wait_for(written.wait(), 20)
        held = opened() - before
        assert len(held) >= 3, held  # a daemon's pipe, a command's and its file
        told, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(tell, b"%d" % len(held & opened()))
            os._exit(0)
        assert await asyncio.to_thread(os.read, told, 100) == b"0"
        await asyncio.to_thread(os.waitpid, pid, 0)
        pipes.close(told, tell)
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long

    on_full(body)


@pytest.mark.parametrize("server", [False, True])
def test_what_ends_in_time_has_not_run_out_of_it_however_late_it_is_heard(on_full: WithSlot, server: bool) -> None:
    """The event loop may stand still for longer than a command is given: in a step of a training, say."""

    async def body(backend: LocalBackend, slot: Slot) -> None:
        if server:
            leave_to_server(slot)
        shell = await slot.shell()
        await shell.run("true")
        running = [asyncio.ensure_future(slot.execute("exec sleep 0.05", timeout_s=1)) for _ in range(4)]
        running.append(asyncio.ensure_future(shell.run("sleep 0.05", timeout_s=1)))
        await asyncio.sleep(0.01)
        with stopped_server(backend) if server else contextlib.nullcontext():
            still = time.monotonic()
            while time.monotonic() < still + 1.5 or any(one.name == "sleep" for one in descendants(backend.server_pid)):
                time.sleep(0.05)  # noqa: ASYNC251 - so that nobody comes to anything
        assert [(await one).exit_code for one in running] == [0] * 5

    on_full(body)


def test_what_is_dead_in_time_does_not_end_its_slot_however_late_it_is_heard(on_full: WithSlot) -> None:
    """A command that does not die takes its slot with it; one whose death nobody has come to hear of must not."""

    async def body(backend: LocalBackend, slot: Slot) -> None:
        shell = await slot.shell()
        await shell.run("true")
        running = [asyncio.ensure_future(slot.execute("sleep 1000")) for _ in range(2)]
        running.append(asyncio.ensure_future(shell.run("sleep 1000")))
        await slot.execute("until [ $(pgrep -c sleep) = 3 ]; do :; done", timeout_s=20)
        for one in running:
            one.cancel()
        await asyncio.sleep(0)
        time.sleep(_KILL_PATIENCE_S + 0.5)  # noqa: ASYNC251 - so that nobody comes to anything
        await asyncio.wait(running)
        assert (await slot.execute("echo alive")).output == "alive\n"
        assert (await shell.run("echo alive")).output == "alive\n"

    on_full(body)


def test_where_descriptors_are_few_the_server_has_the_shells(on_full: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (2 * free, limits[1]))
        try:
            async with await slot.shell() as shell:
                before = len(os.listdir("/proc/self/fd"))
                assert (await shell.run("echo fine")).output == "fine\n"
                assert len(os.listdir("/proc/self/fd")) == before
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    on_full(body)


def test_the_end_of_a_slot_ends_its_commands(on_full: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        slots = [slot, *[await backend.create(SlotSpec(), "test") for _ in range(2)]]
        shells = [await each.shell() for each in slots]
        await asyncio.sleep(0.1)
        running = [asyncio.ensure_future(each.execute("sleep 100")) for each in slots]
        running += [asyncio.ensure_future(each.run("sleep 100")) for each in shells]
        await asyncio.sleep(0.1)
        await backend.destroy(slots[0])
        await backend.seal(slots[1])
        os.kill(backend.server_pid, signal.SIGKILL)
        ends = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 20)
        assert [type(end) for end in ends] == [SlotLost] * 6
        with pytest.raises(StaleLease):
            await shells[0].run("true")
        with pytest.raises(SlotLost):
            await shells[2].run("true")

    on_full(body)


def test_a_command_begun_during_a_checkpoint_waits_for_it(on_full: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.execute("seq 1 3000 | xargs touch")
        taking = asyncio.ensure_future(backend.checkpoint(slot))
        await asyncio.sleep(0.01)  # what comes in the same moment has begun first
        await slot.execute("touch after")
        assert taking.done()
        fork = await backend.create(SlotSpec(), "fork", await taking)
        assert await fork.stat("after") is None
        assert await fork.stat("3000") is not None

    on_full(body)


def test_a_command_begun_during_a_checkpoint_ends_with_the_server(on_full: WithSlot) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        await slot.execute("seq 1 3000 | xargs touch")
        taking = asyncio.ensure_future(backend.checkpoint(slot))
        await asyncio.sleep(0.01)
        running = [asyncio.ensure_future(slot.execute("true", timeout_s=5)) for _ in range(3)]
        await asyncio.sleep(0)
        os.kill(backend.server_pid, signal.SIGKILL)
        ends = await asyncio.wait_for(asyncio.gather(taking, *running, return_exceptions=True), 20)
        assert [type(end) for end in ends] == [SlotLost] * 4

    on_full(body)


def test_a_careful_umask_leaves_commands_to_the_server(on_full: WithSlot) -> None:
    """What does not fit into a result is in a file that every user of the slot can read."""
    usual = os.umask(0o077)
    try:

        async def body(backend: LocalBackend, slot: Slot) -> None:
            long = await slot.execute("seq 1 1000", max_output_bytes=10)
            path = long.metadata["full_output_path"]
            modes = await slot.execute(["stat", "-c", "%a", path, os.path.dirname(path)])
            assert modes.output == "644\n755\n"

        on_full(body)
    finally:
        os.umask(usual)
