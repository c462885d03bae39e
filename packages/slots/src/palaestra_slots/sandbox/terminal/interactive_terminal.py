"""Types into a terminal of a slot and reads its screen, as a person (or tmux) would.

The program runs as a background process with a terminal of its own. When the screen is captured, this process derives
the screen from the program's output. An emulator, if one is used, also answers the program's queries, for example for
the cursor's position.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from palaestra_slots.sandbox.slot import WORKSPACE, Process, Slot, TerminalSize
from palaestra_slots.sandbox.terminal.screen import Screen, open_screen

_PIECE_BYTES = 128 << 10
_LONGEST_WAIT_S = 30.0

PROMPTED = {"PROMPT_COMMAND": r"printf '\e]133;D;%s\a' $?"}
"""The environment to give a shell so that `command_ended` can wait for its commands. Before every prompt, such a shell
writes an invisible sequence with the exit code of the last command.

The sequence is the one proposed for semantic prompts:
https://gitlab.freedesktop.org/Per_Bothner/specifications/blob/master/proposals/semantic-prompts.md
"""
_MARK = re.compile(rb"\x1b\]133;D;(\d+)\x07")
_LONGEST_MARK = 16

# The names of keys are tmux's, and the codes are those that xterm sends by default:
# https://invisible-island.net/xterm/ctlseqs/ctlseqs.html
_PLAIN = {
    "Enter": "\r", "Tab": "\t", "Space": " ", "BSpace": "\x7f", "Escape": "\x1b", "BTab": "\x1b[Z",
    "Insert": "\x1b[2~", "IC": "\x1b[2~", "Delete": "\x1b[3~", "DC": "\x1b[3~",
    "PageUp": "\x1b[5~", "PgUp": "\x1b[5~", "PPage": "\x1b[5~",
    "PageDown": "\x1b[6~", "PgDn": "\x1b[6~", "NPage": "\x1b[6~",
    "F1": "\x1bOP", "F2": "\x1bOQ", "F3": "\x1bOR", "F4": "\x1bOS", "F5": "\x1b[15~", "F6": "\x1b[17~",
    "F7": "\x1b[18~", "F8": "\x1b[19~", "F9": "\x1b[20~", "F10": "\x1b[21~", "F11": "\x1b[23~", "F12": "\x1b[24~",
}  # fmt: skip
_CURSOR = {"Up": "A", "Down": "B", "Right": "C", "Left": "D", "Home": "H", "End": "F"}
_CONTROL = {"Space": 0, "@": 0, "[": 27, "\\": 28, "]": 29, "^": 30, "_": 31, "?": 127}


@dataclass(frozen=True, slots=True)
class ScreenShot:
    """The state of a terminal at one moment. `cursor` is row and column, counted from 0. Without an emulator,
    `emulated` is False and `text` contains the last lines without control sequences. `lost` counts the bytes that were
    dropped before they could be read; the screen is cleared after each gap.
    """

    text: str
    cursor: tuple[int, int]
    size: TerminalSize
    emulated: bool
    running: bool
    exit_code: int | None = None
    lost: int = 0


class Terminal:
    """One terminal, made by `open`. At the end of an `async with` block, its program is killed."""

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
        """Start a program in a terminal of the slot; `emulator` is passed to `open_screen`."""
        window = size or TerminalSize()
        screen = open_screen(window, emulator)
        process = await slot.spawn(command, cwd=cwd, env=env, terminal=window)
        return cls(process, window, screen)

    async def __aenter__(self) -> Terminal:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Kill the program and forget it. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            await self.process.forget()

    async def send_keys(self, *keys: str) -> None:
        """Press keys by name (`Enter`, `C-c`, `Up`; see `key_code`); anything else is typed as text."""
        pressed = [key_code(key, application_cursor=self._screen.application_cursor) for key in keys]
        typed = [key.encode() if sent is None else sent for key, sent in zip(keys, pressed, strict=True)]
        await self.process.write(b"".join(typed))

    async def send_text(self, text: str) -> None:
        """Type text as it is, even if it is the name of a key."""
        await self.process.write(text.encode(errors="surrogateescape"))

    async def resize(self, size: TerminalSize) -> None:
        """Resize the window of the program, and the screen that this object keeps."""
        await self.process.resize(size)
        self._screen.resize(size)
        self._size = size

    async def capture(self, *, quiet_s: float = 0.05, timeout_s: float = 1.0) -> ScreenShot:
        """Return the screen once the program has written nothing for `quiet_s` seconds, or after `timeout_s` seconds at
        the latest."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while await self._feed_screen(quiet_s) and asyncio.get_running_loop().time() < deadline:
            pass
        return await self._shot()

    async def wait_for(self, pattern: str | re.Pattern[str], *, timeout_s: float = 10.0) -> ScreenShot:
        """Return the screen as soon as its text matches `pattern`. If the text does not match in time, or the program
        ends before it matches, raises TimeoutError, whose message contains the screen."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            shot = await self._shot()
            if re.search(pattern, shot.text):
                return shot
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0 or (not await self._feed_screen(left) and not shot.running):
                raise TimeoutError(f"the terminal did not show {pattern!r} within {timeout_s:g}s:\n{shot.text}")

    async def command_ended(self, cursor: int, patience_s: float) -> int | None:
        """Wait up to `patience_s` seconds until the output after `cursor` shows the end of a command, in a shell with
        `PROMPTED`. Returns the command's exit code, or None if the command did not end in time or the shell ended."""
        deadline = asyncio.get_running_loop().time() + patience_s
        seen = b""
        while (left := deadline - asyncio.get_running_loop().time()) > 0:
            piece = await self.process.read(cursor, wait_s=min(left, _LONGEST_WAIT_S))
            # Two reads may have the halves of a mark.
            seen, cursor = seen[-_LONGEST_MARK:] + piece.data, piece.end
            if mark := _MARK.search(seen):
                return int(mark[1])
            if not piece.data and not (await self.process.status()).running:
                return None
        return None

    async def _feed_screen(self, wait_s: float) -> bool:
        """Feed new output to the screen, waiting up to `wait_s` seconds for it. Returns False if none came."""
        piece = await self.process.read(self._cursor, max_bytes=_PIECE_BYTES, wait_s=wait_s)
        if piece.lost:
            self._lost += piece.lost
            # A full reset (RIS): the lost bytes may have changed modes as well as text.
            self._screen.feed(b"\x1bc")
        self._cursor = piece.end
        answers = self._screen.feed(piece.data)
        if answers:
            with contextlib.suppress(BrokenPipeError):
                await self.process.write(answers)
        return bool(piece.data)

    async def _shot(self) -> ScreenShot:
        status = await self.process.status()
        while await self._feed_screen(0):
            # A program that writes all the time would otherwise never let this end.
            if status.running and self._cursor >= status.output_total_bytes:
                break
        screen = self._screen
        running, code = status.running, status.exit_code
        return ScreenShot(screen.text(), screen.cursor, self._size, screen.emulated, running, code, self._lost)


def key_code(key: str, *, application_cursor: bool = False) -> bytes | None:
    """Return the bytes that a key such as `Enter`, `Up`, `F5`, `C-c`, `M-x` or `M-Up` sends; None if no key has this
    name.

    `application_cursor` is the mode that full-screen programs request, in which cursor keys send different codes.
    """
    if key in _CURSOR:
        # SS3 in application mode, CSI otherwise. Source: "PC-Style Function Keys" in XTerm Control Sequences.
        return ("\x1bO" if application_cursor else "\x1b[").encode() + _CURSOR[key].encode()
    if key in _PLAIN:
        return _PLAIN[key].encode()
    if key.startswith("C-"):
        return _control(key[2:])
    if key.startswith("M-") and len(key) > 2:
        rest = key_code(key[2:], application_cursor=application_cursor)
        if rest is None and len(key) == 3:
            rest = key[2:].encode()
        # Alt is sent as an Escape before the key: xterm's metaSendsEscape, which terminal programs expect.
        return None if rest is None else b"\x1b" + rest
    return None


def _control(name: str) -> bytes | None:
    if name in _CONTROL:
        return bytes([_CONTROL[name]])
    if len(name) == 1 and name.isascii() and name.isalpha():
        return bytes([ord(name.lower()) - ord("a") + 1])
    return None
