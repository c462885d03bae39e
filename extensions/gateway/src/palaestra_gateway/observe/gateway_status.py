"""The status of a gateway: its platforms with their queues and last errors, and the number of sessions and jobs.

A running gateway stores in its mailbox which platforms it has connected to, and the last error of each; the queues are
counted in the mailbox. So `palaestra gateway status` needs no connection to the gateway, and also describes one that is
stopped. The last errors are the warnings that the gateway logs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from palaestra_gateway.mailbox import Mailbox
from palaestra_slots.core.clock import Clock

STORED_EVERY_S = 2.0
_NOTES, _STATUS = "", "status"
"""The notes that belong to no platform, and the name of the one with the status."""
_LOGGER = "palaestra_gateway"
_LONGEST_ERROR = 500


@dataclass(slots=True)
class PlatformStatus:
    """One platform. `connected` is whether the gateway has connected to it since its start; `error` is the last error,
    with its time in seconds since the epoch. `waiting` counts messages that wait for an answer, `unsent` answers that
    the platform has not accepted yet, and `refused` those that it refused."""

    connected: bool = False
    error: str = ""
    error_at: float = 0.0
    waiting: int = 0
    unsent: int = 0
    oldest_unsent_at: float = 0.0
    refused: int = 0


@dataclass(slots=True)
class GatewayStatus:
    """The status at the time `at`, in seconds since the epoch. `error` is the last error that belongs to no
    platform."""

    at: float = 0.0
    started_at: float = 0.0
    platforms: dict[str, PlatformStatus] = field(default_factory=dict)
    sessions: int = 0
    jobs: int = 0
    error: str = ""
    error_at: float = 0.0


class StatusKeeper:
    """Stores the status of the running gateway: the `platforms`, those that are `connected`, and their last errors."""

    def __init__(
        self, mailbox: Mailbox, platforms: Collection[str], connected: Callable[[], Collection[str]], clock: Clock
    ) -> None:
        self._notes = mailbox.notes(_NOTES)
        self._connected, self._clock = connected, clock
        self._status = GatewayStatus(platforms={name: PlatformStatus() for name in platforms})
        self._stored = ""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the last errors from the gateway's log while the block runs."""
        self._status.started_at = self._clock.wall()
        handler = _LastErrors(self._record_error)
        logging.getLogger(_LOGGER).addHandler(handler)
        try:
            yield
        finally:
            logging.getLogger(_LOGGER).removeHandler(handler)

    async def keep(self) -> None:
        """Store the status whenever it has changed."""
        while True:
            await self.store(self._connected())
            await self._clock.sleep(STORED_EVERY_S)

    async def store(self, connected: Collection[str]) -> None:
        for name, platform in self._status.platforms.items():
            platform.connected = name in connected
        text = json.dumps(asdict(self._status))
        if text != self._stored:
            await self._notes.write(_STATUS, text)
            self._stored = text

    def _record_error(self, text: str) -> None:
        """Record an error for the platform with whose name it begins."""
        name = next((name for name in self._status.platforms if text.startswith((f"{name}:", f"{name} "))), None)
        of = self._status if name is None else self._status.platforms[name]
        of.error, of.error_at = text[:_LONGEST_ERROR], self._clock.wall()


class _LastErrors(logging.Handler):
    """Passes warnings and errors to `take`, in the event loop in which it was made."""

    def __init__(self, take: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._take, self._loop = take, asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        reason = "" if record.exc_info is None or record.exc_info[1] is None else f": {record.exc_info[1]}"
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._take, record.getMessage() + reason)


async def read_status(mailbox: Mailbox, now: float) -> GatewayStatus:
    """Return the status of the gateway with this mailbox."""
    kept: dict[str, Any] = json.loads((await mailbox.notes(_NOTES).read()).get(_STATUS, "{}"))
    platforms = {name: PlatformStatus(**each) for name, each in kept.pop("platforms", {}).items()}
    status = GatewayStatus(**{**kept, "platforms": platforms, "at": now})

    def read_counts(connection: sqlite3.Connection) -> None:
        for name, number in connection.execute("select platform, count(*) from incoming where done = 0 group by 1"):
            platforms.setdefault(name, PlatformStatus()).waiting = number
        query = (
            "select platform, count(*), min(created_at) from outgoing where state in ('waiting', 'sending') group by 1"
        )
        for name, number, oldest in connection.execute(query):
            platform = platforms.setdefault(name, PlatformStatus())
            platform.unsent, platform.oldest_unsent_at = number, oldest
        query = "select platform, count(*) from outgoing where state = 'refused' group by 1"
        for name, number in connection.execute(query):
            platforms.setdefault(name, PlatformStatus()).refused = number
        (status.sessions,) = connection.execute("select count(*) from sessions where conversation != ''").fetchone()
        (status.jobs,) = connection.execute("select count(*) from jobs").fetchone()

    await mailbox.do(read_counts)
    return status


def status_lines(status: GatewayStatus, running: bool) -> Iterator[str]:
    """Yield the status as lines for a person."""
    age = f", for {_age(status.at - status.started_at)}" if running else ""
    yield f"The gateway is {'running' if running else 'not running'}{age}."
    yield f"{status.sessions} sessions, {status.jobs} scheduled jobs"
    for name, each in status.platforms.items():
        state = "connected" if each.connected and running else "not connected"
        queues = f"{each.waiting} messages to answer, {each.unsent} answers to send, {each.refused} refused"
        yield f"{name}: {state}, {queues}"
        if each.unsent:
            yield f"  the oldest unsent answer waits for {_age(status.at - each.oldest_unsent_at)}"
        if each.error:
            yield f"  last error, {_age(status.at - each.error_at)} ago: {each.error}"
    if status.error:
        yield f"Last error of the gateway itself, {_age(status.at - status.error_at)} ago: {status.error}"


def _age(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
