"""`palaestra serve executor`: slots and tools over HTTP, for programs that name trajectories by id.

The project's interface contract defines the routes: POST /execute, /release and /artifacts/{read,list,archive}; GET /,
/health and /status. They use one `ToolExecutor` and one pool.

Invariants: a trajectory without calls is released when its lease expires, and its later calls are refused (`Leases`); a
draining service refuses new calls and waits for the running ones.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel

from palaestra_contract.tools.executor import ToolExecutor
from palaestra_contract.tools.http_common import Handle, RequestRefused, application, read, running
from palaestra_contract.tools.payloads import ToolExecutorExecuteRequest, ToolExecutorReleaseRequest, ToolResultPayload
from palaestra_contract.tools.ttl import Leases
from palaestra_slots.core.clock import Clock
from palaestra_slots.core.errors import InfraError
from palaestra_slots.core.io.http_server import listening
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox import artifact_files, artifacts
from palaestra_slots.sandbox.artifacts import (
    ArtifactArchiveRequestPayload,
    ArtifactArchiveResponsePayload,
    ArtifactListRequestPayload,
    ArtifactListResponsePayload,
    ArtifactReadRequestPayload,
    ArtifactReadResponsePayload,
)
from palaestra_slots.sandbox.pool import SlotPool
from palaestra_slots.sandbox.slot import Slot

DEFAULT_LEASE_S = 1800.0
DEFAULT_DRAIN_S = 60.0

RequestT = TypeVar("RequestT", ArtifactReadRequestPayload, ArtifactListRequestPayload, ArtifactArchiveRequestPayload)


class ExecutorService:
    """The routes of the service. Callers must send `token`. If it is None, every program on this machine may call the
    service."""

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
        """Return the web application."""
        posts = {
            "/execute": self._execute,
            "/release": self._release,
            "/artifacts/read": self._artifact(ArtifactReadRequestPayload, artifacts.read, ArtifactReadResponsePayload),
            "/artifacts/list": self._artifact(
                ArtifactListRequestPayload, artifacts.list_entries, ArtifactListResponsePayload
            ),
            "/artifacts/archive": self._artifact(
                ArtifactArchiveRequestPayload, artifacts.archive, ArtifactArchiveResponsePayload
            ),
        }
        return application(self._token, {"/": self._root, "/health": self._health, "/status": self._status}, posts)

    @asynccontextmanager
    async def serving(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
        """Listen for as long as the block runs; yields the URL. Raises `ConfigError`."""
        sweeping = self.leases.sweep(self._executor.release_trajectory)
        server = listening(self.app(), host, port, token=self._token, handler_cancellation=True)
        async with running(sweeping), server as url:
            yield url

    async def drain(self, patience_s: float = DEFAULT_DRAIN_S) -> int:
        """Refuse new calls and wait for the running ones. Returns how many still ran at the time limit."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._idle.wait()
        return self._in_flight

    @contextlib.contextmanager
    def _counting_call(self, trajectory_id: str) -> Iterator[None]:
        """Count a call while the block runs. Raises `RequestRefused` while draining, and `StaleLease` for an expired
        trajectory."""
        if self._draining:
            raise RequestRefused(503, "the service is ending and accepts no more calls", "Draining")
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
            raise RequestRefused(503, "the service is ending", "Draining")
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
        with self._counting_call(request.trajectory_id):
            call = request.tool.to_tool_call()
            result = await self._executor.execute(request.trajectory_id, call, request.timeout_s)
        return ToolResultPayload.from_tool_result(result)

    async def _release(self, body: bytes) -> JSON:
        request = read(body, ToolExecutorReleaseRequest)
        self.leases.end(request.trajectory_id)
        await self._executor.release_trajectory(request.trajectory_id, request.reset_workspace)
        return {"status": "ok"}

    def _artifact(
        self,
        model: type[RequestT],
        work: Callable[[Slot | None, RequestT], Awaitable[BaseModel]],
        response: Callable[..., BaseModel],
    ) -> Handle:
        """Return a handler for artifact requests. The reply to a request that fails has the failure's HTTP status, and
        a body in the same format as a success."""

        async def handle(body: bytes) -> JSON:
            request = read(body, model)
            with self._counting_call(request.trajectory_id):
                try:
                    return await work(self._executor.slot_of(request.trajectory_id), request)
                except InfraError:
                    raise
                except (OSError, ValueError) as error:
                    failed = response(success=False, error=artifact_files.message(error)).model_dump()
                    detail = failed.pop("error")
                    raise RequestRefused(artifact_files.status_of(error), detail, detail, **failed) from None

        return handle
