"""One MCP server of a run, through as many sessions as it takes, and its tools as ours.

Its tools are listed once, when it is first opened: all rollouts of a run have the same. A session that has ended is
opened anew by the next call, once per call. Calls of one server run at the same time, over one session.

Invariant: no call is sent twice that the server may have carried out, unless the server says that doing it twice is the
same as once.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from palaestra.core.errors import ConfigError, ToolServerUnavailable
from palaestra.core.types import JSON
from palaestra.tools.arguments import compiled
from palaestra.tools.mcp.mcp_config import MCPServerConfig
from palaestra.tools.tool import FunctionTool, ToolMistake, ToolReply, ToolRun, ToolSchema

if TYPE_CHECKING:
    from mcp.types import CallToolResult
    from mcp.types import Tool as ServersTool

    from palaestra.tools.mcp.connection import Connection

TOOLSET_PREFIX = "mcp-"
_MOST_NAME = 64
"""Characters of a tool's name: what model servers take."""


def toolset_of(server: str) -> str:
    """The toolset that a server's tools make."""
    return TOOLSET_PREFIX + server


@dataclass(frozen=True, slots=True)
class _Known:
    """A tool as the server knows it; `again` when calling it twice is as good as once."""

    name: str
    again: bool


class MCPServer:
    """A server by its name in the settings. `open` it before its `tools` are asked for; `aclose` is idempotent."""

    def __init__(self, name: str, config: MCPServerConfig) -> None:
        self.name = name
        self._config = config
        self._connection: Connection | None = None
        self._opening = asyncio.Lock()
        self._closed = False
        self.tools: tuple[FunctionTool, ...] = ()

    async def open(self) -> None:
        """Open the first session and list the tools. Raises `ConfigError` and `ToolServerError`."""
        listed = await (await self._session()).list_tools()
        chosen = [tool for tool in listed if self._config.tools.has(tool.name)]
        self._check_choice([tool.name for tool in listed])
        names = tool_names(self.name, [tool.name for tool in chosen])
        self.tools = tuple(self._made(tool, name) for tool, name in zip(chosen, names, strict=True))

    async def aclose(self) -> None:
        """End the session. Calls that are under way raise `ToolServerUnavailable`."""
        self._closed = True
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.aclose()

    async def call(self, known: _Known, arguments: Mapping[str, JSON]) -> ToolReply:
        """Call a tool. Raises `ToolMistake` for what the model can mend, else `ToolServerError`."""
        from palaestra.tools.mcp.connection import NotCarriedOut, ServerSaid
        from palaestra.tools.mcp.result_text import bounded, reply_to

        most = self._config.max_reply_chars
        try:
            result = await self._called(known, arguments, NotCarriedOut)
        except ServerSaid as said:
            raise ToolMistake(bounded(str(said), most)) from None
        except TimeoutError:
            raise ToolMistake(f"The tool did not answer within {self._config.timeout:g} s.") from None
        return reply_to(result, most)

    async def _called(
        self, known: _Known, arguments: Mapping[str, JSON], not_carried_out: type[ToolServerUnavailable]
    ) -> CallToolResult:
        """The result of a call, sent once more over a new session where that does nothing twice."""
        connection = await self._session()
        try:
            return await connection.call(known.name, arguments)
        except ToolServerUnavailable as error:
            if not (known.again or isinstance(error, not_carried_out)):
                raise
        return await (await self._session(instead_of=connection)).call(known.name, arguments)

    async def _session(self, instead_of: Connection | None = None) -> Connection:
        """The live session, opened if there is none, or only one that somebody has just found ended."""
        from palaestra.tools.mcp.connection import Connection

        async with self._opening:
            if self._closed:
                raise ToolServerUnavailable(f"MCP server '{self.name}' is closed: the run has ended")
            connection = self._connection
            if connection is not None and (connection is instead_of or not connection.alive):
                self._connection = None
                await connection.aclose()
            if self._connection is None:
                self._connection = await Connection.opened(self.name, self._config.resolved())
            return self._connection

    def _made(self, tool: ServersTool, name: str) -> FunctionTool:
        hints = tool.annotations
        reads = bool(hints and hints.read_only_hint)
        known = _Known(tool.name, again=reads or bool(hints and hints.idempotent_hint))
        schema = schema_of(name, tool)
        problem = _problem(schema)

        async def run(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
            return await self.call(known, arguments)

        return FunctionTool(
            schema if problem is None else ToolSchema(name, schema.description),
            run,
            toolset_of(self.name),
            parallel_safe=reads or self._config.parallel,
            missing=lambda: problem,
            touches_world=True,
            world_session=toolset_of(self.name),
        )

    def _check_choice(self, names: Sequence[str]) -> None:
        for name in (*(self._config.tools.include or ()), *self._config.tools.exclude):
            if name not in names:
                raise ConfigError(
                    f"MCP server '{self.name}' has no tool {name!r}, which its settings name; it has "
                    f"{', '.join(names) or 'none'}"
                )


def recorded_tool(server: str, schema: ToolSchema) -> FunctionTool:
    """A tool of a server as a record tells of it: for runs whose world is that record."""

    async def run(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
        raise ToolServerUnavailable(f"MCP server '{server}' is not open: {schema.name} is known from a record alone")

    toolset = toolset_of(server)
    return FunctionTool(schema, run, toolset, touches_world=True, world_session=toolset)


def owner_of(tool: str, servers: Iterable[str]) -> str | None:
    """Which of the servers has a tool of this name, as `tool_names` makes them."""
    found = [server for server in servers if tool.startswith(f"mcp_{_plain(server)}_")]
    return max(found, key=len, default=None)


def schema_of(name: str, tool: ServersTool) -> ToolSchema:
    """The server's own schema of a tool, under the name that models see."""
    given = dict(tool.input_schema)
    parameters, required = given.pop("properties", None) or {}, given.pop("required", None) or ()
    given.pop("type", None)
    given.pop("$schema", None)  # of no use to a model; the keywords mean the same without it
    given.pop("title", None)
    return ToolSchema(name, (tool.description or tool.title or "").strip(), parameters, tuple(required), keywords=given)


def tool_names(server: str, tools: Sequence[str]) -> list[str]:
    """`mcp_<server>_<tool>` for each, with only the characters that model servers take, and no two alike.

    Where that would be too long or would not tell two apart, it ends in a part of the original name's hash.
    """
    plain = [f"mcp_{_plain(server)}_{_plain(tool)}" for tool in tools]
    return [
        name if len(name) <= _MOST_NAME and plain.count(name) == 1 else f"{name[: _MOST_NAME - 9]}_{_hash(tool)}"
        for name, tool in zip(plain, tools, strict=True)
    ]


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]", "_", text)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _problem(schema: ToolSchema) -> str | None:
    """Why no call could be checked against the schema, or None."""
    try:
        compiled(schema)
    except ConfigError as error:
        return str(error)
    return None
