"""An MCP server over stdin and stdout, by hand, that breaks the protocol as its arguments say: the tools that it lists
beside `good`, and the result of every call, as JSON. It writes other lines between its messages."""

from __future__ import annotations

import json
import sys
from typing import Any

TOOLS, RESULT = map(json.loads, sys.argv[1:])
GOOD = {"name": "good", "inputSchema": {"type": "object", "properties": {"city": {"type": "string"}}}}


def answer(method: str, parameters: dict[str, Any]) -> dict[str, Any]:
    if method == "initialize":
        info = {"name": "wrong", "version": "1"}
        return {"protocolVersion": parameters["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/call" and RESULT == "die":
        sys.exit(1)
    return {"tools": [*TOOLS, GOOD]} if method == "tools/list" else RESULT


for line in sys.stdin:
    print("[wrong] handling a request\n\n{}", flush=True)
    request = json.loads(line)
    if request.get("method") in ("initialize", "tools/list", "tools/call"):
        result = answer(request["method"], request.get("params") or {})
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)
    elif "id" in request:
        error = {"code": -32601, "message": "Method not found"}
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "error": error}), flush=True)
