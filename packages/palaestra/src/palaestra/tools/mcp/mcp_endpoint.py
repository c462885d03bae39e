"""Serves tools to one MCP client: the messages of the Model Context Protocol, without the HTTP connections.

    status, reply = await McpTools(definitions, call).answer(body)

Format: the protocol's transport "Streamable HTTP" (modelcontextprotocol.io), both of 2025-06-18 and of 2026-07-28. A
request of the second kind names its version in `_meta`, and no handshake comes before it. Only the part for a server
without sessions is supported. The server never sends messages unasked: it answers requests with JSON, and notifications
with status 202.

Invariant: every message of a client is answered; only errors of `call` are raised.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from importlib.metadata import version
from typing import TypeAlias

import msgspec

from palaestra.tools.tool import ToolOutcome
from palaestra_slots.core.types import JSON

VERSIONS = ("2025-06-18", "2025-11-25", "2025-03-26", "2024-11-05")
"""The protocol versions in which these messages are the same. A request for any other version gets the first."""

STATELESS_VERSIONS = ("2026-07-28",)
"""The protocol versions whose every request names its version."""

_VERSION_KEY = "io.modelcontextprotocol/protocolVersion"
_SERVER_KEY = "io.modelcontextprotocol/serverInfo"
_WRONG_VERSION = -32022
_UNCACHED = {"ttlMs": 0, "cacheScope": "private"}
_PARSE_ERROR, _INVALID_REQUEST, _METHOD_NOT_FOUND, _INVALID_PARAMS = -32700, -32600, -32601, -32602

CallTool: TypeAlias = Callable[[str, str], Awaitable[ToolOutcome]]
"""Runs one call, given the tool's name and its arguments as JSON text."""


class McpTools:
    """Answers the messages of a client that uses these tools. `definitions` are OpenAI function schemas."""

    def __init__(self, definitions: Iterable[Mapping[str, JSON]], call: CallTool) -> None:
        functions = [each.get("function", each) for each in definitions]
        self._tools = {each["name"]: _mcp_tool(each) for each in functions}
        self._call = call

    async def answer(self, body: bytes) -> tuple[int, JSON]:
        """Return the HTTP status and the JSON of the reply, which is None if the reply is empty. Raises the errors of
        `call`."""
        try:
            message = msgspec.json.decode(body)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            return 400, _rpc_error(None, _PARSE_ERROR, f"The body is not JSON: {error}.")
        if not isinstance(message, dict):
            return 400, _rpc_error(None, _INVALID_REQUEST, "The body is not a single message.")
        method, number = message.get("method"), message.get("id")
        if not isinstance(method, str) or number is None:
            return 202, None  # a notification, or the reply to a request that was never sent
        if isinstance(number, bool) or not isinstance(number, str | int):
            return 400, _rpc_error(None, _INVALID_REQUEST, "The id of a request must be a string or an integer.")
        params = message.get("params")
        params = params if isinstance(params, dict) else {}
        meta = params.get("_meta")
        meta = meta if isinstance(meta, dict) else {}
        # Clients of the stateless protocol send their version with every request, in place of `initialize`.
        if method == "server/discover" or _VERSION_KEY in meta:
            return await self._stateless(number, method, params, meta.get(_VERSION_KEY))
        match method:
            case "initialize":
                return 200, _rpc_result(number, _initialized(params.get("protocolVersion")))
            case "ping":
                return 200, _rpc_result(number, {})
            case "tools/list":
                return 200, _rpc_result(number, {"tools": list(self._tools.values())})
            case "tools/call":
                return 200, await self._called(number, params)
        return 200, _rpc_error(number, _METHOD_NOT_FOUND, f"There is no method {method[:100]!r} here.")

    async def _stateless(
        self, number: str | int, method: str, params: Mapping[str, JSON], asked: JSON
    ) -> tuple[int, JSON]:
        """Answer a request that names its own version."""
        if asked not in STATELESS_VERSIONS:
            data = {"supported": [*STATELESS_VERSIONS, *VERSIONS], "requested": str(asked)[:100]}
            error = _rpc_error(
                number, _WRONG_VERSION, f"The protocol version {str(asked)[:100]!r} is not supported here."
            )
            error["error"]["data"] = data
            return 400, error
        match method:
            case "server/discover":
                found = {"supportedVersions": list(STATELESS_VERSIONS), "capabilities": {"tools": {}}}
                return 200, _complete(number, {**found, **_UNCACHED})
            case "tools/list":
                return 200, _complete(number, {"tools": list(self._tools.values()), **_UNCACHED})
            case "tools/call":
                reply = await self._called(number, params)
                return (200, _complete(number, reply["result"])) if "result" in reply else (400, reply)
        return 404, _rpc_error(number, _METHOD_NOT_FOUND, f"There is no method {method[:100]!r} here.")

    async def _called(self, number: str | int, params: Mapping[str, JSON]) -> JSON:
        name, arguments = params.get("name"), params.get("arguments")
        if not isinstance(name, str) or name not in self._tools:
            known = ", ".join(self._tools)
            return _rpc_error(number, _INVALID_PARAMS, f"Unknown tool {str(name)[:100]!r}. Available tools: {known}")
        outcome = await self._call(name, json.dumps({} if arguments is None else arguments, ensure_ascii=False))
        return _rpc_result(number, {"content": [{"type": "text", "text": outcome.text}], "isError": outcome.failed})


def _mcp_tool(function: Mapping[str, JSON]) -> JSON:
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    return {"name": function["name"], "description": function.get("description") or "", "inputSchema": schema}


def _initialized(asked: JSON) -> JSON:
    return {
        "protocolVersion": asked if asked in VERSIONS else VERSIONS[0],
        "capabilities": {"tools": {}},
        "serverInfo": _server_info(),
    }


@functools.cache
def _server_info() -> JSON:
    """Return the server's name and version. Cached, because each version is read from the disk."""
    return {"name": "palaestra", "version": version("palaestra")}


def _complete(number: str | int, result: Mapping[str, JSON]) -> JSON:
    """Return the reply to a request that names its version."""
    return _rpc_result(number, {**result, "resultType": "complete", "_meta": {_SERVER_KEY: _server_info()}})


def _rpc_result(number: str | int, result: JSON) -> JSON:
    return {"jsonrpc": "2.0", "id": number, "result": result}


def _rpc_error(number: str | int | None, code: int, message: str) -> JSON:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message}}
