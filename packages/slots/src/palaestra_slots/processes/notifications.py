"""Reports events in watched sessions: matching lines, new output, and the end or loss of the process.

A session with a `Watch` has a follower, which waits for output from the slot. A line that matches within
`MATCH_EVERY_S` seconds of the last reported match is only counted. The next report about matches includes the number
of such lines and the number of bytes that came too fast to be searched. The search ends after `MAX_MATCHES` reported
matches.

Reports appear in the registry's `Notifications` and in the next reply about the session, unless that is the reply to a
write. Every queue is bounded, and adding to a queue never waits for a reader; when a queue is full, its oldest entry is
dropped.
"""

from __future__ import annotations

import contextlib
import logging
import queue
from collections.abc import Callable

from palaestra_slots.core.clock import Clock
from palaestra_slots.core.errors import InfraError
from palaestra_slots.processes.process_output import readable
from palaestra_slots.processes.session import FORGOTTEN, KILL_GRACE_S, ProcessSession, Reply
from palaestra_slots.sandbox.slot import ProcessStatus

logger = logging.getLogger(__name__)

MATCH_EVERY_S, MAX_MATCHES = 15.0, 8
MAX_REPORTED_CHARS = 2000
"""The maximum number of characters of output in one event."""

MAX_NOTIFICATIONS = 256

_PIECE_BYTES, _LONGEST_WAIT_S, _MAX_LINE_CHARS = 128 << 10, 30.0, 10_000


_WORDS = {"completion": "exited", "watch_match": "match"}
"""The words for these event types in a session's notices. Other types keep their names."""


class Notifications:
    """Queues of reports, which any thread may read. The reports have the format that Atropos and Hermes use.

    `completion_queue` has one object for each event of a watched session. `pending_watchers` has one object for each
    session whose output is reported at intervals; the object stays until a reader removes it.

    An event has `type` (completion, watch_match, progress, lost), `session_id`, `task_id`, `session_key`, `command`,
    `output` and `exit_code`. A watcher has `session_id`, `check_interval` (seconds), `session_key` and
    `notify_on_complete`. Both have the entries of the watch's address, such as `platform` and `chat_id`.
    """

    def __init__(self) -> None:
        self.completion_queue: queue.Queue[Reply] = queue.Queue(MAX_NOTIFICATIONS)
        self.pending_watchers: list[Reply] = []

    def add_event(self, session: ProcessSession, kind: str, text: str, exit_code: int | None) -> None:
        """Add a report to `completion_queue`. Its `type` is `kind`, and its `output` is `text`."""
        item: Reply = {"type": kind, "session_id": session.id, "task_id": session.task_id}
        item |= {"session_key": session.session_key, "command": session.command}
        item |= {"output": text, "exit_code": exit_code, **session.watch.address}
        while True:
            try:
                return self.completion_queue.put_nowait(item)
            except queue.Full:
                with contextlib.suppress(queue.Empty):  # a reader may have made room
                    self.completion_queue.get_nowait()

    def add_watcher(self, session: ProcessSession) -> None:
        """Add a running session to `pending_watchers` if its watch has an interval."""
        watch = session.watch
        if watch.interval_s is None:
            return
        item: Reply = {"session_id": session.id, "check_interval": watch.interval_s}
        item |= {"session_key": session.session_key, "notify_on_complete": watch.on_exit, **watch.address}
        self.pending_watchers.append(item)
        del self.pending_watchers[:-MAX_NOTIFICATIONS]


class Follower:
    """Follows one session to its end, and calls `report` with the session and the type, text and exit code of each
    report."""

    def __init__(
        self, session: ProcessSession, report: Callable[[ProcessSession, str, str, int | None], None], clock: Clock
    ) -> None:
        self._session, self._report, self._clock = session, report, clock
        self._watch = session.watch
        self._cursor = session.followed
        self._rest = b""
        self._line = ""
        self._since = ""
        self._matches = self._unreported = self._lost = 0
        self._last_match = float("-inf")

    async def run(self) -> None:
        """Follow the session until its process has ended or cannot be reached any more."""
        try:
            await self._follow()
        except ProcessLookupError:
            self._session.lose(FORGOTTEN)
            self._add_notice("lost", self._session.lost)
        except InfraError as error:  # the next request about the session raises it
            logger.debug("%s is no longer followed: %s", self._session.id, error)

    async def _follow(self) -> None:
        session, now = self._session, self._clock.monotonic()
        check = now + (self._watch.interval_s or 0.0)
        age_s = self._clock.wall() - session.started_at  # a session recovered after a restart has used up some time
        deadline = None if self._watch.lifetime_s is None else now + self._watch.lifetime_s - age_s
        # After the end of the process, there may be output that was not read yet.
        while (status := await session.refresh()).running or self._cursor < status.output_total_bytes:
            ends = [end for end in (deadline, check if self._watch.interval_s else None) if end is not None]
            left = min([end - self._clock.monotonic() for end in ends], default=_LONGEST_WAIT_S)
            await self._read_output(max(0.0, min(left, _LONGEST_WAIT_S)) if status.running else 0.0)
            if self._watch.interval_s and self._clock.monotonic() >= check:
                check = self._clock.monotonic() + self._watch.interval_s
                self._add_progress()
            if deadline is not None and status.running and self._clock.monotonic() >= deadline:
                session.status = await session.reach().kill(KILL_GRACE_S)
                session.notices.add(f"killed after its time limit of {self._watch.lifetime_s:g}s")
        self._search_lines("", last=True)
        self._report_exit(status)

    async def _read_output(self, wait_s: float) -> None:
        piece = await self._session.reach().read(self._cursor, max_bytes=_PIECE_BYTES, wait_s=wait_s)
        if piece.lost:
            # What comes after a gap does not continue the line before it.
            self._rest, self._line = b"", ""
            self._lost += piece.lost
        data = self._rest + piece.data
        text, held = readable(data, more=True)
        self._cursor, self._rest = piece.end, data[len(data) - held :] if held else b""
        self._session.followed = piece.end - held
        self._search_lines(text)

    def _search_lines(self, text: str, last: bool = False) -> None:
        """Search the lines that `text` completes. If `last` is true, also search the unfinished line."""
        self._since = (self._since + text)[-MAX_REPORTED_CHARS:]
        *lines, rest = (self._line + text).split("\n")
        # A program may never end its line.
        self._line = "" if last else rest[-_MAX_LINE_CHARS:]
        for line in [*lines, rest] if last else lines:
            if self._matches < MAX_MATCHES and any(pattern in line for pattern in self._watch.patterns):
                self._match(line)

    def _match(self, line: str) -> None:
        now = self._clock.monotonic()
        if now - self._last_match < MATCH_EVERY_S:
            self._unreported += 1
            return
        self._last_match = now
        self._matches += 1
        stop = " (the search for the patterns has ended)" if self._matches == MAX_MATCHES else ""
        self._add_notice("watch_match", line.strip()[:MAX_REPORTED_CHARS] + self._not_reported() + stop)

    def _not_reported(self) -> str:
        """Describe the matches and the lost bytes that have not been reported, and reset their counts."""
        lines, lost, self._unreported, self._lost = self._unreported, self._lost, 0, 0
        parts = [f"{lines} more lines matched"] if lines else []
        if lost and self._watch.patterns:
            parts.append(f"{lost} bytes came too fast to be searched")
        return f" ({', '.join(parts)})" if parts else ""

    def _add_progress(self) -> None:
        if self._since:
            self._add_notice("progress", self._since)
            self._since = ""

    def _report_exit(self, status: ProcessStatus) -> None:
        if counted := self._not_reported():
            self._add_notice("watch_match", counted.strip(" ()"))
        if self._watch.on_exit or self._watch.interval_s:
            self._add_notice("completion", self._since, status.exit_code)

    def _add_notice(self, kind: str, text: str, exit_code: int | None = None) -> None:
        code = "" if exit_code is None else f" with exit code {exit_code}"
        notice = f"{_WORDS.get(kind, kind)}{code}"
        self._session.notices.add(f"{notice}: {text.strip()}" if text.strip() else notice)
        self._report(self._session, kind, text, exit_code)
