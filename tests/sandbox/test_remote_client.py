"""Places that do not behave: whatever comes from one is an infrastructure failure, and nothing waits for it."""

from __future__ import annotations

import asyncio
import json
import struct
import sys
from collections.abc import Sequence

import pytest

from palaestra.core.errors import SandboxError, SlotLost
from palaestra.core.types import Blame
from palaestra.sandbox.remote.client import RemoteClient
from palaestra.sandbox.slotd.protocol.frames import MAX_FRAME, FrameKind

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


def test_a_place_that_falls_silent_in_a_frame_is_lost() -> None:
    half = HELLO + frame(FrameKind.RESULT, 2, b"", length=1000)
    failure = start(
        f"{READ_ALL}; sys.stdout.buffer.write({half!r}); sys.stdout.flush(); sys.stdin.buffer.read()", silence_s=1.0
    )
    assert isinstance(failure, SlotLost)
