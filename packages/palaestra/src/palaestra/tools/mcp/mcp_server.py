"""One MCP server of a run and its tools, which are listed once, so that all rollouts of the run have the same tools.

Calls run concurrently over one session. If the session has ended, a call opens a new session, but only once. A result
becomes bounded text. Images, sound and binary files are replaced by their type and size.

Invariant: a call that the server may have carried out is not sent again, unless the server declares the tool read-only
or idempotent.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from palaestra.tools.arguments import compiled
from palaestra.tools.human.approval import Permit
from palaestra.tools.mcp.mcp_config import MCPServerConfig, toolset_of
from palaestra.tools.tool import FunctionTool, ToolMistake, ToolReply, ToolRun, ToolSchema
from palaestra_slots.core.errors import ConfigError, ToolServerUnavailable
from palaestra_slots.core.printable import one_line, without_middle
from palaestra_slots.core.types import JSON

if TYPE_CHECKING:
    from mcp.types import BlobResourceContents, CallToolResult, ContentBlock, TextResourceContents
    from mcp.types import Tool as ServersTool

    from palaestra.tools.mcp.mcp_connection import Connection

logger = logging.getLogger(__name__)

_MOST_NAME = 64
"""The maximum number of characters that model servers accept in a tool's name."""
_MOST_ASKED = 128
"""The maximum number of characters of a tool's name that a person is shown. Source: the specification of MCP."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A tool by the name that the server gives it. `again` is true if a second call has no further effect."""

    name: str
    again: bool


class MCPServer:
    """A server by its name in the settings. Call `open` before using `tools`; `aclose` is idempotent."""

    def __init__(self, name: str, config: MCPServerConfig) -> None:
        self.name = name
        self._config = config
        self._connection: Connection | None = None
        self._retired: list[Connection] = []
        self._opening = asyncio.Lock()
        self._closed = False
        self.tools: tuple[FunctionTool, ...] = ()

    async def open(self) -> None:
        """Open the first session and list the tools. Raises `ConfigError` and `ToolServerError`."""
        listed = await (await self._live_connection()).list_tools()
        chosen = [tool for tool in listed if self._config.tools.has(tool.name)]
        self._check_choice([tool.name for tool in listed])
        names = tool_names(self.name, [tool.name for tool in chosen])
        self.tools = tuple(self._function_tool(tool, name) for tool, name in zip(chosen, names, strict=True))

    async def aclose(self) -> None:
        """End the session. Running calls raise `ToolServerUnavailable`."""
        self._closed = True
        connection, self._connection = self._connection, None
        retired, self._retired = self._retired, []
        for each in (*retired, *([connection] if connection is not None else ())):
            await each.aclose()

    async def call(self, known: _Known, arguments: Mapping[str, JSON]) -> ToolReply:
        """Call a tool. Raises `ToolMistake` if the server answers with an error or does not answer in time, and
        `ToolServerError` for any other failure."""
        from palaestra.tools.mcp.mcp_connection import NotCarriedOut

        return await reply_to(self._called(known, arguments, NotCarriedOut), self._config)

    async def _called(
        self, known: _Known, arguments: Mapping[str, JSON], not_carried_out: type[ToolServerUnavailable]
    ) -> CallToolResult:
        """Return the result of a call. If the session ended during the call, the call is sent once more, provided that
        the server did not carry it out or that it may be repeated."""
        connection = await self._live_connection()
        try:
            return await connection.call(known.name, arguments)
        except ToolServerUnavailable as error:
            if not (known.again or isinstance(error, not_carried_out)):
                raise
        return await (await self._live_connection(instead_of=connection)).call(known.name, arguments)

    async def _live_connection(self, instead_of: Connection | None = None) -> Connection:
        """Return the live session, opened if necessary. `instead_of` is a session that has just ended and must not be
        returned."""
        from palaestra.tools.mcp.mcp_connection import Connection

        async with self._opening:
            if self._closed:
                raise ToolServerUnavailable(f"MCP server '{self.name}' is closed: the run has ended")
            connection = self._connection
            # Several calls may notice the end of one session: only the first of them finds it here and opens another.
            if connection is not None and (connection is instead_of or not connection.alive):
                self._connection = None
                if connection.alive:  # other calls may still get their replies from it
                    connection.retire()
                    self._retired.append(connection)
                else:
                    await connection.aclose()
            if self._connection is None:
                self._connection = await Connection.opened(self.name, self._config.resolved())
            return self._connection

    def _function_tool(self, tool: ServersTool, name: str) -> FunctionTool:
        hints = tool.annotations
        reads = bool(hints and hints.read_only_hint)
        known = _Known(tool.name, again=reads or bool(hints and hints.idempotent_hint))
        schema = schema_of(name, tool)
        problem = _problem(schema)
        if problem is not None:
            logger.warning(
                "MCP server '%s' leaves out the tool %r: %s", self.name, one_line(tool.name, _MOST_ASKED), problem
            )

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
            asks=self._permit(tool),
        )

    def _permit(self, tool: ServersTool) -> Permit | None:
        """Return what a person is asked before a call of the tool, or None. The server's hints are believed unless the
        settings say otherwise: whoever runs a server trusts it."""
        hints = tool.annotations
        reads = bool(hints and hints.read_only_hint and not hints.destructive_hint)
        if not self._config.asks(tool.name, reads=reads):
            return None
        return Permit(  # quoted, because a server's name for a tool could otherwise imitate another server
            f"the tool {tool.name[:_MOST_ASKED]!r} of the MCP server '{self.name}'",
            f"mcp:{self.name}:{self._config.target}:{tool.name}",
            f"mcp-server:{self.name}:{self._config.target}",
        )

    def _check_choice(self, names: Sequence[str]) -> None:
        choice = self._config.tools
        for name in (*(choice.include or ()), *choice.exclude, *choice.allow):
            if name not in names:
                raise ConfigError(
                    f"MCP server '{self.name}' has no tool {name!r}, which its settings name; it has "
                    f"{', '.join(names) or 'none'}"
                )


def recorded_tool(server: str, schema: ToolSchema) -> FunctionTool:
    """Return a tool of a server with a recorded schema, for runs that replay that recording."""

    async def run(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
        raise ToolServerUnavailable(f"MCP server '{server}' is not open: {schema.name} is known only from a recording")

    toolset = toolset_of(server)
    return FunctionTool(schema, run, toolset, touches_world=True, world_session=toolset)


def owner_of(tool: str, servers: Iterable[str]) -> str | None:
    """Return the server whose tool has this name (see `tool_names`), or None. If several servers fit, return the one
    with the longest name."""
    found = [server for server in servers if tool.startswith(f"mcp_{_as_identifier(server)}_")]
    return max(found, key=len, default=None)


def schema_of(name: str, tool: ServersTool) -> ToolSchema:
    """Return the schema that the server gives for a tool, under the name that models see."""
    given = dict(tool.input_schema)
    if "properties" not in given:  # such a schema allows every argument
        given.setdefault("additionalProperties", True)
    parameters, required = given.pop("properties", None) or {}, given.pop("required", None) or ()
    given.pop("type", None)
    given.pop("$schema", None)  # useless to a model, and the check finds the draft
    given.pop("title", None)
    return ToolSchema(name, (tool.description or tool.title or "").strip(), parameters, tuple(required), keywords=given)


def tool_names(server: str, tools: Sequence[str]) -> list[str]:
    """Return `mcp_<server>_<tool>` for each tool, unique and with only the characters that model servers accept.

    A name that would be too long or ambiguous ends in a part of the original name's hash.
    """
    plain = [f"mcp_{_as_identifier(server)}_{_as_identifier(tool)}" for tool in tools]
    return [
        name if len(name) <= _MOST_NAME and plain.count(name) == 1 else f"{name[: _MOST_NAME - 9]}_{_hash(tool)}"
        for name, tool in zip(plain, tools, strict=True)
    ]


def _as_identifier(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]", "_", text)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _problem(schema: ToolSchema) -> str | None:
    """Return the reason why the schema cannot check calls, or None."""
    try:
        compiled(schema)
    except ConfigError as error:
        return str(error)
    return None


async def reply_to(call: Awaitable[CallToolResult], limits: MCPServerConfig) -> ToolReply:
    """Await a call and return its reply. Raises `ToolMistake` if the server answers with an error or does not answer in
    time."""
    from palaestra.tools.mcp.mcp_connection import ServerSaid

    most = limits.max_reply_chars
    try:
        return _tool_reply(await call, most)
    except ServerSaid as said:
        raise ToolMistake(_bounded(str(said), most)) from None
    except TimeoutError:
        raise ToolMistake(f"The tool did not answer within {limits.timeout:g} s.") from None


def _tool_reply(result: CallToolResult, most_chars: int) -> dict[str, JSON]:
    """Return `{"output": …}`, with `structured` content unless the text repeats it, and `output_total_chars` if the
    text was cut.

    Raises `ToolMistake` with the same text for a result that is an error.
    """
    text = "\n".join(_block_text(block) for block in result.content)
    if result.is_error:
        raise ToolMistake(_bounded(text, most_chars) or "The tool reported an error without a message.")
    reply: dict[str, JSON] = {"output": _bounded(text, most_chars)}
    if len(text) > most_chars:
        reply["output_total_chars"] = len(text)
    structured = result.structured_content
    if structured is not None and not _says(text, structured):
        written = json.dumps(structured, ensure_ascii=False)
        fits = len(written) <= most_chars
        reply["structured"] = structured if fits else _bounded(written, most_chars)
    return reply


def _bounded(text: str, most_chars: int) -> str:
    """Return the text. If it is too long, return its beginning and end, with the number of missing characters between
    them."""
    return without_middle(text, most_chars, "\n... ({} characters left out) ...\n")


def _says(text: str, structured: JSON) -> bool:
    """Return whether the text repeats the structured content: servers send both for clients that support only one."""
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        said = text
    return bool(said == structured or (isinstance(structured, dict) and structured == {"result": said}))


def _block_text(block: ContentBlock) -> str:
    from mcp import types

    match block:
        case types.TextContent():
            return block.text
        case types.ImageContent() | types.AudioContent():
            return f"[{block.type}: {block.mime_type}, {_decoded_bytes(block.data)} bytes, not shown]"
        case types.ResourceLink():
            about = ", ".join(each for each in (block.name, block.mime_type, block.description) if each)
            return f"[resource {block.uri}: {about}]"
        case types.EmbeddedResource():
            return _shown_resource(block.resource)


def _shown_resource(resource: TextResourceContents | BlobResourceContents) -> str:
    from mcp import types

    if isinstance(resource, types.TextResourceContents):
        return f"[resource {resource.uri}]\n{resource.text}"
    kind = resource.mime_type or "binary"
    return f"[resource {resource.uri}: {kind}, {_decoded_bytes(resource.blob)} bytes, not shown]"


def _decoded_bytes(base64_text: str) -> int:
    return len(base64_text) * 3 // 4 - base64_text[-2:].count("=")
