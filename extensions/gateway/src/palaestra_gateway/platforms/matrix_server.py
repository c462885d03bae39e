"""Requests to a Matrix homeserver with one account, whose failures become platform errors."""

from __future__ import annotations

import json
from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from nio import AsyncClient
from nio.responses import ErrorResponse

from palaestra_gateway.platforms.http_api import connection_failures, read_body
from palaestra_gateway.platforms.matrix_encryption import make_client
from palaestra_slots.core.errors import PlatformError, PlatformRefused, PlatformUnavailable
from palaestra_slots.core.printable import without_middle

SYNCED = "palaestra.synced"
"""The type of the account data that holds the sync token."""

_REQUEST_S = 30.0
_FOR_LATER = frozenset({"M_LIMIT_EXCEEDED", "M_UNKNOWN", "M_RESOURCE_LIMIT_EXCEEDED"})


class MatrixServer:
    """The homeserver at `url`. After `accepted`, a refused token counts as withdrawn: its owner can restore it, so
    messages wait."""

    def __init__(self, name: str, url: str, token: str, most_bytes: int) -> None:
        self.client: AsyncClient | None = None
        self.accepted = False
        self._name, self._url, self._token, self._most_bytes = name, url, token, most_bytes

    def open(self, folder: Path | None) -> AsyncClient:
        """Return the client for the next requests. It can encrypt if `folder` is set and the extra is installed."""
        self.client = make_client(self._url, folder, timeout_s=_REQUEST_S)
        self.client.access_token = self._token
        return self.client

    async def aclose(self) -> None:
        client, self.client, self.accepted = self.client, None, False
        if client is not None:
            await client.close()
            if client.store is not None:
                client.store.database.close()

    def running(self) -> AsyncClient:
        """Return the client. Raises `PlatformUnavailable` if it is not open."""
        if self.client is None:
            raise PlatformUnavailable(f"{self._name} is not connected")
        return self.client

    async def read_position(self) -> str | None:
        """Return the sync token up to which the bot has read, or None before the first start."""
        status, data = await self.request("GET", self._position_path())
        if status == 404:
            return None
        if status != 200:
            raise self._status_failure(status, data)
        return str(json.loads(data).get("since") or "") or None

    async def write_position(self, since: str) -> None:
        status, data = await self.request("PUT", self._position_path(), json.dumps({"since": since}).encode())
        if status != 200:
            raise self._status_failure(status, data)

    def _position_path(self) -> str:
        return f"/_matrix/client/v3/user/{quote(self.running().user_id)}/account_data/{SYNCED}"

    async def request(
        self, method: str, path: str, data: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Send a request; returns the status and the body of the answer. Raises `PlatformError`."""
        client = self.running()
        given = {"Authorization": f"Bearer {client.access_token}", **(headers or {})}
        async with self.failures():
            reply = await client.send(method, path, data, given, timeout=120.0)
            async with reply:
                return reply.status, await read_body(reply, self._most_bytes, f"{self._name}: the homeserver sends")

    async def upload(self, name: str, media_type: str, data: bytes) -> str:
        """Store a file; returns its `mxc` address."""
        path = f"/_matrix/media/v3/upload?filename={quote(name)}" if name else "/_matrix/media/v3/upload"
        status, reply = await self.request("POST", path, data, {"Content-Type": media_type})
        if status != 200:
            raise self._status_failure(status, reply)
        return str(json.loads(reply)["content_uri"])

    async def ask(self, request: Awaitable[Any]) -> Any:
        """Return the response to a request. Raises `PlatformError` if it fails."""
        async with self.failures():
            response = await request
        if isinstance(response, ErrorResponse):
            raise self.failure(response)
        return response

    def failures(self) -> AbstractAsyncContextManager[None]:
        """Turn connection errors in the block into `PlatformUnavailable`."""
        return connection_failures(f"{self._name}: {self._url} does not answer")

    def failure(self, error: ErrorResponse | object) -> PlatformError:
        """Return the error for a response that reports one."""
        code, message = getattr(error, "status_code", None), getattr(error, "message", str(error))
        problem = f"{self._name}: {self._url} answers {code}: {message}"
        withdrawn = code == "M_UNKNOWN_TOKEN" and self.accepted
        if withdrawn or code in _FOR_LATER or not isinstance(code, str) or not code.startswith("M_"):
            wait_ms = getattr(error, "retry_after_ms", None)
            return PlatformUnavailable(problem, wait_ms / 1000 if wait_ms else None)
        return PlatformRefused(problem)

    def _status_failure(self, status: int, data: bytes) -> PlatformError:
        said = without_middle(data.decode(errors="replace"), 200)
        problem = f"{self._name}: {self._url} answers HTTP {status}: {said}"
        return PlatformUnavailable(problem) if status == 429 or status >= 500 else PlatformRefused(problem)
