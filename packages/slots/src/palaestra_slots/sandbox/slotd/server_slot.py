"""Manages one slot in the server: its init, its descriptors, its processes, and its end; finds the slots that requests
name, and answers the requests.

A slot's death is noticed through the process descriptor of its init. The slot's control socket closes earlier, while
other processes may still run.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

from . import files, syscalls
from .event_loop import READ, WRITE, EpollLoop, Job
from .exec import background, pipes, process_tree
from .exec.background import BackgroundProcesses
from .exec.pipes import Shelf
from .exec.stateful_shell import ShellProcesses
from .exec.supervisor import Supervisor
from .namespaced import cgroups
from .network import network_namespace
from .protocol import init_messages
from .protocol.frames import Fields, Frame, FrameConnection, FrameKind, OpenRequest, SendFrame
from .protocol.init_messages import EnvBlock, ReportKind
from .rung import CannotMake, NetworkScope, NewSlot
from .streams import Listing, Upload

_log = logging.getLogger("slotd")

MAX_ANSWER_BYTES = 4 << 20

_GONE_EVERY_S = 0.002
_OOM_LASTS_S = 1.0
_IF_DEAD = os.WEXITED | os.WNOHANG | os.WNOWAIT
_MAX_ARGUMENTS_BYTES = 1 << 20
_PIECE_BYTES = 64 << 10


class LifeStage(Enum):
    """The stage of a slot's life."""

    STARTING = "starting"
    LIVE = "live"
    DEAD = "dead"


class ServerSlot:
    """One slot of the server. `on_ready` is called when the init is ready. `on_end` is called once, when the slot is
    dead, unless `kill` has replaced it. Implements `SlotOwner`."""

    def __init__(
        self, name: str, epoch: int, new: NewSlot, loop: EpollLoop,
        on_ready: Callable[[ServerSlot], None], on_end: Callable[[ServerSlot], None],
    ) -> None:  # fmt: skip
        self.name, self.epoch, self.files, self.groups = name, epoch, new.files, new.groups
        self.state = LifeStage.STARTING
        self.failure = "its first process died"  # why it could not be made
        self.root = self.process = -1  # descriptors of its root directory and of its init's process
        self.was_made = False  # whether its init has reported that it is ready
        self.loss = "lost"  # the error of requests about the dead slot; "ended" if its own commands have ended it
        self.pid = -1  # the pid of its init, as the server sees it
        self.ending: Callable[[], None] | None = None  # set by `kill`; called instead of `on_end`
        self.uploads: set[Upload] = set()  # files that are being written
        self.supervisor: Supervisor
        self.shells: ShellProcesses
        self.background: BackgroundProcesses
        self._loop, self._init, self._on_ready, self._on_end = loop, new.init, on_ready, on_end
        self._channel: socket.socket
        self._oom_kills, self._oom_seen_s = 0, -math.inf
        self._hung = False  # whether the init was killed because it did not respond
        self._host_kills = _host_oom_kills() if new.init.exposed else 0

    def start(
        self, environment: EnvBlock, shelf: Shelf, send: SendFrame, open_requests: dict[int, OpenRequest],
        numbers: Iterator[int],
    ) -> None:  # fmt: skip
        """Start the init. If this raises OSError, nothing was started."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.pid = self._init.fork(theirs)
        # A signal by pid could hit another process after the init was reaped; a pidfd never names another one.
        self.process, self._channel = os.pidfd_open(self.pid), ours
        ours.setblocking(False)
        self.supervisor = Supervisor(self, ours, self._loop, send, open_requests, environment, shelf)
        self.shells = ShellProcesses(self.supervisor, numbers)
        self.background = BackgroundProcesses(self.supervisor, numbers)
        self._loop.watch(ours.fileno(), self._on_begin)
        self._loop.watch(self.process, self._on_death)

    def kill(self, then: Callable[[], None]) -> None:
        """End every process of the slot; when they are dead, `then` is called instead of `on_end`.

        The root is closed first, so that the dying init unmounts it and not this process: an unmount waits for the
        kernel, and if this process waited, all slots would wait with it.
        """
        self.ending = then
        self._close_root()
        if self.state is LifeStage.DEAD:
            self.ending()
            return
        if self.state is LifeStage.LIVE:
            self._init.end_soon(self.pid)
        self._kill_init()

    def ran_out_of_memory(self) -> bool:
        """Return whether the kernel has killed a process of the slot for lack of memory since the last call."""
        kills, self._oom_kills = self._oom_kills, cgroups.oom_kills(list(self.groups)) if self.groups else 0
        if self._oom_kills > kills:
            self._oom_seen_s = time.monotonic()
        return self._oom_kills > kills

    def ask_oom(self, then: Callable[[bool], None]) -> None:
        """Call `then` with the result of `ran_out_of_memory`."""
        then(self.ran_out_of_memory())

    def open_line(self) -> socket.socket | None:
        """Return a second socket for orders to the init. Returns None if the init does not take a second socket, or if
        no descriptors are left."""
        return self.supervisor.open_line() if self._init.takes_lines else None

    def end_hung(self) -> None:
        if self.state is LifeStage.LIVE and os.waitid(os.P_PIDFD, self.process, _IF_DEAD) is None:
            self._hung = not process_tree.is_exiting(self.pid)
            self._kill_init()

    def make_socket(self, make: Callable[[], socket.socket]) -> socket.socket:
        """Return the socket that `make` opens in the slot's network. Raises OSError if the slot has no network, or if
        `make` raises it."""
        if self._init.network is NetworkScope.NONE:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "the slot has no network")
        if self._init.network is NetworkScope.SHARED:
            return make()
        return socket.socket(fileno=self.make_in_network(lambda: [make().detach()])[0])

    @property
    def network(self) -> NetworkScope:
        """The slot's network."""
        return self._init.network

    def make_in_network(self, make: Callable[[], Sequence[int]]) -> list[int]:
        """Return the descriptors that `make` opens in the slot's own network. Raises OSError."""
        opened = network_namespace.open_network(self.pid)
        try:
            return network_namespace.open_in(opened, make)
        finally:
            pipes.close(*opened)

    def _close_root(self) -> None:
        pipes.close(self.root)
        self.root = -1

    def _kill_init(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # the init is dead, and only processes that it left still live
            signal.pidfd_send_signal(self.process, signal.SIGKILL)

    def _on_begin(self) -> None:
        """Handle the init's first message: READY, or the reason for its failure."""
        try:
            data, fds = pipes.receive(self._channel, init_messages.MAX_REPORT, 1)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.unwatch(self._channel.fileno())
            return
        report = init_messages.decode_report(data)
        # The kernel drops a passed descriptor if the receiver has no number left for it. Source: unix(7).
        if report.kind is ReportKind.READY and not fds:
            self.failure = "the slot server has no descriptor left for its root"
            self._kill_init()
        elif report.kind is ReportKind.READY:
            self.root, self.state, self.was_made = fds[0], LifeStage.LIVE, True
            self.supervisor.listen()
            self._on_ready(self)
        else:
            self.failure = report.text

    def _on_death(self) -> None:
        self._loop.unwatch(self.process)
        with contextlib.suppress(ChildProcessError):
            _, status = os.waitpid(self.pid, 0)
            if self.ending is None and self._ended_by_commands(status):
                self.loss = "ended"
        self._bury()

    def _ended_by_commands(self, status: int) -> bool:
        """Return whether the slot's own commands have ended the init, or have made it hang.

        They have, unless SIGKILL from outside has: from a process of the machine, or from the kernel for want of memory
        that is not the slot's own. This does not depend on how they did it, so an agent cannot avoid its score by a way
        that is not known here.
        """
        if self._hung or os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            return True
        if self._init.exposed:
            return _host_oom_kills() == self._host_kills
        if not self._init.shares_memory:
            return False
        # The kernel may have killed a command just before the init, and this may have been asked about already.
        return self.ran_out_of_memory() or time.monotonic() - self._oom_seen_s < _OOM_LASTS_S

    def _bury(self) -> None:
        """Handle the death of the init. The slot is dead once the processes that the init has left are dead."""
        try:
            gone = self._init.gone()
        except OSError:  # no process or descriptor is left to find out
            gone = False
        if not gone:
            self._loop.later(_GONE_EVERY_S, self._bury)
            return
        if self.state is LifeStage.STARTING:
            self._on_begin()  # the report of its failure may still be in the socket
        while self.state is LifeStage.LIVE and self.supervisor.receive():
            pass  # reports on commands may also still be in the socket
        self._close_root()
        self.state = LifeStage.DEAD
        self.supervisor.slot_died()
        for upload in tuple(self.uploads):
            upload.lose(self.name, self.loss)
        os.close(self.process)
        if self.ending is not None:
            self.ending()
        else:
            self._on_end(self)


def _host_oom_kills() -> int:
    """Return the number of processes of this machine that the kernel has killed so far for lack of memory."""
    with contextlib.suppress(OSError), open("/proc/vmstat") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
    return 0


# The requests that parts of a slot serve, by name.
OPERATIONS: dict[str, Callable[[ServerSlot, Frame], None]] = {
    "exec": lambda slot, frame: slot.supervisor.exec(frame),
    "shell": lambda slot, frame: slot.shells.open(frame),
    "run": lambda slot, frame: slot.shells.run(frame),
    "close_shell": lambda slot, frame: slot.shells.close(frame),
    **dict.fromkeys(background.OPERATIONS, lambda slot, frame: slot.background.serve(frame)),
}


# The requests that are answered at once.
ANSWERS: dict[str, Callable[[ServerSlot, Fields], Fields | None]] = {
    "oom": lambda slot, fields: {"oom": slot.ran_out_of_memory()},
    "hung": lambda slot, fields: slot.end_hung(),
    "arguments": lambda slot, fields: {"arguments": _process_arguments(slot.root, int(fields["pid"]))},
}


def _process_arguments(root: int, pid: int) -> list[str] | None:
    """Return the arguments of the live process whose number in the slot is `pid`, read from the kernel; None if there
    is no such process."""
    try:
        fd = files.open_at(root, f"/proc/{pid}/cmdline", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # Only the kernel's own file counts: elsewhere, the work could have written one.
        if syscalls.filesystem_type(fd) != files.PROC:
            return None
        data = os.read(fd, _MAX_ARGUMENTS_BYTES)
    except ProcessLookupError:
        return None
    finally:
        os.close(fd)
    words = data.removesuffix(b"\0").split(b"\0")
    return [word.decode(errors="replace") for word in words] if data else None


class ServiceQuery:
    """One connection to a service at 127.0.0.1 in a slot: sends a request and passes the answer to `answered`. The
    answer ends with the connection or at the size limit; at the time limit, `answered` gets an error. Raises
    OSError."""

    def __init__(
        self, loop: EpollLoop, slot: ServerSlot, fields: Fields, request: bytes,
        answered: Callable[[bytes, OSError | None], None],
    ) -> None:  # fmt: skip
        self._loop, self._unsent, self._answered = loop, memoryview(request), answered
        self._most = min(int(fields["max_bytes"]), MAX_ANSWER_BYTES)
        self._received = bytearray()
        self._socket = slot.make_socket(lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        self._socket.setblocking(False)
        late = TimeoutError(errno.ETIMEDOUT, "the answer did not end in time")
        self._timer = loop.later(fields["timeout_s"], lambda: self._end_query(late))
        self._socket.connect_ex(("127.0.0.1", int(fields["port"])))
        loop.watch(self._socket.fileno(), self._write_request)
        loop.watch_for(self._socket.fileno(), WRITE, self._write_request)

    def _write_request(self) -> None:
        # The socket does not block, so this is where the result of the connect is.
        problem = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if problem:
            self._end_query(OSError(problem, os.strerror(problem)))
            return
        try:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError as error:
            self._end_query(error)
            return
        if not self._unsent:
            self._loop.watch_for(self._socket.fileno(), READ, self._read_answer)

    def _read_answer(self) -> None:
        try:
            data = self._socket.recv(_PIECE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._end_query(error)
            return
        self._received += data
        if not data or len(self._received) >= self._most:
            self._end_query(None)

    def _end_query(self, error: OSError | None) -> None:
        self._timer.cancel()
        self._loop.unwatch(self._socket.fileno())
        self._socket.close()
        self._answered(bytes(self._received[: self._most]), error)


class RequestError(Exception):
    """A request cannot be served; `fields` are the fields of the ERROR frame."""

    def __init__(self, error: str, message: str) -> None:
        super().__init__(message)
        self.fields: Fields = {"error": error, "message": message}


class Replies:
    """Sends the answers over the client's connection. `open_requests` has the requests that are not answered yet, by
    number."""

    def __init__(self, connection: FrameConnection) -> None:
        self.connection = connection
        self.open_requests: dict[int, OpenRequest] = {}

    def fail(self, frame: Frame, error: Exception) -> None:
        """Answer with the ERROR for an exception."""
        if isinstance(error, RequestError):
            fields = error.fields
        elif isinstance(error, CannotMake):
            fields = {"error": "sandbox", "message": str(error)}
        elif isinstance(error, OSError):
            fields = {"error": "os", "errno": error.errno, "message": error.strerror, "path": error.filename}
        else:
            _log.exception("request %s failed", frame.fields.get("op", frame.kind))
            fields = {"error": "sandbox", "message": f"{type(error).__name__}: {error}"}
        self.connection.send(FrameKind.ERROR, frame.request, fields)

    def send(self, frame: Frame, fields: Fields | None = None, data: bytes = b"") -> None:
        """Answer with a RESULT."""
        self.connection.send(FrameKind.RESULT, frame.request, fields, data)

    def send_list(self, frame: Frame, entries: Iterable[Fields | None]) -> Job:
        """Answer with a list of any length; None among the entries stands for a pause."""
        listing = Listing()
        try:
            yield from listing.fill(entries)
            listing.send(frame.request, self.connection, self.open_requests)
        finally:
            listing.close()


class Deferred(NamedTuple):
    """A leased slot that is not made yet: the `create` request, and the layers that it keeps until then."""

    fields: Fields
    layers: tuple[Any, ...]

    def release(self) -> None:
        for layer in self.layers:
            layer.release()


class SlotTable:
    """The slots of the server: those that were made by name, and the deferred ones by epoch."""

    def __init__(self) -> None:
        self.by_name: dict[str, ServerSlot] = {}
        self.deferred: dict[int, Deferred] = {}

    def leased(self, frame: Frame, alive: bool = True) -> ServerSlot:
        """Return the slot that a request names. Raises `RequestError` if the request's lease is not the current one, or
        the slot is dead."""
        name, epoch = frame.fields["slot"], frame.fields["epoch"]
        slot = self.by_name.get(name)
        if slot is None or slot.epoch != epoch or slot.ending is not None:
            raise RequestError("stale", f"the lease of {name} (epoch {epoch}) has ended")
        if alive and slot.state is not LifeStage.LIVE:
            raise RequestError(slot.loss, f"{name} is dead")
        return slot
