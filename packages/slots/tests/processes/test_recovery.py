"""A new registry finds the processes of an old one where their slots stayed, and takes nobody else's for them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from palaestra_slots.core.errors import ConfigError, IsolationUnavailable
from palaestra_slots.core.types import JSON
from palaestra_slots.processes.registry import ProcessRegistry
from palaestra_slots.processes.session import Watch
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Rung, Slot, SlotSpec
from processes.scenes import OnBackend


@contextlib.asynccontextmanager
async def attached(folder: Path, *, end: bool = False) -> AsyncIterator[LocalBackend]:
    """A backend whose slots stay when it is closed, unless this is the `end`."""
    backend = LocalBackend(rung=Rung.USERNS, service="processes", service_directory=folder)
    try:
        await backend.start()
    except IsolationUnavailable as error:
        pytest.skip(str(error))
    try:
        yield backend
    finally:
        await (backend.end() if end else backend.aclose())


async def reported(registry: ProcessRegistry) -> dict[str, JSON]:
    return await asyncio.to_thread(registry.notifications.completion_queue.get, True, 20)


@pytest.mark.slots
def test_sessions_go_on_in_slots_that_stay(tmp_path: Path) -> None:
    folder, path = tmp_path / "services", tmp_path / "state" / "processes.json"
    folder.mkdir(mode=0o700)

    async def before() -> tuple[str, str, int, Slot]:
        async with attached(folder) as backend, ProcessRegistry(checkpoint_path=path) as registry:
            slot = await backend.create(SlotSpec(), "t")
            command = 'echo one; while read -r x; do echo "<$x>"; done; exit 6'
            watch = Watch(patterns=("one", "<b>"))
            talks = await registry.spawn(slot, command, task_id="t", session_key="chat", watch=watch)
            ends = await registry.spawn(slot, "until [ -e go ]; do read -t 0.01 x; done; echo bye; exit 7", task_id="t")
            assert (await reported(registry))["output"] == "one"
            cursor = (await registry.poll(talks.id, since=0))["cursor"]
            gone = await backend.create(SlotSpec(), "gone")
            await registry.spawn(gone, "exec sleep 1000", task_id="gone")
            await backend.destroy(gone)
            await slot.write_text("go", "")
            return talks.id, ends.id, cursor, slot

    async def after(talks: str, ends: str, cursor: int) -> None:
        async with attached(folder, end=True) as backend, ProcessRegistry(checkpoint_path=path) as registry:
            assert await registry.recover_from_checkpoint(backend.leases()) == 2
            assert await registry.has_active_for_session("chat")
            await registry.submit_stdin(talks, "b", end=True)
            ended = await registry.wait(talks)
            assert (ended["exit_code"], ended["output"]) == (6, "one\n<b>\n")
            polled = await registry.poll(talks, since=cursor)
            assert (polled["output"], polled["note"]) == ("<b>\n", "Found again after a restart.")
            assert (await registry.wait(ends))["exit_code"] == 7
            (lost,) = await registry.list_sessions("gone")
            assert lost["status"] == "lost"
            assert "was gone" in lost["error"]
            event = await reported(registry)
            assert (event["type"], event["output"]) == ("watch_match", "<b>")
            fresh = await registry.spawn(backend.leases()[0], "true", task_id="t")
            assert fresh.id not in (talks, ends)
            assert await registry.recover_from_checkpoint(backend.leases()) == 0

    talks, ends, cursor, _ = asyncio.run(before())
    asyncio.run(after(talks, ends, cursor))


@pytest.mark.slots
def test_the_same_numbers_in_another_slot_are_another_process(on_backend: OnBackend, tmp_path: Path) -> None:
    path = tmp_path / "processes.json"

    async def before(backend: LocalBackend) -> None:
        slot = await backend.create(SlotSpec(), "t")
        await ProcessRegistry(checkpoint_path=path).spawn(slot, "exec sleep 1000", task_id="t")
        assert path.stat().st_mode & 0o777 == 0o600  # commands may hold keys

    async def after(backend: LocalBackend) -> None:
        slot = await backend.create(SlotSpec(), "t")
        stranger = await slot.spawn("exec sleep 1000")
        (record,) = json.loads(path.read_text())["sessions"]
        assert (record["slot_id"], record["status"]["process_id"], record["status"]["pid"]) == (
            slot.slot_id, stranger.process_id, stranger.pid
        )  # fmt: skip
        registry = ProcessRegistry(checkpoint_path=path)
        assert await registry.recover_from_checkpoint([slot]) == 0
        (lost,) = await registry.list_sessions()
        assert "different process" in lost["error"]
        assert (await registry.kill_process(lost["session_id"]))["status"] == "lost"
        assert await registry.kill_all() == 0
        assert (await stranger.status()).running

    on_backend(before)
    on_backend(after)


def test_a_checkpoint_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "processes.json"
    registry = ProcessRegistry(checkpoint_path=path)
    assert asyncio.run(registry.recover_from_checkpoint([])) == 0
    for content, says in (
        ("{", "move it away"),
        ("[]", "move it away"),
        ('{"schema": "palaestra.processes", "version": 2, "sessions": []}', "palaestra.processes 2"),
        ('{"schema": "other", "version": 1, "sessions": []}', "the format other"),
    ):
        path.write_text(content)
        with pytest.raises(ConfigError, match=says):
            asyncio.run(registry.recover_from_checkpoint([]))
