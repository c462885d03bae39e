"""Runs background processes, which outlive the request that started them. Serves these requests, each of which also has
the fields of the slot's lease:

    op          fields                                              RESULT
    spawn       argv | command, cwd, env, terminal, stdin,          `BackgroundProcess.fields`
                apart, hold
    output      process, cursor, max_bytes, wait_s, stderr          the same, start, and the bytes
    wait        process, wait_s                                     the same
    input       process, close, and the bytes                       written
    signal      process, signal
    resize      process, rows, columns
    kill        process, grace_s                                    the same, and swept, once the whole tree is dead
    processes                                                       processes: one object each
    dismiss     process                                             the process is killed and forgotten

A cancelled `output` or `wait` is answered with the current state, and a cancelled `input` with the number of bytes
written.

Output goes to a ring that clients read by cursor, and also to a spill file of the slot once the ring is full, so no
reader can hold up the process or the server. A process that was started with `hold` waits instead, as with a pipe:
while `HELD_BYTES` come after the cursor of the last read, its output is not taken. `apart` gives standard error a ring
of its own. Input is written as fast as the process reads it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import stat
import struct
import termios
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .. import files
from ..event_loop import WRITE, Timer
from ..protocol.frames import Fields, Frame, FrameKind
from ..protocol.init_messages import EnvBlock, InitReport, ReportKind, Spawn
from . import pipes
from .pipes import PIPE_BYTES, Capture, Ring, Spill
from .supervisor import Supervisor, start_error

MAX_PROCESSES = 64  # per slot, including ended processes; a new process replaces the oldest ended one
RING_BYTES = 256 << 10
HELD_BYTES = RING_BYTES // 2  # what the pipe holds at the end of the process fits into the rest of the ring
END_OF_INPUT = b"\x04"  # ends the input of a terminal in its usual mode
MAX_SIDE = 1000  # the maximum number of rows and of columns of a terminal
_BREATH_EVERY_BYTES, _BREATH_S, _NOBODY_S = 4 << 20, 0.02, 0.02  # pauses let the server serve other processes

_GET_PEER, _SET_LOCK = 0x5441, 0x40045431  # TIOCGPTPEER, TIOCSPTLCK: the same on x86-64 and aarch64
_PTMX = os.makedev(5, 2)


class BackgroundProcesses:
    """The background processes of one slot, oldest first. `numbers` yields the numbers that name them."""

    def __init__(self, supervisor: Supervisor, numbers: Iterator[int]) -> None:
        self._supervisor, self._numbers = supervisor, numbers
        self._processes: dict[int, BackgroundProcess] = {}

    def serve(self, frame: Frame) -> None:
        """Serve one request. Raises OSError."""
        op, fields = frame.fields["op"], frame.fields
        try:
            if op == "spawn":
                self._start_process(frame)
            elif op == "processes":
                found = {"processes": [process.fields() for process in self._processes.values()]}
                self._supervisor.send(FrameKind.RESULT, frame.request, found)
            else:
                process = self._processes.get(fields["process"])
                if process is None:
                    raise OSError(errno.ESRCH, "no such process in this slot; an ended process may have been forgotten")
                if op == "dismiss":
                    # Forgotten first, so that no later request can name it; the supervisor still passes on the reports
                    # until it is dead.
                    del self._processes[process.name]
                _OPERATIONS[op](process, frame.request, fields, frame.data)
        except ValueError as error:
            raise OSError(errno.EINVAL, str(error)) from None

    def _start_process(self, frame: Frame) -> None:
        fields, supervisor = frame.fields, self._supervisor
        self._make_room()
        process = BackgroundProcess(next(self._numbers), supervisor, hold=bool(fields.get("hold")))

        def started(error: Fields | None) -> None:
            if error is None:
                self._processes[process.name] = process
                supervisor.send(FrameKind.RESULT, frame.request, process.fields())
            else:
                supervisor.send(FrameKind.ERROR, frame.request, error)

        argv = fields.get("argv") or [f"/bin/{supervisor.shell_name()}", "-c", fields["command"]]
        size = fields["terminal"] and (fields["terminal"][0], fields["terminal"][1])
        env = supervisor.with_variables(fields["env"])
        apart = bool(fields.get("apart"))
        process.start(argv, files.absolute(fields["cwd"]), env, size, fields["stdin"], apart, started)

    def _make_room(self) -> None:
        if len(self._processes) >= MAX_PROCESSES:
            ended = next((process.name for process in self._processes.values() if process.over), None)
            if ended is None:
                message = f"{MAX_PROCESSES} background processes are already running in the slot; end one first"
                raise OSError(errno.EAGAIN, message)
            del self._processes[ended]


@dataclass
class _Reader:
    """A request that waits for output of a stream after a cursor or, if `cursor` is None, for the end of the
    process."""

    number: int
    stream: _Output | None
    cursor: int | None
    max_bytes: int
    timer: Timer | None


class BackgroundProcess:
    """One process. Implements `Child` for the process and `OpenRequest` for the requests that wait for it."""

    def __init__(self, name: int, supervisor: Supervisor, *, hold: bool = False) -> None:
        self.name, self.pid, self.over = name, 0, False
        self.terminal = False
        self._supervisor, self._hold = supervisor, hold
        self._loop, self._send, self._open = supervisor.loop, supervisor.send, supervisor.open_requests
        self._outputs: list[_Output] = []  # standard output or the terminal, and standard error if it is kept apart
        self._input: _Input | None = None
        self._readers: dict[int, _Reader] = {}
        self._killers: list[int] = []
        self._end: InitReport | None = None
        self._started, self._started_s = time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME)
        self._ended = 0.0
        self._on_start: Callable[[Fields | None], None] = lambda _: None
        self._cwd = ""

    def start(
        self, argv: list[str], cwd: str, env: EnvBlock, size: tuple[int, int] | None, stdin: bool, apart: bool,
        on_start: Callable[[Fields | None], None],
    ) -> None:  # fmt: skip
        """Start the process; `on_start` is then called with None, or with the fields of an ERROR. Raises OSError and
        ValueError."""
        self._on_start, self.terminal, self._cwd = on_start, size is not None, cwd
        ends: list[int] = []
        try:
            if size is not None:
                ends.append(self._add_output(_open_terminal(self._supervisor.owner.root, *size)))
                # A copy, because input and output are closed at different times, and the loop has one callback for each
                # descriptor.
                self._input = _Input(os.dup(self._outputs[0].fd), END_OF_INPUT, self._supervisor)
                places = [(0, 0), (0, 1), (0, 2)]
            else:
                ends.append(self._add_output(pipes.pipe()))
                reader, writer = pipes.input_pipe() if stdin else (-1, -1)
                self._input = _Input(writer, b"", self._supervisor)
                ends.append(reader)
                places = [(1, 0), (0, 1), (0, 2)]
                if apart:
                    ends.append(self._add_output(pipes.pipe()))
                    places[2] = (2, 2)
            fds = [fd if fd >= 0 else pipes.nothing() for fd in ends]
            spawn = Spawn(self.name, argv, cwd, env, places, terminal=self.terminal, announce=True)
            self._supervisor.spawn(self, spawn, fds)
        except (OSError, ValueError):
            self._close()
            raise
        finally:
            # While this process held a copy of the child's end, no read would find the end of the output.
            pipes.close(*ends)
        for stream in self._outputs:
            stream.watch()

    # Requests

    def read(self, number: int, cursor: int, max_bytes: int, wait_s: float, stderr: bool) -> None:
        """Answer with the output from `cursor`. If there is no output yet, first wait up to `wait_s` seconds for output
        or for the end of the process. Raises ValueError if standard error is not kept apart."""
        if stderr and len(self._outputs) < 2:
            raise ValueError("the process was not started with its standard error apart")
        stream = self._outputs[1 if stderr else 0]
        if cursor < 0:
            cursor = max(0, stream.ring.total + cursor)
        stream.taken(cursor)
        self._answer_when_ready(_Reader(number, stream, cursor, max_bytes, None), wait_s)

    def wait(self, number: int, wait_s: float) -> None:
        """Answer when the process has ended, or after `wait_s` seconds."""
        self._answer_when_ready(_Reader(number, None, None, 0, None), wait_s)

    def write(self, number: int, data: bytes, close: bool) -> None:
        """Answer when all of `data` is written. If `close` is true, end the input after that. Raises
        BrokenPipeError."""
        if self._input is None or self.over:
            raise BrokenPipeError(errno.EPIPE, "the process has ended")
        self._input.write(number, data, close, self)

    def resize(self, number: int, rows: int, columns: int) -> None:
        """Resize the process's terminal. Raises OSError if the process has no terminal."""
        if not self.terminal:
            raise OSError(errno.ENOTTY, "the process has no terminal")
        if self._outputs[0].fd >= 0:
            _resize(self._outputs[0].fd, rows, columns)
        self._send(FrameKind.RESULT, number)

    def signal(self, number: int, signal_number: int) -> None:
        """Send a signal to the process group."""
        if not self.over:
            self._supervisor.signal(self.name, signal_number)
        self._send(FrameKind.RESULT, number)

    def kill(self, number: int, grace_s: float = 0.0) -> None:
        """Kill the process's whole tree, and answer when it is dead. With `grace_s`, send SIGTERM first, and SIGKILL
        after that time or when the main process has ended."""
        if self.over and not self._killers:
            self._send(FrameKind.RESULT, number, self.fields())
            return
        self._killers.append(number)
        if grace_s > 0:
            self._supervisor.kill_at_end(self.name)
            self._supervisor.signal(self.name, signal.SIGTERM)
            self._loop.later(grace_s, self._insist)
        else:
            self._supervisor.kill_child(self.name)

    def _insist(self) -> None:
        if self._killers:
            self._supervisor.kill_child(self.name)

    def fields(self) -> Fields:
        """Return the process's current state for a RESULT."""
        end = self._end
        code = None if end is None else 128 - end.value if end.value < 0 else end.value
        ended = self._ended or time.monotonic()
        fields: Fields = {"process": self.name, "pid": self.pid, "running": not self.over, "exit_code": code}
        fields |= {"started_s": self._started_s, "duration_s": round(ended - self._started, 6)}
        fields |= {"output_total_bytes": sum(stream.ring.total for stream in self._outputs)}
        fields |= {"cpu_s": end and end.cpu_s, "max_rss_bytes": end and end.max_rss_bytes}
        return {**fields, "terminal": self.terminal, **self._outputs[0].spill.fields()}

    # Events

    def on_frame(self, frame: Frame) -> None:
        """Answer a cancelled request with the current state."""
        if frame.kind is not FrameKind.CANCEL:
            return
        if frame.request in self._readers:
            self._answer_reader(self._readers[frame.request])
        if self._input is not None:
            self._input.cancel(frame.request)

    def on_report(self, report: InitReport) -> None:
        """Handle a report about the process: its start, its end, or the death of its whole tree."""
        if report.kind is ReportKind.STARTED:
            self.pid = report.value
            self._on_start(None)
        elif report.kind is ReportKind.NOT_STARTED:
            self._supervisor.drop(self.name)
            self.over = True
            self._close()
            self._on_start(start_error(report, self._cwd))
        elif report.kind is ReportKind.KILLED:
            killers, self._killers = self._killers, []
            for number in killers:
                self._send(FrameKind.RESULT, number, {**self.fields(), "swept": report.flag})
            self._supervisor.drop(self.name)
        else:
            self._on_end(report)

    def on_lost(self) -> None:
        owner = self._supervisor.owner
        lost = {"error": owner.loss, "message": f"{owner.name} ended while a process ran in it"}
        # The request `spawn` itself is still unanswered.
        if not self.pid and not self.over:
            self._on_start(lost)
        for number in [*self._readers, *self._killers]:
            self._open.pop(number, None)
            self._send(FrameKind.ERROR, number, lost)
        self._readers.clear()
        if self._input is not None:
            self._input.fail(lost)
        self.over = True
        self._close()

    def descriptors(self) -> tuple[int, ...]:
        return *(stream.fd for stream in self._outputs), -1 if self._input is None else self._input.fd

    def on_output(self, stream: _Output) -> None:
        """Answer the requests that wait for output of this stream."""
        for reader in [reader for reader in self._readers.values() if reader.stream is stream]:
            self._answer_reader(reader)

    def _on_end(self, report: InitReport) -> None:
        for stream in self._outputs:
            stream.read_rest()
        # Set only after the drain, so that a reader who learns that the process has ended has all of its output.
        self._end, self.over, self._ended = report, True, time.monotonic()
        # A kill that is under way ends with the report KILLED, which comes after this one.
        if not self._killers:
            self._supervisor.drop(self.name)
        if self._input is not None:
            self._input.finish()
        for stream in self._outputs:
            stream.spill.close()
            stream.watch()  # of processes that the ended one has left
        for reader in list(self._readers.values()):
            self._answer_reader(reader)

    def _answer_when_ready(self, reader: _Reader, wait_s: float) -> None:
        ready = reader.stream is not None and reader.cursor is not None and reader.stream.ring.total > reader.cursor
        if ready or self.over or wait_s <= 0:
            self._answer_reader(reader)
            return
        self._readers[reader.number] = reader
        self._open[reader.number] = self
        reader.timer = self._loop.later(wait_s, lambda: self._answer_reader(reader))

    def _answer_reader(self, reader: _Reader) -> None:
        if reader.timer is not None:
            reader.timer.cancel()
        self._readers.pop(reader.number, None)
        self._open.pop(reader.number, None)
        start, data = 0, b""
        if reader.stream is not None and reader.cursor is not None:
            start, data = reader.stream.ring.read(reader.cursor, reader.max_bytes)
        self._send(FrameKind.RESULT, reader.number, {**self.fields(), "start": start}, data)

    def _add_output(self, opened: tuple[int, int]) -> int:
        """Add a stream with the first of two descriptors, and return the other, which is the child's."""
        self._outputs.append(_Output(opened[0], self, self._supervisor, self._hold))
        return opened[1]

    def _close(self) -> None:
        if self._input is not None:
            self._input.finish()
        for stream in self._outputs:
            stream.close()


class _Output:
    """One stream of a process's output: the ring that clients read, and the spill file. With `hold`, the stream is not
    read while `HELD_BYTES` come after the cursor of the last request."""

    def __init__(self, fd: int, process: BackgroundProcess, supervisor: Supervisor, hold: bool) -> None:
        self.fd, self.ring = fd, Ring(RING_BYTES)
        self.spill = Spill(supervisor.shelf, f"process-{process.name & 0xFFFF}", RING_BYTES)
        self._process, self._loop, self._hold = process, supervisor.loop, hold
        self._seen = Capture(RING_BYTES)
        self._breath = self._cursor = 0
        self._paused = self._watched = False

    def watch(self) -> None:
        """Read the stream whenever it has output, unless it is held."""
        wanted = self.fd >= 0 and not self._paused and not self._is_held()
        if wanted and not self._watched:
            self._loop.watch(self.fd, self._on_output)
        elif self._watched and not wanted:
            self._loop.unwatch(self.fd)
        self._watched = wanted

    def taken(self, cursor: int) -> None:
        """Note that a client has all output before the cursor."""
        self._cursor = max(self._cursor, cursor)
        if self._hold:
            self.watch()

    def read_rest(self) -> None:
        """Read what the process wrote before its end, which is in the pipe now."""
        taken = 0
        # The ended process cannot have left more than a pipe holds. What it has started may write without end, and must
        # not keep the loop here.
        while self.fd >= 0 and taken <= PIPE_BYTES:
            before = self.ring.total
            self._on_output()
            if self.ring.total == before:
                break
            taken += self.ring.total - before

    def close(self) -> None:
        """Close the stream and its spill file. Idempotent."""
        self.spill.close()
        if self._watched:
            self._loop.unwatch(self.fd)
            self._watched = False
        pipes.close(self.fd)
        self.fd = -1

    def _is_held(self) -> bool:
        return self._hold and not self._process.over and self.ring.total - self._cursor >= HELD_BYTES

    def _on_output(self) -> None:
        data = pipes.read(self.fd)
        if data:
            self._take_output(data)
        elif data is None:
            return
        elif self._process.terminal and not self._process.over:
            # No process has the terminal open now. Closing the terminal would hang up on a process that is about to
            # open it, or to end.
            self._pause(_NOBODY_S)
        else:
            self.close()

    def _take_output(self, data: bytes) -> None:
        self.spill.add(data, self._seen)
        if self._seen.total <= RING_BYTES:
            self._seen.add(data)
        self.ring.add(data)
        self._process.on_output(self)
        self._breath += len(data)
        if self._breath >= _BREATH_EVERY_BYTES and not self._process.over:
            self._breath = 0
            self._pause(_BREATH_S)
        elif self._hold:
            self.watch()

    def _pause(self, seconds: float) -> None:
        """Stop reading for a while. Without such pauses, a flood of output, or a terminal that no process has open,
        would keep the loop busy."""
        if not self._paused:
            self._paused = True
            self.watch()
            self._loop.later(seconds, self._resume)

    def _resume(self) -> None:
        self._paused = False
        self.watch()


_OPERATIONS: dict[str, Callable[[BackgroundProcess, int, Fields, bytes], None]] = {
    "output": lambda process, number, f, _: process.read(
        number, f["cursor"], f["max_bytes"], f["wait_s"], bool(f.get("stderr"))
    ),
    "wait": lambda process, number, f, _: process.wait(number, f["wait_s"]),
    "input": lambda process, number, f, data: process.write(number, data, f["close"]),
    "signal": lambda process, number, f, _: process.signal(number, f["signal"]),
    "resize": lambda process, number, f, _: process.resize(number, f["rows"], f["columns"]),
    "kill": lambda process, number, f, _: process.kill(number, f["grace_s"]),
    "dismiss": lambda process, number, f, _: process.kill(number),
}
OPERATIONS = ("spawn", "processes", *_OPERATIONS)


class _Input:
    """The writing end of a process's input. `mark` ends the input of a terminal, which stays open. The data of requests
    is written in order; each request is answered when all its data is written."""

    def __init__(self, fd: int, mark: bytes, supervisor: Supervisor) -> None:
        self.fd, self._mark = fd, mark
        self._loop, self._send, self._open = supervisor.loop, supervisor.send, supervisor.open_requests
        self._writing: deque[tuple[int, memoryview, int]] = deque()
        self._closing = self._listening = False

    def write(self, number: int, data: bytes, close: bool, owner: BackgroundProcess) -> None:
        """Answer when all of `data` is written. If `close` is true, end the input after that. Raises
        BrokenPipeError."""
        if self.fd < 0 or self._closing:
            raise BrokenPipeError(errno.EPIPE, "the input of the process is closed")
        if close:
            # A terminal stays open: if the master were closed, the kernel would hang up on the process (SIGHUP).
            data, self._closing = data + self._mark, not self._mark
        self._writing.append((number, memoryview(data), len(data)))
        self._open[number] = owner
        self._pump()

    def cancel(self, number: int) -> None:
        """Answer a request with the number of bytes written, and drop the rest."""
        for item in [item for item in self._writing if item[0] == number]:
            self._writing.remove(item)
            self._answer_write(item)

    def finish(self) -> None:
        """Answer all requests and close, because the process has stopped reading. Idempotent."""
        while self._writing:
            self._answer_write(self._writing.popleft())
        self._close()

    def fail(self, fields: Fields) -> None:
        """Refuse all requests and close, because the slot is dead."""
        while self._writing:
            self._refuse(self._writing.popleft()[0], fields)
        self._close()

    def _pump(self) -> None:
        """Write as much as possible without waiting."""
        while self._writing and self.fd >= 0:
            number, view, size = self._writing[0]
            try:
                written = os.write(self.fd, view) if view else 0
            except BlockingIOError:
                break
            except OSError:
                # The next message gets the same error of its own: each writer waits for an answer.
                self._writing.popleft()
                message = "the process has closed its input"
                self._refuse(number, {"error": "os", "errno": errno.EPIPE, "message": message, "path": None})
                continue
            if written < len(view):
                self._writing[0] = (number, view[written:], size)
            else:
                self._writing.popleft()
                self._answer_write((number, view[written:], size))
        # The input is closed only after everything that was written to it before.
        if self._closing and not self._writing:
            self._close()
        self._listen()

    def _listen(self) -> None:
        """Watch for room only while data is waiting, because a pipe without a reader is always ready."""
        wanted = bool(self._writing) and self.fd >= 0
        if wanted and not self._listening:
            # `watch_for` changes what is watched, and needs a descriptor that is watched already.
            self._loop.watch(self.fd, self._pump)
            self._loop.watch_for(self.fd, WRITE, self._pump)
        elif self._listening and not wanted and self.fd >= 0:
            self._loop.unwatch(self.fd)
        self._listening = wanted

    def _answer_write(self, item: tuple[int, memoryview, int]) -> None:
        number, view, size = item
        self._open.pop(number, None)
        self._send(FrameKind.RESULT, number, {"written": size - len(view)})

    def _refuse(self, number: int, fields: Fields) -> None:
        self._open.pop(number, None)
        self._send(FrameKind.ERROR, number, fields)

    def _close(self) -> None:
        if self.fd >= 0:
            if self._listening:
                self._loop.unwatch(self.fd)
                self._listening = False
            pipes.close(self.fd)
            self.fd = -1


def _open_terminal(root: int, rows: int, columns: int) -> tuple[int, int]:
    """Return the master, which does not block, and the slave of a new pseudo terminal in the slot's devpts, so that
    `tty` in the slot names an existing file. Raises OSError if the slot has no devpts."""
    master = files.open_at(root, "/dev/pts/ptmx", os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
    try:
        status = os.fstat(master)
        if not stat.S_ISCHR(status.st_mode) or status.st_rdev != _PTMX:
            raise OSError(errno.ENODEV, "not the terminal multiplexer", "/dev/pts/ptmx")
        fcntl.ioctl(master, _SET_LOCK, struct.pack("i", 0))
        _resize(master, rows, columns)
        # The kernel opens the other end of exactly this terminal. Its path could lead elsewhere, since the slot chooses
        # what is there.
        slave = fcntl.ioctl(master, _GET_PEER, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except BaseException:
        os.close(master)
        raise
    return master, slave


def _resize(master: int, rows: int, columns: int) -> None:
    """Set the window size; the foreground processes get SIGWINCH. Raises ValueError for a size out of range."""
    if not (1 <= rows <= MAX_SIDE and 1 <= columns <= MAX_SIDE):
        raise ValueError(f"a terminal can have 1 to {MAX_SIDE} rows and columns, not {rows} and {columns}")
    with contextlib.suppress(FileNotFoundError):
        fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
