"""Follows one running command: reads its pipes into a bounded capture, enforces its time limit, and reports its end.

A command ends with its main process. The output pipe is then read until it is empty, but not until its end: a daemon
may hold the pipe open, in which case it is drained slowly. This process keeps the pipe's writing end open until the
command has ended; otherwise the end of the pipe, shortly before the report, would wake this process one more time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import struct
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .. import files, syscalls
from ..event_loop import EpollLoop, Timer
from ..protocol import frames
from ..protocol.frames import USUAL_OUTPUT_BYTES, USUAL_TIMEOUT_S, WINDOW, Fields, Frame, FrameKind, SendFrame
from ..protocol.init_messages import EnvBlock, InitReport, ReportKind
from . import pipes
from .pipes import PIPE_BYTES, READ_BYTES, Capture, Shelf, Spill

MAX_VERDICT_BYTES = 16 << 20
TIMEOUT_EXIT_CODE = 124

_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)

_SHELLS = {None: 0, "bash": frames.BASH, "sh": frames.SH}


class CommandSpec(NamedTuple):
    """A command as the client requested it. `stream` also sends the output as it arrives; `spill` keeps output that
    exceeds the limit in a file of the slot; `stderr` captures standard error separately, up to the same limit;
    `watched` are files whose openings are counted."""

    argv: list[str]
    shell: str | None
    cwd: str
    env: EnvBlock
    stdin: bytes
    timeout_s: float
    max_output_bytes: int
    stream: bool
    verdict: bool
    spill: bool
    stderr: bool
    watched: Sequence[str]


def command_spec(frame: Frame, argv: list[str], shell: str | None, cwd: str, env: EnvBlock) -> CommandSpec:
    """Return the command of an `exec` or `run` request, with default limits where the request sets none."""
    fields = frame.fields
    return CommandSpec(
        argv, shell, cwd, env, frame.data, fields.get("timeout_s", USUAL_TIMEOUT_S),
        fields.get("max_output_bytes", USUAL_OUTPUT_BYTES), "stream" in fields, "verdict" in fields,
        "no_spill" not in fields, "stderr" in fields, fields.get("watched", ()),
    )  # fmt: skip


class _VerdictPipe:
    """The channel on which tests report, apart from the output. `fd` is its reading end, -1 once it is closed."""

    def __init__(self, loop: EpollLoop, fd: int) -> None:
        self.fd = fd
        self.data = bytearray()
        self._loop = loop

    def read(self) -> None:
        """Take the next piece of the verdict, and close the pipe at its end."""
        data = pipes.read(self.fd)
        if data is None:
            return
        # Bytes beyond the limit are read and dropped, so that a longer verdict is cut and does not hang the grader.
        self.data += data[: MAX_VERDICT_BYTES - len(self.data)]
        if not data:
            self.close()

    def drain(self) -> None:
        """Read what the command wrote before its end, up to a pipe's capacity, and close the pipe."""
        for _ in range(PIPE_BYTES // READ_BYTES + 1):
            if self.fd >= 0:
                self.read()
        self.close()

    def close(self) -> None:
        """Close the pipe. Idempotent."""
        if self.fd >= 0:
            self._loop.close(self.fd)
            self.fd = -1


class _ErrorPipe:
    """Standard error, if it is captured apart from the output. `fd` is the reading end, -1 once it is closed."""

    def __init__(self, loop: EpollLoop, fd: int, max_bytes: int) -> None:
        self.fd = fd
        self.capture = Capture(max_bytes)
        self._loop = loop

    def read(self) -> int | None:
        """Take the next piece. Returns its size: 0 at the end, None if no data is available now."""
        data = pipes.read(self.fd)
        if data is None:
            return None
        self.capture.add(data)
        if not data:
            self.close()
        return len(data)

    def drain(self) -> int | None:
        """Read what the command wrote before its end, up to a pipe's capacity. Returns the reading end, still watched,
        if a daemon holds the pipe."""
        taken = 0
        while self.fd >= 0 and taken <= PIPE_BYTES:
            size = self.read()
            if size is None:
                break
            taken += size
        held, self.fd = (self.fd if self.fd >= 0 else None), -1
        return held

    def close(self) -> None:
        """Close the pipe. Idempotent."""
        if self.fd >= 0:
            self._loop.close(self.fd)
            self.fd = -1


class OpenCounter:
    """Counts how often files below `root` are opened, by whatever program and path. The events are read at the end. A
    file that cannot be watched is not counted. Source: inotify(7)."""

    _EVENT, _ACCESS, _CLOSE, _OPEN, _OVERFLOW = struct.Struct("iIII"), 0x1, 0x18, 0x20, 0x4000

    def __init__(self, root: int, paths: Sequence[str]) -> None:
        self.fd = -1
        self._paths: dict[int, str] = {}
        events = self._OPEN | self._ACCESS | self._CLOSE  # between two openings, so that the kernel does not merge them
        with contextlib.suppress(OSError):
            self.fd = syscalls.inotify() if paths else -1
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    handle = files.open_at(root, path, os.O_PATH)
                    try:
                        if stat.S_ISREG(os.fstat(handle).st_mode):
                            watch = syscalls.inotify_watch(self.fd, f"/proc/self/fd/{handle}", events)
                            self._paths[watch] = path
                    finally:
                        os.close(handle)

    def counts(self) -> dict[str, int]:
        """Return how often each file was opened, and close the counter."""
        found = dict.fromkeys(self._paths.values(), 0)
        with contextlib.suppress(OSError):  # nothing more to read
            while self.fd >= 0:
                for watch, events, _, _ in self._EVENT.iter_unpack(os.read(self.fd, READ_BYTES)):
                    # After an overflow, events are missing. Each file then counts as opened, so that a flood of events
                    # cannot hide one.
                    for path in self._paths.values() if events & self._OVERFLOW else [self._paths.get(watch)]:
                        if path is not None and events & (self._OPEN | self._OVERFLOW):
                            found[path] += 1
        self.close()
        return found

    def close(self) -> None:
        """Close the counter. Idempotent."""
        pipes.close(self.fd)
        self.fd = -1


class CommandPipes(NamedTuple):
    """The pipes of a command: the two ends of its output pipe, and the reading ends of the verdict and of standard
    error. An end is -1 if there is none: an earlier process (a stateful shell) has the writing end of the output, or
    standard error goes to the output."""

    output: int
    child_output: int
    verdict: int = -1
    errors: int = -1


class Execution:
    """A command, from the order to start it to its RESULT frame. `kill` kills the command, and `receive` handles
    all reports that have arrived.
    """

    def __init__(
        self, number: int, spec: CommandSpec, loop: EpollLoop, send: SendFrame, kill: Callable[[], None],
        receive: Callable[[], None], ends: CommandPipes, shelf: Shelf, opened: OpenCounter | None = None,
    ) -> None:  # fmt: skip
        self._opened = opened
        self.number, self.spec = number, spec
        self._loop, self._send, self._kill, self._receive, self._shelf = loop, send, kill, receive, shelf
        self._output, self._child_output = ends.output, ends.child_output
        self._shared = self._child_output < 0
        self._verdict = _VerdictPipe(loop, ends.verdict) if ends.verdict >= 0 else None
        self._errors = _ErrorPipe(loop, ends.errors, spec.max_output_bytes) if ends.errors >= 0 else None
        self._spill: Spill | None = None
        self._capture = Capture(spec.max_output_bytes)
        self._credit = WINDOW
        self._started = time.monotonic()
        self._timer: Timer | None = None
        self.killing = self._timed_out = self._cancelled = self._swept = False
        self._exit: InitReport | None = None
        self.was_killed = False  # whether the command, or the last one that its shell ran, ended by SIGKILL
        self.over = self.awaiting_oom = False  # whether the RESULT was sent; whether `ask_oom` is still unanswered
        # The pipes of output and standard error, still watched, if a daemon holds them after the command's end.
        self.leftover: int | None = None
        self.errors_leftover: int | None = None

    def start(self) -> None:
        """Start watching the pipes and the time limit."""
        self._loop.watch_soon(self._output, self._read_output)
        if self._verdict is not None:
            self._loop.watch_soon(self._verdict.fd, self._verdict.read)
        if self._errors is not None:
            self._loop.watch_soon(self._errors.fd, self._errors.read)
        self._timer = self._loop.later(self.spec.timeout_s, self._time_out)

    def cancel(self) -> None:
        """Kill the command, because its caller has cancelled it; the RESULT follows when the whole tree is dead."""
        self._cancelled = True
        self._begin_kill()

    def give_credit(self, size: int) -> None:
        """Add credit: the client has received `size` bytes of the stream."""
        if self._credit <= 0 < self._credit + size and self._output >= 0:
            self._loop.watch(self._output, self._read_output)
        self._credit += size

    def take(self, data: bytes) -> None:
        """Take the next piece of the output."""
        if self.spec.spill and self._capture.total + len(data) > self.spec.max_output_bytes:
            if self._spill is None:
                self._spill = Spill(self._shelf, f"{self.number}", self.spec.max_output_bytes)
            self._spill.add(data, self._capture)
        self._capture.add(data)
        if self.spec.stream:
            self._send(FrameKind.DATA, self.number, None, data)
            self._credit -= len(data)
            if self._credit <= 0:
                # The command then waits at its full pipe, so a client that does not read bounds what is kept for it.
                self._loop.unwatch(self._output)

    def await_oom(self) -> None:
        """Record that the slot's owner was asked whether memory had run out."""
        self.awaiting_oom = True

    def on_exit(self, report: InitReport) -> bool:
        """Record that the main process has ended. Returns False while the rest of its tree is being killed."""
        self._exit = report
        self.was_killed = report.value in _KILLED
        return not self.killing

    def on_killed(self, swept: bool) -> None:
        """Record that the command's whole tree is dead."""
        self._swept = swept

    @property
    def ended(self) -> bool:
        """Whether the main process has ended."""
        return self._exit is not None

    def finish(self, oom: bool, shell_flags: int = 0) -> None:
        """Read the rest of the pipes, send the RESULT with the flags of a stateful shell, and clean up."""
        # Without this process's own writing end, a read finds the end of the pipe, unless a daemon holds it.
        self._close_child_end()
        held = self._drain()
        head, tail = self._capture.parts()
        end = self._exit or InitReport(ReportKind.EXIT, self.number, -signal.SIGKILL)
        result = frames.encode_result(  # the exit code in the form of a shell's `$?`: 128+n after signal n
            TIMEOUT_EXIT_CODE if self._timed_out else end.value if end.value >= 0 else 128 - end.value,
            shell_flags | _SHELLS[self.spec.shell] | (self._kill_flags(oom) if oom or self.killing else 0),
            len(head),
            len(tail),
            self._capture.total,
            round(time.monotonic() - self._started, 6),
            end.cpu_s,
            end.max_rss_bytes,
        )
        fields: frames.Fields = {}
        if self._spill is not None:
            self._spill.close()
            fields |= self._spill.fields()
        errors = b""
        if self._errors is not None:
            self.errors_leftover = self._errors.drain()
            capture = self._errors.capture
            sizes = [len(part) for part in capture.parts()]
            fields["stderr"] = [*sizes, capture.total]
            errors = b"".join(capture.parts())
        if self._opened is not None:
            fields["opened"] = self._opened.counts()
        if end.value < 0:
            fields["signal"] = -end.value
        verdict = b"" if self._verdict is None else self._verdict.data
        self._send(FrameKind.RESULT, self.number, fields, b"".join((result, head, tail, errors, verdict)))
        self.over = True
        self._cancel_timer()
        if held:
            self.leftover, self._output = self._output, -1
        else:
            self._close_output()

    def fail(self, fields: Fields) -> None:
        """Send an ERROR, because the command could not be started or its slot is gone."""
        self.drop()
        self._send(FrameKind.ERROR, self.number, fields)

    def drop(self) -> None:
        """Close everything, and send no answer."""
        self.over = True
        self._cancel_timer()
        self._close_child_end()
        if self._verdict is not None:
            self._verdict.close()
        if self._errors is not None:
            self._errors.close()
        if self._opened is not None:
            self._opened.close()
        if self._spill is not None:
            self._spill.close()
        self._close_output()

    def descriptors(self) -> tuple[int, ...]:
        """Return the execution's open descriptors in this process; negative numbers mean none."""
        spill = -1 if self._spill is None else self._spill.fd
        verdict = -1 if self._verdict is None else self._verdict.fd
        errors = -1 if self._errors is None else self._errors.fd
        opened = -1 if self._opened is None else self._opened.fd
        return self._output, self._child_output, verdict, errors, opened, spill

    def _kill_flags(self, oom: bool) -> int:
        return (
            (frames.TIMEOUT if self._timed_out else 0)
            | (frames.CANCELLED if self._cancelled else 0)
            | (frames.SWEPT if self._swept else 0)
            | (frames.OOM if oom else 0)
        )

    def _begin_kill(self) -> None:
        """Kill the command, unless it has ended or is already being killed. If a stateful shell were interrupted after
        the command's end, the interrupt would hit the shell's next command."""
        if not self.killing and not self.ended:
            self.killing = True
            self._kill()

    def _time_out(self) -> None:
        self._receive()  # if the loop was blocked, the command may have ended in time without being noticed
        if not self.ended and not self.over:
            self._timed_out = True
            self._begin_kill()

    def _read_output(self) -> None:
        """Read one piece per round of the loop, so that a flood does not delay other commands."""
        data = pipes.read(self._output)
        if data is None:
            return
        if not data:
            self._close_output()
            return
        self.take(data)

    def _drain(self) -> bool:
        """Read the output that the command wrote before its end, up to a pipe's capacity. Returns True if another
        process can still write."""
        if self._verdict is not None:
            self._verdict.drain()
        taken = 0
        # A shell holds its pipe open for the next command, so the last read of each command would raise. Asking the
        # kernel for the number of bytes is cheaper.
        while self._output >= 0 and taken <= PIPE_BYTES and not (self._shared and pipes.is_empty(self._output)):
            data = pipes.read(self._output)
            if not data:
                return data is None
            taken += len(data)
            self.take(data)
        return self._output >= 0

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _close_output(self) -> None:
        if self._output >= 0:
            self._loop.close(self._output)
            self._output = -1

    def _close_child_end(self) -> None:
        if self._child_output >= 0:
            os.close(self._child_output)
            self._child_output = -1
