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
from typing import Any, NamedTuple

from . import pipes
from .capture import Capture
from .frames import WINDOW, Fields, Kind
from .link import Link
from .loop import Loop, Timer
from .orders import Environment, Report
from .orders import Kind as ReportKind
from .pipes import PIPE_BYTES, READ_BYTES
from .spills import Spill

MAX_VERDICT_BYTES = 16 << 20
TIMEOUT_EXIT_CODE = 124


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
    """From the spawn message to the RESULT frame. `kill` is how the slot is asked to act.

    `output` is where a command that runs in a process which was there before writes; what `open_spill` gives takes what
    is too long.
    """

    def __init__(
        self,
        number: int,
        request: Request,
        loop: Loop,
        link: Link,
        kill: Callable[[], None],
        output: int | None = None,
        open_spill: Callable[[], Spill] | None = None,
    ) -> None:
        self.number, self.request = number, request
        self._loop, self._link, self._kill = loop, link, kill
        self._output, self.child_output = pipes.pipe() if output is None else (output, -1)
        self._verdict, self.child_verdict = pipes.pipe() if request.verdict else (-1, -1)
        self.open_spill = open_spill if request.spill else None
        self._spill: Spill | None = None
        self._capture = Capture(request.max_output_bytes)
        self._verdict_data = bytearray()
        self._credit = WINDOW
        self._started = time.monotonic()
        self._timer: Timer | None = None
        self.killing = self._timed_out = self._cancelled = self._swept = False
        self._exit: Report | None = None
        self.leftover: int | None = None
        """The output pipe that a daemon still holds after the end, watched until somebody else empties it."""

    def start(self) -> None:
        """The command is on its way to the slot's init."""
        if self.child_verdict >= 0:
            os.close(self.child_verdict)
            self.child_verdict = -1
        self._loop.watch(self._output, self._read_output)
        if self._verdict >= 0:
            self._loop.watch(self._verdict, self._read_verdict)
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
        return not self.killing

    def on_killed(self, swept: bool) -> None:
        """Everything the command started is dead."""
        self._swept = swept

    @property
    def ended(self) -> bool:
        """Whether the main process has ended, though it may not be over yet."""
        return self._exit is not None

    @property
    def was_killed(self) -> bool:
        """Whether it, or what a shell ran as its last command, ended by SIGKILL."""
        return self._exit is not None and self._exit.value in (-signal.SIGKILL, 128 + signal.SIGKILL)

    def finish(self, oom: bool, **more: object) -> None:
        """Take what is left in the pipes and send the RESULT; `more` are fields of it.

        What is 0 or false is left out of it, but for the exit code (see `calls.Lease.result`).
        """
        self._stop()
        self._close_child_ends()
        self._drain()
        head, tail = self._capture.parts()
        end = self._exit or Report(ReportKind.EXIT, self.number, -signal.SIGKILL)
        fields: dict[str, Any] = {
            "exit_code": TIMEOUT_EXIT_CODE if self._timed_out else _shell_status(end.value),
            "duration_s": round(time.monotonic() - self._started, 6),
            "shell": self.request.shell,
            "cpu_s": end.cpu_s,
            "max_rss_bytes": end.max_rss_bytes,
            **more,
        }
        if self._capture.total:
            fields |= {"output_total_bytes": self._capture.total, "truncated": self._capture.truncated}
            fields |= {"head": len(head), "tail": len(tail)}
        if oom or self.killing:
            fields |= {"oom": oom, "swept": self._swept}
            fields |= {"timeout": self._timed_out, "cancelled": self._cancelled}
        if self._spill is not None:
            self._spill.close()
            fields |= self._spill.fields()
        self._link.send(Kind.RESULT, self.number, fields, head + tail + bytes(self._verdict_data))

    def fail(self, fields: Fields) -> None:
        """The command could not be started, or its slot is gone."""
        self.drop()
        self._link.send(Kind.ERROR, self.number, fields)

    def drop(self) -> None:
        """Let go of everything, without an answer."""
        self._stop()
        self._close_child_ends()
        self._close_verdict()
        if self._spill is not None:
            self._spill.close()
        if self._output >= 0:
            self._loop.close(self._output)
            self._output = -1

    def _begin_kill(self) -> None:
        if not self.killing:
            self.killing = True
            self._kill()

    def _time_out(self) -> None:
        self._timed_out = True
        self._begin_kill()

    def _read_output(self) -> None:
        """One piece per round of the loop, so that a flood is one voice among many."""
        data = pipes.read(self._output)
        if data is None:
            return
        if not data:
            self._loop.close(self._output)
            self._output = -1
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

    def _drain(self) -> None:
        """What the command wrote before it ended is in the pipes now; no more than a pipe holds belongs to it."""
        if self._verdict >= 0:
            for _ in range(PIPE_BYTES // READ_BYTES + 1):
                if self._verdict >= 0:
                    self._read_verdict()
            self._close_verdict()
        taken = 0
        while self._output >= 0 and taken <= PIPE_BYTES:
            data = pipes.read(self._output)
            if data is None:
                break
            if not data:
                self._loop.close(self._output)
                self._output = -1
                break
            taken += len(data)
            self.take(data)
        if self._output >= 0:
            self.leftover, self._output = self._output, -1

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _close_verdict(self) -> None:
        if self._verdict >= 0:
            self._loop.close(self._verdict)
            self._verdict = -1

    def _close_child_ends(self) -> None:
        for fd in (self.child_output, self.child_verdict):
            if fd >= 0:
                os.close(fd)
        self.child_output = self.child_verdict = -1


def _shell_status(code: int) -> int:
    """A process's end as a shell's `$?` gives it: 128+n after signal n."""
    return 128 - code if code < 0 else code
