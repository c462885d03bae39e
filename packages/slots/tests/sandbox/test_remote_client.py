"""Places that do not behave: whatever comes from one is an infrastructure failure, and nothing waits for it."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from golden_messages import raises
from palaestra_slots.core.errors import SandboxError, SlotLost
from palaestra_slots.core.types import Blame
from palaestra_slots.sandbox.backends.remote import PlaceSpec, RemoteBackend
from palaestra_slots.sandbox.local.local_slot import LocalSlot
from palaestra_slots.sandbox.remote import launch
from palaestra_slots.sandbox.remote.remote_client import RemoteClient
from palaestra_slots.sandbox.slot import Rung, Slot, SlotSpec
from palaestra_slots.sandbox.slotd.protocol.frames import MAX_FRAME, FrameKind
from palaestra_slots.sandbox.transfer import download_dir
from programs import assert_missing_module_is_named

READ_ALL = "size = int(sys.stdin.buffer.readline()); sys.stdin.buffer.read(size)"


def frame(
    kind: int, request: int, text: bytes = b"", *, length: int | None = None, text_length: int | None = None
) -> bytes:
    header = struct.pack(
        "!IBII",
        len(text) if length is None else length,
        kind,
        request,
        len(text) if text_length is None else text_length,
    )
    return header + text


def start(program: str, *, silence_s: float = 60.0) -> Exception:
    """The failure of a client whose place runs a program instead of the launcher."""

    def command(call: Sequence[str]) -> Sequence[str]:
        return [sys.executable, "-I", "-S", "-c", f"import sys\n{program}"]

    async def use() -> None:
        async with asyncio.timeout(30):
            client = await RemoteClient.start_by(command, "full", {}, lambda *lost: None, silence_s=silence_s)
            try:
                await client.call("create", {})
            finally:
                await client.aclose()

    with pytest.raises(SandboxError) as failure:
        asyncio.run(use())
    return failure.value


HELLO = frame(FrameKind.HELLO, 1, json.dumps({"pid": 1}).encode())


@pytest.mark.parametrize(
    "sent",
    [
        b"Welcome to this machine\n",
        frame(FrameKind.HELLO, 1, length=MAX_FRAME + 1, text_length=0),
        frame(FrameKind.HELLO, 1, b"{}", text_length=3),
        frame(99, 1),
        frame(FrameKind.HELLO, 1, b"{"),
        frame(FrameKind.HELLO, 1, b"\xff\xff"),
        frame(FrameKind.ERROR, 1, b"{}"),
        frame(FrameKind.LOST, 0, b"{}"),
        frame(FrameKind.ERROR, 0, b"[]"),
        frame(FrameKind.HELLO, 1, b"[" * 100_000),
    ],
)
def test_bytes_that_are_not_the_servers_end_the_connection(sent: bytes) -> None:
    wait = "sys.stdin.buffer.read()"
    failure = start(f"{READ_ALL}; sys.stdout.buffer.write({sent!r}); sys.stdout.flush(); {wait}")
    assert isinstance(failure, SlotLost)
    assert failure.blame is Blame.SANDBOX
    if sent.startswith(b"Welcome"):
        assert "login" in str(failure)


@pytest.mark.parametrize(
    "program",
    [
        "sys.exit('no daemon')",
        "sys.stdin.buffer.read(1000); sys.exit('no daemon')",
        f"{READ_ALL}; sys.exit('no daemon')",
        f"{READ_ALL}; sys.stdout.buffer.write({HELLO[:9]!r}); sys.exit('no daemon')",
        f"{READ_ALL}; sys.stdout.buffer.write({HELLO!r}); sys.exit('no daemon')",
        f"{READ_ALL}; sys.stdout.buffer.write({HELLO!r}); sys.stdout.flush(); sys.stdin.read(9); sys.exit('no daemon')",
    ],
)
def test_a_place_that_ends_at_any_step_is_lost_with_the_end_of_its_log(program: str) -> None:
    failure = start(program)
    assert isinstance(failure, SlotLost)
    assert "no daemon" in str(failure)


ANSWER = f"""
import json, struct
{READ_ALL}
def read(size):
    return sys.stdin.buffer.read(size)
while head := read(9 + 4):
    length, kind, request, text = struct.unpack("!IBII", head)
    fields, _ = json.loads(read(text) or b"{{}}"), read(length - text)
    if kind == {int(FrameKind.HELLO)}:
        kind, data = kind, b'{{"pid": 1}}'
        sys.stdout.buffer.write(struct.pack("!IBII", len(data), kind, request, len(data)) + data)
    elif kind == {int(FrameKind.REQUEST)}:
        data = ANSWERS.get(fields["op"], b"")
        sys.stdout.buffer.write(struct.pack("!IBII", len(data), {int(FrameKind.RESULT)}, request, 0) + data)
    sys.stdout.flush()
"""
"""A place that was taken over: it answers each operation with the bytes in ANSWERS."""


@pytest.mark.parametrize(
    "listed",
    [
        [("/workspace/..", "dir")],
        [("/workspace/../../x", "file")],
        [("/", "dir")],
        [("x", "file")],
        [("/workspace/a", "file"), ("/workspace/b/c", "file")],
        [("/workspace/a\0b", "file")],
    ],
)
async def test_a_place_that_lists_what_cannot_be_leads_no_download_elsewhere(
    listed: list[tuple[str, str]], tmp_path: Path
) -> None:
    entries = [{"path": path, "kind": kind, "size": 1, "mode": 0o600, "mtime": 0.0} for path, kind in listed]
    answers = {"list": json.dumps(entries).encode(), "read": b"x"}

    def command(call: Sequence[str]) -> Sequence[str]:
        return [sys.executable, "-I", "-S", "-c", f"import sys\nANSWERS = {answers!r}\n{ANSWER}"]

    async with asyncio.timeout(30):
        client = await RemoteClient.start_by(command, "none", {}, lambda *lost: None)
        try:
            slot = LocalSlot(client, "slot-1", 1, Rung.NONE, SlotSpec(), "t", no_fork, client.loop)
            with pytest.raises(SandboxError, match="lists"):
                await download_dir(slot, "/workspace", tmp_path / "down/here")
            with pytest.raises(SandboxError, match="lists"):
                await slot.list_dir()
        finally:
            await client.aclose()
    assert {path.name for path in tmp_path.rglob("*")} == {"down", "here"}


def no_fork(slot: LocalSlot) -> AbstractAsyncContextManager[Slot]:
    raise AssertionError


def test_a_place_that_falls_silent_in_a_frame_is_lost() -> None:
    half = HELLO + frame(FrameKind.RESULT, 2, b"", length=1000)
    failure = start(
        f"{READ_ALL}; sys.stdout.buffer.write({half!r}); sys.stdout.flush(); sys.stdin.buffer.read()", silence_s=1.0
    )
    assert isinstance(failure, SlotLost)


def test_a_python_without_its_standard_library_is_named(tmp_path: Path) -> None:
    assert_missing_module_is_named(launch, tmp_path)


class WithoutPython(RemoteBackend):
    """Places whose image has no python3."""

    name = "elsewhere"

    async def check(self, host: str) -> None:
        pass

    def command(self, place: PlaceSpec, call: Sequence[str]) -> Sequence[str]:
        return ["/bin/sh", "-c", "echo no python3 here >&2; exit 127"]


async def test_a_failure_to_start_names_the_image() -> None:
    async def use() -> None:
        async with WithoutPython(image="debian:12") as backend:
            await backend.create(SlotSpec(), "one")

    with raises(SandboxError, "elsewhere", "12"):
        await use()


def test_files_of_killed_launchers_are_removed_by_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names = ("killed", "running", "starting", "of-an-older-version")
    folders = {name: tmp_path / f"{launch.PREFIX}{name}" for name in names}
    folders["other"] = tmp_path / "other"
    for name, folder in folders.items():
        (folder / "slotd").mkdir(parents=True)
        if name != "of-an-older-version":
            (folder / launch.LOCK).touch()
            age = 0 if name == "starting" else 2 * launch.STARTING_S
            os.utime(folder / launch.LOCK, (time.time() - age, time.time() - age))
    (tmp_path / f"{launch.PREFIX}link").symlink_to(folders["other"])
    with (folders["running"] / launch.LOCK).open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        launch.remove_abandoned()
    assert {name for name, folder in folders.items() if not folder.exists()} == {"killed"}
