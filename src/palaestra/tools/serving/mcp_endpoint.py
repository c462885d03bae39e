"""Serves tools to one MCP client: the messages of the Model Context Protocol, without the HTTP connections.

    status, reply = await McpTools(definitions, call).answer(body)

Format: the protocol's transport "Streamable HTTP" (modelcontextprotocol.io, 2025-06-18). Only the part for a server
without sessions is supported. The server never sends messages unasked: it answers requests with JSON, and notifications
with status 202.

Invariant: every message of a client is answered; only errors of `call` are raised.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from importlib.metadata import version
from typing import TypeAlias

import msgspec

from palaestra.core.types import JSON
from palaestra.tools.tool import ToolOutcome

VERSIONS = ("2025-06-18", "2025-11-25", "2025-03-26", "2024-11-05")
"""The protocol versions in which these messages are the same. A request for any other version gets the first."""

_PARSE_ERROR, _INVALID_REQUEST, _METHOD_NOT_FOUND, _INVALID_PARAMS = -32700, -32600, -32601, -32602

CallTool: TypeAlias = Callable[[str, str], Awaitable[ToolOutcome]]
"""Runs one call, given the tool's name and its arguments as JSON text."""


class McpTools:
    """Answers the messages of a client that uses these tools. `definitions` are OpenAI function schemas."""

    def __init__(self, definitions: Iterable[Mapping[str, JSON]], call: CallTool) -> None:
        functions = [each.get("function", each) for each in definitions]
        self._tools = {each["name"]: _shown(each) for each in functions}
        self._call = call

    async def answer(self, body: bytes) -> tuple[int, JSON]:
        """Return the HTTP status and the JSON of the reply, which is None if the reply is empty. Raises the errors of
        `call`."""
        try:
            message = msgspec.json.decode(body)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            return 400, _error(None, _PARSE_ERROR, f"The body is not JSON: {error}.")
        if not isinstance(message, dict):
            return 400, _error(None, _INVALID_REQUEST, "The body is not a single message.")
        method, number = message.get("method"), message.get("id")
        if not isinstance(method, str) or number is None:
            return 202, None  # a notification, or the reply to a request that was never sent
        if isinstance(number, bool) or not isinstance(number, str | int):
            return 400, _error(None, _INVALID_REQUEST, "The id of a request must be a string or an integer.")
        params = message.get("params")
        params = params if isinstance(params, dict) else {}
        match method:
            case "initialize":
                return 200, _result(number, _initialized(params.get("protocolVersion")))
            case "ping":
                return 200, _result(number, {})
            case "tools/list":
                return 200, _result(number, {"tools": list(self._tools.values())})
            case "tools/call":
                return 200, await self._called(number, params)
        return 200, _error(number, _METHOD_NOT_FOUND, f"There is no method {method[:100]!r} here.")

    async def _called(self, number: str | int, params: Mapping[str, JSON]) -> JSON:
        name, arguments = params.get("name"), params.get("arguments")
        if not isinstance(name, str) or name not in self._tools:
            known = ", ".join(self._tools)
            return _error(number, _INVALID_PARAMS, f"Unknown tool {str(name)[:100]!r}. Available tools: {known}")
        outcome = await self._call(name, json.dumps({} if arguments is None else arguments, ensure_ascii=False))
        return _result(number, {"content": [{"type": "text", "text": outcome.text}], "isError": outcome.failed})


def _shown(function: Mapping[str, JSON]) -> JSON:
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    return {"name": function["name"], "description": function.get("description") or "", "inputSchema": schema}


def _initialized(asked: JSON) -> JSON:
    return {
        "protocolVersion": asked if asked in VERSIONS else VERSIONS[0],
        "capabilities": {"tools": {}},
        "serverInfo": {"name": "palaestra", "version": version("palaestra")},
    }


def _result(number: str | int, result: JSON) -> JSON:
    return {"jsonrpc": "2.0", "id": number, "result": result}


def _error(number: str | int | None, code: int, message: str) -> JSON:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message}}
