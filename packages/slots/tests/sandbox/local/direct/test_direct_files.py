"""Small files that the client reads and writes itself: as the server does it, and nothing stays open."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import resource
import signal
from collections.abc import Awaitable, Callable

import pytest

from palaestra_slots.core.errors import SlotLost, StaleLease
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Slot, SlotSpec
from sandbox.bodies import WithSlot
from sandbox.processes import descendants

pytestmark = pytest.mark.slots


def open_roots() -> int:
    """How many directories this process holds by a path descriptor."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            with open(f"/proc/self/fdinfo/{fd}") as file:
                flags = int(file.read().split()[3], 8)
        except FileNotFoundError:  # that of the listing
            continue
        found += flags & os.O_PATH != 0
    return found


async def until(condition: Callable[[], bool]) -> None:
    """Others tell it when they get to it."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - nothing here is told
            await asyncio.sleep(0.01)


def test_small_files_need_no_server(on_full: WithSlot) -> None:
    async def body(backend: LocalBackend, _: Slot) -> None:
        slot = await backend.create(SlotSpec(), "test")
        stopped = [process.pid for process in descendants(backend.server_pid)]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            await slot.write_bytes("f", b"data", mode=0o640)
            assert await slot.read_bytes("/workspace/f", offset=1) == b"ata"
            info = await slot.stat("f")
            assert await slot.stat("nothing") is None
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        assert info is not None
        assert (info.path, info.size, info.mode) == ("/workspace/f", 4, 0o640)
        assert (await slot.execute("stat -c '%U %a' f; cat f")).output == "root 640\ndata"

    on_full(body)


def test_who_reaches_files_makes_no_difference(on_full: WithSlot) -> None:
    """Also for what is refused: the same errors with the same words."""
    prepare = (
        "mkdir d closed; echo abc > d/f; ln -s d/f link; ln -s /etc/passwd out; ln -s ../../../../etc/hostname up;"
        "ln -s loop loop; mkfifo fifo; ln -s /proc/1/environ environ; touch -d @1 d/f; chmod 4755 d/f; mkdir -p a/b;"
        f"touch {'n' * 255}"
    )
    paths = [
        "d/f", "link", "out", "up", "loop", "fifo", "environ", "d", "", ".", "..", "/", "nothing", "d/f/x", "no/such",
        "a\0b", "\ud800", "caf\udce9", "n" * 255, "n" * 256, "/dev/null", "/proc/self/status", "a/../d/f", "link/",
    ]  # fmt: skip

    async def outcome(call: Awaitable[object]) -> object:
        try:
            return await call
        except (OSError, ValueError, TypeError) as error:
            return type(error), getattr(error, "errno", None), getattr(error, "filename", None), str(error)

    async def outcomes(slot: Slot) -> list[object]:
        await slot.execute(prepare)
        found: list[object] = []
        for path in paths:
            found += [await outcome(slot.stat(path)), await outcome(slot.read_bytes(path))]
            found += [await outcome(slot.read_bytes(path, offset=2)), await outcome(slot.read_bytes(path, max_bytes=3))]
        for path in paths:
            found += [await outcome(slot.write_bytes(path, path.encode(errors="replace")))]
        found += [await outcome(slot.write_bytes("big", b"x" * size)) for size in (128 << 10, (128 << 10) + 1)]
        found += [len(await slot.read_bytes("big"))]
        found += [await outcome(slot.write_bytes("f", "text"))]  # type: ignore[arg-type]
        found += [await outcome(slot.read_bytes("f", offset=-1))]
        seen = "find . -printf '%p %y %m %U %s %l\n' | sort; cat d/f no/such; readlink link"
        return [_timeless(each) for each in found] + [(await slot.execute(seen)).output]

    def _timeless(found: object) -> object:
        return str(found).partition("mtime")[0] if "mtime" in str(found) else found

    async def body(backend: LocalBackend, _: Slot) -> None:
        reached, asked = [await backend.create(SlotSpec(), "test") for _ in range(2)]
        asked.requests.slot_ended()  # type: ignore[attr-defined]
        assert await outcomes(reached) == await outcomes(asked)

    on_full(body)


def test_a_root_is_held_no_longer_than_its_lease(on_full: WithSlot) -> None:
    async def body(backend: LocalBackend, spare: Slot) -> None:
        await backend.destroy(spare)
        before = open_roots()
        slots = [await backend.create(SlotSpec(), "test") for _ in range(4)]
        assert open_roots() == before + 4
        await backend.destroy(slots[0])
        await backend.forget(await backend.seal(slots[1]))
        assert open_roots() == before + 2
        for slot in slots[:2]:
            with pytest.raises(StaleLease):
                await slot.read_bytes("f")
            with pytest.raises(StaleLease):
                await slot.write_bytes("f", b"")
        init = next(process for process in descendants(backend.server_pid) if process.name == "slot-init")
        os.kill(init.pid, signal.SIGKILL)
        await until(lambda: open_roots() == before + 1)
        making = asyncio.ensure_future(backend.create(SlotSpec(), "test"))
        await asyncio.sleep(0)
        making.cancel()
        await asyncio.wait([making])
        assert open_roots() == before + 1
        os.kill(backend.server_pid, signal.SIGKILL)
        await until(lambda: open_roots() == before)
        for slot in slots[2:]:
            with pytest.raises(SlotLost):
                await slot.read_bytes("f")

    on_full(body)


def test_a_process_with_few_descriptors_asks_the_server(on_full: WithSlot) -> None:
    async def body(backend: LocalBackend, _: Slot) -> None:
        before, limits = open_roots(), resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (2 * lowest, limits[1]))
        try:
            slot = await backend.create(SlotSpec(), "test")
            assert open_roots() == before
            await slot.write_bytes("f", b"data")
            assert await slot.read_bytes("f") == b"data"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    on_full(body)


def test_a_process_that_may_open_no_more_asks_the_server(on_full: WithSlot) -> None:
    async def body(backend: LocalBackend, _: Slot) -> None:
        slot, taken = await backend.create(SlotSpec(), "test"), []
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, limits[0]), limits[1]))
        try:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.dup(0))
            await slot.write_bytes("f", b"data")
            assert await slot.read_bytes("f") == b"data"
            assert await slot.stat("f") is not None
        finally:
            for fd in taken:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    on_full(body)


def test_a_forked_child_keeps_no_files_of_slots(on_full: WithSlot) -> None:
    """A pool of processes, say, which lives longer than the slots that were there when it was started."""

    async def body(backend: LocalBackend, spare: Slot) -> None:
        slots = [spare, *[await backend.create(SlotSpec(), "test") for _ in range(2)]]
        before = open_roots()
        pid = os.fork()
        if pid == 0:
            os._exit(before - open_roots())
        _, status = await asyncio.to_thread(os.waitpid, pid, 0)
        assert os.waitstatus_to_exitcode(status) == 3
        await slots[0].write_bytes("f", b"data")
        assert open_roots() == before

    on_full(body)


def test_nothing_stays_open_after_what_is_refused(on_full: WithSlot) -> None:
    async def body(backend: LocalBackend, _: Slot) -> None:
        slot = await backend.create(SlotSpec(), "test")
        await slot.write_bytes("f", b"data")
        before = len(os.listdir("/proc/self/fd"))
        assert await slot.read_bytes("f", offset=1 << 63) == b""
        with pytest.raises(TypeError):
            await slot.read_bytes("f", offset=1.5)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            await slot.write_bytes("f", b"", mode="640")  # type: ignore[arg-type]
        assert len(os.listdir("/proc/self/fd")) == before

    on_full(body)


def test_what_looks_at_many_files_finds_none_half_made(on_full: WithSlot) -> None:
    async def body(backend: LocalBackend, _: Slot) -> None:
        slot = await backend.create(SlotSpec(), "test")
        await slot.execute("mkdir d; for i in $(seq 300); do echo $i > d/$i; done")

        async def write() -> None:
            for number in itertools.count():
                await slot.write_bytes(f"d/{number % 300 + 1}", b"new")

        writing = asyncio.ensure_future(write())
        for _ in range(40):
            snapshot = await backend.checkpoint(slot)
            paths = [change.path for change in await backend.changes(snapshot)]
            await backend.forget(snapshot)
            paths += [change.path for change in await slot.changes()]
            paths += [entry.path for entry in await slot.list_dir("d")]
            assert [path for path in paths if "/." in path] == []
        writing.cancel()

    on_full(body)


def test_calls_that_fail_leave_others_their_time(on_full: WithSlot) -> None:
    """As of a loop that waits for a file."""

    async def body(backend: LocalBackend, _: Slot) -> None:
        slot = await backend.create(SlotSpec(), "test")

        async def make() -> None:
            await slot.write_text("f", "data")

        making = asyncio.ensure_future(make())
        for _ in range(10_000):
            if await slot.read_text("f", missing=""):
                break
        assert await slot.read_text("f", missing="") == "data"
        await making

    on_full(body)


def test_many_calls_leave_others_their_time(on_full: WithSlot) -> None:
    async def body(backend: LocalBackend, _: Slot) -> None:
        slot = await backend.create(SlotSpec(), "test")
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.ensure_future(other())
        for _ in range(200):
            await slot.write_bytes("f", b"data")
        task.cancel()
        assert turns >= 10

    on_full(body)


def test_a_slot_that_stands_still_goes_on_at_a_file_call(on_full: WithSlot) -> None:
    async def body(backend: LocalBackend, _: Slot) -> None:
        slot = await backend.create(SlotSpec(), "test")
        await slot.execute(": > ticks; (while :; do echo >> ticks; sleep 0.01; done) >/dev/null 2>&1 &")
        freezing = asyncio.ensure_future(slot.freeze())
        await asyncio.sleep(0)
        await slot.read_bytes("ticks")  # before everything stands still
        assert await freezing >= 1
        before = len(await slot.read_bytes("ticks"))  # which lets it go on
        while len(await slot.read_bytes("ticks")) <= before + 1:  # noqa: ASYNC110 - nothing here is told
            await asyncio.sleep(0.01)

    on_full(body)
