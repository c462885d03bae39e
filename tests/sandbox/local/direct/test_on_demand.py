"""Slots that the server makes only when they must do more than show files."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import palaestra
from palaestra import Task, environment
from palaestra_slots.core.errors import IsolationUnavailable, SandboxError, SlotLost
from palaestra_slots.core.types import Network
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.local.direct.direct_slot import OnDemandSlot
from palaestra_slots.sandbox.slot import Mount, Slot, SlotSpec, Snapshot
from sandbox.bodies import WithSlot

pytestmark = pytest.mark.slots

SHOWN = ("/workspace", "/kept")
Body = Callable[[LocalBackend, Snapshot], Awaitable[None]]


@pytest.fixture
def over_work(on_full: WithSlot) -> Callable[[Body], None]:
    """Run a test's coroutine with a backend of the level `full`, and work that was sealed."""

    def run(body: Body) -> None:
        async def play(backend: LocalBackend, slot: Slot) -> None:
            await slot.write_bytes("answer.txt", b"42\n")
            await slot.execute(
                "mkdir -p deep/er; echo x > deep/er/x; ln -s answer.txt link; ln -s deep way; echo h > /etc/h"
            )
            await body(backend, await backend.seal(slot))

        on_full(play)

    return run


async def made(backend: LocalBackend, snapshot: Snapshot, **settings: Any) -> Slot:
    return await backend.create(SlotSpec(on_demand=SHOWN, **settings), "grade", snapshot)


def is_made(slot: Slot) -> bool:
    requests = slot.requests  # type: ignore[attr-defined]
    return not isinstance(requests, OnDemandSlot) or requests._making is not None


async def live(backend: LocalBackend) -> int:
    return int((await backend._running_server().call("stats", {})).fields["live"])


def test_files_are_read_without_the_slot(over_work: Callable[[Body], None]) -> None:
    async def body(backend: LocalBackend, work: Snapshot) -> None:
        before = await live(backend)
        slot = await made(backend, work)
        assert await slot.read_bytes("answer.txt") == b"42\n"
        assert await slot.read_bytes("/workspace/./deep/er/x", offset=1) == b"\n"
        assert await slot.read_text("absent", missing="no") == "no"
        for path in ("absent/x", "answer.txt/x", "/kept"):
            assert await slot.stat(path) is None
        with pytest.raises(IsADirectoryError) as error:
            await slot.read_bytes("deep")
        assert error.value.filename == "/workspace/deep"
        with pytest.raises(OSError, match="more than the limit"):
            await slot.read_bytes("answer.txt", max_bytes=1)
        assert not is_made(slot)
        assert await live(backend) == before
        async with asyncio.TaskGroup() as group:  # the slot shows what was read
            for path in ("answer.txt", "deep", "/", "deep/er/x"):
                group.create_task(same_in_slot(backend, work, slot, path))
        await backend.destroy(slot)

    async def same_in_slot(backend: LocalBackend, work: Snapshot, unmade: Slot, path: str) -> None:
        slot = await backend.create(SlotSpec(), "made", work)
        ours, theirs = await unmade.stat(path), await slot.stat(path)
        assert ours is not None
        assert theirs is not None
        assert (ours.path, ours.kind, ours.mode, ours.uid, ours.gid) == (
            theirs.path, theirs.kind, theirs.mode, theirs.uid, theirs.gid
        )  # fmt: skip
        await backend.destroy(slot)

    over_work(body)


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("link", b"42\n"),
        ("way/er/x", b"x\n"),
        ("/workspace/../etc/h", b"h\n"),
        ("/etc/h", b"h\n"),
        ("/tmp/../etc/h", b"h\n"),
    ],
)
def test_what_only_a_slot_shows_is_read_in_one(over_work: Callable[[Body], None], path: str, content: bytes) -> None:
    async def body(backend: LocalBackend, work: Snapshot) -> None:
        slot = await made(backend, work)
        assert await slot.read_bytes(path) == content
        assert is_made(slot)
        await backend.destroy(slot)

    over_work(body)


def test_the_first_command_makes_the_slot(over_work: Callable[[Body], None]) -> None:
    async def body(backend: LocalBackend, work: Snapshot) -> None:
        slot = await made(backend, work, env=(("A", "a"),))
        await slot.read_bytes("answer.txt")
        both = await asyncio.gather(slot.execute("echo $A; cat answer.txt"), slot.execute("pwd"))
        assert [each.output for each in both] == ["a\n42\n", "/workspace\n"]
        await slot.write_bytes("answer.txt", b"43")
        assert await slot.read_bytes("answer.txt") == b"43"  # from the slot, and no longer from the layer
        assert {each.path for each in await slot.changes()} == {"/workspace/answer.txt"}
        sealed = await backend.seal(slot)
        again = await backend.create(SlotSpec(on_demand=SHOWN), "again", sealed)
        assert await again.read_bytes("answer.txt") == b"43"
        await backend.destroy(again)

    over_work(body)


def test_the_layers_stay_until_the_slot_has_ended(over_work: Callable[[Body], None]) -> None:
    async def body(backend: LocalBackend, work: Snapshot) -> None:
        slot, other = await made(backend, work), await made(backend, work)
        await backend.forget(work)
        await backend.destroy(other)
        assert (await slot.execute("cat answer.txt")).output == "42\n"
        await backend.destroy(slot)
        open_files = len(os.listdir("/proc/self/fd"))
        with pytest.raises(SandboxError):
            await made(backend, work)
        assert len(os.listdir("/proc/self/fd")) == open_files

    over_work(body)


def test_a_caller_that_gives_up_leaves_the_slot_to_the_next(over_work: Callable[[Body], None]) -> None:
    async def body(backend: LocalBackend, work: Snapshot) -> None:
        slot = await made(backend, work)
        command = asyncio.ensure_future(slot.execute("true"))
        await asyncio.sleep(0)
        command.cancel()
        with pytest.raises(asyncio.CancelledError):
            await command
        assert (await slot.execute("cat answer.txt")).output == "42\n"
        await backend.destroy(slot)
        before = await live(backend)
        slot = await made(backend, work)
        command = asyncio.ensure_future(slot.execute("true"))
        await asyncio.sleep(0)
        await backend.destroy(slot)  # while it is being made
        await asyncio.gather(command, return_exceptions=True)  # the command may still have run
        assert await live(backend) == before

    over_work(body)


def test_a_slot_that_cannot_be_made_fails_every_later_request(over_work: Callable[[Body], None]) -> None:
    async def body(backend: LocalBackend, work: Snapshot) -> None:
        slot = await made(backend, work)
        backend._running_server()._process.kill()  # type: ignore[union-attr]
        for _ in range(2):
            with pytest.raises(SlotLost):
                await slot.execute("true")
        with pytest.raises(SlotLost):
            await slot.stat("/")
        await backend.destroy(slot)  # there is nothing to end

    over_work(body)


def test_mounts_and_networks_are_made_at_once(over_work: Callable[[Body], None], tmp_path: Path) -> None:
    (tmp_path / "answer.txt").write_text("mounted")

    async def body(backend: LocalBackend, work: Snapshot) -> None:
        for settings in (
            {"mounts": (Mount(str(tmp_path), "/workspace/deep"),)},
            {"mounts": (Mount(str(tmp_path), "/kept"),)},
            {"network": Network.ON},
        ):
            slot = await made(backend, work, **settings)
            assert is_made(slot)
            await backend.destroy(slot)
        slot = await made(backend, work, mounts=(Mount(str(tmp_path), "/other"),))
        assert not is_made(slot)
        assert (await slot.execute("cat /other/answer.txt")).output == "mounted"
        await backend.destroy(slot)

    over_work(body)


@pytest.mark.parametrize("on_demand", [(), SHOWN], ids=["at once", "on demand"])
@pytest.mark.parametrize(
    ("done", "target"),
    [
        ("echo x > /opt", "/opt/tests"),
        ("ln -s workspace /opt", "/opt/tests"),
        ("mkdir /opt; ln -s /workspace /opt/tests", "/opt/tests"),
        ("mkdir -m 700 /opt; echo mine > /opt/mine", "/opt/tests"),
        ("ln -s /workspace /other; mkdir /workspace/m; echo mine > /workspace/m/answer.txt", "/other/m"),
    ],
    ids=["file", "link", "link below", "new directory", "link to the workspace"],
)
def test_no_work_keeps_a_mount_from_its_place(
    on_full: WithSlot, tmp_path: Path, done: str, target: str, on_demand: tuple[str, ...]
) -> None:
    """An agent that could would have no score in place of 0."""
    (tmp_path / "answer.txt").write_text("mounted")

    async def body(backend: LocalBackend, slot: Slot) -> None:
        assert (await slot.execute(f"rm -rf /opt; {done}")).success
        work = await backend.seal(slot)
        mounts = (Mount(str(tmp_path), target),)
        slot = await backend.create(SlotSpec(mounts=mounts, on_demand=on_demand), "grade", work)
        assert await slot.read_text("m/answer.txt", missing="") == ("mine\n" if "mkdir /workspace/m" in done else "")
        assert (await slot.execute(f"cat {target}/answer.txt")).output == "mounted"
        assert not (await slot.execute(f"touch {target}/new")).success
        assert await slot.read_text("/opt/mine", missing="") == ("mine\n" if "/opt/mine" in done else "")
        await backend.destroy(slot)

    on_full(body)


def test_reads_that_are_given_up_leave_no_file_open(over_work: Callable[[Body], None]) -> None:
    async def body(backend: LocalBackend, work: Snapshot) -> None:
        writer = await backend.create(SlotSpec(), "work", work)
        await writer.execute("head -c 30000000 /dev/zero > large")
        sealed = await backend.seal(writer)
        slot = await backend.create(SlotSpec(on_demand=SHOWN), "grade", sealed)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            reads = [asyncio.ensure_future(slot.read_bytes("large")) for _ in range(40)]
            await asyncio.sleep(0)
            for read in reads:
                read.cancel()
            await asyncio.gather(*reads, return_exceptions=True)
        assert len(await slot.read_bytes("large")) == 30_000_000  # after the others, whose threads close their files
        assert len(os.listdir("/proc/self/fd")) <= before + 8
        await backend.destroy(slot)
        await backend.forget(sealed)

    over_work(body)


def test_a_score_that_reads_a_file_needs_one_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of the agent make the only slot, however many files they write; a score that runs a command makes
    the second, and so does work with links."""
    counts: dict[str, int] = {}

    @environment(toolsets=["terminal"])
    def copies() -> Iterator[Task]:
        yield Task(id="copy", prompt="Copy a to b", files={"a": "1"}, solution="cp a b; cp a c; mkdir d; cp a d/b")

    @environment(toolsets=["terminal"])
    def links() -> Iterator[Task]:
        yield Task(id="copy", prompt="Copy a to b", files={"a": "1"}, solution="cp a b; ln b c")

    @copies.score
    @links.score
    async def copied(sandbox: Slot) -> bool:
        return await sandbox.read_text("b") == "1"

    @environment(toolsets=["terminal"])
    def listed() -> Iterator[Task]:
        yield Task(id="copy", prompt="Copy a to b", files={"a": "1"}, solution="cp a b")

    @listed.score
    async def shown(sandbox: Slot) -> bool:
        return (await sandbox.execute("cat b")).output == "1"

    started = OnDemandSlot._make_slot

    async def counted(self: OnDemandSlot) -> Any:
        counts["made"] = counts.get("made", 0) + 1
        return await started(self)

    monkeypatch.setattr(OnDemandSlot, "_make_slot", counted)
    for env, made_for_score in ((copies, {}), (listed, {"made": 1}), (links, {"made": 2})):
        try:
            run = palaestra.run_sync(env, policy="oracle", folder=tmp_path, isolation="full")
        except IsolationUnavailable as error:
            pytest.skip(str(error))
        assert [each.reward for group in run.groups for each in group.trajectories] == [1.0]
        assert counts == made_for_score
