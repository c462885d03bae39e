"""The MCP servers of a session: each is started when a call first wants one of its tools, and ends with the session.

Not for a run, whose servers are opened together at its start (`servers.py`). Invariant: after `aclose` no server that
was started here is left, nor one that was being started.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from palaestra.core.cancel_scope import Ending
from palaestra.core.errors import InfraError, ToolServerUnavailable
from palaestra.tools.mcp.mcp_config import MCPServerConfig
from palaestra.tools.mcp.mcp_server import MCPServer, owner_of
from palaestra.tools.registry.registry import ToolRegistry

logger = logging.getLogger(__name__)

HAND_ON = frozenset({"delegate_task", "execute_code"})
"""Tools that give away all the others: with them every server is wanted."""


class ServersOnDemand:
    """Servers by name. The tools of one that has started are in `registry`, and stay there."""

    def __init__(self, configs: Mapping[str, MCPServerConfig], registry: ToolRegistry) -> None:
        self._required = {name: config.required for name, config in configs.items() if config.used}
        self._servers = {name: MCPServer(name, configs[name]) for name in self._required}
        self._registry = registry
        self._started: set[str] = set()
        self._starting = {name: asyncio.Lock() for name in self._required}
        self._ending = Ending()

    async def for_call(self, tool: str) -> None:
        """Start what a call of this tool needs, and has not been started yet. Raises as `start` does."""
        if tool in HAND_ON:
            await self.all()
        elif (owner := owner_of(tool, self._servers)) is not None:
            await self.start(owner)

    async def all(self) -> None:
        """Start every server. Raises what the first required one raised; of the others that failed, the log tells."""
        ended = await asyncio.gather(*map(self.start, self._servers), return_exceptions=True)
        for name, error in zip(self._servers, ended, strict=True):
            if error is None:
                continue
            if self._required[name] or not isinstance(error, InfraError):
                raise error
            logger.warning("going on without %s", error)

    async def start(self, name: str) -> None:
        """Start one, if it has not been. Raises `ConfigError` and `ToolServerError`; the next call tries again."""
        closed = ToolServerUnavailable(f"The session was closed while MCP server '{name}' was being started")
        async with self._ending.block(closed), self._starting[name]:
            if name in self._started:
                return
            server = self._servers[name]
            await server.open()
            for tool in server.tools:
                self._registry.register(tool)
            self._started.add(name)

    async def aclose(self) -> None:
        """End all servers. Idempotent."""
        await self._ending.end()
        await asyncio.gather(*(server.aclose() for server in self._servers.values()))
