"""The words of this layer: a session, what is watched of it, and what is told of it. No I/O.

A *session* is one background process of a slot under an id that an agent can say. It belongs to a task; nobody else's
agent can look at it, write to it or end it. What a slot knows of the process (output, exit code, input) stays with the
slot; nothing of it is copied here, so a session costs the same whatever the process writes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from palaestra.sandbox.slot import Process, ProcessStatus

MAX_OUTPUT_CHARS = 200_000
"""How much of the end of an output `log` shows, in bytes, which are characters in plain text. Slots keep no less."""

FINISHED_TTL_SECONDS = 1800
"""How long after its end a process is remembered."""

MAX_PROCESSES = 64
"""How many processes of one task may run at a time."""

KILL_GRACE_S = 2.0
"""How long a process may take to end itself before it is killed."""

FORGOTTEN = "the slot has dropped what it knew of it, to make room for newer processes"


class EventKind(StrEnum):
    """What a watched session has to tell."""

    EXITED = "exited"
    MATCH = "match"
    PROGRESS = "progress"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class ProcessEvent:
    """One thing that a watched session told. `text` is the line that matched, or the output since the last event.

    `address` is what the session was started with: where a front door sends this.
    """

    kind: EventKind
    session_id: str
    task_id: str
    session_key: str
    text: str
    exit_code: int | None = None
    address: Mapping[str, str] = field(default_factory=dict)

    def line(self) -> str:
        """In one line, for a model to read."""
        code = "" if self.exit_code is None else f" with exit code {self.exit_code}"
        return f"{self.kind}{code}: {self.text.strip()}" if self.text.strip() else f"{self.kind}{code}"


@dataclass(frozen=True, slots=True)
class Watch:
    """What to tell of a session without being asked.

    `patterns`: lines of output that contain one of these. `interval_s`: what was written, so often. `on_exit`: its
    end. `lifetime_s`: nothing, but it is killed when it has run so long.
    """

    patterns: tuple[str, ...] = ()
    interval_s: float | None = None
    on_exit: bool = False
    lifetime_s: float | None = None
    address: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.patterns or self.on_exit) or self.interval_s is not None or self.lifetime_s is not None


@dataclass(slots=True, eq=False)
class ProcessSession:
    """One background process by its session id.

    `session_key` names the conversation it was started from; `started_at` is seconds since the epoch. `lost` says why
    it cannot be reached any more, and is empty while it can be. `status` is what was last heard of it, `followed` the
    cursor up to which a follower has looked through its output; `notices` keeps the newest of what that had to tell.
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
    recovered: bool = False
    followed: int = 0
    waiting: set[asyncio.Future[None]] = field(default_factory=set)
    notices: deque[str] = field(default_factory=lambda: deque(maxlen=8))

    # The contract's names for what was last heard of it.

    @property
    def pid(self) -> int:
        """Its pid in the slot."""
        return self.status.pid

    @property
    def exited(self) -> bool:
        """Whether it had ended."""
        return not self.status.running

    @property
    def exit_code(self) -> int | None:
        """How it had ended; None while it ran."""
        return self.status.exit_code

    @property
    def detached(self) -> bool:
        """Whether it was found again after a restart. Its output and input can be had all the same."""
        return self.recovered

    @property
    def pid_scope(self) -> str:
        """Whose pid it is: a process of a sandbox, never of the host."""
        return "sandbox"

    @property
    def notify_on_complete(self) -> bool:
        """Whether its end is told without being asked for."""
        return self.watch.on_exit

    @property
    def watcher_interval(self) -> float:
        """How often its output is told, in seconds; 0 for never."""
        return self.watch.interval_s or 0

    @property
    def watcher_platform(self) -> str:
        """Where that is told, like `watcher_chat_id` and `watcher_thread_id`: what its watch's address says."""
        return self.watch.address.get("platform", "")

    @property
    def watcher_chat_id(self) -> str:
        return self.watch.address.get("chat_id", "")

    @property
    def watcher_thread_id(self) -> str:
        return self.watch.address.get("thread_id", "")

    @property
    def running(self) -> bool:
        """Whether it ran when it was last heard of, and can be reached."""
        return self.status.running and not self.lost

    @property
    def ended_at(self) -> float | None:
        """When it ended, in seconds since the epoch; None while it runs."""
        return None if self.status.running else self.started_at + self.status.duration_s

    def reach(self) -> Process:
        """The process. Raises `SessionLost`."""
        if self.process is None:
            raise SessionLost(self.lost)
        return self.process

    async def refresh(self) -> ProcessStatus:
        """How the process is now. Raises `SessionLost`, and what the slot raises when it is gone itself."""
        try:
            self.status = await self.reach().status()
        except ProcessLookupError:
            raise self.lose(FORGOTTEN) from None
        return self.status

    def lose(self, reason: str) -> SessionLost:
        """It cannot be reached any more; the error to raise."""
        self.process, self.lost = None, reason
        return SessionLost(reason)


class SessionLost(LookupError):
    """A session whose process cannot be reached any more; the message says why. For callers to tell, not a bug."""
