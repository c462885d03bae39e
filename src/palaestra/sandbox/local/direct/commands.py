"""Commands and shells of a slot that this process has the slot's init start itself: without the server.

On the rung `full` the server hands a line to the init over with the slot's root (`slotd/handing.py`). Then what the
server does for the commands of other slots (capture, time limits, spilling, shells that go on) is done here, by
the same code: requests are frames (`slotd/command_requests.py`), and so are the answers. A command then wakes one
process less.

The server stays in charge of the slot: it makes, freezes and ends it, and counts what the kernel killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import resource
import socket
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path

from palaestra.core.errors import SlotLost
from palaestra.core.types import JSON
from palaestra.sandbox.local.direct.event_loop import Rounds
from palaestra.sandbox.local.requests import InFlight, OnData, Reply
from palaestra.sandbox.slotd.exec.output import Shelf
from palaestra.sandbox.slotd.exec.supervisor import Commands
from palaestra.sandbox.slotd.protocol.frames import Fields, Frame, Kind, new, received
from palaestra.sandbox.slotd.protocol.init_messages import Environment
from palaestra.sandbox.slotd.requests.command_requests import FIRST_CHILD, CommandRequests
from palaestra.sandbox.slotd.requests.streams import Conversation
from palaestra.sandbox.slotd.rung import Place

_KEPT_DESCRIPTORS = 2
"""One in so many descriptors that this process may have is for what else it does."""

Ask = Callable[[str], Awaitable[dict[str, JSON]]]
"""Asks the server something about a slot."""


_NO_MORE_FILES = (errno.EMFILE, errno.ENFILE)


class NoRoom(OSError):
    """This process may open no more files. The server may."""


class Line:
    """The line to one slot's init, until `close`. Implements `Overseer`.

    `root` and `owner` are the slot's, `pid` is its first process. `ask` asks the server about the slot.
    """

    def __init__(
        self, channel: socket.socket, rounds: Rounds, name: str, pid: int, root: int, owner: int,
        environment: Environment, ask: Ask,
    ) -> None:  # fmt: skip
        channel.setblocking(False)
        self.name, self.pid, self.root = name, pid, root
        self._channel, self._rounds, self._ask = channel, rounds, ask
        self._in_flight = InFlight(self._take)
        self._talks: dict[int, Conversation] = {}
        self._commands = Commands(self, channel, rounds, self, self._talks, environment)
        shelf = Shelf(lambda path: Place(root, path, owner))
        self._requests = CommandRequests(self._commands, shelf, itertools.count(FIRST_CHILD))
        self._tasks: set[asyncio.Task[None]] = set()
        self._commands.listen()

    def close(self) -> None:
        """Let go of it; whoever waits for a command hears that the slot has ended. Idempotent."""
        if self._rounds.over:
            self._commands.let_go()
        elif self._commands.live:
            self._commands.lost()

    def let_go(self) -> None:
        """Close every descriptor, in a forked child: what watches them is its parent's too."""
        self._commands.let_go()

    def has_room(self) -> bool:
        """Whether this process may open some more files."""
        try:
            fd = os.dup(self._channel.fileno())
        except OSError:
            return False
        os.close(fd)
        return is_low(fd)

    def request(
        self, op: str, fields: Fields, data: bytes = b"", on_data: OnData | None = None
    ) -> Coroutine[None, None, Reply]:
        """A request for commands, to its answer. `fields` becomes its own.

        Raises `NoRoom` for one of which nothing has begun because this process may open no more files, and `SlotLost`
        once the line is closed.
        """
        fields["op"] = op
        return self._in_flight.request(Kind.REQUEST, fields, data, on_data)

    def send(self, kind: Kind, request: int, fields: Fields | None = None, data: bytes = b"") -> None:
        """What has become of a command."""
        self._in_flight.on_frame(new(Frame, (kind, request, fields or {}, data)))

    def end_hung(self) -> None:
        """A command cannot be killed, or the init takes no orders: the slot is to end."""
        self._do(self._end_slot())

    def ask_oom(self, then: Callable[[bool], None]) -> None:
        """Say whether the kernel has killed something of the slot for want of memory."""
        self._do(self._ask_oom(then))

    def _take(self, kind: Kind, number: int, fields: Fields, data: bytes) -> None:
        """A request, or what follows one."""
        if kind is not Kind.REQUEST:
            if number in self._talks:
                self._talks[number].on_frame(received(kind, number, fields, data))
            return
        if not self._commands.live:
            raise SlotLost(f"{self.name} is dead")
        try:
            self._requests.serve(received(kind, number, fields, data))
        except OSError as error:
            if error.errno not in _NO_MORE_FILES:
                raise
            raise NoRoom(error.errno, error.strerror) from None

    async def _end_slot(self) -> None:
        with contextlib.suppress(Exception):  # it has ended
            await self._ask("hung")

    async def _ask_oom(self, then: Callable[[bool], None]) -> None:
        oom = False
        with contextlib.suppress(Exception):  # the slot has ended, which `close` tells everybody
            oom = bool((await self._ask("oom"))["oom"])
        then(oom)

    def _do(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def is_low(fd: int) -> bool:
    """Whether a descriptor that was opened just now leaves enough to others."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return fd < limit // _KEPT_DESCRIPTORS


def may_make_files() -> bool:
    """Whether what this process makes in a slot has the modes that it is given; see umask(2)."""
    for text in Path("/proc/self/status").read_text().splitlines():
        if text.startswith("Umask:"):
            return int(text.split()[1], 8) & ~0o022 == 0
    return False


def process_behind(descriptor: int) -> int:
    """The pid of a process descriptor; 0 for one that is gone. The descriptor is closed."""
    try:
        for text in Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines():
            if text.startswith("Pid:"):
                return max(0, int(text.split()[1]))
        return 0
    finally:
        os.close(descriptor)
