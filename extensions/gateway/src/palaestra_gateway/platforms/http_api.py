"""Requests to the HTTP API of a chat service, whose failures become platform errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import aiohttp

from palaestra_slots.core.clock import SystemClock
from palaestra_slots.core.errors import PlatformError, PlatformRefused, PlatformUnavailable
from palaestra_slots.core.printable import without_middle
from palaestra_slots.core.retry import RETRIED_STATUSES, retry_after_s

_REQUEST_S = 120.0


class HttpApi:
    """The API at `url`, with these headers in each request. After `accepted`, a refused token counts as withdrawn: its
    owner can restore it, so messages wait."""

    def __init__(self, name: str, url: str, headers: Mapping[str, str]) -> None:
        self.url = url.rstrip("/")
        self.accepted = False
        self._name, self._headers = name, dict(headers)
        self._client: aiohttp.ClientSession | None = None

    @property
    def client(self) -> aiohttp.ClientSession:
        """The HTTP client. Raises `PlatformUnavailable` before `open`, and after `aclose`."""
        if self._client is None:
            raise PlatformUnavailable(f"{self._name} is not connected")
        return self._client

    def open(self) -> None:
        timeout = aiohttp.ClientTimeout(total=_REQUEST_S)
        self._client = aiohttp.ClientSession(
            headers=self._headers, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()
        )

    async def aclose(self) -> None:
        client, self._client, self.accepted = self._client, None, False
        if client is not None:
            await client.close()

    async def call(self, method: str, path: str, *, most_bytes: int = 4 << 20, **options: Any) -> bytes:
        """Send a request (`options` are those of aiohttp), and return the body of the answer. Raises `PlatformError`,
        also if the body has more than `most_bytes`."""
        url = path if path.startswith(("http://", "https://")) else f"{self.url}{path}"
        options.setdefault("allow_redirects", False)
        async with self.failures(), self.client.request(method, url, **options) as reply:
            body = await read_body(reply, most_bytes, f"{self._name}: an answer has")
            if reply.status >= 300:
                raise self.failure(reply.status, reply.headers, body)
            return body

    async def json(self, method: str, path: str, **options: Any) -> Any:
        """Send a request, and return the answer's JSON."""
        body = await self.call(method, path, **options)
        try:
            return json.loads(body)
        except ValueError:
            raise PlatformUnavailable(f"{self._name}: {self.url} answers without JSON: {body[:100]!r}") from None

    def failure(self, status: int, headers: Mapping[str, str], body: bytes) -> PlatformError:
        said = without_middle(body.decode(errors="replace"), 300)
        problem = f"{self._name}: {self.url} answers HTTP {status}: {said}"
        if status in RETRIED_STATUSES or status >= 500 or (status == 401 and self.accepted):
            wait = headers.get("Retry-After") or headers.get("X-Ratelimit-Reset") if status == 429 else None
            return PlatformUnavailable(problem, retry_after_s(wait, SystemClock().wall()))
        return PlatformRefused(problem)

    def failures(self) -> AbstractAsyncContextManager[None]:
        """Turn connection errors in the block into `PlatformUnavailable`."""
        return connection_failures(f"{self._name}: {self.url} cannot be reached")


@asynccontextmanager
async def connection_failures(problem: str) -> AsyncIterator[None]:
    """Turn connection errors in the block into `PlatformUnavailable`, whose message begins with `problem`."""
    try:
        yield
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        if isinstance(error, PlatformError):
            raise
        raise PlatformUnavailable(f"{problem}: {error!r:.200}") from error


async def read_body(reply: aiohttp.ClientResponse, most_bytes: int, problem: str) -> bytes:
    """Return the body of an answer. Raises `PlatformRefused`, whose message begins with `problem`, if it is longer than
    `most_bytes`."""
    body = bytearray()
    async for chunk in reply.content.iter_any():
        body += chunk
        if len(body) > most_bytes:
            raise PlatformRefused(f"{problem} more than {most_bytes >> 20} MB")
    return bytes(body)
