"""One running command as the server sees it: its pipes, its bounded capture, its time limit, its end.

A command has ended when its main process has; then what is in the pipe is taken and nobody waits for the pipe's end,
since a daemon may hold it. Such a daemon must still be able to write, so its pipe is kept and emptied slowly. Until the
command has ended the server holds the writing end too: the pipe's end, which comes a little before the report of the
command's, would only wake it twice.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from ..protocol import command_result
from ..protocol.frames import WINDOW, Fields, Kind
from ..protocol.init_messages import Environment, Report
from ..protocol.init_messages import Kind as ReportKind
from . import pipes
from .output import Capture, Spill
from .pipes import PIPE_BYTES, READ_BYTES

MAX_VERDICT_BYTES = 16 << 20
TIMEOUT_EXIT_CODE = 124

_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)

_SHELLS = {None: 0, "bash": command_result.BASH, "sh": command_result.SH}


class Timer(Protocol):
    """A call that is to come."""

    def cancel(self) -> None: ...


class Rounds(Protocol):
    """What watches a command's pipes and its time: the server's `Loop`, or the client's.

    `watch_soon` may begin a little later, for what is read at the end anyway.
    """

    def watch(self, fd: int, call: Callable[[], object]) -> None: ...

    def watch_soon(self, fd: int, call: Callable[[], object]) -> None: ...

    def watch_for(self, fd: int, events: int, call: Callable[[], object]) -> None: ...

    def unwatch(self, fd: int) -> None: ...

    def close(self, fd: int) -> None: ...

    def later(self, seconds: float, call: Callable[[], object]) -> Timer: ...


class Asker(Protocol):
    """Who is told what becomes of a command: the client at the other end of a `Link`, or the client itself."""

    def send(self, kind: Kind, request: int, fields: Fields | None = None, data: bytes = b"") -> None: ...


class Request(NamedTuple):
    """What a client asked to run.

    `stream` sends the output as it comes, besides capturing it; `spill` keeps what is too long in a file of the slot.
    """

    argv: list[str]
    shell: str | None
    cwd: str
    env: Environment
    stdin: bytes
    timeout_s: float
    max_output_bytes: int
    stream: bool
    verdict: bool
    spill: bool = False


class Execution:
    """From the spawn message to the RESULT frame. `kill` asks the slot to act, `hear` takes what it has said.

    It is made when the command is on its way to the slot's init already: until it has begun there is time. `pipe` is
    where it writes, without a writing end (negative) for one that runs in a process which was there before; what
    `open_spill` gives takes what is too long.
    """

    def __init__(
        self,
        number: int,
        request: Request,
        loop: Rounds,
        link: Asker,
        kill: Callable[[], None],
        hear: Callable[[], None],
        pipe: tuple[int, int],
        verdict: int = -1,
        open_spill: Callable[[], Spill] | None = None,
    ) -> None:
        self.number, self.request = number, request
        self._loop, self._link, self._kill, self._hear = loop, link, kill, hear
        self._output, self._child_output = pipe
        self._shared = self._child_output < 0
        self._verdict = verdict
        self.open_spill = open_spill if request.spill else None
        self._spill: Spill | None = None
        self._capture = Capture(request.max_output_bytes)
        self._verdict_data = bytearray()
        self._credit = WINDOW
        self._started = time.monotonic()
        self._timer: Timer | None = None
        self.killing = self._timed_out = self._cancelled = self._swept = False
        self._exit: Report | None = None
        self.was_killed = False
        """Whether it, or what a shell ran as its last command, ended by SIGKILL."""
        self.over = self.in_question = False
        """Whether nobody waits for it any more; whether it is being asked why it was killed."""
        self.leftover: int | None = None
        """The output pipe that a daemon still holds after the end, watched until somebody else empties it."""

    def start(self) -> None:
        """Listen to the command."""
        self._loop.watch_soon(self._output, self._read_output)
        if self._verdict >= 0:
            self._loop.watch_soon(self._verdict, self._read_verdict)
        self._timer = self._loop.later(self.request.timeout_s, self._time_out)

    def cancel(self) -> None:
        """The caller has given up: kill; the RESULT comes when everything is dead."""
        self._cancelled = True
        self._begin_kill()

    def give_credit(self, size: int) -> None:
        """The client has taken so much of the stream."""
        if self._credit <= 0 < self._credit + size and self._output >= 0:
            self._loop.watch(self._output, self._read_output)
        self._credit += size

    def take(self, data: bytes) -> None:
        """The next piece of the output."""
        if self.open_spill is not None and self._capture.total + len(data) > self.request.max_output_bytes:
            if self._spill is None:
                self._spill = self.open_spill()
            self._spill.add(data, self._capture)
        self._capture.add(data)
        if self.request.stream:
            self._link.send(Kind.DATA, self.number, None, data)
            self._credit -= len(data)
            if self._credit <= 0:
                self._loop.unwatch(self._output)

    def on_exit(self, report: Report) -> bool:
        """The main process has ended. True when the command is over."""
        self._exit = report
        self.was_killed = report.value in _KILLED
        return not self.killing

    def on_killed(self, swept: bool) -> None:
        """Everything the command started is dead."""
        self._swept = swept

    @property
    def ended(self) -> bool:
        """Whether the main process has ended, though it may not be over yet."""
        return self._exit is not None

    def finish(self, oom: bool, of_shell: int = 0) -> None:
        """Take what is left in the pipes and send the RESULT; `of_shell` are the flags of one that goes on.

        Whoever waits for it gets it before anything is put away.
        """
        self._close_child_end()
        held = self._drain()
        head, tail = self._capture.parts()
        end = self._exit or Report(ReportKind.EXIT, self.number, -signal.SIGKILL)
        outcome = command_result.encode(  # the exit code as a shell's `$?` gives it: 128+n after signal n
            TIMEOUT_EXIT_CODE if self._timed_out else end.value if end.value >= 0 else 128 - end.value,
            of_shell | _SHELLS[self.request.shell] | (self._why_killed(oom) if oom or self.killing else 0),
            len(head),
            len(tail),
            self._capture.total,
            round(time.monotonic() - self._started, 6),
            end.cpu_s,
            end.max_rss_bytes,
        )
        fields = None
        if self._spill is not None:
            self._spill.close()
            fields = self._spill.fields()
        self._link.send(Kind.RESULT, self.number, fields, b"".join((outcome, head, tail, self._verdict_data)))
        self.over = True
        self._stop()
        if held:
            self.leftover, self._output = self._output, -1
        else:
            self._close_output()

    def fail(self, fields: Fields) -> None:
        """The command could not be started, or its slot is gone."""
        self.drop()
        self._link.send(Kind.ERROR, self.number, fields)

    def drop(self) -> None:
        """Let go of everything, without an answer."""
        self.over = True
        self._stop()
        self._close_child_end()
        self._close_verdict()
        if self._spill is not None:
            self._spill.close()
        self._close_output()

    def descriptors(self) -> tuple[int, ...]:
        """What is open here."""
        spill = -1 if self._spill is None else self._spill.fd
        return self._output, self._child_output, self._verdict, spill

    def _why_killed(self, oom: bool) -> int:
        return (
            (command_result.TIMEOUT if self._timed_out else 0)
            | (command_result.CANCELLED if self._cancelled else 0)
            | (command_result.SWEPT if self._swept else 0)
            | (command_result.OOM if oom else 0)
        )

    def _begin_kill(self) -> None:
        """Nothing that has ended is killed: a shell goes on with its next command, which an interrupt would meet."""
        if not self.killing and not self.ended:
            self.killing = True
            self._kill()

    def _time_out(self) -> None:
        """Where the loop has stood still, what ended in time has only not been heard of yet."""
        self._hear()
        if not self.ended and not self.over:
            self._timed_out = True
            self._begin_kill()

    def _read_output(self) -> None:
        """One piece per round of the loop, so that a flood is one voice among many."""
        data = pipes.read(self._output)
        if data is None:
            return
        if not data:
            self._close_output()
            return
        self.take(data)

    def _read_verdict(self) -> None:
        data = pipes.read(self._verdict)
        if data is None:
            return
        # What is too much is read and dropped: the grader sees a verdict that is longer than allowed, not a hang.
        self._verdict_data += data[: MAX_VERDICT_BYTES - len(self._verdict_data)]
        if not data:
            self._close_verdict()

    def _drain(self) -> bool:
        """What the command wrote before it ended is in the pipes now; no more than a pipe holds belongs to it.

        True where somebody can still write to the output.
        """
        if self._verdict >= 0:
            for _ in range(PIPE_BYTES // READ_BYTES + 1):
                if self._verdict >= 0:
                    self._read_verdict()
            self._close_verdict()
        taken = 0
        while self._output >= 0 and taken <= PIPE_BYTES and not (self._shared and pipes.is_empty(self._output)):
            data = pipes.read(self._output)
            if not data:
                return data is None
            taken += len(data)
            self.take(data)
        return self._output >= 0

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _close_verdict(self) -> None:
        if self._verdict >= 0:
            self._loop.close(self._verdict)
            self._verdict = -1

    def _close_output(self) -> None:
        if self._output >= 0:
            self._loop.close(self._output)
            self._output = -1

    def _close_child_end(self) -> None:
        if self._child_output >= 0:
            os.close(self._child_output)
            self._child_output = -1
