"""An MCP server of 2025 over stdin and stdout, by hand: it knows the handshake alone, and tells of new tools. An
argument, if given, is the cursor of every page."""

from __future__ import annotations

import json
import sys
from typing import Any

SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
INFO = {"name": "old", "version": "1"}


def answer(method: str, parameters: dict[str, Any]) -> dict[str, Any]:
    if method == "initialize":
        capabilities = {"tools": {"listChanged": True}}
        return {"protocolVersion": parameters["protocolVersion"], "capabilities": capabilities, "serverInfo": INFO}
    if method == "tools/list":
        first = "cursor" not in parameters
        tool = {"name": "echo" if first else "more", "inputSchema": SCHEMA}
        if sys.argv[1:]:
            return {"tools": [tool], "nextCursor": sys.argv[1]}
        return {"tools": [tool], **({"nextCursor": "2"} if first else {})}
    if method == "tools/call":
        tell({"method": "notifications/tools/list_changed"})
        return {"content": [{"type": "text", "text": parameters["arguments"]["text"]}]}
    raise LookupError(method)


def tell(message: dict[str, Any]) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request:
        continue
    try:
        tell({"id": request["id"], "result": answer(request["method"], request.get("params") or {})})
    except LookupError as error:
        tell({"id": request["id"], "error": {"code": -32601, "message": f"no method {error}"}})
