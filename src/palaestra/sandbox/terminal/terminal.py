"""Typing into a terminal of a slot and looking at its screen, as a person (or tmux) would.

Over any `Slot`: the program runs as a background process with a terminal of its own; the screen is emulated here, from
the bytes it has sent, whenever somebody looks. So answers to a program's questions (where is the cursor?) are given
then, too. Programs whose command line and output are enough need none of this.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from palaestra.sandbox.slot import WORKSPACE, Process, Slot, TerminalSize
from palaestra.sandbox.terminal.keys import code
from palaestra.sandbox.terminal.screen import Screen, open_screen

_PIECE_BYTES = 128 << 10


@dataclass(frozen=True, slots=True)
class ScreenShot:
    """A terminal as it was. `cursor` is row and column from 0.

    `emulated` is False when no emulator is installed: then `text` is the last lines without control sequences.
    `lost` is how many bytes had been dropped before anybody looked; the screen was begun anew after them.
    """

    text: str
    cursor: tuple[int, int]
    size: TerminalSize
    emulated: bool
    running: bool
    exit_code: int | None = None
    lost: int = 0


class Terminal:
    """One terminal. Made by `open`; `async with` ends what runs in it."""

    def __init__(self, process: Process, size: TerminalSize, screen: Screen) -> None:
        self.process = process
        self._size, self._screen = size, screen
        self._cursor = self._lost = 0

    @classmethod
    async def open(
        cls,
        slot: Slot,
        command: str | Sequence[str] = ("bash", "-i"),
        *,
        size: TerminalSize | None = None,
        cwd: str = WORKSPACE,
        env: Mapping[str, str] | None = None,
        emulator: str = "best",
    ) -> Terminal:
        """Start a program in a terminal of the slot; `emulator` as `open_screen` has it."""
        window = size or TerminalSize()
        screen = open_screen(window, emulator)
        process = await slot.spawn(command, cwd=cwd, env=env, terminal=window)
        return cls(process, window, screen)

    async def __aenter__(self) -> Terminal:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Kill what runs in it and forget it. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            await self.process.forget()

    async def send_keys(self, *keys: str) -> None:
        """Press keys by their names (`Enter`, `C-c`, `Up`; see `keys.code`); what is no key's name is typed as text."""
        pressed = [code(key, application_cursor=self._screen.application_cursor) for key in keys]
        typed = [key.encode() if sent is None else sent for key, sent in zip(keys, pressed, strict=True)]
        await self.process.write(b"".join(typed))

    async def send_text(self, text: str) -> None:
        """Type text as it is, also where it is the name of a key."""
        await self.process.write(text.encode(errors="surrogateescape"))

    async def resize(self, size: TerminalSize) -> None:
        """Another window size, for the program and the screen."""
        await self.process.resize(size)
        self._screen.resize(size)
        self._size = size

    async def capture(self, *, quiet_s: float = 0.05, timeout_s: float = 1.0) -> ScreenShot:
        """The screen, as soon as nothing has been written for `quiet_s`, or after `timeout_s` in any case."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while await self._take(quiet_s) and asyncio.get_running_loop().time() < deadline:
            pass
        return await self._shot()

    async def wait_for(self, pattern: str | re.Pattern[str], *, timeout_s: float = 10.0) -> ScreenShot:
        """The screen when its text matches. Raises TimeoutError, with the screen, when it does not in time."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            shot = await self._shot()
            if re.search(pattern, shot.text):
                return shot
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0 or (not await self._take(left) and not shot.running):
                raise TimeoutError(f"the terminal does not show {pattern!r} within {timeout_s:g}s:\n{shot.text}")

    async def _take(self, wait_s: float) -> bool:
        """Feed the screen with what is new; whether there was any."""
        piece = await self.process.read(self._cursor, max_bytes=_PIECE_BYTES, wait_s=wait_s)
        if piece.lost:
            self._lost += piece.lost
            self._screen.feed(b"\x1bc")
        self._cursor = piece.end
        answers = self._screen.feed(piece.data)
        if answers:
            with contextlib.suppress(BrokenPipeError):
                await self.process.write(answers)
        return bool(piece.data)

    async def _shot(self) -> ScreenShot:
        status = await self.process.status()
        while await self._take(0):
            if status.running and self._cursor >= status.output_total_bytes:
                break
        screen = self._screen
        return ScreenShot(
            text=screen.text(),
            cursor=screen.cursor,
            size=self._size,
            emulated=screen.emulated,
            running=status.running,
            exit_code=status.exit_code,
            lost=self._lost,
        )
