"""The tests that every sandbox backend must pass. Needs pytest.

Subclass `BackendConformance` in a test module and implement `make_backend`; pytest finds the tests in the subclass:

    class TestMine(BackendConformance):
        @classmethod
        def make_backend(cls) -> Backend:
            return MyBackend(...)

The tests of a class share one running backend. Each test is named after the behaviour that it checks.
"""

from __future__ import annotations

import asyncio
import errno
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from palaestra_slots.core.errors import AcquireTimeout, SandboxError, SlotLost, StaleLease
from palaestra_slots.core.types import Limits, Network
from palaestra_slots.sandbox.pool import SlotPool, SlotPoolConfig
from palaestra_slots.sandbox.slot import Backend, Rung, Slot, SlotSpec, TerminalSize, View

_WITHOUT_NETWORK = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES, errno.EPERM, errno.EAFNOSUPPORT)

Body = Callable[[Backend], Awaitable[None]]


class BackendConformance(ABC):
    """Tests the behaviour of a backend, which must have room for at least three slots."""

    runner: ClassVar[asyncio.Runner]
    backend: ClassVar[Backend]

    @classmethod
    @abstractmethod
    def make_backend(cls) -> Backend:
        """Return a backend that is not started yet. Called in a running event loop."""

    async def end_place(self, slot: Slot) -> None:
        """End a slot's container, machine or process, as a crash would. The default skips the test that needs this
        method."""
        pytest.skip("the backend's tests do not implement end_place")

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _running(cls) -> Iterator[None]:
        yield from cls.running()

    @classmethod
    def running(cls) -> Iterator[None]:
        """Start the backend of this class for the tests, and close it afterwards. If the tests need further fixtures,
        override `_running` and call this method there."""

        async def start() -> None:
            cls.backend = cls.make_backend()
            await cls.backend.start()

        with asyncio.Runner() as cls.runner:
            cls.runner.run(start())
            yield
            cls.runner.run(cls.backend.aclose())

    def in_slot(self, body: Callable[[Slot], Awaitable[Any]], spec: SlotSpec | None = None) -> Any:
        """Run a coroutine function with a new slot, and destroy the slot afterwards."""

        async def main() -> Any:
            slot = await self.backend.create(spec or SlotSpec(), "conformance")
            try:
                return await body(slot)
            finally:
                await self.backend.destroy(slot)

        return self.runner.run(main())

    # Lifecycle

    def test_a_started_backend_names_its_level(self) -> None:
        assert isinstance(self.backend.rung, Rung)
        assert self.backend.stats()["rung"] == self.backend.rung.label

    def test_start_is_idempotent(self) -> None:
        self.runner.run(self.backend.start())

    def test_a_destroyed_slot_takes_no_calls(self) -> None:
        async def body(slot: Slot) -> None:
            await self.backend.destroy(slot)
            await self.backend.destroy(slot)
            with pytest.raises(StaleLease):
                await slot.execute("true")

        self.in_slot(body)

    def test_slots_have_different_epochs_and_files(self) -> None:
        async def main() -> None:
            slots = await asyncio.gather(*(self.backend.create(SlotSpec(), f"t{n}") for n in range(3)))
            assert len({slot.epoch for slot in slots}) == 3
            for number, slot in enumerate(slots):
                await slot.write_text("mine", str(number))
            assert [await slot.read_text("mine") for slot in slots] == ["0", "1", "2"]
            await asyncio.gather(*map(self.backend.destroy, slots))

        self.runner.run(main())

    def test_its_statistics_count_the_slots(self) -> None:
        before = self.backend.stats()
        assert {"backend", "rung", "slots", "lost"} <= before.keys()

        async def body(slot: Slot) -> None:
            assert self.backend.stats()["slots"] == before["slots"] + 1

        self.in_slot(body)
        assert self.backend.stats()["slots"] == before["slots"]

    def test_its_end_ends_the_slots_and_it_can_start_again(self) -> None:
        async def main() -> None:
            backend = self.make_backend()
            await backend.start()
            slot = await backend.create(SlotSpec(), "ended")
            await backend.aclose()
            await backend.aclose()
            with pytest.raises(SandboxError):
                await slot.execute("true")
            await backend.start()
            try:
                again = await backend.create(SlotSpec(), "again")
                assert again.epoch != slot.epoch
                assert (await again.execute("echo here")).output == "here\n"
            finally:
                await backend.aclose()

        self.runner.run(main())

    # Settings of a slot

    def test_variables_and_limits_reach_commands(self) -> None:
        async def body(slot: Slot) -> None:
            assert (await slot.execute("echo $COLOUR")).output == "dark red\n"
            if slot.rung is not Rung.NONE:
                assert int((await slot.execute("ulimit -n")).output) <= 128

        self.in_slot(body, SlotSpec(env=(("COLOUR", "dark red"),), limits=Limits(open_files=128)))

    def test_a_slot_without_a_network_reaches_no_address(self) -> None:
        # A reserved address (RFC 5737): with a network, the connection would time out.
        connect = "import socket\ntry: socket.create_connection(('192.0.2.1', 80), 20)\n"
        connect += "except OSError as error: print(type(error).__name__, error.errno)"

        async def body(slot: Slot) -> None:
            found = await slot.execute(["python3", "-c", connect], timeout_s=60)
            assert found.output.split()[1:2] in ([str(code)] for code in _WITHOUT_NETWORK), found.output

        if self.backend.rung is not Rung.NONE:
            self.in_slot(body, SlotSpec(network=Network.OFF))

    # Commands

    def test_a_command_has_output_and_exit_code(self) -> None:
        async def body(slot: Slot) -> None:
            result = await slot.execute("echo out; echo err >&2; exit 7")
            assert (result.exit_code, set(result.output.split())) == (7, {"out", "err"})
            assert (await slot.execute(["/bin/echo", "a  b"])).output == "a  b\n"
            assert (await slot.execute("cat", stdin=b"in")).output == "in"
            assert (await slot.execute("cat", stdin="grüße")).output == "grüße"
            assert (await slot.execute("echo $X", env={"X": "1"})).output == "1\n"
            assert (await slot.execute(["no-such-program"])).exit_code == 127

        self.in_slot(body)

    def test_a_timeout_kills_the_command_and_its_children(self) -> None:
        async def body(slot: Slot) -> None:
            begun = time.monotonic()
            result = await slot.execute("echo begun; sleep 60 & sleep 60", timeout_s=0.5)
            assert time.monotonic() - begun < 20
            assert result.metadata["timeout"] is True
            assert result.output == "begun\n"
            assert (await slot.execute("true")).exit_code == 0

        self.in_slot(body)

    def test_a_cancelled_command_is_killed(self) -> None:
        async def body(slot: Slot) -> None:
            running = asyncio.create_task(slot.execute("echo $$ > pid; sleep 60"))
            while not await slot.read_text("pid", missing=""):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert await slot.arguments(int(await slot.read_text("pid"))) is None

        self.in_slot(body)

    def test_long_output_is_bounded_and_counted(self) -> None:
        async def body(slot: Slot) -> None:
            result = await slot.execute("head -c 3000000 /dev/zero | tr '\\0' x", max_output_bytes=1000)
            assert result.metadata["truncated"] is True
            assert result.metadata["output_total_bytes"] == 3_000_000
            assert len(result.output) < 3000

        self.in_slot(body)

    def test_commands_of_several_slots_run_together(self) -> None:
        async def main() -> None:
            slots = [await self.backend.create(SlotSpec(), f"t{n}") for n in range(3)]
            begun = time.monotonic()
            await asyncio.gather(*(slot.execute("sleep 1") for slot in slots))
            # One after the other, the three commands would take at least 3 s.
            assert time.monotonic() - begun < 2.5
            await asyncio.gather(*map(self.backend.destroy, slots))

        self.runner.run(main())

    def test_output_arrives_while_the_command_runs(self) -> None:
        async def body(slot: Slot) -> None:
            pieces: list[bytes] = []
            first = asyncio.Event()

            def take(piece: bytes) -> None:
                pieces.append(piece)
                first.set()

            running = asyncio.create_task(
                slot.execute("echo one; while [ ! -e go ]; do sleep 0.05; done", on_output=take)
            )
            await asyncio.wait_for(first.wait(), 20)
            assert not running.done()
            await slot.write_text("go", "")
            await running
            assert b"".join(pieces) == b"one\n"

        self.in_slot(body)

    def test_a_verdict_does_not_mix_with_output(self) -> None:
        async def body(slot: Slot) -> None:
            result = await slot.execute("echo out; echo verdict >&3", verdict=True)
            assert (result.output, result.verdict) == ("out\n", b"verdict\n")

        self.in_slot(body)

    # Shells and background processes

    def test_a_shell_keeps_its_state(self) -> None:
        async def body(slot: Slot) -> None:
            shell = await slot.shell()
            await shell.run("mkdir d; cd d; X=1")
            result = await shell.run("basename $PWD; echo $X")
            assert result.output == "d\n1\n"
            await shell.aclose()

        self.in_slot(body)

    def test_a_background_process_is_read_written_and_killed(self) -> None:
        async def body(slot: Slot) -> None:
            process = await slot.spawn("read line; echo got $line; sleep 60")
            await process.write(b"it\n")
            cursor, output = 0, b""
            while b"got it" not in output:
                piece = await process.read(cursor)
                output, cursor = output + piece.data, piece.end
                await asyncio.sleep(0.01)
            await process.kill()
            status = await process.wait(timeout_s=20)
            assert status.exit_code is not None

        self.in_slot(body)

    def test_a_background_process_keeps_its_streams_apart_and_waits_for_its_reader(self) -> None:
        async def body(slot: Slot) -> None:
            command = "echo wrong >&2; head -c 3000000 /dev/zero; exit 3"
            process = await slot.spawn(command, stdin=False, stderr=True, hold=True)
            await asyncio.sleep(0.2)
            assert (await process.status()).running, "without a reader, the process waits"
            pieces = [piece async for piece in process.output()]
            assert sum(len(piece.data) for piece in pieces) == 3_000_000
            assert not any(piece.lost for piece in pieces)
            errors = [piece.data async for piece in process.output(stderr=True)]
            assert b"".join(errors) == b"wrong\n"
            assert (await process.status()).exit_code == 3

        self.in_slot(body)

    def test_a_terminal_has_its_size(self) -> None:
        async def body(slot: Slot) -> None:
            process = await slot.spawn("tty >/dev/null && echo terminal", terminal=TerminalSize(30, 100))
            await process.wait(timeout_s=20)
            assert b"terminal" in (await process.read(0)).data

        self.in_slot(body)

    # Files

    def test_files_go_both_ways(self, tmp_path: Path) -> None:
        async def body(slot: Slot) -> None:
            data = bytes(range(256)) * 4000
            await slot.write_bytes("deep/down/data", data, mode=0o755)
            assert await slot.read_bytes("deep/down/data") == data
            info = await slot.stat("deep/down/data")
            assert info is not None
            assert info.size == len(data)
            (tmp_path / "up").write_bytes(data)
            assert await slot.upload(tmp_path / "up", "up") == len(data)
            assert await slot.download("up", tmp_path / "down") == len(data)
            assert (tmp_path / "down").read_bytes() == data
            assert {Path(entry.path).name for entry in await slot.list_dir()} == {"deep", "up"}
            await slot.remove("deep")
            assert await slot.stat("deep") is None
            with pytest.raises(FileNotFoundError):
                await slot.read_bytes("deep/down/data")

        self.in_slot(body)

    def test_a_link_does_not_lead_out_of_the_slot(self) -> None:
        async def body(slot: Slot) -> None:
            await slot.make_link("out", "/../../../../../../proc/1/environ")
            assert await slot.read_text("out", missing="nothing") in ("nothing", "") or self.backend.rung is Rung.NONE

        self.in_slot(body)

    # Snapshots

    def test_slots_start_from_a_sealed_one(self) -> None:
        async def main() -> None:
            slot = await self.backend.create(SlotSpec(), "first")
            await slot.execute("echo kept > a; mkdir d; echo x > d/b")
            snapshot = await self.backend.seal(slot)
            with pytest.raises(StaleLease):
                await slot.execute("true")
            assert "/workspace/a" in {change.path for change in await self.backend.changes(snapshot)}
            one, two = [await self.backend.create(snapshot.spec, name, snapshot) for name in ("one", "two")]
            await one.execute("echo changed > a")
            assert await two.read_text("a") == "kept\n"
            assert await two.read_text("d/b") == "x\n"
            for each in (one, two):
                await self.backend.destroy(each)
            await self.backend.forget(snapshot)
            await self.backend.forget(snapshot)

        self.runner.run(main())

    def test_a_view_shows_a_part_of_the_change(self) -> None:
        async def main() -> None:
            slot = await self.backend.create(SlotSpec(), "first")
            await slot.execute("echo a > a; echo b > b")
            snapshot = await self.backend.seal(slot, View(without=("/workspace/b",)))
            seen = await self.backend.create(snapshot.spec, "seen", snapshot)
            assert await seen.read_text("a") == "a\n"
            assert await seen.stat("b") is None
            await self.backend.destroy(seen)
            await self.backend.forget(snapshot)

        self.runner.run(main())

    def test_a_checkpoint_is_a_snapshot_or_an_error(self) -> None:
        async def body(slot: Slot) -> None:
            await slot.write_text("a", "before")
            if self.backend.rung < Rung.USERNS:
                with pytest.raises(SandboxError):
                    await self.backend.checkpoint(slot)
                return
            snapshot = await self.backend.checkpoint(slot)
            await slot.write_text("a", "after")
            fork = await self.backend.create(snapshot.spec, "fork", snapshot)
            assert await fork.read_text("a") == "before"
            await self.backend.destroy(fork)
            await self.backend.forget(snapshot)

        self.in_slot(body)

    def test_nothing_of_a_slot_reaches_the_next(self) -> None:
        async def dirty(slot: Slot) -> None:
            await slot.execute("echo secret > s; echo secret > /tmp/s; echo secret > $HOME/s; (sleep 300 &) ")

        async def clean(slot: Slot) -> str:
            found = await slot.execute("cat s /tmp/s $HOME/s 2>/dev/null; ls -A")
            return found.output

        self.in_slot(dirty)
        if self.backend.rung is not Rung.NONE:
            assert self.in_slot(clean) == ""

    # The pool

    def test_a_pool_leases_up_to_its_limit(self) -> None:
        async def main() -> None:
            pool = SlotPool(SlotPoolConfig(max_slots=1, acquire_timeout=0.2), self.backend)
            await pool.start()
            slot = await pool.acquire("one")
            with pytest.raises(AcquireTimeout):
                await pool.acquire("two")
            await pool.release(slot)
            await pool.release(await pool.acquire("three"))

        self.runner.run(main())

    # Faults

    def test_after_the_end_of_a_place_there_is_another(self) -> None:
        async def main() -> None:
            slot = await self.backend.create(SlotSpec(), "lost")
            await self.end_place(slot)
            with pytest.raises(SlotLost):
                await slot.execute("sleep 5; true")
            await self.backend.destroy(slot)
            again = await self.backend.create(SlotSpec(), "again")
            assert (await again.execute("echo here")).output == "here\n"
            await self.backend.destroy(again)

        self.runner.run(main())
