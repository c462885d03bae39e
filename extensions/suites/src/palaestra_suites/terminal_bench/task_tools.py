"""The tools that an agent gets for a task's own MCP servers and skills.

The servers are known only once a rollout's services run, but the tools of a group are fixed before. So there is one
tool that lists what the servers offer, and one that calls it. A server that is a command runs in the agent's slot as
the agent's user, and a URL is reached from there, so a task's servers reach nothing that the agent could not. Whatever
goes wrong with them is a reply to the model: the agent may have ended them itself.

A skill is a folder with a `SKILL.md` (https://agentskills.io/specification) in the task's `skills_dir`, which its image
has. It is read in the slot.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import posixpath
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from palaestra.tools import parameters
from palaestra.tools.mcp.mcp_config import MCPServerConfig
from palaestra.tools.tool import FunctionTool, ToolMistake, ToolReply, ToolRun, ToolSchema
from palaestra_slots.core.cancel_scope import end_tasks
from palaestra_slots.core.errors import SandboxError, TaskError, ToolServerError
from palaestra_slots.core.extras import install_command
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import Process, Slot
from palaestra_slots.sandbox.slot_port import slot_port
from palaestra_suites.terminal_bench.terminal_task import TaskAgent, TaskServer
from palaestra_toolsets.tools.skills import DOCUMENT, MAX_BYTES, read_header

if TYPE_CHECKING:
    from mcp.client import Transport
    from mcp.client._transport import TransportStreams
    from mcp.types import CallToolResult, Tool

    from palaestra.tools.mcp.mcp_connection import Connection, OpenTransport

TOOLSET = "task"
_MOST_SKILLS = 200
_MOST_LINE = 4 << 20
"""The maximum number of bytes of one message of a server that is a command."""


def task_tools(agent: TaskAgent) -> list[FunctionTool]:
    """Return the tools for the servers and skills that a task declares; empty if it declares none. Raises `TaskError`
    if they need an extra that is not installed."""
    tools = []
    if agent.servers:
        if importlib.util.find_spec("mcp") is None:
            raise TaskError(f"its MCP servers need the extra 'mcp': {install_command('mcp')}")
        tools += _server_tools({server.name: server for server in agent.servers})
    if agent.skills_dir:
        tools.append(_skill_tool(agent.skills_dir))
    return tools


def _server_tools(servers: Mapping[str, TaskServer]) -> list[FunctionTool]:
    names = list(servers)
    server = parameters.choice("The name of the server.", names)

    async def list_tools(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
        sessions = run.state(_Sessions)
        asked = [arguments["server"]] if arguments.get("server") else names
        return {"servers": {name: await sessions.tools(servers[name], run) for name in asked}}

    async def call_tool(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
        given = arguments.get("arguments") or {}
        return await run.state(_Sessions).call(servers[arguments["server"]], arguments["tool"], given, run)

    return [
        FunctionTool(
            ToolSchema(
                "mcp_list_tools",
                f"List the tools of this task's MCP servers, with the schemas of their arguments. The servers are "
                f"{', '.join(names)}. Call a tool with mcp_call_tool.",
                {"server": server},
                (),
            ),
            list_tools,
            TOOLSET,
        ),
        FunctionTool(
            ToolSchema(
                "mcp_call_tool",
                "Call a tool of one of this task's MCP servers, as mcp_list_tools lists it.",
                {
                    "server": server,
                    "tool": parameters.text("The name of the tool."),
                    "arguments": {"type": "object", "description": "The arguments of the tool."},
                },
                ("server", "tool"),
            ),
            call_tool,
            TOOLSET,
        ),
    ]


class _Sessions:
    """The sessions of one rollout with its task's servers. The first call of a server opens its session, and a call
    after the session's end opens another."""

    def __init__(self) -> None:
        self._open: dict[str, Connection] = {}
        self._processes: dict[str, Process] = {}
        self._opening = asyncio.Lock()

    async def tools(self, server: TaskServer, run: ToolRun) -> JSON:
        try:
            listed = await (await self._live_connection(server, run)).list_tools()
        except ToolServerError as error:
            return {"error": str(error)}
        return [_tool_fields(tool) for tool in listed]

    async def call(self, server: TaskServer, tool: str, arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
        from palaestra.tools.mcp.mcp_server import reply_to

        async def call_session() -> CallToolResult:
            return await (await self._live_connection(server, run)).call(tool, arguments)

        limits = _session_config(run)
        try:
            return await reply_to(call_session(), limits)
        except ToolServerError as error:
            raise ToolMistake(str(error)[: limits.max_reply_chars]) from None

    async def aclose(self) -> None:
        """End all sessions."""
        sessions, self._open = self._open, {}
        await asyncio.gather(*(session.aclose() for session in sessions.values()))

    async def _live_connection(self, server: TaskServer, run: ToolRun) -> Connection:
        from palaestra.tools.mcp.mcp_connection import Connection

        async with self._opening:
            session = self._open.get(server.name)
            if session is not None and session.alive and await self._runs(server.name):
                return session
            if session is not None:
                await session.aclose()
            opener = _opener(server, await run.slot(), self._processes)
            self._open[server.name] = await Connection.opened(server.name, _session_config(run, server), opener)
            return self._open[server.name]

    async def _runs(self, name: str) -> bool:
        """Return whether the process of a server that is a command still runs; True for any other server."""
        process = self._processes.get(name)
        try:
            return process is None or (await process.status()).running
        except (ProcessLookupError, SandboxError):
            return False


def _session_config(run: ToolRun, server: TaskServer | None = None) -> MCPServerConfig:
    """Return the limits of a session. The server's address only names it in errors: `_opener` opens the way to it."""
    where = (server.url or server.command[0]) if server is not None else "http://task"
    return MCPServerConfig(url=where, timeout=run.timeout_s)


def _tool_fields(tool: Tool) -> dict[str, JSON]:
    return {"name": tool.name, "description": tool.description or "", "arguments": tool.input_schema}


def _opener(server: TaskServer, slot: Slot, processes: dict[str, Process]) -> OpenTransport:
    """Return what opens the way to a server. The process of a server that is a command is put into `processes`."""

    async def opened(stack: contextlib.AsyncExitStack) -> Transport:
        if server.url is None:
            process = await slot.spawn(server.command, cwd="/", stderr=True, hold=True)
            processes[server.name] = process
            return _streams(process)
        address = urlsplit(server.url)
        port = address.port or (443 if address.scheme == "https" else 80)
        path = await stack.enter_async_context(slot_port(slot, address.hostname or "", port))
        return await _http(stack, server, str(path))

    return opened


async def _http(stack: contextlib.AsyncExitStack, server: TaskServer, socket: str) -> Transport:
    """Return the way to a server's URL through a Unix socket. No proxy and no redirect to another address is used."""
    import httpx2
    from mcp.client.sse import sse_client
    from mcp.client.streamable_http import streamable_http_client

    def client(
        headers: dict[str, str] | None = None, timeout: httpx2.Timeout | None = None, auth: httpx2.Auth | None = None
    ) -> httpx2.AsyncClient:
        way = httpx2.AsyncHTTPTransport(uds=socket)
        return httpx2.AsyncClient(transport=way, headers=headers, timeout=timeout or 300, auth=auth, trust_env=False)

    assert server.url is not None
    if server.sse:
        return sse_client(server.url, headers=dict(server.headers), httpx_client_factory=client)
    http = await stack.enter_async_context(client(dict(server.headers)))
    return streamable_http_client(server.url, http_client=http)


@asynccontextmanager
async def _streams(process: Process) -> AsyncIterator[TransportStreams]:
    """Yield the streams of messages of a server's process: one JSON document per line of its input and output. Its
    standard error is dropped, and it ends with the block. Source: the transport `stdio` of the MCP specification."""
    import anyio
    from mcp.shared.message import SessionMessage

    received, reading = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    writing, to_send = anyio.create_memory_object_stream[SessionMessage](0)

    async def receive() -> None:
        with contextlib.suppress(SandboxError, OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            async with received:
                async for line in _output_lines(process):
                    await received.send(_parse_message(line))

    async def send() -> None:
        with contextlib.suppress(SandboxError, OSError):
            async for message in to_send:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                await process.write(text.encode() + b"\n")

    async def drop_errors() -> None:
        with contextlib.suppress(SandboxError, OSError):
            async for _ in process.output(stderr=True):  # or the server would wait once they are many
                pass

    tasks = [asyncio.create_task(each()) for each in (receive, send, drop_errors)]
    try:
        yield reading, writing
    finally:
        await end_tasks(*tasks)
        for stream in (received, reading, writing, to_send):
            stream.close()
        with contextlib.suppress(ProcessLookupError, SandboxError):
            await asyncio.shield(process.forget())


async def _output_lines(process: Process) -> AsyncIterator[bytes]:
    """Yield the lines of a process's output, until it ends or a line is too long."""
    buffer = b""
    async for piece in process.output():
        *lines, buffer = (buffer + piece.data).split(b"\n")
        for line in lines:
            if line.strip():
                yield line
        if len(buffer) > _MOST_LINE:
            return


def _parse_message(line: bytes) -> Exception | JSON:
    """Return the message in a line, or the error of a line that is not one."""
    from mcp.shared.message import SessionMessage
    from mcp.types import jsonrpc_message_adapter

    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as error:
        return error


def _skill_tool(folder: str) -> FunctionTool:
    async def skill(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
        slot, name = await run.slot(), str(arguments.get("name") or "")
        if not name:
            return {"skills": await _skills(slot, folder)}
        if "/" in name or name.startswith("."):
            raise ToolMistake("The name of a skill has no slash and does not begin with a dot.")
        path = posixpath.join(folder, name, DOCUMENT)
        try:
            text = (await slot.read_bytes(path, max_bytes=MAX_BYTES)).decode(errors="replace")
        except OSError:
            raise ToolMistake(f"There is no skill {name!r}.", skills=await _skills(slot, folder)) from None
        return {"folder": posixpath.dirname(path), "content": text}

    return FunctionTool(
        ToolSchema(
            "skill",
            f"Read a skill: a document that describes how to do a task. Without a name, list this task's skills. Their "
            f"files are in {folder}.",
            {"name": parameters.text("The name of the skill.")},
            (),
        ),
        skill,
        TOOLSET,
    )


async def _skills(slot: Slot, folder: str) -> list[dict[str, JSON]]:
    """Return the names and descriptions of the skills in a slot's folder."""
    try:
        entries = await slot.list_dir(folder)
    except OSError:
        return []
    found = []
    for name in sorted(posixpath.basename(entry.path) for entry in entries)[:_MOST_SKILLS]:
        with contextlib.suppress(OSError, ToolMistake):
            data = await slot.read_bytes(posixpath.join(folder, name, DOCUMENT), max_bytes=MAX_BYTES)
            found.append({"name": name, "description": read_header(data.decode(errors="replace"))[1]})
    return found
