"""The tool server: runs external tools for executors, beside their slots. `palaestra serve tools`.

It serves the tools of its registry that are marked `external`: those that need no slot, such as a search with a key
that only this machine has, or the tools of MCP servers. Each trajectory has its own tool state, dropped when it made no
call for a while. The contract's `POST /execute`, with `GET /health`, `GET /tools` and `POST /release` besides.

Invariant: a call over a socket and one in this process (`answer`) take the same way, and their bodies are the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from aiohttp import web

from palaestra.core.clock import Clock
from palaestra.core.errors import PalaestraError
from palaestra.core.io.http_server import listening
from palaestra.core.types import JSON
from palaestra.sandbox.slot import Slot
from palaestra.tools.builtin.terminal import clamp_timeout
from palaestra.tools.call_text import ToolResult, result_of
from palaestra.tools.registry.registry import ToolRegistry
from palaestra.tools.runtime.runtime import ToolRuntime
from palaestra.tools.runtime.scoped_objects import States
from palaestra.tools.runtime.ttl import Leases
from palaestra.tools.serving.http_common import (
    MOST_REQUEST_BYTES,
    Answer,
    Handle,
    Refusal,
    beside,
    read,
    respond,
    route,
)
from palaestra.tools.serving.payloads import (
    ToolExecutorReleaseRequest,
    ToolServerExecuteRequest,
    ToolServerResultPayload,
)
from palaestra.tools.tool import FunctionTool, ToolMistake

DEFAULT_TIMEOUT_S = 120.0
DEFAULT_LEASE_S = 3600.0


class ToolServer:
    """External tools by trajectory. `token` is what callers must send, None lets everybody call.

    `shared` is what the tools of all trajectories have together; without one the server has and closes its own.
    """

    def __init__(
        self,
        tools: ToolRegistry,
        *,
        token: str | None = None,
        lease_s: float = DEFAULT_LEASE_S,
        clock: Clock | None = None,
        shared: States | None = None,
    ) -> None:
        served = [tool for name in tools.list_tools() if (tool := tools.get(name)) is not None and tool.schema.external]
        self._own = States()
        self.tools = ToolRegistry(served, shared=self._own if shared is None else shared)
        self.leases = Leases(lease_s, clock)
        self._token = token
        self._states: dict[str, ToolRuntime] = {}
        self._posts: dict[str, Handle] = {"/execute": self._execute, "/release": self._release}
        self.total_requests = self.total_errors = 0

    async def answer(self, path: str, body: bytes, authorization: str | None = None) -> Answer:
        """What a POST comes to: `/execute` or `/release`."""
        return await respond(self._posts[path], body, self._token, authorization)

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application(client_max_size=MOST_REQUEST_BYTES)
        route(app, "GET", "/", self._token, self._root)
        route(app, "GET", "/health", self._token, self._health)
        route(app, "GET", "/tools", self._token, self._tools)
        for path, handle in self._posts.items():
            route(app, "POST", path, self._token, handle)
        return app

    @asynccontextmanager
    async def serving(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
        """Listen for as long as the block runs; gives the URL. Raises `ConfigError`."""
        sweeping = self.leases.sweep(self.release)
        async with beside(sweeping), listening(self.app(), host, port, handler_cancellation=True) as url:
            try:
                yield url
            finally:
                await self.aclose()

    async def aclose(self) -> None:
        """Close what the tools of all trajectories hold. Idempotent."""
        while self._states:
            await self.release(next(iter(self._states)))
        await self._own.aclose()

    async def execute(self, request: ToolServerExecuteRequest) -> ToolServerResultPayload:
        """Run one call. Mistakes and failures of a tool are results.

        Raises `Refusal` for a tool that is not served, and `InfraError`.
        """
        self.total_requests += 1
        name, call = self.tools.known_as(request.tool.name), request.tool.to_tool_call()
        if self.tools.get(name) is None:
            there_are = ", ".join(self.tools.list_tools()) or "none"
            raise Refusal(404, f"this server has no tool {request.tool.name!r}; it has {there_are}", "UnknownTool")
        if request.trajectory_id is None:
            alone = _bound(self.tools, "")
            try:
                payload = await self._called(alone, name, call.arguments, request.timeout_s)
            finally:
                await alone.aclose()
        else:
            with self.leases.in_use(request.trajectory_id):
                bound = self._states.setdefault(request.trajectory_id, _bound(self.tools, request.trajectory_id))
                payload = await self._called(bound, name, call.arguments, request.timeout_s)
        payload.uniq_id = call.uniq_id
        self.total_errors += not payload.success
        return payload

    async def release(self, trajectory_id: str) -> None:
        """Close and drop a trajectory's tool state."""
        bound = self._states.pop(trajectory_id, None)
        if bound is not None:
            await bound.aclose()

    async def _called(
        self, bound: ToolRuntime, name: str, arguments: dict[str, JSON], timeout_s: float | None
    ) -> ToolServerResultPayload:
        limit = DEFAULT_TIMEOUT_S if timeout_s is None else clamp_timeout(timeout_s)
        try:
            async with asyncio.timeout(limit):
                reply = (await bound.call(name, arguments, timeout_s=limit)).reply
        except PalaestraError:
            raise
        except TimeoutError:
            reply = {"error": f"The tool did not answer within {limit:g} s."}
        result: ToolResult = result_of(reply)
        plain = reply if isinstance(reply, str) else dict(reply)
        return ToolServerResultPayload(**result.to_dict(), reply=plain)

    async def _root(self, body: bytes) -> JSON:
        return {"message": "Palaestra tool server", "server": "palaestra"}

    async def _health(self, body: bytes) -> JSON:
        return {
            "status": "ok",
            "tools": len(self.tools.list_tools()),
            "trajectories": len(self.leases),
            "total_requests": self.total_requests,
            "total_errors": self.total_errors,
        }

    async def _tools(self, body: bytes) -> JSON:
        return {"tools": self.tools.definitions()}

    async def _execute(self, body: bytes) -> JSON:
        return await self.execute(read(body, ToolServerExecuteRequest))

    async def _release(self, body: bytes) -> JSON:
        trajectory_id = read(body, ToolExecutorReleaseRequest).trajectory_id
        self.leases.end(trajectory_id)
        await self.release(trajectory_id)
        return {"status": "ok"}


def external(tool: FunctionTool) -> FunctionTool:
    """The same tool, marked as one that needs no slot."""
    return replace(tool, schema=replace(tool.schema, external=True))


def _bound(tools: ToolRegistry, trajectory_id: str) -> ToolRuntime:
    return ToolRuntime(tools, _no_slot, trajectory_id, timeout_s=DEFAULT_TIMEOUT_S)


async def _no_slot() -> Slot:
    raise ToolMistake("This tool works in a sandbox slot, which a tool server has none of.")
