"""Following a session's output and end, so that somebody hears of them without asking.

Only sessions with a `Watch` have a follower; it waits at the slot and costs nothing while nothing happens. What it has
to tell is bounded: lines that match within `MATCH_EVERY_S` of each other are counted and told as one, and after
`MAX_MATCHES` of them the patterns are no longer looked for. Output that came faster than it could be followed is told
as such, never passed over in silence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from palaestra.core.clock import Clock
from palaestra.core.errors import InfraError
from palaestra.processes.output import readable
from palaestra.processes.session import FORGOTTEN, KILL_GRACE_S, EventKind, ProcessEvent, ProcessSession
from palaestra.sandbox.slot import ProcessStatus

logger = logging.getLogger(__name__)

MATCH_EVERY_S, MAX_MATCHES = 15.0, 8
MAX_TOLD_CHARS = 2000
"""How much output one event carries: its end."""

_PIECE_BYTES, _LONGEST_WAIT_S, _MAX_LINE_CHARS = 128 << 10, 30.0, 10_000

Tell = Callable[[ProcessEvent], None]


class Follower:
    """Follows one session to its end. `tell` gets its events; they are in the session's `notices` too."""

    def __init__(self, session: ProcessSession, tell: Tell, clock: Clock) -> None:
        self._session, self._tell, self._clock = session, tell, clock
        self._watch = session.watch
        self._cursor = session.followed
        self._rest = b""
        self._line = ""
        self._since = ""
        self._matches = self._unsaid = self._lost = 0
        self._told_match = float("-inf")

    async def run(self) -> None:
        """Until the process has ended, or its slot has; then there is nothing more to tell."""
        try:
            await self._follow()
        except ProcessLookupError:
            self._session.lose(FORGOTTEN)
            self._say(EventKind.LOST, self._session.lost)
        except InfraError as error:  # whoever asks for the session next hears of it as an error of the slot
            logger.debug("%s is no longer followed: %s", self._session.id, error)

    async def _follow(self) -> None:
        session, now = self._session, self._clock.monotonic()
        check = now + (self._watch.interval_s or 0.0)
        # A session that was found again has used up a part of its time.
        age_s = self._clock.wall() - session.started_at
        deadline = None if self._watch.lifetime_s is None else now + self._watch.lifetime_s - age_s
        while (status := await session.refresh()).running or self._cursor < status.output_total_bytes:
            ends = [end for end in (deadline, check if self._watch.interval_s else None) if end is not None]
            left = min([end - self._clock.monotonic() for end in ends], default=_LONGEST_WAIT_S)
            await self._read(max(0.0, min(left, _LONGEST_WAIT_S)) if status.running else 0.0)
            if self._watch.interval_s and self._clock.monotonic() >= check:
                check = self._clock.monotonic() + self._watch.interval_s
                self._progress()
            if deadline is not None and status.running and self._clock.monotonic() >= deadline:
                session.status = await session.reach().kill(KILL_GRACE_S)
                session.notices.append(f"killed after its time limit of {self._watch.lifetime_s:g}s")
        self._take("", last=True)
        self._ended(status)

    async def _read(self, wait_s: float) -> None:
        piece = await self._session.reach().read(self._cursor, max_bytes=_PIECE_BYTES, wait_s=wait_s)
        if piece.lost:
            self._rest, self._line = b"", ""
            self._lost += piece.lost
        data = self._rest + piece.data
        text, held = readable(data, more=True)
        self._cursor, self._rest = piece.end, data[len(data) - held :] if held else b""
        self._session.followed = piece.end - held
        self._take(text)

    def _take(self, text: str, last: bool = False) -> None:
        """Look through the lines that are complete now."""
        self._since = (self._since + text)[-MAX_TOLD_CHARS:]
        *lines, rest = (self._line + text).split("\n")
        self._line = "" if last else rest[-_MAX_LINE_CHARS:]
        for line in [*lines, rest] if last else lines:
            if self._matches < MAX_MATCHES and any(pattern in line for pattern in self._watch.patterns):
                self._match(line)

    def _match(self, line: str) -> None:
        now = self._clock.monotonic()
        if now - self._told_match < MATCH_EVERY_S:
            self._unsaid += 1
            return
        self._told_match = now
        self._matches += 1
        stop = " (the patterns are no longer looked for)" if self._matches == MAX_MATCHES else ""
        self._say(EventKind.MATCH, line.strip()[:MAX_TOLD_CHARS] + self._besides() + stop)

    def _besides(self) -> str:
        """What was not told one by one since the last match, once."""
        lines, lost, self._unsaid, self._lost = self._unsaid, self._lost, 0, 0
        parts = [f"{lines} more lines matched"] if lines else []
        if lost and self._watch.patterns:
            parts.append(f"{lost} bytes came too fast to be looked through")
        return f" ({', '.join(parts)})" if parts else ""

    def _progress(self) -> None:
        if self._since:
            self._say(EventKind.PROGRESS, self._since)
            self._since = ""

    def _ended(self, status: ProcessStatus) -> None:
        if besides := self._besides():
            self._say(EventKind.MATCH, besides.strip(" ()"))
        if self._watch.on_exit or self._watch.interval_s:
            self._say(EventKind.EXITED, self._since, status.exit_code)

    def _say(self, kind: EventKind, text: str, exit_code: int | None = None) -> None:
        session = self._session
        event = ProcessEvent(
            kind, session.id, session.task_id, session.session_key, text, exit_code, self._watch.address
        )
        session.notices.append(event.line())
        self._tell(event)
