"""One slot as the server sees it: its init, its descriptors, its commands, its end.

A slot is dead when the process descriptor of its init says so, and only then: the control socket is closed earlier,
while other processes of the slot still run.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from .event_loop import Loop
from .exec import pipes
from .exec.background import Background
from .exec.supervisor import Commands
from .namespaced import cgroups, namespaces
from .protocol import init_messages
from .protocol.connection import Link
from .protocol.frames import Fields
from .protocol.init_messages import Kind
from .requests.command_requests import CommandRequests
from .requests.handover import Line
from .requests.streams import Conversation, Upload
from .rung import Body, Ground, Network

_GONE_EVERY_S = 0.002


class State(Enum):
    """Where a slot is in its life."""

    STARTING = "starting"
    LIVE = "live"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Lease:
    """Who may use the slot."""

    name: str
    epoch: int


@dataclass
class Slot:
    """Owned by the server. `on_end` is called once, when every process of the slot is dead."""

    lease: Lease
    ground: Ground
    groups: tuple[str, ...]
    loop: Loop
    link: Link
    on_ready: Callable[[Slot], None]
    on_end: Callable[[Slot], None]
    talks: dict[int, Conversation]
    environment: init_messages.Environment
    state: State = State.STARTING
    failure: Fields = field(default_factory=dict)
    root: int = -1
    ending: Callable[[], None] | None = None
    """Set by whoever ends the slot on purpose; called instead of reporting a loss."""
    commands: Commands = field(init=False)
    """What its init has been told to start; from `start` on."""
    requests: CommandRequests = field(init=False)
    """Set by the server."""
    processes: dict[int, Background] = field(default_factory=dict)
    """Those that outlive a call, ended ones included, oldest first."""
    uploads: set[Upload] = field(default_factory=set)
    """Files that are being written."""

    def __post_init__(self) -> None:
        self._pid = self._process = -1
        self._body: Body
        self._channel: socket.socket
        self._oom_kills = 0

    def start(self, body: Body) -> None:
        """Fork the init. `on_ready` or `on_end` follows. Raises OSError, and has started nothing then."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._body, pid = body, body.fork(theirs)
        self._pid, self._process, self._channel = pid, os.pidfd_open(pid), ours
        ours.setblocking(False)
        self.commands = Commands(self, ours, self.loop, self.link, self.talks, self.environment)
        self.loop.watch(ours.fileno(), self._on_begin)
        self.loop.watch(self._process, self._on_death)

    def kill(self, then: Callable[[], None] | None = None) -> None:
        """End every process of the slot; `then` runs when they are dead, instead of the report of a loss."""
        self.ending = then or self.ending or (lambda: None)
        if self.state is State.DEAD:
            self.ending()
        else:
            self._kill_init()

    @property
    def name(self) -> str:
        """The lease's."""
        return self.lease.name

    @property
    def pid(self) -> int:
        """The slot's first process, as the server numbers processes."""
        return self._pid

    def ran_out_of_memory(self) -> bool:
        """Whether the kernel has killed something of the slot for want of memory since it was asked last."""
        kills, self._oom_kills = self._oom_kills, cgroups.oom_kills(list(self.groups)) if self.groups else 0
        return self._oom_kills > kills

    def ask_oom(self, then: Callable[[bool], None]) -> None:
        """The same as a call."""
        then(self.ran_out_of_memory())

    def open_line(self) -> Line | None:
        """For somebody else who is to give orders to the init; None where it takes none."""
        line = self.commands.open_line() if self._body.takes_lines else None
        return None if line is None else Line(line, self._process)

    def end_hung(self) -> None:
        """A command cannot be killed, or the init takes no orders: end the slot, so that nobody waits for ever."""
        if self.state is State.LIVE:
            self._kill_init()

    def make_socket(self, make: Callable[[], socket.socket]) -> socket.socket:
        """What `make` makes in the slot's network. Raises OSError where it has none, or `make` does."""
        if self._body.network is Network.NONE:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "the slot has no network")
        if self._body.network is Network.SHARED:
            return make()
        opened = namespaces.open_network(self._pid)
        try:
            return namespaces.socket_in(opened, make)
        finally:
            pipes.close(*opened)

    def release_files(self) -> None:
        """Let go of the slot's files and of the layers below them."""
        self.ground.release()

    def _kill_init(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # only what it has left still lives
            signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def _on_begin(self) -> None:
        """Take the init's first message: it is ready, or why not."""
        fds: list[int] = []
        try:
            data, fds = pipes.receive(self._channel, init_messages.MAX_REPORT, 1)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.loop.unwatch(self._channel.fileno())
            return
        report = init_messages.decode_report(data)
        if report.kind is Kind.READY:
            self.root, self.state = fds[0], State.LIVE
            self.commands.listen()
            self.on_ready(self)
        else:
            self.failure = {"failed": report.text}

    def _on_death(self) -> None:
        self.loop.unwatch(self._process)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        self._bury()

    def _bury(self) -> None:
        """The init is dead; the slot is when nothing it has left lives any more."""
        if not self._body.gone():
            self.loop.later(_GONE_EVERY_S, self._bury)
            return
        if self.root < 0:
            self._on_begin()  # the reason may still lie in the socket
        while self.root >= 0 and self.commands.receive():
            pass  # and so may a command's end
        self.state = State.DEAD
        self.commands.lost()
        for upload in tuple(self.uploads):
            upload.lose(self.name)
        os.close(self._process)
        if self.root >= 0:
            os.close(self.root)
        if self.ending is not None:
            self.ending()
        else:
            self.on_end(self)
