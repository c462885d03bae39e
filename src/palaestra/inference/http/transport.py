"""The one HTTP client: JSON requests to a model server, pooled, bounded, retried, with errors that name the way out.

Not for what is in the bodies: engines encode and decode. Invariants: retries happen here and nowhere above; in each
lane at most so many requests are under way, the rest wait in the order they came; every failure is an engine error.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from yarl import URL

from palaestra.core.clock import Clock, SystemClock
from palaestra.core.config import sent_secret
from palaestra.core.errors import ConfigError, EngineRefused, EngineUnavailable
from palaestra.core.retry import AT_START, RETRIED_STATUSES, Passing, RetryPolicy, persist, retry_after_s
from palaestra.core.types import JSON
from palaestra.core.uncharged_time import take_turn
from palaestra.inference.config import APIServerConfig
from palaestra.inference.http.chat_completions import encode_json
from palaestra.inference.http.error_messages import FailedWithin, overloaded, refused, shown, unreachable

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
LOOK_TIMEOUT_S = 10.0
KEEP_ALIVE_S = 4.0
"""Shorter than the 5 s after which uvicorn, under most model servers, closes an idle connection: no races with it."""

_HEADERS = {"Content-Type": "application/json", "Accept": "application/json"}


Body: TypeAlias = Callable[[], bytes]
"""Makes the body of a request, anew for each try: while the model works nothing holds it."""

Reader: TypeAlias = Callable[[aiohttp.ClientResponse], Awaitable[bytes]]
"""Reads the body of one reply. `aiohttp.ClientError` from it is a broken connection, which is tried again; after
`FailedWithin` the reply counts as one of the status that it says."""


@dataclass(frozen=True, slots=True)
class Response:
    """What came back, whatever the status."""

    status: int
    body: bytes
    retry_after: str | None = None


class Transport:
    """A pool of connections to one model server. Opens on first use; `aclose` is idempotent.

    `lanes` maps a lane's name to how many of its requests may be under way at once. `timeout_s` is for one request with
    its retries, without the time that it waits for its turn here. `query` is added to every address. `model` is only
    for messages.
    """

    def __init__(
        self,
        *,
        model: str = "",
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
        lanes: Mapping[str, int] | None = None,
        timeout_s: float = 1200.0,
        retry: RetryPolicy | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        remembered: int = 1000,
    ) -> None:
        self.model = model
        self.timeout_s = timeout_s
        self.retry = retry or RetryPolicy()
        self.requests = self.retries = self.failures = self.in_flight = 0
        self.latencies_s: deque[float] = deque(maxlen=remembered)
        self._headers = {**_HEADERS, **(headers or {})}
        self._query = query
        self._lanes = {name: asyncio.Semaphore(limit) for name, limit in (lanes or {"train": 512}).items()}
        self._clock = clock or SystemClock()
        self._rng = rng or random.Random()
        self._session: aiohttp.ClientSession | None = None

    @classmethod
    def to(
        cls,
        config: APIServerConfig,
        *,
        clock: Clock | None = None,
        retry: RetryPolicy | None = None,
        rng: random.Random | None = None,
    ) -> Transport:
        """The pool for a server as it is configured, with the lanes `train` and `eval`. Raises `ConfigError`."""
        return cls(
            model=config.model_name,
            headers=_authorization(config),
            query=URL(config.base_url or "").query,
            lanes={"train": config.num_max_requests_at_once, "eval": config.num_requests_for_eval},
            timeout_s=config.timeout,
            retry=retry,
            clock=clock,
            rng=rng,
            remembered=config.rolling_buffer_length,
        )

    async def aclose(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def post_json(self, url: URL, payload: JSON, *, lane: str = "train", read: Reader | None = None) -> bytes:
        """The body of a successful reply to a POST, as `read` gives it.

        Raises `EngineUnavailable` when the retries are used up, `EngineRefused` or `ContextExceeded` at once when the
        server says no.
        """
        body = encode_json(payload)
        response = await self.request("POST", url, lambda: body, lane=lane, read=read)
        if not 200 <= response.status < 300:
            raise self.refusal(url, response.status, response.body)
        return response.body

    def refusal(self, url: URL, status: int, body: bytes) -> EngineRefused:
        """The error for a reply whose status trying again cannot change, counted as a failure."""
        self.failures += 1
        return refused(url, status, body, self.model)

    async def look(self, method: str, url: URL, body: Body | None = None) -> Response:
        """A request of the start, which says within seconds when there is no server. Raises `EngineUnavailable`."""
        return await self.request(method, url, body, retry=AT_START, timeout_s=LOOK_TIMEOUT_S)

    async def list_models(self, url: URL) -> Response:
        """A look at the server's list of models. Raises `EngineRefused` when the key is refused, as `look` besides."""
        response = await self.look("GET", url)
        if response.status in (401, 403):
            raise refused(url, response.status, response.body, self.model)
        return response

    async def request(
        self,
        method: str,
        url: URL,
        body: Body | None = None,
        *,
        lane: str = "train",
        retry: RetryPolicy | None = None,
        timeout_s: float | None = None,
        read: Reader | None = None,
    ) -> Response:
        """Send until there is a reply that trying again would not change. Raises `EngineUnavailable`."""
        whole_s = timeout_s or self.timeout_s

        async def send(tries: int, left_s: float) -> Response:
            waited_s = await self._take_turn(lane)
            try:
                response = await self._send(method, url, body, left_s, read)
            except (aiohttp.ClientError, OSError) as error:
                raise Passing(unreachable(url, error, self.model, tries, whole_s), waited_s=waited_s) from error
            finally:
                self._lanes[lane].release()
            if response.status in RETRIED_STATUSES:
                asked_s = retry_after_s(response.retry_after, self._clock.wall())
                raise Passing(overloaded(url, response.status, response.body, self.model, tries), asked_s, waited_s)
            return response

        def again(wait_s: float, problem: Exception) -> None:
            self.retries += 1
            logger.info("Trying %s again in %.1f s: %s", shown(url), wait_s, problem)

        try:
            return await persist(
                send, retry=retry or self.retry, timeout_s=whole_s, clock=self._clock, rng=self._rng, again=again
            )
        except EngineUnavailable:
            self.failures += 1
            raise

    async def _take_turn(self, lane: str) -> float:
        """Take a place in the lane, to be released; the seconds waited for it. Raises `ConfigError`."""
        if lane not in self._lanes:
            raise ConfigError(f"There is no split '{lane}'; there are {', '.join(self._lanes)}.")
        asked_s = self._clock.monotonic()
        await take_turn(self._lanes[lane])
        return self._clock.monotonic() - asked_s

    async def _send(self, method: str, url: URL, body: Body | None, timeout_s: float, read: Reader | None) -> Response:
        self.requests += 1
        self.in_flight += 1
        try:
            session = self._session or self._open()
            data = None if body is None else _SentOnce(body())
            timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
            started_s = self._clock.monotonic()
            async with session.request(
                method, url, params=self._query, data=data, timeout=timeout, allow_redirects=False
            ) as reply:
                try:
                    status, content = reply.status, await (read(reply) if read else reply.read())
                except FailedWithin as failed:
                    status, content = failed.status, failed.body
                self.latencies_s.append(self._clock.monotonic() - started_s)
                return Response(status, content, reply.headers.get("Retry-After"))
        finally:
            self.in_flight -= 1

    def _open(self) -> aiohttp.ClientSession:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, ttl_dns_cache=300),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self._headers,
        )
        return self._session


def _authorization(config: APIServerConfig) -> dict[str, str]:
    """The header for the key. Raises `ConfigError`."""
    key = sent_secret(config.api_key, "--openai.api_key")
    if key is None:
        return {}
    if config.base_url and URL(config.base_url).user is not None:
        raise ConfigError("--openai.base_url names a user and --openai.api_key is set too: leave out one of them.")
    return {"Authorization": f"Bearer {key}"}


class _SentOnce(aiohttp.Payload):
    """Bytes that are let go of when they have been written."""

    _autoclose = True

    def __init__(self, body: bytes) -> None:
        super().__init__(body)
        self._size = len(body)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return str(self._value, encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        body, self._value = self._value, b""
        self._consumed = True
        await writer.write(body)
