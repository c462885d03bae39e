"""Pid 1 of a slot: builds the slot around itself, gives up its privileges, then starts commands and reaps.

It is forked from the server, so everything it needs is in memory and it works with any root. What it sets once
(limits, capabilities, filter, namespaces) every command inherits; a command costs one message and one `posix_spawn`.
Output never passes through it: the descriptors of a command's pipes come with the message. Nothing of the slot can
reach it: it is not dumpable, its only descriptor is the control socket, and signals from inside cannot kill pid 1.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from .. import syscalls
from ..exec import kill, pipes
from ..protocol import init_messages
from ..protocol.init_messages import Kind, Order, Report
from . import namespaces
from .init_steps import Step, perform

CONTROL = 3

Start = Callable[[init_messages.Spawn, list[int]], int]
"""Starts a command with the descriptors of its order, and returns its pid."""

SPAWN_SIGNALS = tuple(number for number in range(1, 32) if number not in (signal.SIGKILL, signal.SIGSTOP))
"""What a command finds at its default: what this process ignores, and what whoever started the run did."""


class NoDirectory(OSError):
    """A command cannot be started where it is to start."""


def run(steps: Sequence[Step], fds: Mapping[int, int], own_network: bool) -> NoReturn:
    """The life of a slot, in the child of a fork. `fds` maps numbers to the descriptors that the steps know by them."""
    status = 1
    try:
        gc.disable()
        _keep_only(fds)
        syscalls.set_name("slot-init")
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=CONTROL)
        try:
            perform(steps)
            syscalls.close_from(CONTROL + 1)
            places = open_places(own_network)
        except BaseException as error:
            send(
                channel,
                Report(
                    Kind.FAILED,
                    value=getattr(error, "errno", None) or 0,
                    text=getattr(error, "strerror", None) or str(error),
                ),
            )
            raise
        report_ready(channel, places)
        Init(channel).serve()
        status = 0
    finally:
        os._exit(status)


def open_places(own_network: bool) -> list[int]:
    """The slot's root, and of a network of its own what `namespaces.open_network` gives: of a process that is not
    dumpable and was not executed in them, who is not root can look up nothing."""
    network = namespaces.open_network("self") if own_network else []
    return [os.open("/", os.O_PATH | os.O_DIRECTORY), *network]


def report_ready(channel: socket.socket, places: list[int]) -> None:
    """READY, with those descriptors, which are closed here."""
    socket.send_fds(channel, [init_messages.encode_report(Report(Kind.READY))], places)
    for fd in places:
        os.close(fd)


def _keep_only(fds: Mapping[int, int]) -> None:
    """Close what belongs to the server and to other slots, first of all."""
    above = max(*fds, *fds.values()) + 1
    high = {place: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for place, fd in fds.items() if fd != place}
    for place, fd in high.items():
        os.dup2(fd, place, inheritable=False)
    first = CONTROL
    for kept in sorted(fds):
        syscalls.close_from(first, kept - 1)
        first = kept + 1
    syscalls.close_from(first)


class Init:
    """The control loop: messages in, processes out. How a process is started and a slot emptied can be replaced."""

    def __init__(
        self, channel: socket.socket, start: Start | None = None, kill_slot: Callable[[], None] | None = None
    ) -> None:
        self._channel, self._start, self._kill_slot = channel, start or start_command, kill_slot
        self._commands: dict[int, kill.Command] = {}
        self._names: dict[int, int] = {}
        self._at_end: dict[int, kill.Moment] = {}

    def serve(self) -> None:
        """Until the server closes the channel; the slot ends with this process."""
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(CONTROL, select.POLLIN)
        poll.register(reader, select.POLLIN)
        while True:
            ready = dict(poll.poll())
            if reader in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(reader, 4096)
            self._reap()
            if CONTROL in ready and not self._take():
                return

    def _take(self) -> bool:
        data, fds = pipes.receive(self._channel, init_messages.MAX_DATAGRAM + 4096, 8)
        if not data:
            return False
        order, command, number = init_messages.decode_order(data)
        if order is Order.LONG:
            with open(fds.pop(0), "rb") as file:
                data = file.read()
            order, command, number = init_messages.decode_order(data)
        if order is Order.SPAWN:
            self._spawn(init_messages.decode_spawn(data), fds)
        elif order is Order.KILL:
            self._kill(command, init_messages.decode_moment(data), number)
        else:
            self._signal(command, number)
        return True

    def _spawn(self, spawn: init_messages.Spawn, fds: list[int]) -> None:
        said: Report | None = None
        try:
            started = time.clock_gettime(time.CLOCK_BOOTTIME)
            pid = self._start(spawn, fds)
            self._commands[pid] = kill.Command(pid, kill.ticks(started))
            self._names[pid] = spawn.command
            if spawn.announce:
                said = Report(Kind.STARTED, spawn.command, pid)
        except OSError as error:
            said = Report(Kind.NOT_STARTED, spawn.command, error.errno or 0, isinstance(error, NoDirectory))
        finally:
            for fd in fds:
                os.close(fd)
        if said is not None:
            send(self._channel, said)

    def _signal(self, name: int, number: int) -> None:
        """Send a signal to the group that a command leads."""
        for pid, known in self._names.items():
            if known == name:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, number)

    def _kill(self, name: int, after: kill.Moment, flags: int) -> None:
        """Kill a command and what it started, then say so. Its exit is reported first, as always."""
        if flags & init_messages.AT_END and name in self._names.values():
            self._at_end[name] = after
            return
        self._at_end.pop(name, None)
        swept, spare = False, bool(flags & init_messages.SPARE)
        for pid, known in list(self._names.items()):
            if known == name:
                others = [command for command in self._commands.values() if command.pid != pid]
                swept = kill.kill_tree(self._commands[pid], others, self._reap, after, spare, self._kill_slot)
        self._reap()
        send(self._channel, Report(Kind.KILLED, name, flag=swept))

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._commands:
                command, name = self._commands.pop(pid), self._names.pop(pid)
                code, cpu_s = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
                send(self._channel, Report(Kind.EXIT, name, code, False, cpu_s, usage.ru_maxrss << 10))
                if name in self._at_end:
                    self._kill_rest(name, command, self._at_end.pop(name))

    def _kill_rest(self, name: int, ended: kill.Command, after: kill.Moment) -> None:
        """The main process has ended: kill what is left of its tree, then say so."""
        others = list(self._commands.values())
        swept = kill.kill_tree(ended, others, self._reap, after, spare=True, kill_slot=self._kill_slot)
        send(self._channel, Report(Kind.KILLED, name, flag=swept))


def start_command(spawn: init_messages.Spawn, fds: list[int]) -> int:
    """The pid of a new process. Raises OSError, `NoDirectory` where the directory is what failed."""
    moved: list[int] = []
    try:
        _enter(spawn.cwd)
        env = spawn.env.variables()
        path = find(spawn.argv[0], env)
        highest = max(target for _, target in spawn.places)
        if highest > CONTROL:  # where a descriptor that is still to be copied may lie
            fds = moved = above(highest, fds)
        actions = _terminal(spawn, fds) + [(os.POSIX_SPAWN_DUP2, fds[i], target) for i, target in spawn.places]
        return os.posix_spawn(
            path, spawn.argv, env, file_actions=actions, setsid=True, setsigmask=(), setsigdef=SPAWN_SIGNALS
        )
    finally:
        for fd in moved:
            os.close(fd)
        with contextlib.suppress(OSError):  # a root that the slot may not enter fails its commands, not init
            os.chdir("/")


def _enter(directory: str) -> None:
    try:
        os.chdir(directory)
    except OSError as error:
        raise NoDirectory(error.errno, error.strerror) from None


def above(highest: int, fds: Sequence[int]) -> list[int]:
    """Copies of descriptors that lie above a number."""
    return [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, highest + 1) for fd in fds]


def _terminal(spawn: init_messages.Spawn, fds: list[int]) -> list[tuple[int, int, str, int, int]]:
    """Opening a terminal is how the leader of a session without one gets it; `setsid` has come before."""
    if not spawn.terminal:
        return []
    return [(os.POSIX_SPAWN_OPEN, 0, os.ttyname(fds[spawn.places[0][0]]), os.O_RDWR, 0)]


def find(program: str, env: Mapping[str, str]) -> str:
    """The path of a program, looked up as a shell would. Raises OSError when there is none that can be run."""
    if "/" in program:
        return program
    denied = False
    for folder in env.get("PATH", "").split(":"):
        path = f"{folder or '.'}/{program}"
        if os.access(path, os.X_OK) and not os.path.isdir(path):
            return path
        denied = denied or os.path.isfile(path)
    raise OSError(errno.EACCES if denied else errno.ENOENT, "cannot run", program)


def send(channel: socket.socket, report: Report) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        channel.send(init_messages.encode_report(report))
