"""Follows the processes that a slot's init starts for one side, the server or the client. Serves the request `exec`.

    op      fields                                                                          RESULT
    exec    command | argv, cwd, env, timeout_s, max_output_bytes, stream, verdict,         see `frames.encode_result`
            no_spill, stderr, watched, and the input's bytes

The server has one supervisor per slot, which uses the init's control socket. At the level `full`, the client also has
one, which uses a second socket to the init (`sandbox/local/direct`). The init reports on each process to the side that
started it.
"""

from __future__ import annotations

import array
import contextlib
import errno
import functools
import os
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

from .. import files
from ..event_loop import READ, WRITE, EpollLoop
from ..protocol import init_messages
from ..protocol.frames import Fields, Frame, FrameKind, OpenRequest, SendFrame
from ..protocol.init_messages import EnvBlock, InitReport, Order, ReportKind, Spawn
from . import pipes, process_tree
from .execution import CommandPipes, CommandSpec, Execution, OpenCounter, command_spec
from .pipes import Shelf

FIRST_CHILD = 1 << 31  # the first name of a shell or background process; lower numbers are those of `exec` requests

_KILL_PATIENCE_S = 10.0
# When to look for a child that another process of the slot holds, how often to continue it, and how often at most.
_HELD_AFTER_S, _HELD_EVERY_S, _HELD_TIMES = 0.5, 0.1, 20

_STANDARD: init_messages.Places = ((0, 0), (1, 1), (1, 2))  # input, output, errors with the output
_APART: init_messages.Places = ((0, 0), (1, 1), (2, 2))  # errors in a pipe of their own


class Child(Protocol):
    """A process that outlives the request that started it: a shell or a background process."""

    def on_report(self, report: InitReport) -> None:
        """Handle the init's report on this child: STARTED, NOT_STARTED, EXIT or KILLED."""

    def on_lost(self) -> None:
        """Handle the death of the slot."""

    def descriptors(self) -> Sequence[int]:
        """Return the descriptors that the child has open in this process; negative numbers mean none."""


class SlotOwner(Protocol):
    """Represents the slot: the server's `ServerSlot`, or the client's `DirectSlot`, which sends requests to the
    server."""

    root: int  # a descriptor of the slot's root directory
    loss: str  # the kind of error with which requests fail once the slot is dead

    @property
    def name(self) -> str: ...

    @property
    def pid(self) -> int:
        """The slot's first process, as this process numbers it."""

    def end_hung(self) -> None:
        """End the slot, because a command cannot be killed or the init accepts no orders."""

    def ask_oom(self, then: Callable[[bool], None]) -> None:
        """Call `then` with True if the kernel has killed a process of the slot for lack of memory since the last call,
        else with False."""


class Supervisor:
    """Starts, follows and kills processes of one slot until `slot_died`. Implements `OpenRequest` for commands.

    `open_requests` holds the unanswered requests by number.
    """

    def __init__(
        self, owner: SlotOwner, channel: socket.socket, loop: EpollLoop, send: SendFrame,
        open_requests: dict[int, OpenRequest], environment: EnvBlock, shelf: Shelf,
    ) -> None:  # fmt: skip
        self.owner, self._channel = owner, channel
        self.loop, self.send, self.open_requests, self.shelf = loop, send, open_requests, shelf
        self.environment = environment  # the variables of every command, in addition to those of its request
        self.live = True
        self._executions: dict[int, Execution] = {}
        self._children: dict[int, Child] = {}
        self._dying: dict[int, object] = {}  # the last kill order for each child
        self._leftovers = LeftoverPipes(loop)
        self._unsent: list[tuple[bytes, list[int]]] = []
        self._ordered = self._looking = False  # an order was sent since the last look; a look at the init is planned
        self._has_bash = True  # whether to try bash without a check; false once it was missing

    # Commands

    def exec(self, frame: Frame) -> None:
        """Start a command in a process of its own; its RESULT or ERROR is sent when the command is over. Raises
        OSError."""
        fields, argv, shell, env = frame.fields, frame.fields.get("argv"), None, self.environment
        if argv is None:
            shell = "bash" if self._has_bash else self.shell_name()
            argv = [f"/bin/{shell}", "-c", fields["command"]]
        try:
            if "env" in fields:
                env = self.with_variables(fields["env"])
            cwd = files.absolute(fields["cwd"]) if "cwd" in fields else files.WORKSPACE
            self._start_command(frame.request, command_spec(frame, argv, shell, cwd, env))
        except ValueError:
            self.refuse(frame.request)

    def _start_command(self, number: int, spec: CommandSpec) -> None:
        """Start a command. If this raises OSError, or ValueError for words that no system call accepts, nothing was
        started."""
        stdin = pipes.memory_file(spec.stdin) if spec.stdin else -1
        verdict = child_verdict = errors = child_errors = -1
        output = (-1, -1)
        opened = OpenCounter(self.owner.root, spec.watched) if spec.watched else None
        try:
            output = pipes.pipe()
            fds, places = [stdin if stdin >= 0 else pipes.nothing(), output[1]], _STANDARD
            if spec.stderr:
                errors, child_errors = pipes.pipe()
                fds, places = [*fds, child_errors], _APART
            if spec.verdict:
                verdict, child_verdict = pipes.pipe()
                fds, places = [*fds, child_verdict], (*places, (len(fds), 3))
            self._order(init_messages.encode_spawn(number, spec.argv, spec.cwd, spec.env, places), fds)
        except (OSError, ValueError):
            pipes.close(*output, verdict, errors, -1 if opened is None else opened.fd)
            raise
        finally:
            # The init has copies. If these stayed open, the pipes would never end.
            pipes.close(child_verdict, child_errors, stdin)
        kill = functools.partial(self._kill_command, number)
        ends = CommandPipes(*output, verdict, errors)
        execution = Execution(number, spec, self.loop, self.send, kill, self.receive_all, ends, self.shelf, opened)
        self._executions[number] = execution
        self.open_requests[number] = self
        execution.start()

    def refuse(self, number: int) -> None:
        """Answer a command whose words no system call accepts, because of a NUL, a lone surrogate or a variable without
        a name."""
        report = InitReport(ReportKind.NOT_STARTED, number, errno.EINVAL)
        self.send(FrameKind.ERROR, number, start_error(report))

    def on_frame(self, frame: Frame) -> None:
        """Handle the client's request to send more output or to cancel a command."""
        execution = self._executions.get(frame.request)
        if execution is None:
            return
        if frame.kind is FrameKind.CANCEL:
            execution.cancel()
        elif frame.kind is FrameKind.CREDIT:
            execution.give_credit(frame.fields["bytes"])

    def finish(self, execution: Execution, shell_flags: int, then: Callable[[Execution], None]) -> None:
        """Send a command's RESULT, unless it has been sent. If the command was killed, first ask whether memory had run
        out."""
        if not execution.was_killed:
            if not execution.over:
                execution.finish(False, shell_flags)
                then(execution)
        elif not execution.awaiting_oom:
            execution.await_oom()
            self.owner.ask_oom(functools.partial(self._finish_killed, execution, shell_flags, then))

    def shell_name(self) -> str:
        """Return `bash`, or `sh` if the root has no bash. The file is looked up each time, because a process of the
        slot may remove it."""
        return "bash" if files.describe(self.owner.root, "/bin/bash", 0) is not None else "sh"

    def with_variables(self, variables: dict[str, str] | None) -> EnvBlock:
        """Return the environment of a command that sets additional variables. Raises ValueError for invalid
        variables."""
        if not variables:
            return self.environment
        return init_messages.env_block({**self.environment.variables(), **variables})

    # Children

    def spawn(self, child: Child, spawn: Spawn, fds: Sequence[int]) -> None:
        """Start a child, which gets the init's reports about it until it is dropped. Raises ValueError for invalid
        words."""
        self._order(init_messages.encode_spawn(*spawn), fds)
        self._children[spawn.command] = child

    def drop(self, child: int) -> None:
        """Stop passing reports to a child."""
        self._children.pop(child, None)

    def signal(self, child: int, number: int) -> None:
        """Send a signal to the process group that a child leads."""
        self._order(init_messages.encode(Order.SIGNAL, child, number))

    def kill_child(self, child: int, after: process_tree.Moment = process_tree.ALWAYS, spare: bool = False) -> None:
        """Kill the processes that a child has started since the moment `after`, and, unless `spare` is true, the child
        itself. The report KILLED follows."""
        # A second order for the same child gets its own patience, and this timer must not count for it.
        order = self._dying[child] = object()
        self._order(init_messages.encode_kill(child, after, spare))
        self.loop.later(_KILL_PATIENCE_S, lambda: self._give_up(lambda: self._dying.get(child) is order))

    def kill_at_end(self, child: int, after: process_tree.Moment = process_tree.ALWAYS) -> None:
        """Kill the same processes as `kill_child` once the child has ended, unless `kill_child` is called first."""
        self._order(init_messages.encode_kill(child, after, at_end=True))

    def drain_later(self, fd: int) -> None:
        """Keep reading an output pipe without a request, so that the processes that hold it can write."""
        self.loop.unwatch(fd)
        self._leftovers.add(fd)

    # The init

    def listen(self) -> None:
        """Start to receive reports, because the init is ready."""
        self.loop.watch(self._channel.fileno(), self.receive)

    def open_line(self) -> socket.socket | None:
        """Return a second socket over which the client can send orders to the init; None if no descriptors are left."""
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            return None
        with theirs:
            self._order(init_messages.encode(Order.LINE), [theirs.fileno()])
        return ours

    def receive(self) -> bool:
        """Receive and handle one report of the init. Returns False if none has arrived."""
        try:
            data = self._channel.recv(init_messages.MAX_REPORT)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.loop.unwatch(self._channel.fileno())  # the owner will report the slot's end
            return False
        report = init_messages.decode_report(data)
        if report.command in self._executions:
            self._on_command(self._executions[report.command], report)
            return True
        if report.kind is ReportKind.KILLED:
            self._dying.pop(report.command, None)
        if report.command in self._children:
            self._children[report.command].on_report(report)
        return True

    def receive_all(self) -> None:
        """Receive and handle all reports that have arrived."""
        while self.live and self.receive():
            pass

    def slot_died(self) -> None:
        """Answer all requests with the owner's `loss` and close everything."""
        self.live = False
        self.loop.unwatch(self._channel.fileno())
        self._channel.close()
        self._leftovers.close()
        for _, fds in self._unsent:
            pipes.close(*fds)
        self._unsent.clear()
        for execution in list(self._executions.values()):
            self._forget(execution)
            execution.fail({"error": self.owner.loss, "message": f"{self.owner.name} ended while a command ran in it"})
        for child in list(self._children.values()):
            child.on_lost()
        self._children.clear()

    def close_descriptors(self) -> None:
        """Close every descriptor and nothing else, for a forked child or when the loop is gone. Idempotent."""
        if self.live:
            self.live = False
            self._channel.close()
            self._leftovers.close()
            everyone: list[Execution | Child] = [*self._executions.values(), *self._children.values()]
            for fds in [*(one.descriptors() for one in everyone), *(fds for _, fds in self._unsent)]:
                pipes.close(*fds)

    # Internal

    def _order(self, order: bytes, fds: Sequence[int] = ()) -> None:
        """Send an order with copies of these descriptors, or queue it until the init accepts orders again."""
        if not self.live:
            return
        memory = -1
        if len(order) > init_messages.MAX_DATAGRAM:
            memory = pipes.memory_file(order)
            order, fds = init_messages.encode(Order.LONG), [memory, *fds]
        try:
            # The init must get orders in the order of their requests: one to kill must not overtake the one to start.
            if self._unsent or not self._send_order(order, fds):
                # The caller closes its descriptors as soon as this returns.
                self._unsent.append((order, [os.dup(fd) for fd in fds]))
                self.loop.watch_for(self._channel.fileno(), READ | WRITE, self._send_unsent)
        finally:
            pipes.close(memory)

    def _send_order(self, order: bytes, fds: Sequence[int]) -> bool:
        """Return whether the socket has accepted the order. Also returns True if the init is gone, since the slot's end
        will be reported."""
        self._ordered = True
        if not self._looking:
            self._looking = True
            self.loop.later(_HELD_AFTER_S, self._look)
        try:
            self._channel.sendmsg([order], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
        except BlockingIOError:
            return False
        except OSError:
            self.owner.end_hung()
        return True

    def _look(self, times: int = 0) -> None:
        """Continue a child that another process of the slot has stopped before it has executed its program, because the
        init waits for it. Kill the child if it is stopped again and again."""
        held = process_tree.held_children(self.owner.pid) if self.live else []
        for pid in held:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGCONT if times < _HELD_TIMES else signal.SIGKILL)
        if held:
            self.loop.later(_HELD_EVERY_S, lambda: self._look(times + 1))
        # Only an order can make the init wait for a child, so a slot without orders needs no timer.
        elif self._ordered:
            self._ordered = False
            self.loop.later(_HELD_AFTER_S, self._look)
        else:
            self._looking = False

    def _send_unsent(self) -> None:
        while self._unsent and self._send_order(*self._unsent[0]):
            pipes.close(*self._unsent.pop(0)[1])
        if not self._unsent:
            self.loop.watch_for(self._channel.fileno(), READ, self.receive)
        self.receive()  # the init may accept no orders until its reports are received

    def _on_command(self, execution: Execution, report: InitReport) -> None:
        if report.kind is ReportKind.EXIT:
            if execution.on_exit(report):
                self.finish(execution, 0, self._put_away)
        elif report.kind is ReportKind.NOT_STARTED:
            self._on_not_started(execution, report)
        elif report.kind is ReportKind.KILLED:
            execution.on_killed(report.flag)
            self.finish(execution, 0, self._put_away)

    def _on_not_started(self, execution: Execution, report: InitReport) -> None:
        """Start a command line again with `sh` if bash is missing. Otherwise, send the ERROR."""
        spec = execution.spec
        self._forget(execution)
        if spec.shell == "bash" and report.value == errno.ENOENT and not report.flag and not execution.killing:
            self._has_bash = False
            execution.drop()
            try:
                self._start_command(execution.number, spec._replace(argv=["/bin/sh", *spec.argv[1:]], shell="sh"))  # noqa: S604
            except OSError as error:  # no descriptors are left
                fields = {"error": "os", "errno": error.errno, "message": error.strerror, "path": None}
                self.send(FrameKind.ERROR, execution.number, fields)
        else:
            execution.fail(start_error(report, spec.cwd))

    def _finish_killed(
        self, execution: Execution, shell_flags: int, then: Callable[[Execution], None], oom: bool
    ) -> None:
        if not execution.over:  # the slot may have died meanwhile
            execution.finish(oom, shell_flags)
            then(execution)

    def _put_away(self, execution: Execution) -> None:
        self._forget(execution)
        if execution.leftover is not None:
            self.drain_later(execution.leftover)
        if execution.errors_leftover is not None:
            self.drain_later(execution.errors_leftover)

    def _forget(self, execution: Execution) -> None:
        del self._executions[execution.number]
        del self.open_requests[execution.number]

    def _kill_command(self, number: int) -> None:
        self._order(init_messages.encode(Order.KILL, number))
        self.loop.later(_KILL_PATIENCE_S, lambda: self._give_up(lambda: self._lives(number)))

    def _lives(self, number: int) -> bool:
        execution = self._executions.get(number)
        return execution is not None and not execution.awaiting_oom

    def _give_up(self, lives: Callable[[], bool]) -> None:
        """End the slot if the killed process is still alive."""
        # If the loop was blocked, the report that the process is dead may be in the socket already.
        self.receive_all()
        if self.live and lives():
            self.owner.end_hung()


def start_error(report: InitReport, cwd: str | None = None) -> Fields:
    """Return the fields of the ERROR frame for a command that could not be started."""
    number = report.value
    if report.flag:
        return {"error": "os", "errno": number, "message": "cannot start a command in the directory", "path": cwd}
    names = {errno.ENOENT: "not found", errno.EACCES: "permission denied", errno.E2BIG: "argument list too long"}
    return {"error": "exec", "errno": number, "message": names.get(number, os.strerror(number))}


_DRAIN_EVERY_S, _DRAIN_BYTES, _MAX_LEFTOVERS = 0.05, 256 << 10, 32


class LeftoverPipes:
    """The output pipes of one slot that belong to no request. They are drained slowly; if there are too many, the
    oldest is closed."""

    def __init__(self, loop: EpollLoop) -> None:
        self._loop = loop
        self._pipes: list[int] = []

    def add(self, fd: int) -> None:
        """Add a non-blocking pipe, which is closed when its end is reached."""
        self._pipes.append(fd)
        if len(self._pipes) == 1:
            self._loop.later(_DRAIN_EVERY_S, self._drain)
        if len(self._pipes) > _MAX_LEFTOVERS:
            os.close(self._pipes.pop(0))

    def close(self) -> None:
        """Close all pipes."""
        for fd in self._pipes:
            os.close(fd)
        self._pipes.clear()

    def _drain(self) -> None:
        for fd in list(self._pipes):
            try:
                if not os.read(fd, _DRAIN_BYTES):
                    self._pipes.remove(fd)
                    os.close(fd)
            except BlockingIOError:
                continue
        if self._pipes:
            self._loop.later(_DRAIN_EVERY_S, self._drain)
