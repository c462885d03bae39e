"""Files of a slot, read and written by this process itself: a descriptor of the slot's root is all it takes.

On the rung `full` the slot server and its client are root of the same machine, so the server hands the root of each
slot over (`slotd/handover.py`), and the client does what the server would, by the same code (`slotd/files.py`), which
resolves paths inside that root. That saves the way to another process and back, which costs more than the file does.

Everything else asks the server, which then says the same as ever: to write what would take more than a moment, in
which the slot may end; slots of a service, other rungs, and whatever goes wrong here, be it that nothing is there or
that this process may open no more files.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from typing import Any

from palaestra.sandbox.local.direct import after_fork
from palaestra.sandbox.local.direct.commands import Ask, Line, is_low, may_make_files, process_behind
from palaestra.sandbox.local.direct.event_loop import Rounds
from palaestra.sandbox.slotd import files
from palaestra.sandbox.slotd.exec import pipes
from palaestra.sandbox.slotd.protocol.frames import CHUNK
from palaestra.sandbox.slotd.protocol.init_messages import Environment
from palaestra.sandbox.slotd.requests import handover
from palaestra.sandbox.slotd.requests.handover import Handed

_IN_A_ROW = 16
"""After so many calls the event loop has its turn: none of them waits for anything by itself."""

_QUICK_BYTES = 1 << 20
"""What is read at once, within a fraction of a millisecond; more than that is read in a thread."""

_calls = itertools.count(1)


class AskServer(Exception):
    """It cannot be done here."""


class Reach:
    """The files of one slot, until `close`, or until nobody has it any more.

    Paths are text, and relative ones start in the workspace. The calls raise `AskServer` where anything goes wrong.
    """

    def __init__(self, root: int, owner: int, line: Line | None) -> None:
        self._root, self._owner = root, owner
        self.line = line
        """For commands, where there is one."""
        after_fork.not_for_children(self)

    def close(self) -> None:
        """Let go of the line, and of the slot's root, which keeps the slot's files in memory. Idempotent."""
        if self.line is not None:
            self.line.close()
        pipes.close(self._root)
        self._root = -1

    def let_go(self) -> None:
        """Close the descriptors, in a forked child."""
        pipes.close(self._root)
        self._root = -1
        if self.line is not None:
            self.line.let_go()

    __del__ = close

    async def read(self, path: str, offset: int, max_bytes: int) -> bytes:
        """A file from `offset` to its end."""
        try:
            fd, size = files.open_for_reading(self._root, files.absolute(path), offset, max_bytes)
            if size > _QUICK_BYTES:
                return await asyncio.to_thread(_read, fd, size)
            data = _read(fd, size)
        except OSError:
            raise AskServer from None
        await _turn()
        return data

    async def write(self, path: str, data: bytes, mode: int | None) -> None:
        """Replace or make a file, in a directory that is there."""
        if len(data) > CHUNK:
            raise AskServer
        try:
            writing = files.Writing(self._root, files.absolute(path), mode, self._owner, make_folders=False)
            try:
                writing.add(data)
            except BaseException:
                writing.discard()
                raise
            writing.finish()
            writing.close()
        except OSError:
            raise AskServer from None
        await _turn()

    async def describe(self, path: str) -> dict[str, Any] | None:
        """The entry at a path, links not followed; None when there is nothing."""
        try:
            entry = files.describe(self._root, path)
        except OSError:
            raise AskServer from None
        await _turn()
        return entry


def _read(fd: int, size: int) -> bytes:
    """So many bytes of a file, or as many of them as there still are. It is closed."""
    try:
        data = os.read(fd, size)
        while len(data) < size and (more := os.read(fd, size - len(data))):  # one call reads 2 GiB at most
            data += more
        return data
    finally:
        os.close(fd)


async def _turn() -> None:
    """Whoever makes many calls leaves others their time."""
    if next(_calls) % _IN_A_ROW == 0:
        await asyncio.sleep(0)


class Hands:
    """Takes what the server hands over."""

    def __init__(self, channel: socket.socket) -> None:
        channel.setblocking(False)
        self._channel, self._rounds = channel, Rounds()
        self._taken: dict[int, Handed] = {}
        after_fork.not_for_children(self)

    def reach(self, name: str, epoch: int, environment: Environment, ask: Ask) -> Reach | None:
        """What came for a slot that has been made just now; None where only the server reaches it. Asked for once."""
        handed = self._take(epoch)
        if handed is None or not handed.fds:
            return None
        if not is_low(max(handed.fds)):
            pipes.close(*handed.fds)
            return None
        root, *others = handed.fds
        line = None
        if len(others) == 2 and may_make_files():
            channel, pid = socket.socket(fileno=others[0]), process_behind(others[1])
            line = Line(channel, self._rounds, name, pid, root, handed.owner, environment, ask)
        else:
            pipes.close(*others)
        return Reach(root, handed.owner, line)

    def forget(self, epoch: int) -> None:
        """Nobody wants that slot."""
        handed = self._take(epoch)
        if handed is not None:
            pipes.close(*handed.fds)

    def close(self) -> None:
        """Nobody asks any more. Idempotent."""
        self._rounds.end()
        self.let_go()

    def let_go(self) -> None:
        """Close every descriptor, in a forked child."""
        self._channel.close()
        self._rounds.let_go()
        for handed in self._taken.values():
            pipes.close(*handed.fds)
        self._taken.clear()

    def _take(self, epoch: int) -> Handed | None:
        while (handed := handover.take(self._channel)) is not None:
            self._taken[handed.epoch] = handed
        return self._taken.pop(epoch, None)
