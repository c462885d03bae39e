"""One slot as the server sees it: its init, its descriptors, its commands, its end.

A slot is dead when the process descriptor of its init says so, and only then: the control socket is closed earlier,
while other processes of the slot still run.
"""

from __future__ import annotations

import array
import contextlib
import errno
import functools
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from . import cgroups, descriptors, files, killing, namespaces, orders, pipes
from .executions import Execution, Request
from .frames import Fields
from .frames import Kind as FrameKind
from .leftovers import Leftovers
from .link import Link
from .loop import Loop
from .orders import Kind, Order, Report, Spawn
from .spills import Spill
from .workshop import Body, Ground, Network

_KILL_PATIENCE_S = 10.0
_GONE_EVERY_S = 0.002

STANDARD: orders.Places = ((0, 0), (1, 1), (1, 2))
_WITH_VERDICT: orders.Places = (*STANDARD, (2, 3))
"""Places of a command: input, output, errors with the output, and the verdict's descriptor."""


class State(Enum):
    """Where a slot is in its life."""

    STARTING = "starting"
    LIVE = "live"
    DEAD = "dead"


class Child(Protocol):
    """What the slot's init has started and is not one command of one request: a shell, a background process."""

    def on_report(self, report: Report) -> None:
        """The init's word on it: STARTED, NOT_STARTED, EXIT or KILLED."""
        ...

    def on_lost(self) -> None:
        """The slot is dead, and the child with it."""
        ...


class Given(Protocol):
    """A shell that has been given a command; see `waiting.py`."""

    def go_on(self, number: int, request: Request, open_spill: Callable[[], Spill]) -> None:
        """This is the request of that command: see to it until it is over."""
        ...


class Waiting(Protocol):
    """Shells that wait for commands."""

    def give(self, fields: Fields, data: bytes) -> Given | None:
        """Have one run the command of a request. None where none waits, or the command is not for one."""
        ...

    def start(self) -> None:
        """Have one wait, if none does."""
        ...


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
    environment: orders.Environment
    """What commands have besides what a call adds."""
    state: State = State.STARTING
    failure: Fields = field(default_factory=dict)
    root: int = -1
    ending: Callable[[], None] | None = None
    """Set by whoever ends the slot on purpose; called instead of reporting a loss."""
    waiting: Waiting | None = None
    """Where shells are to wait for commands."""

    def __post_init__(self) -> None:
        self._pid = self._process = -1
        self._body: Body
        self._channel: socket.socket | None = None
        self._executions: dict[int, Execution] = {}
        self._leftovers = Leftovers(self.loop)
        self._network: list[int] = []
        self._oom_kills = 0
        self._children: dict[int, Child] = {}
        self._dying: set[int] = set()
        self._has_bash = True

    def start(self, body: Body) -> None:
        """Fork the init. `on_ready` or `on_end` follows. Raises OSError, and has started nothing then."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._body, pid = body, body.fork(theirs)
        self._pid, self._process, self._channel = pid, os.pidfd_open(pid), ours
        ours.setblocking(False)
        self.loop.watch(ours.fileno(), self._on_message)
        self.loop.watch(self._process, self._on_death)

    def kill(self, then: Callable[[], None] | None = None) -> None:
        """End every process of the slot; `then` runs when they are dead, instead of the report of a loss."""
        self.ending = then or self.ending or (lambda: None)
        if self.state is State.DEAD:
            self.ending()
        else:
            self._kill_init()

    def execute(self, number: int, request: Request, open_spill: Callable[[], Spill] | None = None) -> None:
        """Start a command in a process of its own; its RESULT or ERROR is sent when it is over."""
        self._start_command(number, request, open_spill)
        if self.waiting is not None:
            self.waiting.start()

    def _start_command(self, number: int, request: Request, open_spill: Callable[[], Spill] | None) -> None:
        stdin = descriptors.memory_file(request.stdin) if request.stdin else -1
        output, verdict, child_verdict = pipes.pipe(), -1, -1
        fds, places = [stdin if stdin >= 0 else pipes.nothing(), output[1]], STANDARD
        try:
            if request.verdict:
                verdict, child_verdict = pipes.pipe()
                fds, places = [*fds, child_verdict], _WITH_VERDICT
            self._ask(orders.encode_spawn(Spawn(number, request.argv, request.cwd, request.env, places)), fds)
        except ValueError:  # a NUL, a lone surrogate, a variable without a name
            pipes.close(*output, verdict)
            self.link.send(FrameKind.ERROR, number, start_error(Report(Kind.NOT_STARTED, number, errno.EINVAL)))
            return
        finally:
            if child_verdict >= 0:
                os.close(child_verdict)
            if stdin >= 0:
                os.close(stdin)
        kill = functools.partial(self._kill_command, number)
        self.adopt(Execution(number, request, self.loop, self.link, kill, output, verdict, open_spill))

    def adopt(self, execution: Execution) -> None:
        """A command has been started: listen to it until it is over."""
        self._executions[execution.number] = execution
        execution.start()

    def start_again(self, execution: Execution) -> None:
        """Start a command anew that has not run: in a process of its own."""
        del self._executions[execution.number]
        execution.drop()
        self.execute(execution.number, execution.request, execution.open_spill)

    def spawn(self, child: Child, spawn: Spawn, fds: list[int]) -> None:
        """Start a child; its reports go to it until it is dropped. Raises ValueError for what no system call takes."""
        order = orders.encode_spawn(spawn)
        self._children[spawn.command] = child
        self._ask(order, fds)

    def drop(self, command: int) -> None:
        """No more reports on a child."""
        self._children.pop(command, None)

    def signal(self, command: int, number: int) -> None:
        """Send a signal to the process group that a child leads."""
        self._ask(orders.encode(Order.SIGNAL, command, number))

    def kill_child(self, command: int, after: killing.Moment = killing.ALWAYS, spare: bool = False) -> None:
        """Kill what a child has started (after a moment), and itself unless it is spared. KILLED follows."""
        self._dying.add(command)
        self._ask(orders.encode_kill(command, after, spare))
        self.loop.later(_KILL_PATIENCE_S, lambda: self._give_up(command))

    def kill_at_end(self, command: int, after: killing.Moment = killing.ALWAYS) -> None:
        """Kill what a child has started (after a moment) as soon as its main process has ended. KILLED follows its end,
        unless `kill_child` comes first."""
        self._ask(orders.encode_kill(command, after, at_end=True))

    def conclude(self, execution: Execution, of_shell: int = 0) -> None:
        """Send a command's RESULT, with the flags of a shell that goes on."""
        execution.finish(execution.was_killed and self.ran_out_of_memory(), of_shell)

    def ran_out_of_memory(self) -> bool:
        """Whether the kernel has killed something of the slot for want of memory since it was asked last."""
        kills, self._oom_kills = self._oom_kills, cgroups.oom_kills(list(self.groups)) if self.groups else 0
        return self._oom_kills > kills

    def open_line(self) -> socket.socket | None:
        """A socket over which somebody else can give orders to the init; None where the init takes none."""
        if not self._body.takes_lines:
            return None
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:  # no descriptors are left
            return None
        with theirs:
            self._ask(orders.encode(Order.LINE), [theirs.fileno()])
        return ours

    def end_hung(self) -> None:
        """A command cannot be killed: end the slot, so that its caller does not wait for ever."""
        if self.state is State.LIVE:
            self._kill_init()

    def empty(self, fd: int) -> None:
        """Read an output pipe that nobody waits for any more, so that who still holds it can write."""
        self.loop.unwatch(fd)
        self._leftovers.add(fd)

    @property
    def pid(self) -> int:
        """The slot's first process, as the server numbers processes."""
        return self._pid

    def make_socket(self, make: Callable[[], socket.socket]) -> socket.socket:
        """What `make` makes in the slot's network. Raises OSError where it has none, or `make` does."""
        if self._body.network is Network.NONE:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "the slot has no network")
        if self._body.network is Network.SHARED:
            return make()
        if self._network:
            return namespaces.socket_in(self._network, make)
        opened = namespaces.open_network(self._pid)
        try:
            return namespaces.socket_in(opened, make)
        finally:
            pipes.close(*opened)

    def runs(self, number: int) -> bool:
        """Whether a command is still on."""
        return number in self._executions

    def with_variables(self, variables: dict[str, str] | None) -> orders.Environment:
        """The environment of a command. Raises ValueError for what cannot be in one."""
        if not variables:
            return self.environment
        return orders.environment({**self.environment.variables(), **variables})

    def shell(self) -> str:
        """`bash`, or `sh` in a root that has no bash. Looked for each time: what runs in the slot may remove it."""
        return "bash" if files.describe(self.root, "/bin/bash") is not None else "sh"

    def likely_shell(self) -> str:
        """The same for a command that can be started again with `sh`: looked for once bash was not there."""
        return "bash" if self._has_bash else self.shell()

    def cancel(self, number: int) -> None:
        """Kill a command, if it still runs."""
        if number in self._executions:
            self._executions[number].cancel()

    def give_credit(self, number: int, size: int) -> None:
        """Pass on what the client has taken."""
        if number in self._executions:
            self._executions[number].give_credit(size)

    def release_files(self) -> None:
        """Let go of the slot's files and of the layers below them."""
        self.ground.release()

    def _kill_command(self, number: int) -> None:
        self._ask(orders.encode(Order.KILL, number))
        self.loop.later(_KILL_PATIENCE_S, lambda: self._give_up(number))

    def _give_up(self, number: int) -> None:
        """A command that cannot be killed takes its slot with it, so that its caller does not wait for ever."""
        if number in self._executions or number in self._dying:
            self.end_hung()

    def _kill_init(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # only what it has left still lives
            signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def _ask(self, order: bytes, fds: list[int] | None = None) -> None:
        assert self._channel is not None
        extra = fds or []
        memory = -1
        if len(order) > orders.MAX_DATAGRAM:
            memory = descriptors.memory_file(order)
            order, extra = orders.encode(Order.LONG), [memory, *extra]
        try:
            self._channel.sendmsg([order], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", extra))])
        except OSError:
            # An init that does not take messages is as good as dead; what waits for it hears of it when it is.
            self._kill_init()
        finally:
            if memory >= 0:
                os.close(memory)

    def _on_message(self) -> bool:
        """Take one message of the init's; False when there is none."""
        assert self._channel is not None
        fds: list[int] = []
        try:
            if self.root >= 0:
                data = self._channel.recv(orders.MAX_REPORT)
            else:
                data, fds = descriptors.receive(self._channel, orders.MAX_REPORT, 3)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.loop.unwatch(self._channel.fileno())
            return False
        report = orders.decode_report(data)
        if report.command in self._executions:
            self.on_command(self._executions[report.command], report)
        elif report.kind is Kind.READY:
            (self.root, *self._network), self.state = fds, State.LIVE
            self.on_ready(self)
        elif report.kind is Kind.FAILED:
            self.failure = {"failed": report.text}
        else:
            if report.kind is Kind.KILLED:
                self._dying.discard(report.command)
            if report.command in self._children:
                self._children[report.command].on_report(report)
        return True

    def on_command(self, execution: Execution, report: Report) -> None:
        """The init's word on a command's main process, or that what was to be killed is dead."""
        if report.kind is Kind.EXIT:
            if execution.on_exit(report):
                self._finish(execution)
        elif report.kind is Kind.NOT_STARTED:
            self._on_not_started(execution, report)
        elif report.kind is Kind.KILLED:
            execution.on_killed(report.flag)
            self._finish(execution)

    def _on_not_started(self, execution: Execution, report: Report) -> None:
        """A command line is tried once more with `sh` where there was no bash."""
        request = execution.request
        if request.shell == "bash" and report.value == errno.ENOENT and not report.flag and not execution.killing:
            self._has_bash = False
            execution.request = request._replace(argv=["/bin/sh", *request.argv[1:]], shell="sh")  # noqa: S604
            self.start_again(execution)
        else:
            del self._executions[execution.number]
            execution.fail(start_error(report, request.cwd))

    def _finish(self, execution: Execution) -> None:
        del self._executions[execution.number]
        self.conclude(execution)
        if execution.leftover is not None:
            self.empty(execution.leftover)

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
        if self._channel is not None:
            while self._on_message():
                pass  # the reason, or a command's end, may still lie in the socket
            self.loop.unwatch(self._channel.fileno())
            self._channel.close()
        os.close(self._process)
        if self.root >= 0:
            os.close(self.root)
            pipes.close(*self._network)
        self._leftovers.close()
        self.state = State.DEAD
        for execution in list(self._executions.values()):
            execution.fail({"error": "lost", "message": f"{self.lease.name} ended while a command ran in it"})
        self._executions.clear()
        for child in list(self._children.values()):
            child.on_lost()
        self._children.clear()
        if self.ending is not None:
            self.ending()
        else:
            self.on_end(self)


def start_error(report: Report, cwd: str | None = None) -> Fields:
    """The ERROR of a command that could not be started, in `cwd` where that may be the reason."""
    number = report.value
    if report.flag:
        return {"error": "os", "errno": number, "message": "no directory to start in", "path": cwd}
    names = {errno.ENOENT: "not found", errno.EACCES: "permission denied", errno.E2BIG: "argument list too long"}
    return {"error": "exec", "errno": number, "message": names.get(number, os.strerror(number))}
