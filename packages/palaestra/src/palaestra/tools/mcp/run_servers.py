"""Several MCP servers: `MCPServers` opens all servers of a run together when the run starts. `ServersOnDemand` starts a
server of a session when one of the server's tools is first called.

Invariant: after `aclose`, no server that was started here still runs, even if opening failed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping

from palaestra.tools.mcp.mcp_config import MCPServerConfig, checked_names, toolset_of
from palaestra.tools.mcp.mcp_server import MCPServer, owner_of, recorded_tool
from palaestra.tools.registry.build import Installed
from palaestra.tools.registry.registry import ToolRegistry
from palaestra.tools.tool import FunctionTool, ToolSchema
from palaestra_slots.core.cancel_scope import Ending
from palaestra_slots.core.errors import InfraError, PalaestraError, ToolServerUnavailable
from palaestra_slots.core.types import JSON

logger = logging.getLogger(__name__)

HAND_ON = frozenset({"delegate_task", "execute_code"})
"""Tools that may call any other tool and therefore need every server."""


class MCPServers:
    """Servers by name. This class is an async context manager. If there are no servers, it does nothing and loads
    nothing.

    `without` lists disabled toolsets, whose servers need not run. With `forgiving`, a server that cannot be opened,
    even a required one, becomes an empty toolset that reports the reason.
    """

    def __init__(
        self,
        configs: Mapping[str, MCPServerConfig],
        *,
        without: Collection[str] = (),
        forgiving: bool = False,
    ) -> None:
        checked_names(configs)
        self._configs = {
            name: config for name, config in configs.items() if config.used and toolset_of(name) not in without
        }
        self._forgiving = forgiving
        self._servers: dict[str, MCPServer] = {}
        self._installed: tuple[Installed, ...] = ()

    async def __aenter__(self) -> MCPServers:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @classmethod
    def recorded(
        cls,
        configs: Mapping[str, MCPServerConfig],
        definitions: Iterable[Mapping[str, JSON]],
        *,
        without: Collection[str] = (),
    ) -> MCPServers:
        """Return the servers of a recording, with tools that have the schemas of `definitions`. No server is opened."""
        servers = cls(configs, without=without)
        known: dict[str, list[FunctionTool]] = {name: [] for name in servers._configs}
        for definition in definitions:
            schema = ToolSchema.from_dict(definition)
            owner = owner_of(schema.name, known)
            if owner is not None:
                known[owner].append(recorded_tool(owner, schema))
        servers._installed = tuple(_installed(name, tools) for name, tools in known.items())
        return servers

    async def open(self) -> None:
        """Open all servers concurrently and list their tools. Raises the error of a required server that fails, unless
        the servers are `forgiving`."""
        if self._installed:
            return
        self._servers = {name: MCPServer(name, config) for name, config in self._configs.items()}
        # All have opened or failed before an error is raised, so that `aclose`
        # leaves none behind that is still opening.
        ended = await asyncio.gather(*(server.open() for server in self._servers.values()), return_exceptions=True)
        problems = dict(zip(self._servers, ended, strict=True))
        for name, error in problems.items():
            forgiven = isinstance(error, PalaestraError) and (self._forgiving or not self._configs[name].required)
            if error is not None and not forgiven:
                await self.aclose()
                raise error
        self._installed = tuple(_installed(name, each.tools, problems[name]) for name, each in self._servers.items())

    async def aclose(self) -> None:
        """Close all servers. Idempotent."""
        servers, self._servers, self._installed = self._servers, {}, ()
        await asyncio.gather(*(server.aclose() for server in servers.values()))

    def tools(self) -> list[FunctionTool]:
        """Return the tools of all opened servers."""
        return [tool for server in self._servers.values() for tool in server.tools]

    def toolsets(self) -> list[str]:
        """Return the servers' toolsets, in the order of the settings."""
        return [toolset_of(name) for name in self._configs]

    def installed(self) -> tuple[Installed, ...]:
        """Return the servers' tools, with one `Installed` per server."""
        return self._installed


def _installed(name: str, tools: Iterable[FunctionTool], problem: BaseException | None = None) -> Installed:
    return Installed(toolset_of(name), f"MCP server {name}", tuple(tools), None if problem is None else str(problem))


class ServersOnDemand:
    """Servers by name. When a server starts, its tools are added to `registry` and stay there."""

    def __init__(self, configs: Mapping[str, MCPServerConfig], registry: ToolRegistry) -> None:
        self._required = {name: config.required for name, config in configs.items() if config.used}
        self._servers = {name: MCPServer(name, configs[name]) for name in self._required}
        self._registry = registry
        self._started: set[str] = set()
        self._starting = {name: asyncio.Lock() for name in self._required}
        self._ending = Ending()

    async def for_call(self, tool: str) -> None:
        """Start the servers that a call of this tool needs. Raises as `start` does."""
        if tool in HAND_ON:
            await self.start_all()
        elif (owner := owner_of(tool, self._servers)) is not None:
            await self.start(owner)

    async def start_all(self) -> None:
        """Start every server. Raises the error of the first required server that fails, or a `ConfigError` of any
        server. Infrastructure failures of other servers are logged."""
        ended = await asyncio.gather(*map(self.start, self._servers), return_exceptions=True)
        for name, error in zip(self._servers, ended, strict=True):
            if error is None:
                continue
            if self._required[name] or not isinstance(error, InfraError):
                raise error
            logger.warning("a server that is not required is left out: %s", error)

    async def start(self, name: str) -> None:
        """Start one server unless it was started before. Raises `ConfigError` and `ToolServerError`. After a failure,
        the next call tries again."""
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
