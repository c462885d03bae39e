"""The executor service: slots and tools for whoever names trajectories over HTTP. `palaestra serve executor`.

The contract's routes over one `ToolExecutor` and one pool: POST /execute, /release, /artifacts/{read,list,archive}; GET
/, /health, /status. Not for deciding what a call may do: the executor's configuration does.

Invariants: a trajectory whose client is gone is released after its lease, and is refused from then on, so that nobody
takes a fresh workspace for the old one; what is draining takes no new trajectory and finishes what it has taken.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel

from palaestra.core.clock import Clock
from palaestra.core.errors import InfraError
from palaestra.core.io.http_server import listening
from palaestra.core.types import JSON
from palaestra.sandbox.pool import SlotPool
from palaestra.sandbox.slot import Slot
from palaestra.tools.runtime.executor import ToolExecutor
from palaestra.tools.runtime.ttl import Leases
from palaestra.tools.serving import artifacts
from palaestra.tools.serving.http_common import MOST_REQUEST_BYTES, Refusal, beside, read, route
from palaestra.tools.serving.payloads import (
    ArtifactArchiveRequestPayload,
    ArtifactArchiveResponsePayload,
    ArtifactListRequestPayload,
    ArtifactListResponsePayload,
    ArtifactReadRequestPayload,
    ArtifactReadResponsePayload,
    ToolExecutorExecuteRequest,
    ToolExecutorReleaseRequest,
    ToolResultPayload,
)

DEFAULT_LEASE_S = 1800.0
DEFAULT_DRAIN_S = 60.0


RequestT = TypeVar("RequestT", ArtifactReadRequestPayload, ArtifactListRequestPayload, ArtifactArchiveRequestPayload)


class ExecutorService:
    """The routes. `token` is what callers must send, None lets everybody call."""

    def __init__(
        self,
        executor: ToolExecutor,
        pool: SlotPool,
        *,
        token: str | None = None,
        lease_s: float = DEFAULT_LEASE_S,
        clock: Clock | None = None,
    ) -> None:
        self.leases = Leases(lease_s, clock)
        self._executor = executor
        self._pool = pool
        self._token = token
        self._draining = False
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def app(self) -> web.Application:
        """The web application."""
        app = web.Application(client_max_size=MOST_REQUEST_BYTES)
        for path, answer in {"/": self._root, "/health": self._health, "/status": self._status}.items():
            route(app, "GET", path, self._token, answer)
        for path, handle in {
            "/execute": self._execute,
            "/release": self._release,
            "/artifacts/read": self._read,
            "/artifacts/list": self._list,
            "/artifacts/archive": self._archive,
        }.items():
            route(app, "POST", path, self._token, handle)
        return app

    @asynccontextmanager
    async def serving(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
        """Listen for as long as the block runs; gives the URL. Raises `ConfigError`."""
        sweeping = self.leases.sweep(self._executor.release_trajectory)
        async with beside(sweeping), listening(self.app(), host, port, handler_cancellation=True) as url:
            yield url

    async def drain(self, patience_s: float = DEFAULT_DRAIN_S) -> int:
        """Refuse new calls and wait for those under way: how many were left when the patience was over."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._idle.wait()
        return self._in_flight

    @contextlib.contextmanager
    def _call(self, trajectory_id: str) -> Iterator[None]:
        """For the time of a call. Raises `Refusal` while draining, `StaleLease` for an expired trajectory."""
        if self._draining:
            raise Refusal(503, "the service is ending and takes no more calls", "Draining")
        with self.leases.in_use(trajectory_id):
            self._in_flight += 1
            self._idle.clear()
            try:
                yield
            finally:
                self._in_flight -= 1
                if not self._in_flight:
                    self._idle.set()

    async def _root(self, body: bytes) -> JSON:
        return {"message": "Palaestra tool executor", "server": "palaestra"}

    async def _health(self, body: bytes) -> JSON:
        if self._draining:
            raise Refusal(503, "the service is ending", "Draining")
        return {"status": "ok"}

    async def _status(self, body: bytes) -> JSON:
        stats = self._executor.stats
        return {
            "queue_size": self._executor.queue_size(),
            "total_requests": stats.total_requests,
            "total_errors": stats.total_errors,
            "trajectories": len(self.leases),
            "lease_s": self.leases.ttl_s,
            "draining": self._draining,
            "pool": dict(self._pool.get_stats()),
        }

    async def _execute(self, body: bytes) -> JSON:
        request = read(body, ToolExecutorExecuteRequest)
        with self._call(request.trajectory_id):
            call = request.tool.to_tool_call()
            result = await self._executor.execute(request.trajectory_id, call, request.timeout_s)
        return ToolResultPayload.from_tool_result(result)

    async def _release(self, body: bytes) -> JSON:
        request = read(body, ToolExecutorReleaseRequest)
        self.leases.end(request.trajectory_id)
        await self._executor.release_trajectory(request.trajectory_id, request.reset_workspace)
        return {"status": "ok"}

    async def _read(self, body: bytes) -> JSON:
        request = read(body, ArtifactReadRequestPayload)
        return await self._told(request, artifacts.read, ArtifactReadResponsePayload)

    async def _list(self, body: bytes) -> JSON:
        request = read(body, ArtifactListRequestPayload)
        return await self._told(request, artifacts.entries, ArtifactListResponsePayload)

    async def _archive(self, body: bytes) -> JSON:
        request = read(body, ArtifactArchiveRequestPayload)
        return await self._told(request, artifacts.archive, ArtifactArchiveResponsePayload)

    async def _told(
        self,
        request: RequestT,
        work: Callable[[Slot | None, RequestT], Awaitable[BaseModel]],
        response: Callable[..., BaseModel],
    ) -> JSON:
        """The artifact, or a refusal with its status and the contract's body."""
        with self._call(request.trajectory_id):
            try:
                return await work(self._executor.slot_of(request.trajectory_id), request)
            except InfraError:
                raise
            except (OSError, ValueError) as error:
                failed = response(success=False, error=artifacts.said(error)).model_dump()
                detail = failed.pop("error")
                raise Refusal(artifacts.status_of(error), detail, detail, **failed) from None
