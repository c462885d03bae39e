"""Commands of a slot that this process starts itself, over a line to the slot's init: without the server.

On the rung `full` the server hands the line over with the slot's root (`slotd/handing.py`). Then the init starts what
the client asks for and reports the end to it, and what the server does for other commands (capture, time limit,
spilling, cancellation) is done here, by the same code (`slotd/executions.py`). A command then wakes one process less.

The server stays in charge of the slot: it ends it, freezes it, counts what the kernel killed, and runs what this does
not: commands with input, a verdict or a reader of their output, those for shells that wait, and those that could not be
started as they stand.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import functools
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

from palaestra.core.errors import SlotLost
from palaestra.core.types import JSON
from palaestra.sandbox.slotd import orders, pipes
from palaestra.sandbox.slotd.executions import Execution, Request
from palaestra.sandbox.slotd.frames import Frame, Kind
from palaestra.sandbox.slotd.leftovers import Leftovers
from palaestra.sandbox.slotd.orders import Kind as ReportKind
from palaestra.sandbox.slotd.orders import Order, Report, Spawn
from palaestra.sandbox.slotd.slots import STANDARD
from palaestra.sandbox.slotd.spills import Shelf, Spill
from palaestra.sandbox.slotd.workshop import Place

_SOON_S = 0.005
"""Pipes are watched after so long: most commands have ended by then, and a pipe is read at the end anyway."""

_KILL_PATIENCE_S = 10.0

Ask = Callable[[str], Awaitable[dict[str, JSON]]]
"""Asks the server something about the slot."""


class Rounds:
    """An event loop as commands need it; see `executions.Rounds`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._soon: dict[int, Callable[[], object]] = {}
        self._watched: set[int] = set()
        self._waiting = False

    def watch(self, fd: int, call: Callable[[], object]) -> None:
        """Call when there is something to read, from soon on."""
        self._soon[fd] = call
        if not self._waiting:
            self._waiting = True
            self._loop.call_later(_SOON_S, self._begin)

    def unwatch(self, fd: int) -> None:
        """No more calls; a descriptor that is not watched is fine."""
        if self._soon.pop(fd, None) is None and fd in self._watched:
            self._watched.discard(fd)
            self._loop.remove_reader(fd)

    def close(self, fd: int) -> None:
        """Stop watching a descriptor and close it."""
        self.unwatch(fd)
        os.close(fd)

    def later(self, seconds: float, call: Callable[[], object]) -> asyncio.TimerHandle:
        """Call once after so many seconds."""
        return self._loop.call_later(seconds, call)

    def _begin(self) -> None:
        self._waiting = False
        for fd, call in self._soon.items():
            self._watched.add(fd)
            self._loop.add_reader(fd, call)
        self._soon.clear()


class _Running:
    """One command, and who waits for it. Implements `executions.Asker`."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.answer: asyncio.Future[Frame | None] = asyncio.get_running_loop().create_future()
        self.over = asyncio.Event()
        self.execution: Execution

    def send(self, kind: Kind, request: int, fields: dict[str, JSON] | None = None, data: bytes = b"") -> None:
        """It has ended."""
        self.end(Frame(kind, request, fields or {}, data))

    def end(self, answer: Frame | None, error: Exception | None = None) -> None:
        """The answer, None for a command that has not begun, or an error; whoever waited may have been cancelled."""
        self.over.set()
        if not self.answer.done():
            if error is None:
                self.answer.set_result(answer)
            else:
                self.answer.set_exception(error)


class Line:
    """The line to one slot's init, until `close`, or until nobody has it any more.

    `root` and `owner` are the slot's, for what is too long for a result.
    """

    def __init__(self, fd: int, rounds: Rounds, root: int, owner: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)
        self._loop, self._rounds = asyncio.get_running_loop(), rounds
        self._shelf = Shelf(lambda path: Place(root, path, owner))
        self._leftovers = Leftovers(rounds)
        self._running: dict[int, _Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.has_bash = True
        """Whether command lines can be started; the server finds another shell for them."""
        self._loop.add_reader(fd, self._receive)

    def close(self, why: str) -> None:
        """Let go of it; commands that run are lost, and `why` is what their callers hear. Idempotent."""
        if self._socket.fileno() < 0:
            return
        if not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
            for running in self._running.values():
                running.execution.drop()
                running.end(None, SlotLost(why))
        self._running.clear()
        self._leftovers.close()
        self._socket.close()

    def let_go(self) -> None:
        """Close the socket, in a forked child: what watches it is its parent's too."""
        self._socket.close()

    async def run(self, number: int, request: Request, ask: Ask) -> Frame | None:
        """The RESULT of a command, as the server would send it; None where it has not begun, and the server is to try.

        Cancelled, it kills the command and waits until all that it started is dead.
        """
        running = self._start(number, request, ask)
        if running is None:
            return None
        try:
            return await running.answer
        except asyncio.CancelledError:
            running.execution.cancel()
            while not running.over.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await running.over.wait()
            raise

    def _start(self, number: int, request: Request, ask: Ask) -> _Running | None:
        try:
            order = orders.encode_spawn(Spawn(number, request.argv, request.cwd, request.env, STANDARD))
            if len(order) > orders.MAX_DATAGRAM:
                return None
            output = pipes.pipe()
        except (ValueError, OSError):
            return None
        fds = array.array("i", (pipes.nothing(), output[1]))
        try:
            self._socket.sendmsg([order], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        except OSError:  # it does not take them fast enough, or is gone
            pipes.close(*output)
            return None
        running = self._running[number] = _Running(ask)
        kill = functools.partial(self._kill, running, number)
        open_spill = functools.partial(Spill, self._shelf, f"{number}", request.max_output_bytes)
        running.execution = Execution(number, request, self._rounds, running, kill, output, open_spill=open_spill)
        running.execution.start()
        return running

    def _receive(self) -> None:
        try:
            data = self._socket.recv(orders.MAX_REPORT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._socket.fileno())  # the server will say what has become of the slot
            return
        report = orders.decode_report(data)
        running = self._running.get(report.command)
        if running is not None:
            self._on_report(running, report)

    def _on_report(self, running: _Running, report: Report) -> None:
        execution = running.execution
        if report.kind is ReportKind.NOT_STARTED and not execution.killing:
            del self._running[report.command]
            if execution.request.shell and report.value == errno.ENOENT and not report.flag:
                self.has_bash = False
            execution.drop()
            running.end(None)
        elif report.kind is ReportKind.EXIT and not execution.on_exit(report):
            pass  # it is being killed, and KILLED follows
        else:
            if report.kind is ReportKind.KILLED:
                execution.on_killed(report.flag)
            self._finish(running)

    def _finish(self, running: _Running) -> None:
        if running.execution.was_killed and not running.execution.killing:
            self._do(self._finish_killed(running))
        else:
            self._conclude(running, oom=False)

    async def _finish_killed(self, running: _Running) -> None:
        """The kernel may have done it, for want of memory."""
        oom = False
        with contextlib.suppress(Exception):  # the slot has ended, which `close` tells everybody
            oom = (await running.ask("oom"))["oom"]
        if running.execution.number in self._running:
            self._conclude(running, oom)

    def _conclude(self, running: _Running, oom: bool) -> None:
        execution = running.execution
        del self._running[execution.number]
        execution.finish(oom)
        if execution.leftover is not None:
            self._rounds.unwatch(execution.leftover)
            self._leftovers.add(execution.leftover)

    def _kill(self, running: _Running, number: int) -> None:
        with contextlib.suppress(OSError):
            self._socket.send(orders.encode(Order.KILL, number))
        self._loop.call_later(_KILL_PATIENCE_S, self._give_up, running, number)

    def _give_up(self, running: _Running, number: int) -> None:
        """What cannot be killed takes its slot with it, so that its caller does not wait for ever."""
        if number in self._running:
            self._do(self._end_slot(running))

    async def _end_slot(self, running: _Running) -> None:
        with contextlib.suppress(Exception):  # it has ended
            await running.ask("hung")

    def _do(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def may_make_files() -> bool:
    """Whether what this process makes in a slot has the modes that it is given; see umask(2)."""
    for text in Path("/proc/self/status").read_text().splitlines():
        if text.startswith("Umask:"):
            return int(text.split()[1], 8) & ~0o022 == 0
    return False
