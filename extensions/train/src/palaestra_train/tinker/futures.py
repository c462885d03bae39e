"""Keeps results that clients fetch later. Each accepted request has an id and, once it is done, one answer.

Invariants: a request that a client repeats gets the same id and runs once. A fetched answer stays for `KEPT_S` unless
memory runs short, so that a client can fetch it again after its connection broke. The number of waiting requests and
the bytes of requests and answers are limited.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from palaestra_slots.core.clock import Clock
from palaestra_slots.core.errors import DiskError, EngineError
from palaestra_slots.core.types import JSON
from palaestra_train.tinker.model import UserError

log = logging.getLogger(__name__)

KEPT_S, UNFETCHED_S = 60.0, 3600.0
"""Seconds that an answer is kept after it was fetched, and seconds that it is kept if no client fetches it."""

MOST_WAITING = 8192
"""The maximum number of requests without an answer."""

MOST_BYTES = 1 << 30
"""The maximum size in bytes of all kept answers, and also of all requests that wait or are being read."""


class Busy(Exception):
    """The server has reached a limit; the client sends the request again later."""


@dataclass(frozen=True, slots=True)
class FutureAnswer:
    body: bytes
    protobuf: bool = False

    @classmethod
    def of(cls, value: dict[str, JSON]) -> FutureAnswer:
        return cls(msgspec.json.encode(value))

    @classmethod
    def failure(cls, message: str, category: Literal["user", "server"]) -> FutureAnswer:
        """Return an answer for which the SDK raises `RequestFailedError` with this message and does not ask again."""
        return cls.of({"error": message, "category": category})


def failure_answer(error: Exception) -> FutureAnswer:
    """Return the answer for an accepted request that failed: the SDK shows it and does not send the request again."""
    if isinstance(error, UserError):
        return FutureAnswer.failure(str(error), "user")
    if isinstance(error, DiskError | EngineError):
        return FutureAnswer.failure(str(error), "server")
    log.error("a request failed", exc_info=error)
    return FutureAnswer.failure(f"{type(error).__name__}: {error}", "server")


@dataclass(slots=True, eq=False)
class PendingRequest:
    """One request. `sequences` are the ids of the sequences that a sampling request will have."""

    request_id: str
    session_id: str
    sequences: list[str] | None = None
    cancel: Callable[[], object] | None = None
    answer: FutureAnswer | None = None
    size: int = 0
    """The size of the request in bytes, which counts towards `MOST_BYTES` until the request is done."""
    done_s: float = 0.0
    fetched_s: float | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Futures:
    """All requests of a server, by id."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._all: dict[str, PendingRequest] = {}
        self._bytes = 0
        self._held = 0
        self._waiting = 0

    async def read(
        self, body: Callable[[], Awaitable[bytes]], size: int, submit: Callable[[bytes], PendingRequest]
    ) -> PendingRequest:
        """Submit a large request, whose `body` of `size` bytes is read only if there is room for it. Raises `Busy`."""
        if self._held and self._held + size > MOST_BYTES:
            raise Busy(f"requests of {self._held >> 20} MiB are waiting")
        self._held += size
        try:
            raw = await body()
            self._held += len(raw) - size
            size = len(raw)
            pending = submit(raw)
            if pending.answer is None and not pending.size:  # this is not a repeated request
                pending.size, size = size, 0
        finally:
            self._held -= size
        return pending

    def find(self, request_id: str) -> PendingRequest | None:
        return self._all.get(request_id)

    def add(self, request_id: str, session_id: str) -> PendingRequest:
        """Add a request. Raises `Busy` if a limit is reached."""
        if self._waiting >= MOST_WAITING:
            raise Busy(f"{self._waiting} requests are waiting")
        if self._bytes >= MOST_BYTES:
            self._drop_answers(lambda pending: pending.fetched_s is not None)
            if self._bytes >= MOST_BYTES:
                raise Busy(f"{self._bytes >> 20} MiB of results have not been fetched")
        pending = self._all[request_id] = PendingRequest(request_id, session_id)
        self._waiting += 1
        return pending

    def finish(self, pending: PendingRequest, answer: FutureAnswer) -> None:
        """Set the answer. Later answers are ignored."""
        if pending.answer is None:
            pending.answer, pending.cancel, pending.done_s = answer, None, self._clock.monotonic()
            self._bytes += len(answer.body)
            self._waiting -= 1
            self._held -= pending.size
            pending.size = 0
            pending.done.set()

    def fetched(self, pending: PendingRequest) -> None:
        pending.fetched_s = self._clock.monotonic()

    def sweep(self) -> None:
        """Drop expired answers."""
        now_s = self._clock.monotonic()
        self._drop_answers(
            lambda pending: (
                now_s - pending.done_s > UNFETCHED_S
                if pending.fetched_s is None
                else now_s - pending.fetched_s > KEPT_S
            )
        )

    def end_session(self, session_id: str) -> None:
        """Cancel and drop all requests of a session."""
        for pending in self._of(session_id):
            if pending.cancel is not None:
                pending.cancel()
            self.finish(pending, FutureAnswer.failure("The session has ended.", "user"))
        self._drop_answers(lambda pending: pending.session_id == session_id)

    def _of(self, session_id: str) -> Iterator[PendingRequest]:
        yield from [pending for pending in self._all.values() if pending.session_id == session_id]

    def _drop_answers(self, old: Callable[[PendingRequest], bool]) -> None:
        for pending in list(self._all.values()):
            if pending.answer is not None and old(pending):
                del self._all[pending.request_id]
                self._bytes -= len(pending.answer.body)
