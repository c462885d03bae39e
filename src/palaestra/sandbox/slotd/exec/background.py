"""A process that outlives the call that started it: its output, input, terminal, signals and end.

What it writes goes to a ring that clients read by cursor, however late, and to a spill file in the slot once it is more
than the ring holds. Nobody's reading is waited for, so nobody can hold the process or the server up. What is written
to it is taken as fast as it reads; that delays only who writes.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..protocol.frames import Fields, Frame, Kind
from ..protocol.init_messages import Environment, Report, Spawn
from ..protocol.init_messages import Kind as ReportKind
from . import pipes, pty
from .command import Timer
from .output import Capture, Ring, Shelf, Spill
from .pipes import PIPE_BYTES
from .stdin import Input
from .supervisor import Commands, start_error

RING_BYTES = 256 << 10
END_OF_INPUT = b"\x04"
"""What ends the input of a terminal in its usual mode."""

_BREATH_EVERY_BYTES, _BREATH_S, _NOBODY_S = 4 << 20, 0.02, 0.02
"""After so much output of one process the server turns to the others for a moment: at most 200 MB/s per process."""


@dataclass
class _Reader:
    """A request that waits for output after a cursor, or (`cursor` None) for the end."""

    number: int
    cursor: int | None
    max_bytes: int
    timer: Timer | None


class Background:
    """One such process. Implements `Child` for it and `Conversation` for the requests that wait for it."""

    def __init__(self, name: int, commands: Commands, shelf: Shelf) -> None:
        self.name, self.pid, self.over = name, 0, False
        self._commands = commands
        self._loop, self._link, self._talks = commands.loop, commands.link, commands.talks
        self._output = -1
        self._input: Input | None = None
        self._terminal = False
        self._ring, self._seen = Ring(RING_BYTES), Capture(RING_BYTES)
        self._spill = Spill(shelf, f"process-{name & 0xFFFF}", RING_BYTES)
        self._breath = 0
        self._paused = False
        self._readers: dict[int, _Reader] = {}
        self._killers: list[int] = []
        self._end: Report | None = None
        self._started, self._started_s = time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME)
        self._ended = 0.0
        self._on_start: Callable[[Fields | None], None] = lambda _: None
        self._cwd = ""

    def start(
        self, argv: list[str], cwd: str, env: Environment, size: tuple[int, int] | None, stdin: bool,
        on_start: Callable[[Fields | None], None],
    ) -> None:  # fmt: skip
        """Start it; `on_start` is called with None, or with the ERROR why not. Raises OSError, ValueError."""
        self._on_start, self._terminal, self._cwd = on_start, size is not None, cwd
        writer, mark = -1, b""
        if size is not None:
            self._output, slave = pty.open_pair(self._commands.root, *size)
            writer, mark = os.dup(self._output), END_OF_INPUT
            ends, places = [slave], [(0, 0), (0, 1), (0, 2)]
        else:
            self._output, output = pipes.pipe()
            reader, writer = pipes.input_pipe() if stdin else (-1, -1)
            ends, places = [output, reader], [(1, 0), (0, 1), (0, 2)]
        self._input = Input(writer, mark, self._loop, self._link, self._talks)
        fds = [fd if fd >= 0 else pipes.nothing() for fd in ends]
        try:
            spawn = Spawn(self.name, argv, cwd, env, places, terminal=self._terminal, announce=True)
            self._commands.spawn(self, spawn, fds)
        except ValueError:
            self._close()
            raise
        finally:
            pipes.close(*ends)
        self._loop.watch(self._output, self._on_output)

    # Requests

    def read(self, number: int, cursor: int, max_bytes: int, wait_s: float) -> None:
        """Answer with the output from `cursor` on; where there is none yet, wait for some, for the end, or so long."""
        if cursor < 0:
            cursor = max(0, self._ring.total + cursor)
        self._wait(_Reader(number, cursor, max_bytes, None), wait_s)

    def wait(self, number: int, wait_s: float) -> None:
        """Answer when it has ended, or after so long."""
        self._wait(_Reader(number, None, 0, None), wait_s)

    def write(self, number: int, data: bytes, close: bool) -> None:
        """Answer when all of `data` is in its input; `close` ends the input after it. Raises BrokenPipeError."""
        if self._input is None or self.over:
            raise BrokenPipeError(errno.EPIPE, "the process has ended")
        self._input.write(number, data, close, self)

    def resize(self, rows: int, columns: int) -> None:
        """Another size for its terminal. Raises OSError where it has none."""
        if not self._terminal:
            raise OSError(errno.ENOTTY, "the process has no terminal")
        if self._output >= 0:
            pty.resize(self._output, rows, columns)

    def signal(self, number: int) -> None:
        """To its process group."""
        if not self.over:
            self._commands.signal(self.name, number)

    def kill(self, number: int, grace_s: float = 0.0) -> None:
        """Answer when everything it has started is dead. With `grace_s`, SIGTERM and so much time come first.

        Where the main process ends in that time, what it leaves behind is killed then.
        """
        if self.over and not self._killers:
            self._link.send(Kind.RESULT, number, self.fields())
            return
        self._killers.append(number)
        if grace_s > 0:
            self._commands.kill_at_end(self.name)
            self._commands.signal(self.name, signal.SIGTERM)
            self._loop.later(grace_s, self._insist)
        else:
            self._commands.kill_child(self.name)

    def _insist(self) -> None:
        if self._killers:
            self._commands.kill_child(self.name)

    def fields(self) -> Fields:
        """What there is to say of it now."""
        end = self._end
        code = None if end is None else 128 - end.value if end.value < 0 else end.value
        ended = self._ended or time.monotonic()
        fields: Fields = {"process": self.name, "pid": self.pid, "running": not self.over, "exit_code": code}
        fields |= {"started_s": self._started_s, "duration_s": round(ended - self._started, 6)}
        fields |= {"output_total_bytes": self._ring.total}
        fields |= {"cpu_s": end and end.cpu_s, "max_rss_bytes": end and end.max_rss_bytes}
        return {**fields, "terminal": self._terminal, **self._spill.fields()}

    # What happens to it

    def on_frame(self, frame: Frame) -> None:
        """A request that waited is given up: it is answered with what there is."""
        if frame.kind is not Kind.CANCEL:
            return
        if frame.request in self._readers:
            self._answer(self._readers[frame.request])
        if self._input is not None:
            self._input.cancel(frame.request)

    def on_report(self, report: Report) -> None:
        """Its start, its end, or that everything it had started is dead."""
        if report.kind is ReportKind.STARTED:
            self.pid = report.value
            self._on_start(None)
        elif report.kind is ReportKind.NOT_STARTED:
            self._commands.drop(self.name)
            self.over = True
            self._close()
            self._on_start(start_error(report, self._cwd))
        elif report.kind is ReportKind.KILLED:
            killers, self._killers = self._killers, []
            for number in killers:
                self._link.send(Kind.RESULT, number, {**self.fields(), "swept": report.flag})
            self._commands.drop(self.name)
        else:
            self._on_end(report)

    def on_lost(self) -> None:
        """The slot is gone."""
        lost = {"error": "lost", "message": f"{self._commands.name} ended while a process ran in it"}
        if not self.pid and not self.over:
            self._on_start(lost)
        for number in [*self._readers, *self._killers]:
            self._talks.pop(number, None)
            self._link.send(Kind.ERROR, number, lost)
        self._readers.clear()
        if self._input is not None:
            self._input.fail(lost)
        self.over = True
        self._close()

    def descriptors(self) -> tuple[int, int]:
        """What is open here."""
        return self._output, -1 if self._input is None else self._input.fd

    def _on_end(self, report: Report) -> None:
        taken = 0
        while self._output >= 0 and taken <= PIPE_BYTES:  # what it wrote before it ended is in the pipe now
            before = self._ring.total
            self._on_output()
            if self._ring.total == before:
                break
            taken += self._ring.total - before
        self._end, self.over, self._ended = report, True, time.monotonic()
        if not self._killers:
            self._commands.drop(self.name)
        if self._input is not None:
            self._input.finish()
        self._spill.close()
        for reader in list(self._readers.values()):
            self._answer(reader)

    def _on_output(self) -> None:
        data = pipes.read(self._output)
        if data:
            self._take(data)
        elif data is None:
            return
        elif self._terminal and not self.over:
            # Nobody has it open now. To close it would be to hang up on a process that is about to end, or to open it.
            self._pause(_NOBODY_S)
        else:
            self._close_output()

    def _take(self, data: bytes) -> None:
        self._spill.add(data, self._seen)
        if self._seen.total <= RING_BYTES:
            self._seen.add(data)
        self._ring.add(data)
        for reader in [reader for reader in self._readers.values() if reader.cursor is not None]:
            self._answer(reader)
        self._breath += len(data)
        if self._breath >= _BREATH_EVERY_BYTES and not self.over:
            self._breath = 0
            self._pause(_BREATH_S)

    def _pause(self, seconds: float) -> None:
        """Not listen for a while. (A descriptor without a peer is always ready, whatever it is watched for.)"""
        if not self._paused:
            self._paused = True
            self._loop.unwatch(self._output)
            self._loop.later(seconds, self._go_on)

    def _go_on(self) -> None:
        self._paused = False
        if self._output >= 0:
            self._loop.watch(self._output, self._on_output)

    # Answers

    def _wait(self, reader: _Reader, wait_s: float) -> None:
        ready = reader.cursor is not None and self._ring.total > reader.cursor
        if ready or self.over or wait_s <= 0:
            self._answer(reader)
            return
        self._readers[reader.number] = reader
        self._talks[reader.number] = self
        reader.timer = self._loop.later(wait_s, lambda: self._answer(reader))

    def _answer(self, reader: _Reader) -> None:
        if reader.timer is not None:
            reader.timer.cancel()
        self._readers.pop(reader.number, None)
        self._talks.pop(reader.number, None)
        start, data = (0, b"") if reader.cursor is None else self._ring.read(reader.cursor, reader.max_bytes)
        self._link.send(Kind.RESULT, reader.number, {**self.fields(), "start": start}, data)

    # Descriptors

    def _close_output(self) -> None:
        self._loop.unwatch(self._output)
        pipes.close(self._output)
        self._output = -1

    def _close(self) -> None:
        self._spill.close()
        if self._input is not None:
            self._input.finish()
        if self._output >= 0:
            self._close_output()
