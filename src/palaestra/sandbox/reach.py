"""Files of a slot, read and written by this process itself: a descriptor of the slot's root is all it takes.

On the rung `full` the slot server and its client are root of the same machine, so the server hands the root of each
slot over (`slotd/handing.py`), and the client does what the server would, by the same code (`slotd/files.py`), which
resolves paths inside that root. That saves the way to another process and back, which costs more than the file does.

Everything else asks the server, which then says the same as ever: to write what would take more than a moment, in
which the slot may end; slots of a service, other rungs, and whatever goes wrong here, be it that nothing is there or
that this process may open no more files.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import socket
from typing import Any

from palaestra.sandbox import forks
from palaestra.sandbox.line import Line, Rounds, may_make_files
from palaestra.sandbox.slotd import files, handing, pipes
from palaestra.sandbox.slotd.frames import CHUNK

_IN_A_ROW = 16
"""After so many calls the event loop has its turn: none of them waits for anything by itself."""

_QUICK_BYTES = 1 << 20
"""What is read at once, within a fraction of a millisecond; more than that is read in a thread."""

_KEPT_DESCRIPTORS = 2
"""One in so many descriptors that this process may have is for what else it does."""

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
        forks.not_for_children(self)

    def close(self, why: str = "the slot has ended") -> None:
        """Let go of the slot's root, which keeps the slot's files in memory, and of the line. Idempotent."""
        pipes.close(self._root)
        self._root = -1
        if self.line is not None:
            self.line.close(why)

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
        self._taken: dict[int, Reach] = {}
        forks.not_for_children(self)

    def reach(self, epoch: int) -> Reach | None:
        """What came for a slot that has been made just now; None where only the server reaches it. Asked for once."""
        while (handed := handing.take(self._channel)) is not None:
            if _may_keep(handed.fds):
                root, *lines = handed.fds
                line = None
                if lines and may_make_files():
                    line = Line(lines[0], self._rounds, root, handed.owner)
                else:
                    pipes.close(*lines)
                self._taken[handed.epoch] = Reach(root, handed.owner, line)
        return self._taken.pop(epoch, None)

    def close(self) -> None:
        """Nobody asks any more."""
        self._channel.close()
        for reach in self._taken.values():
            reach.close()
        self._taken.clear()

    def let_go(self) -> None:
        """Close the socket, in a forked child."""
        self._channel.close()


def _may_keep(fds: list[int]) -> bool:
    """Whether they leave enough to others; otherwise they are closed."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if fds and max(fds) < limit // _KEPT_DESCRIPTORS:
        return True
    pipes.close(*fds)
    return False
