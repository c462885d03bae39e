"""What one side has the init of a slot start: the commands of its calls, and processes that outlive a call.

The server has one of these for each slot, over the init's control socket. On the rung `full` the client has one too,
over a line of its own (`sandbox/local/direct/commands.py`). Each names what it starts, and is told what becomes of
that and of nothing else.

Output pipes that nobody waits for any more: emptied, slowly, so that a daemon which still holds one can write.
"""

from __future__ import annotations

import array
import errno
import functools
import os
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

from .. import files
from ..event_loop import READ, WRITE
from ..protocol import init_messages
from ..protocol.frames import Fields, Frame
from ..protocol.frames import Kind as FrameKind
from ..protocol.init_messages import Kind, Order, Report, Spawn
from ..requests.streams import Conversation
from . import pipes, process_tree
from .command import Asker, Execution, Request, Rounds
from .output import Spill

_KILL_PATIENCE_S = 10.0

_STANDARD: init_messages.Places = ((0, 0), (1, 1), (1, 2))
_WITH_VERDICT: init_messages.Places = (*_STANDARD, (2, 3))
"""Places of a command: input, output, errors with the output, and the verdict's descriptor."""


class Child(Protocol):
    """What the init has started and is not one command of one request: a shell, a background process."""

    def on_report(self, report: Report) -> None:
        """The init's word on it: STARTED, NOT_STARTED, EXIT or KILLED."""
        ...

    def on_lost(self) -> None:
        """The slot is dead, and the child with it."""
        ...

    def descriptors(self) -> Sequence[int]:
        """What it has open here; negative numbers are nothing."""
        ...


class Overseer(Protocol):
    """Who answers for the slot: the server's `Slot`, or a client's line, which asks the server."""

    root: int
    """A descriptor of the slot's root directory."""

    @property
    def name(self) -> str:
        """The slot's."""
        ...

    @property
    def pid(self) -> int:
        """The slot's first process, as this process numbers processes."""
        ...

    def end_hung(self) -> None:
        """A command cannot be killed, or the init takes no orders: end the slot, so that nobody waits for ever."""
        ...

    def ask_oom(self, then: Callable[[bool], None]) -> None:
        """Say whether the kernel has killed something of the slot for want of memory since it was asked last."""
        ...


class Commands:
    """Of one slot, until `lost`. `link` is told how they end; `talks` is where requests find who they go on with.

    Implements `Conversation` for the commands of calls.
    """

    def __init__(
        self, overseer: Overseer, channel: socket.socket, loop: Rounds, link: Asker, talks: dict[int, Conversation],
        environment: init_messages.Environment,
    ) -> None:  # fmt: skip
        self._overseer, self._channel = overseer, channel
        self.loop, self.link, self.talks = loop, link, talks
        self.environment = environment
        """What commands have besides what a call adds."""
        self.live = True
        self._executions: dict[int, Execution] = {}
        self._children: dict[int, Child] = {}
        self._dying: dict[int, object] = {}
        """For each child of which something is being killed, the last order to do so."""
        self._leftovers = Leftovers(loop)
        self._unsent: list[tuple[bytes, list[int]]] = []
        self.has_bash = True
        """Whether a command can be started with bash, and again with `sh` where that is not there; after that, look."""

    @property
    def name(self) -> str:
        """The slot's."""
        return self._overseer.name

    @property
    def pid(self) -> int:
        """The slot's first process, as this process numbers processes."""
        return self._overseer.pid

    @property
    def root(self) -> int:
        """A descriptor of the slot's root directory."""
        return self._overseer.root

    # Commands of one call

    def execute(self, number: int, request: Request, open_spill: Callable[[], Spill] | None) -> None:
        """Start a command in a process of its own; its RESULT or ERROR is sent when it is over."""
        stdin = pipes.memory_file(request.stdin) if request.stdin else -1
        verdict = child_verdict = -1
        output = (-1, -1)
        try:
            output = pipes.pipe()
            fds, places = [stdin if stdin >= 0 else pipes.nothing(), output[1]], _STANDARD
            if request.verdict:
                verdict, child_verdict = pipes.pipe()
                fds, places = [*fds, child_verdict], _WITH_VERDICT
            self._ask(init_messages.encode_spawn(number, request.argv, request.cwd, request.env, places), fds)
        except ValueError:  # a NUL, a lone surrogate, a variable without a name
            pipes.close(*output, verdict)
            self.link.send(FrameKind.ERROR, number, start_error(Report(Kind.NOT_STARTED, number, errno.EINVAL)))
            return
        except OSError:
            pipes.close(*output, verdict)
            raise
        finally:
            pipes.close(child_verdict, stdin)
        kill = functools.partial(self._kill_command, number)
        execution = Execution(number, request, self.loop, self.link, kill, self.hear, output, verdict, open_spill)
        self._executions[number] = execution
        self.talks[number] = self
        execution.start()

    def on_frame(self, frame: Frame) -> None:
        """The client gives credit for more output, or has given a command up."""
        execution = self._executions.get(frame.request)
        if execution is None:
            return
        if frame.kind is FrameKind.CANCEL:
            execution.cancel()
        elif frame.kind is FrameKind.CREDIT:
            execution.give_credit(frame.fields["bytes"])

    def on_command(self, execution: Execution, report: Report) -> None:
        """The init's word on a command's main process, or that what was to be killed is dead."""
        if report.kind is Kind.EXIT:
            if execution.on_exit(report):
                self.conclude(execution, 0, self._put_away)
        elif report.kind is Kind.NOT_STARTED:
            self._on_not_started(execution, report)
        elif report.kind is Kind.KILLED:
            execution.on_killed(report.flag)
            self.conclude(execution, 0, self._put_away)

    def conclude(self, execution: Execution, of_shell: int, then: Callable[[Execution], None]) -> None:
        """Send a command's RESULT, with the flags of a shell that goes on, unless it has been sent: at once, if nobody
        has to be asked whether it was killed for want of memory."""
        if not execution.was_killed:
            if not execution.over:
                execution.finish(False, of_shell)
                then(execution)
        elif not execution.in_question:
            execution.in_question = True
            self._overseer.ask_oom(functools.partial(self._conclude, execution, of_shell, then))

    def shell(self) -> str:
        """`bash`, or `sh` in a root that has no bash. Looked for each time: what runs in the slot may remove it."""
        return "bash" if files.describe(self.root, "/bin/bash") is not None else "sh"

    def with_variables(self, variables: dict[str, str] | None) -> init_messages.Environment:
        """The environment of a command. Raises ValueError for what cannot be in one."""
        if not variables:
            return self.environment
        return init_messages.environment({**self.environment.variables(), **variables})

    # Children

    def spawn(self, child: Child, spawn: Spawn, fds: Sequence[int]) -> None:
        """Start a child; its reports go to it until it is dropped. Raises ValueError for what no system call takes."""
        self._ask(init_messages.encode_spawn(*spawn), fds)
        self._children[spawn.command] = child

    def drop(self, child: int) -> None:
        """No more reports on a child."""
        self._children.pop(child, None)

    def signal(self, child: int, number: int) -> None:
        """Send a signal to the process group that a child leads."""
        self._ask(init_messages.encode(Order.SIGNAL, child, number))

    def kill_child(self, child: int, after: process_tree.Moment = process_tree.ALWAYS, spare: bool = False) -> None:
        """Kill what a child has started (after a moment), and itself unless it is spared. KILLED follows."""
        order = self._dying[child] = object()
        self._ask(init_messages.encode_kill(child, after, spare))
        self.loop.later(_KILL_PATIENCE_S, lambda: self._give_up(lambda: self._dying.get(child) is order))

    def kill_at_end(self, child: int, after: process_tree.Moment = process_tree.ALWAYS) -> None:
        """Kill what a child has started (after a moment) as soon as its main process has ended. KILLED follows its end,
        unless `kill_child` comes first."""
        self._ask(init_messages.encode_kill(child, after, at_end=True))

    def empty(self, fd: int) -> None:
        """Read an output pipe that nobody waits for any more, so that who still holds it can write."""
        self.loop.unwatch(fd)
        self._leftovers.add(fd)

    # The init

    def listen(self) -> None:
        """The init is ready to start something."""
        self.loop.watch(self._channel.fileno(), self.receive)

    def open_line(self) -> socket.socket | None:
        """A socket over which somebody else can give orders to the init; None where no descriptors are left."""
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            return None
        with theirs:
            self._ask(init_messages.encode(Order.LINE), [theirs.fileno()])
        return ours

    def receive(self) -> bool:
        """Take one report of the init's; False when there is none."""
        try:
            data = self._channel.recv(init_messages.MAX_REPORT)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.loop.unwatch(self._channel.fileno())  # whoever sees the slot's end tells of it
            return False
        report = init_messages.decode_report(data)
        if report.command in self._executions:
            self.on_command(self._executions[report.command], report)
            return True
        if report.kind is Kind.KILLED:
            self._dying.pop(report.command, None)
        if report.command in self._children:
            self._children[report.command].on_report(report)
        return True

    def hear(self) -> None:
        """Take all that the init has said already, before something is done because it has not said it in time."""
        while self.live and self.receive():
            pass

    def lost(self) -> None:
        """The slot is dead: whoever waits hears of it, and there are no more orders and reports."""
        self.live = False
        self.loop.unwatch(self._channel.fileno())
        self._channel.close()
        self._leftovers.close()
        for _, fds in self._unsent:
            pipes.close(*fds)
        self._unsent.clear()
        for execution in list(self._executions.values()):
            self._forget(execution)
            execution.fail({"error": "lost", "message": f"{self.name} ended while a command ran in it"})
        for child in list(self._children.values()):
            child.on_lost()
        self._children.clear()

    def let_go(self) -> None:
        """Close every descriptor and nothing else: the loop is gone, or this is a forked child. Idempotent."""
        if self.live:
            self.live = False
            self._channel.close()
            self._leftovers.close()
            everyone: list[Execution | Child] = [*self._executions.values(), *self._children.values()]
            for fds in [*(one.descriptors() for one in everyone), *(fds for _, fds in self._unsent)]:
                pipes.close(*fds)

    # Inside

    def _ask(self, order: bytes, fds: Sequence[int] = ()) -> None:
        """Send an order, with copies of these descriptors; at the pace at which the init takes them."""
        if not self.live:
            return
        memory = -1
        if len(order) > init_messages.MAX_DATAGRAM:
            memory = pipes.memory_file(order)
            order, fds = init_messages.encode(Order.LONG), [memory, *fds]
        try:
            if self._unsent or not self._send(order, fds):
                self._unsent.append((order, [os.dup(fd) for fd in fds]))
                self.loop.watch_for(self._channel.fileno(), READ | WRITE, self._catch_up)
        finally:
            pipes.close(memory)

    def _send(self, order: bytes, fds: Sequence[int]) -> bool:
        """Whether the socket has taken it. An init that has gone has: what waits for it hears of that."""
        try:
            self._channel.sendmsg([order], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
        except BlockingIOError:
            return False
        except OSError:
            self._overseer.end_hung()
        return True

    def _catch_up(self) -> None:
        """The socket takes orders again, or has a report, without which it may never take one."""
        while self._unsent and self._send(*self._unsent[0]):
            pipes.close(*self._unsent.pop(0)[1])
        if not self._unsent:
            self.loop.watch_for(self._channel.fileno(), READ, self.receive)
        self.receive()

    def _on_not_started(self, execution: Execution, report: Report) -> None:
        """A command line is tried once more with `sh` where there was no bash."""
        request = execution.request
        if request.shell == "bash" and report.value == errno.ENOENT and not report.flag and not execution.killing:
            self.has_bash = False
            execution.request = request._replace(argv=["/bin/sh", *request.argv[1:]], shell="sh")  # noqa: S604
            self._forget(execution)
            execution.drop()
            self.execute(execution.number, execution.request, execution.open_spill)
        else:
            self._forget(execution)
            execution.fail(start_error(report, request.cwd))

    def _conclude(self, execution: Execution, of_shell: int, then: Callable[[Execution], None], oom: bool) -> None:
        if not execution.over:  # as it is when the slot has died meanwhile
            execution.finish(oom, of_shell)
            then(execution)

    def _put_away(self, execution: Execution) -> None:
        self._forget(execution)
        if execution.leftover is not None:
            self.empty(execution.leftover)

    def _forget(self, execution: Execution) -> None:
        del self._executions[execution.number]
        del self.talks[execution.number]

    def _kill_command(self, number: int) -> None:
        self._ask(init_messages.encode(Order.KILL, number))
        self.loop.later(_KILL_PATIENCE_S, lambda: self._give_up(lambda: self._lives(number)))

    def _lives(self, number: int) -> bool:
        execution = self._executions.get(number)
        return execution is not None and not execution.in_question

    def _give_up(self, lives: Callable[[], bool]) -> None:
        """What cannot be killed takes its slot with it."""
        self.hear()
        if self.live and lives():
            self._overseer.end_hung()


def start_error(report: Report, cwd: str | None = None) -> Fields:
    """The ERROR of a command that could not be started, in `cwd` where that may be the reason."""
    number = report.value
    if report.flag:
        return {"error": "os", "errno": number, "message": "no directory to start in", "path": cwd}
    names = {errno.ENOENT: "not found", errno.EACCES: "permission denied", errno.E2BIG: "argument list too long"}
    return {"error": "exec", "errno": number, "message": names.get(number, os.strerror(number))}


_EVERY_S, _BYTES, _MOST = 0.05, 256 << 10, 32


class Leftovers:
    """Those of one slot. Nobody reads what comes, so there is no hurry; beyond some, the oldest is closed."""

    def __init__(self, loop: Rounds) -> None:
        self._loop = loop
        self._pipes: list[int] = []

    def add(self, fd: int) -> None:
        """One more, which does not block and is closed here at its end."""
        self._pipes.append(fd)
        if len(self._pipes) == 1:
            self._loop.later(_EVERY_S, self._drain)
        if len(self._pipes) > _MOST:
            os.close(self._pipes.pop(0))

    def close(self) -> None:
        """The slot is dead."""
        for fd in self._pipes:
            os.close(fd)
        self._pipes.clear()

    def _drain(self) -> None:
        for fd in list(self._pipes):
            try:
                if not os.read(fd, _BYTES):
                    self._pipes.remove(fd)
                    os.close(fd)
            except BlockingIOError:
                continue
        if self._pipes:
            self._loop.later(_EVERY_S, self._drain)
