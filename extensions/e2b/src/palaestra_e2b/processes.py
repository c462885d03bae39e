"""The processes of one sandbox that callers have started, and the callers who follow their output.

Every output is read all the time, so that a process runs on when nobody follows it, and passed to each follower at the
follower's pace: a process waits for its slowest follower, as at a pipe, but not longer than `FOLLOWER_S`; then that
follower is dropped with an error. Output that nobody follows is discarded, as at E2B.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from palaestra_e2b.wire_errors import ApiError, RpcError
from palaestra_slots.core.cancel_scope import end_tasks
from palaestra_slots.core.errors import PalaestraError
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import Process, Slot, TerminalSize

MOST_FOLLOWERS = 16
FOLLOWER_S = 60.0
_QUEUED = 8  # messages of at most 128 KiB
_END_SIGNALS = (9, 15)
_START_S = 10.0


class OutputFollower:
    """One caller that follows a process. `messages` ends with None, or with the error that ends the stream."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[JSON | ApiError | RpcError] = asyncio.Queue(_QUEUED)
        self.gone = False

    async def put(self, message: JSON | ApiError | RpcError) -> None:
        """Pass on a message; after `FOLLOWER_S` without room for it, drop the follower."""
        if self.gone:
            return
        try:
            self.messages.put_nowait(message)
        except asyncio.QueueFull:
            try:
                async with asyncio.timeout(FOLLOWER_S):
                    await self.messages.put(message)
            except TimeoutError:
                self.end(
                    RpcError("resource_exhausted", "the output was not read in time; connect to the process again")
                )

    def end(self, last: ApiError | RpcError | None) -> None:
        """End the stream now, with an error or, for None, with nothing more. Messages that wait are dropped."""
        if not self.gone:
            self.gone = True
            with contextlib.suppress(asyncio.QueueEmpty):
                while True:
                    self.messages.get_nowait()
            self.messages.put_nowait(last)


@dataclass(frozen=True, slots=True)
class ProcessRequest:
    """A process to start. `config` is what the caller asked for, in the API's words. `timeout_s` is the time after
    which the whole tree is killed."""

    argv: Sequence[str]
    cwd: str
    env: Mapping[str, str]
    config: dict[str, JSON]
    tag: str | None = None
    stdin: bool = False
    terminal: TerminalSize | None = None
    timeout_s: float | None = None


@dataclass(slots=True, eq=False)
class HostedProcess:
    """One process. `config` is what the caller started, in the API's words."""

    process: Process
    config: dict[str, JSON]
    tag: str | None
    terminal: bool
    followers: set[OutputFollower] = field(default_factory=set)
    reading: asyncio.Task[None] | None = None
    cursors: list[int] = field(default_factory=lambda: [0, 0])
    deadline: asyncio.TimerHandle | None = None
    ended_by: str = ""  # "timeout", or the name of the signal that a caller sent
    failure: ApiError | RpcError | None = None  # that of the streams, until the process is read again

    @property
    def pid(self) -> int:
        """The process's number in the sandbox."""
        return self.process.pid

    def follow(self) -> OutputFollower:
        """Return a new follower. Raises `RpcError` if there are too many."""
        if len(self.followers) >= MOST_FOLLOWERS:
            raise RpcError("resource_exhausted", f"the process has {MOST_FOLLOWERS} followers; disconnect one first")
        follower = OutputFollower()
        if self.failure is not None:
            follower.end(self.failure)
        else:
            self.followers.add(follower)
        return follower

    def leave(self, follower: OutputFollower) -> None:
        """Forget a follower, so that the process does not wait for it any more."""
        self.followers.discard(follower)
        follower.end(None)

    async def emit(self, message: JSON) -> None:
        """Pass a message to all followers."""
        for follower in list(self.followers):
            await follower.put(message)

    def fail(self, error: ApiError | RpcError) -> None:
        """End all streams with an error, also those that begin later."""
        self.failure = error
        for follower in self.followers:
            follower.end(error)
        self.followers.clear()


class ProcessTable:
    """The running processes of one sandbox."""

    def __init__(self) -> None:
        self._running: dict[int, HostedProcess] = {}
        self._starting: set[asyncio.Future[None]] = set()
        self._still: ApiError | RpcError | None = None  # while nothing is read

    def all(self) -> list[HostedProcess]:
        """Return the running processes, oldest first."""
        return list(self._running.values())

    async def start(self, slot: Slot, wanted: ProcessRequest) -> HostedProcess:
        """Start a process. Its output is read from the next time on that the caller waits, so a follower that begins
        before that misses nothing. Raises OSError if it cannot be started, and while the sandbox stands still the error
        of `stand_still`."""
        if self._still is not None:
            raise self._still
        started = asyncio.get_running_loop().create_future()
        self._starting.add(started)
        try:
            return await self._spawn_process(slot, wanted)
        finally:
            self._starting.discard(started)
            started.set_result(None)

    async def _spawn_process(self, slot: Slot, wanted: ProcessRequest) -> HostedProcess:
        terminal = wanted.terminal
        process = await slot.spawn(
            wanted.argv, cwd=wanted.cwd, env=wanted.env, stdin=wanted.stdin, terminal=terminal, stderr=terminal is None,
            hold=True,
        )  # fmt: skip
        hosted = HostedProcess(process, wanted.config, wanted.tag, terminal is not None)
        self._running[hosted.pid] = hosted
        if wanted.timeout_s is not None:
            loop = asyncio.get_running_loop()
            hosted.deadline = loop.call_later(wanted.timeout_s, lambda: loop.create_task(self._on_deadline(hosted)))
        if self._still is None:
            self._start_reading(hosted)
        return hosted

    def find(self, selector: Mapping[str, JSON]) -> HostedProcess:
        """Return the process with the pid or tag of a selector. Raises `RpcError`."""
        if "pid" in selector:
            found = self._running.get(selector["pid"]) if type(selector["pid"]) is int else None
        else:
            tag = selector.get("tag")
            found = next((each for each in self.all() if tag is not None and each.tag == tag), None)
        if found is None:
            wanted = f"pid {selector['pid']!r:.50}" if "pid" in selector else f"tag {selector.get('tag')!r:.50}"
            raise RpcError("not_found", f"process with {wanted} not found")
        return found

    async def signal(self, hosted: HostedProcess, number: int) -> None:
        """Send SIGTERM to a process, or kill its whole tree with SIGKILL."""
        if number not in _END_SIGNALS:
            raise RpcError("invalid_argument", "signal must be SIGNAL_SIGTERM or SIGNAL_SIGKILL")
        if number == 9:
            hosted.ended_by = "killed"
            await hosted.process.kill()
        else:
            await hosted.process.signal(number)

    async def stand_still(self, error: ApiError | RpcError) -> None:
        """Stop reading, because each request would wake up the sandbox, and end all streams with an error. Waits for
        the processes that are being started."""
        self._still = error
        if self._starting:
            await asyncio.wait(self._starting, timeout=_START_S)
        readers = [each.reading for each in self.all() if each.reading is not None]
        for hosted in self.all():
            hosted.fail(error)
            if hosted.deadline is not None:
                hosted.deadline.cancel()  # the time limit of a call does not outlive its stream's pause
        await end_tasks(*readers)

    def go_on(self) -> None:
        """Read again."""
        self._still = None
        for hosted in self.all():
            hosted.failure = None
            self._start_reading(hosted)

    async def aclose(self, error: ApiError | RpcError) -> None:
        """Forget all processes, whose slot is about to end."""
        await self.stand_still(error)
        self._running.clear()

    async def _on_deadline(self, hosted: HostedProcess) -> None:
        hosted.ended_by = "timeout"
        with contextlib.suppress(PalaestraError, ProcessLookupError):
            await hosted.process.kill()

    def _start_reading(self, hosted: HostedProcess) -> None:
        hosted.reading = asyncio.get_running_loop().create_task(self._read_to_end(hosted))

    async def _read_to_end(self, hosted: HostedProcess) -> None:
        """Read a process's output to its end, then tell the followers how it ended and forget it."""
        try:
            if hosted.terminal:
                await _emit_output(hosted, "pty", 0)
            else:
                async with asyncio.TaskGroup() as group:
                    group.create_task(_emit_output(hosted, "stdout", 0))
                    group.create_task(_emit_output(hosted, "stderr", 1))
            await self._finish_process(hosted, hosted.process.exit_code or 0)
        except* (PalaestraError, ProcessLookupError) as errors:
            self._running.pop(hosted.pid, None)
            hosted.fail(RpcError("unavailable", f"the sandbox stopped: {errors.exceptions[0]}"))

    async def _finish_process(self, hosted: HostedProcess, code: int) -> None:
        self._running.pop(hosted.pid, None)
        if hosted.deadline is not None:
            hosted.deadline.cancel()
        if hosted.ended_by == "timeout":
            hosted.fail(RpcError("deadline_exceeded", "the process ran longer than its timeout and was killed"))
        else:
            await hosted.emit({"end": _end_of(code, hosted.ended_by)})
        await hosted.process.forget()


async def _emit_output(hosted: HostedProcess, stream: str, number: int) -> None:
    async for piece in hosted.process.output(hosted.cursors[number], stderr=number == 1):
        hosted.cursors[number] = piece.end
        if hosted.followers:
            await hosted.emit({"data": {stream: base64.b64encode(piece.data).decode()}})


def _end_of(code: int, signal: str) -> dict[str, JSON]:
    """Return the event of a process's end, as Go's `os/exec`, which E2B uses, describes it."""
    if signal:
        return {"exitCode": -1, "exited": False, "status": f"signal: {signal}", "error": f"signal: {signal}"}
    end = {"exitCode": code, "exited": True, "status": f"exit status {code}"}
    return {**end, "error": f"exit status {code}"} if code else end
