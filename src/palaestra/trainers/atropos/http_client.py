"""Requests to a trajectory server: JSON, packed where that pays, each sent once.

Not for trying again: whether a request may be repeated depends on what it says, which `feed` knows.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from typing import TypeVar

import aiohttp
import msgspec

from palaestra.core.clock import Clock, SystemClock
from palaestra.core.errors import TrainerRefused, TrainerUnavailable
from palaestra.core.retry import retry_after_s
from palaestra.core.types import JSON
from palaestra.inference.http.transport import encode_json

PACKED_BYTES = 1024
"""From this size on a body is sent with gzip, as the original environments do."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server said when it was `asked` at an address. `retry_s` is when it wants to be asked again, in
    seconds."""

    asked: str
    status: int
    body: JSON
    retry_s: float | None = None

    def read(self, shape: type[T]) -> T:
        """The body as a `shape`. Raises `TrainerRefused` for what no trajectory server says."""
        try:
            return msgspec.convert(self.body, shape, strict=False)
        except msgspec.ValidationError as error:
            raise TrainerRefused(
                f"{self.asked} does not answer as a trajectory server does ({error}): {str(self.body)[:200]!r}. Say "
                "where the trainer's server is with --env.rollout_server_url"
            ) from None

    @property
    def detail(self) -> str:
        """The reason, for a message."""
        told = self.body.get("detail") if isinstance(self.body, dict) else self.body
        return f"HTTP {self.status}: {str(told)[:500]}"


class TrajectoryClient:
    """A connection to the server at `url`. Opens on first use; `aclose` is idempotent.

    `answered_s` is the monotonic time of the last answer, whatever it said.
    """

    def __init__(self, url: str, *, timeout_s: float = 120.0, clock: Clock | None = None) -> None:
        self.url = url.rstrip("/")
        self._clock = clock or SystemClock()
        self.answered_s = self._clock.monotonic()
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=10.0)
        self._session: aiohttp.ClientSession | None = None

    async def aclose(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def ask(self, method: str, path: str, payload: JSON = None) -> Answer:
        """One request. Raises `TrainerUnavailable` where no answer came; nobody knows then whether it arrived."""
        body = None if payload is None else encode_json(payload)
        headers = {"Content-Type": "application/json"}
        if body is not None and len(body) >= PACKED_BYTES:
            body = gzip.compress(body, compresslevel=1)
            headers["Content-Encoding"] = "gzip"
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=self._timeout, cookie_jar=aiohttp.DummyCookieJar())
        try:
            async with self._session.request(method, self.url + path, data=body, headers=headers) as reply:
                content = await reply.read()
                self.answered_s = self._clock.monotonic()
                asked_s = retry_after_s(reply.headers.get("Retry-After"), self._clock.wall())
                return Answer(self.url + path, reply.status, _read(content), asked_s)
        except (aiohttp.ClientError, OSError) as error:  # a time-out is an OSError too
            what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise TrainerUnavailable(f"the trajectory server {self.url} does not answer {path}: {what}") from None


def _read(content: bytes) -> JSON:
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return content.decode(errors="replace")
