"""The sessions of a training server's clients. A session lives as long as its client sends heartbeats."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from palaestra_slots.core.clock import Clock
from palaestra_slots.core.types import JSON


class NotFound(Exception):
    """The session, model, sampler or request does not exist on this server, or no longer exists."""


@dataclass(slots=True, eq=False)
class ClientSession:
    """One client. `heard_s` is the monotonic time of its last heartbeat; `models` and `samplers` are the ids of what it
    has created."""

    session_id: str
    heard_s: float
    user_metadata: dict[str, JSON] | None = None
    display_name: str | None = None
    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)


class ClientSessions:
    """All sessions of a server. `open` has them by id, oldest first."""

    def __init__(self, clock: Clock) -> None:
        self.open: dict[str, ClientSession] = {}
        self._clock = clock

    def create(self, user_metadata: dict[str, JSON] | None, display_name: str | None) -> ClientSession:
        session = ClientSession(str(uuid.uuid4()), self._clock.monotonic(), user_metadata, display_name)
        self.open[session.session_id] = session
        return session

    def find(self, session_id: str) -> ClientSession:
        """Return the session; looking it up counts as a heartbeat. Raises `NotFound`."""
        found = self.open.get(session_id)
        if found is None:
            raise NotFound(f"There is no session {session_id}: it has ended, or the server was restarted.")
        found.heard_s = self._clock.monotonic()
        return found

    def silent_for_s(self, session: ClientSession) -> float:
        """Return the seconds since the session's last heartbeat."""
        return self._clock.monotonic() - session.heard_s
