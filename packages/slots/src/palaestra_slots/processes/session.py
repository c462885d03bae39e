"""Wraps a background process of a slot in a session that an agent addresses by id.

The slot keeps the output, exit code and input, so the cost of a session does not depend on the amount of output.

Replies have the format that Atropos and Hermes use. Their `status` is running or exited for `poll` and `log`; exited,
timeout or interrupted for `wait`; killed or already_exited for `kill`; and ok, already_exited or error for `write`. If
the process cannot be reached any more, the registry replies to every action with the status lost. Failures of the slot
itself (`InfraError`) are raised.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import ClassVar

from palaestra_slots.core.cancel_scope import end_tasks
from palaestra_slots.core.io.threads import running_loop
from palaestra_slots.core.reply_size import MAX_OUTPUT_CHARS, MAX_REPLY_CHARS, head_within, items_within
from palaestra_slots.core.types import JSON
from palaestra_slots.processes import process_output
from palaestra_slots.sandbox.slot import Process, ProcessStatus

FINISHED_TTL_SECONDS = 1800
"""Seconds after which the session of an ended process may be forgotten. To make room, it may be forgotten earlier."""

MAX_PROCESSES = 64
"""The maximum number of running processes of one task."""

KILL_GRACE_S = 2.0
"""The maximum number of seconds between SIGTERM and SIGKILL."""

PREVIEW_CHARS, LISTED_CHARS, WAITED_CHARS = 1000, 200, 2000
MAX_NEW_BYTES = 20_000
"""The maximum number of bytes of output that one `poll` with a cursor returns."""

WRITE_PATIENCE_S = 10.0
"""Seconds that a write waits for the process to read."""

FORGOTTEN = "the slot has dropped its record of it, to make room for newer processes"

Reply = dict[str, JSON]


@dataclass(frozen=True, slots=True)
class Watch:
    """Selects what is reported about a session: lines that contain one of `patterns`, and new output every `interval_s`
    seconds. The end of the process is reported if `on_exit` or `interval_s` is set.

    If `lifetime_s` is set, the process is killed after that many seconds. Each report includes the entries of
    `address`.
    """

    patterns: tuple[str, ...] = ()
    interval_s: float | None = None
    on_exit: bool = False
    lifetime_s: float | None = None
    address: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.patterns or self.on_exit) or self.interval_s is not None or self.lifetime_s is not None


class SessionNotices:
    """The latest reports of a follower that no reply has shown yet."""

    def __init__(self) -> None:
        self._latest: deque[str] = deque(maxlen=8)

    def add(self, notice: str) -> None:
        """Add a report; the oldest one of too many is dropped."""
        self._latest.append(notice)

    def take(self) -> Reply:
        """Return the notices since the last reply as a part of a reply, and clear them."""
        notices = list(self._latest)
        self._latest.clear()
        return {"notices": notices} if notices else {}


class SessionLost(LookupError):
    """Raised if the process of a session cannot be reached any more. The message gives the reason."""


@dataclass(slots=True, eq=False)
class ProcessSession:
    """One background process, addressed by its session id.

    `session_key` names the conversation that started it; `started_at` is in seconds since the epoch. `status` is the
    last known status; if the process cannot be reached, `lost` is the reason. `detached` is true for a session
    recovered after a restart. A follower has read the output up to the cursor `followed`; `notices` holds the
    follower's latest reports.
    """

    id: str
    command: str
    task_id: str
    session_key: str
    cwd: str
    slot_id: str
    started_at: float
    process: Process | None
    status: ProcessStatus
    watch: Watch = Watch()
    lost: str = ""
    detached: bool = False
    followed: int = 0
    waiting: set[asyncio.Future[None]] = field(default_factory=set)
    notices: SessionNotices = field(default_factory=SessionNotices)
    loop: asyncio.AbstractEventLoop | None = field(default_factory=running_loop)

    pid_scope: ClassVar[str] = "sandbox"

    # The properties below have the names that Atropos and Hermes use. `watcher_interval` is in seconds; 0 means never.

    @property
    def pid(self) -> int:
        return self.status.pid

    @property
    def exited(self) -> bool:
        return not self.status.running

    @property
    def exit_code(self) -> int | None:
        return self.status.exit_code

    @property
    def output_buffer(self) -> str:
        """The last `MAX_OUTPUT_CHARS` bytes of the output, for synchronous code; empty once the session is lost.

        Raises the slot's errors, and `RuntimeError` on the session's own event loop, where `log` must be awaited
        instead.
        """
        from palaestra_slots.core.sync_bridge import wait_on  # imported here, because it is rarely used

        if self.process is None or self.loop is None:
            return ""
        return wait_on(self.loop, self._buffer, "ProcessSession.log")

    async def _buffer(self) -> str:
        status = await self.refresh()
        return (await process_output.tail(self.reach(), MAX_OUTPUT_CHARS, running=status.running)).text

    @property
    def notify_on_complete(self) -> bool:
        return self.watch.on_exit

    @property
    def watcher_interval(self) -> float:
        return self.watch.interval_s or 0

    @property
    def watcher_platform(self) -> str:
        return self.watch.address.get("platform", "")

    @property
    def watcher_chat_id(self) -> str:
        return self.watch.address.get("chat_id", "")

    @property
    def watcher_thread_id(self) -> str:
        return self.watch.address.get("thread_id", "")

    @property
    def running(self) -> bool:
        """Whether the process runs and can be reached."""
        return self.status.running and not self.lost

    @property
    def ended_at(self) -> float | None:
        """The time when the process ended, in seconds since the epoch; None if the last known status is running."""
        return None if self.status.running else self.started_at + self.status.duration_s

    def reach(self) -> Process:
        """Return the session's process. Raises `SessionLost` if it cannot be reached."""
        if self.process is None:
            raise SessionLost(self.lost)
        return self.process

    async def refresh(self) -> ProcessStatus:
        """Update and return the process's status. Raises `SessionLost` if the process cannot be reached, and the slot's
        errors."""
        try:
            self.status = await self.reach().status()
        except ProcessLookupError:
            raise self.lose(FORGOTTEN) from None
        return self.status

    def lose(self, reason: str) -> SessionLost:
        """Mark the process as unreachable. Returns the error to raise."""
        self.process, self.lost = None, reason
        return SessionLost(reason)

    # Actions

    async def poll(self, since: int | None = None) -> Reply:
        """Return the process's status and a part of its output: the end of the output, or, if `since` is given, up to
        `MAX_NEW_BYTES` bytes after that cursor."""
        status = await self.refresh()
        reply: Reply = {"session_id": self.id, "command": self.command, **_status_fields(status)}
        if since is None:
            reply |= await self._tail(status, "output_preview", PREVIEW_CHARS)
        else:
            reply |= await self._new_output(status, since)
        reply |= {"output_total_bytes": status.output_total_bytes, **_full_output(status)}
        if self.detached:
            reply |= {"detached": True, "note": "Found again after a restart."}
        return reply | self.notices.take()

    async def log(self, offset: int = 0, limit: int = 200) -> Reply:
        """Return lines of the kept output. If `offset` is positive, these are up to `limit` lines after the first
        `offset` lines; otherwise, they are the last `limit` lines."""
        status = await self.refresh()
        kept = await process_output.tail(self.reach(), MAX_OUTPUT_CHARS, running=status.running)
        lines = _printed_lines(kept.text)
        first = max(0, len(lines) - limit) if offset <= 0 else min(offset, len(lines))
        shown = [head_within(line, MAX_REPLY_CHARS) for line in lines[first : first + limit]]
        if offset <= 0:
            # If not all fit, the last lines are the ones that were asked for.
            shown = shown[::-1][: items_within(shown[::-1])][::-1]
            first = len(lines) - len(shown)
        else:
            shown = shown[: items_within(shown)]
        showing = f"lines {first + 1}-{first + len(shown)} of {len(lines)}" if shown else f"no lines of {len(lines)}"
        reply: Reply = {"session_id": self.id, "status": _word(status), "output": "\n".join(shown)}
        reply |= {"total_lines": len(lines), "showing": showing, "cursor": kept.end}
        if kept.start:
            reply["dropped_bytes"] = kept.start
            reply["note"] = "Lines are counted from the first one that is kept."
        return reply | _full_output(status) | self.notices.take()

    async def wait(self, timeout_s: float | None, limit_s: float) -> Reply:
        """Wait until the process ends, the time is over, or the wait is interrupted. The time is `timeout_s` seconds,
        but at most `limit_s`; if `timeout_s` is None, it is `limit_s`."""
        patience_s = limit_s if timeout_s is None else min(max(timeout_s, 0.0), limit_s)
        interrupted = await self._ended_or_interrupted(patience_s)
        status = await self.refresh()
        word = "exited" if not status.running else "interrupted" if interrupted else "timeout"
        reply: Reply = {"session_id": self.id, "status": word}
        if not status.running:
            reply["exit_code"] = status.exit_code
        reply |= await self._tail(status, "output", WAITED_CHARS)
        reply["output_total_bytes"] = status.output_total_bytes
        notes = []
        if timeout_s is not None and timeout_s > limit_s:
            notes.append(f"The wait of {timeout_s:g}s was cut to the limit of {limit_s:g}s.")
        if word == "timeout":
            notes.append(f"Waited {patience_s:g}s; the process still runs.")
        if notes:
            reply["timeout_note"] = " ".join(notes)
        if word == "interrupted":
            reply["note"] = "The wait was interrupted; the process still runs."
        return reply | _full_output(status) | self.notices.take()

    async def kill(self, grace_s: float = KILL_GRACE_S) -> Reply:
        """Kill the process tree with SIGTERM and, after `grace_s` seconds at the latest, SIGKILL. Returns once the
        whole tree has ended."""
        before = await self.refresh()
        status = self.status = await self.reach().kill(grace_s) if before.running else before
        word = "killed" if before.running else "already_exited"
        return {"session_id": self.id, "status": word, "exit_code": status.exit_code} | self.notices.take()

    async def write(self, data: bytes, *, end: bool = False) -> Reply:
        """Write to the process's input. If `end` is true, close the input afterwards."""
        if not (await self.refresh()).running:
            error = "The process has ended; nothing was written."
            return {"session_id": self.id, "status": "already_exited", "error": error}
        try:
            async with asyncio.timeout(WRITE_PATIENCE_S):
                await self.reach().write(data)
                if end:
                    await self.reach().close_input()
        except BrokenPipeError:
            return {"session_id": self.id, "status": "error", "error": "The process has closed its input."}
        except TimeoutError:
            error = f"The process did not read all the data in {WRITE_PATIENCE_S:g}s; a part may have been written."
            return {"session_id": self.id, "status": "error", "error": error}
        return {"session_id": self.id, "status": "ok", "bytes_written": len(data)}

    async def submit(self, data: bytes, *, end: bool = False) -> Reply:
        """Write a line to the process's input. The line ends with the code of the Enter key if the process has a
        terminal, and with a newline otherwise."""
        return await self.write(data + (b"\r" if self.status.terminal else b"\n"), end=end)

    async def summary(self) -> Reply:
        """Return this session's entry for a list of sessions."""
        status = await self.refresh()
        started = datetime.fromtimestamp(self.started_at, UTC).isoformat(timespec="seconds")
        reply: Reply = {"session_id": self.id, "command": self.command[:LISTED_CHARS], "cwd": self.cwd}
        reply |= {**_status_fields(status), "started_at": started, **({"detached": True} if self.detached else {})}
        return reply | await self._tail(status, "output_preview", LISTED_CHARS) | self.notices.take()

    async def _tail(self, status: ProcessStatus, name: str, chars: int) -> Reply:
        """Return the last `chars` characters of the output under `name`, and the cursor at their end under `cursor`."""
        # The slot counts bytes, and a character takes up to this many.
        most = process_output.LONGEST_CHARACTER * chars
        end = await process_output.tail(self.reach(), most, running=status.running)
        return {name: end.text[-chars:], "cursor": end.end}

    async def _new_output(self, status: ProcessStatus, since: int) -> Reply:
        new = await process_output.read_output_text(
            self.reach(), since, max_bytes=MAX_NEW_BYTES, running=status.running
        )
        reply: Reply = {"output": new.text, "cursor": new.end}
        if new.lost:
            reply["lost_bytes"] = new.lost
        if new.more and status.output_total_bytes > new.end:
            reply["more_bytes"] = status.output_total_bytes - new.end
        return reply

    async def _ended_or_interrupted(self, patience_s: float) -> bool:
        """Wait up to `patience_s` seconds for the process to end. Return True if an interrupt ended the wait."""
        interrupt: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ending = asyncio.ensure_future(self.reach().wait(patience_s))
        either: list[asyncio.Future[JSON]] = [interrupt, ending]
        self.waiting.add(interrupt)
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                return True
            ending.result()
            return False
        finally:
            self.waiting.discard(interrupt)
            await end_tasks(ending)


def _status_fields(status: ProcessStatus) -> Reply:
    reply: Reply = {"status": _word(status), "pid": status.pid, "uptime_seconds": int(status.duration_s)}
    return reply if status.running else reply | {"exit_code": status.exit_code}


def _word(status: ProcessStatus) -> str:
    return "running" if status.running else "exited"


def _full_output(status: ProcessStatus) -> Reply:
    if status.full_output_path is None:
        return {}
    return {"full_output_path": status.full_output_path, "full_output_bytes": status.full_output_bytes}


def _printed_lines(text: str) -> list[str]:
    """Return the lines of a text. A line may be written anew after a carriage return, as progress bars do it; in a
    terminal, shells move the cursor to the beginning of each new line as well."""
    return re.split(r"\r?\n\r*|\r", text.rstrip("\r").removesuffix("\n")) if text else []
