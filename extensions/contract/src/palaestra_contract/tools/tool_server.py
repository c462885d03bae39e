"""`palaestra serve tools`: a server that runs external tools for executors on other machines.

It serves the tools of its registry that need no slot. These are tools marked `external`, such as a search whose key
only this machine has or the tools of MCP servers, and subclasses of `Tool` that only define `execute`. Each trajectory
has its own tool state, which is dropped at its release or after `lease_s` seconds without calls. The routes are `POST
/execute`, which the project's interface contract defines, and `GET /`, `GET /health`, `GET /tools` and `POST /release`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from aiohttp import web

from palaestra.tools.builtin.terminal import clamp_timeout
from palaestra.tools.call_text import result_of
from palaestra.tools.registry.registry import ToolRegistry
from palaestra.tools.runtime.runtime import ToolRuntime
from palaestra.tools.tool import FunctionTool, States, Tool
from palaestra_contract.tools.http_common import RequestRefused, application, read, running
from palaestra_contract.tools.payloads import (
    ToolExecutorReleaseRequest,
    ToolServerExecuteRequest,
    ToolServerResultPayload,
)
from palaestra_contract.tools.ttl import Leases
from palaestra_slots.core.clock import Clock
from palaestra_slots.core.io.http_server import listening
from palaestra_slots.core.types import JSON

DEFAULT_TIMEOUT_S = 120.0
DEFAULT_LEASE_S = 3600.0


class ToolServer:
    """Runs external tools by trajectory. Callers must send `token`. If it is None, every program on this machine may
    call the server."""

    def __init__(
        self,
        tools: ToolRegistry,
        *,
        token: str | None = None,
        lease_s: float = DEFAULT_LEASE_S,
        clock: Clock | None = None,
    ) -> None:
        self._shared = States()
        self.tools = ToolRegistry((tool for tool in tools.tools() if _needs_no_slot(tool)), shared=self._shared)
        self.leases = Leases(lease_s, clock)
        self._token = token
        self._runtimes: dict[str, ToolRuntime] = {}
        self.total_requests = self.total_errors = 0

    def app(self) -> web.Application:
        """Return the web application."""
        gets = {"/": self._root, "/health": self._health, "/tools": self._definitions}
        return application(self._token, gets, {"/execute": self._execute, "/release": self._release})

    @asynccontextmanager
    async def serving(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
        """Listen for as long as the block runs; yields the URL. Raises `ConfigError`."""
        sweeping = self.leases.sweep(self.release)
        server = listening(self.app(), host, port, token=self._token, handler_cancellation=True)
        async with running(sweeping), server as url:
            try:
                yield url
            finally:
                await self.aclose()

    async def aclose(self) -> None:
        """Close the tool state of all trajectories. Idempotent."""
        while self._runtimes:
            await self.release(next(iter(self._runtimes)))
        await self._shared.aclose()

    async def execute(self, request: ToolServerExecuteRequest) -> ToolServerResultPayload:
        """Run one call. A mistake or failure of the tool is returned as a result.

        Raises `RequestRefused` for a tool that is not served, and `PalaestraError`.
        """
        self.total_requests += 1
        name = self.tools.known_as(request.tool.name)
        if self.tools.get(name) is None:
            known = ", ".join(self.tools.list_tools()) or "none"
            raise RequestRefused(404, f"this server has no tool {request.tool.name!r}; it has {known}", "UnknownTool")
        limit_s = DEFAULT_TIMEOUT_S if request.timeout_s is None else clamp_timeout(request.timeout_s)
        if request.trajectory_id is None:
            async with ToolRuntime(self.tools) as tools:
                outcome = await tools.call(name, request.tool.arguments, timeout_s=limit_s)
        else:
            with self.leases.in_use(request.trajectory_id):
                tools = self._runtimes.get(request.trajectory_id) or ToolRuntime(
                    self.tools, task_id=request.trajectory_id
                )
                self._runtimes[request.trajectory_id] = tools
                outcome = await tools.call(name, request.tool.arguments, timeout_s=limit_s)
        result = result_of(outcome.reply, request.tool.to_tool_call().uniq_id)
        self.total_errors += not result.success
        reply = outcome.reply if isinstance(outcome.reply, str) else dict(outcome.reply)
        return ToolServerResultPayload(**result.to_dict(), reply=reply)

    async def release(self, trajectory_id: str) -> None:
        """Close and drop a trajectory's tool state."""
        tools = self._runtimes.pop(trajectory_id, None)
        if tools is not None:
            await tools.aclose()

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

    async def _definitions(self, body: bytes) -> JSON:
        return {"tools": self.tools.definitions()}

    async def _execute(self, body: bytes) -> JSON:
        return await self.execute(read(body, ToolServerExecuteRequest))

    async def _release(self, body: bytes) -> JSON:
        trajectory_id = read(body, ToolExecutorReleaseRequest).trajectory_id
        self.leases.end(trajectory_id)
        await self.release(trajectory_id)
        return {"status": "ok"}


def _needs_no_slot(tool: Tool) -> bool:
    return tool.schema.external or type(tool).run is Tool.run  # `execute` gets no slot


def external(tool: FunctionTool) -> FunctionTool:
    """Return the same tool, marked as needing no slot."""
    return replace(tool, schema=replace(tool.schema, external=True))
