"""An MCP server by hand, over stdin and stdout or HTTP, that behaves as its argument says, a JSON object:

`pages` (the lists of tools, with cursors), `result` or `error` of a call, `before` and `after` (messages that it sends
before and after the result of a call; `RESULT_ID` stands for the call's id and `TOKEN` for its progress token),
`version` (the protocol version that it names), `noise` (lines on the standard output), `capabilities`, `plain` (HTTP
answers without a stream) and `die` (it ends at a call). Over HTTP, `refused` lists the status and the error of the
first calls, null for a call that is answered; with `sessions` it gives session ids, and with `once` only one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

GOOD = {"name": "good", "inputSchema": {"type": "object", "properties": {"city": {"type": "string"}}}}
FINE = {"content": [{"type": "text", "text": "sunny"}]}


class Server:
    def __init__(self, how: dict[str, Any]) -> None:
        self.how = how
        self.pages: list[Any] = how.get("pages") or [{"tools": [GOOD]}]
        self.page = 0
        self.refused = list(how.get("refused", ()))
        self.sessions = 0

    def answers(self, request: dict[str, Any]) -> Iterator[Any]:
        """The messages that answer one message."""
        how, method, number = self.how, request.get("method"), request.get("id")
        if number is None or method is None:
            return
        if method == "initialize":
            version = how.get("version") or request["params"]["protocolVersion"]
            capabilities = how.get("capabilities", {"tools": {}})
            info = {"name": "documented", "version": "1"}
            result: Any = {"protocolVersion": version, "capabilities": capabilities, "serverInfo": info}
        elif method == "tools/list":
            result = self.pages[min(self.page, len(self.pages) - 1)]
            self.page += 1
        elif method == "tools/call":
            if how.get("die"):
                sys.exit(3)
            yield from self.filled("before", request)
            if "error" in how:
                yield {"jsonrpc": "2.0", "id": number, "error": how["error"]}
                return
            result = how.get("result", FINE)
        else:
            yield {"jsonrpc": "2.0", "id": number, "error": {"code": -32601, "message": "Method not found"}}
            return
        yield {"jsonrpc": "2.0", "id": number, "result": result}
        if method == "tools/call":
            yield from self.filled("after", request)

    def filled(self, key: str, request: dict[str, Any]) -> Iterator[Any]:
        token = (request["params"].get("_meta") or {}).get("progressToken", "none")
        for message in self.how.get(key, ()):
            text = json.dumps(message).replace('"RESULT_ID"', json.dumps(request["id"]))
            yield json.loads(text.replace('"TOKEN"', json.dumps(token)))


def over_stdio(server: Server) -> None:
    for line in server.how.get("noise", ()):
        print(line, flush=True)
    for line in sys.stdin:
        message = json.loads(line)
        for answer in server.answers(message):
            print(json.dumps(answer), flush=True)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self.send(405, b"")

    def do_DELETE(self) -> None:
        self.send(405, b"")

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if "id" not in message or "method" not in message:
            return self.send(202, b"")
        mcp = self.server.mcp
        if message["method"] == "tools/call" and mcp.refused and (refusal := mcp.refused.pop(0)):
            status, error = refusal
            body = json.dumps({"jsonrpc": "2.0", "id": None, "error": error}) if error else "<html>"
            return self.send(status, body.encode(), "application/json" if error else "text/html")
        if message["method"] == "initialize" and mcp.how.get("sessions"):
            mcp.sessions += 1
            if mcp.sessions > 1 and mcp.how.get("once"):
                return self.send(503, b"")
        answers = list(mcp.answers(message))
        if self.server.mcp.how.get("plain") and len(answers) == 1:
            return self.send(200, json.dumps(answers[0]).encode(), "application/json")
        events = "".join(f"event: message\ndata: {json.dumps(each)}\n\n" for each in answers)
        return self.send(200, events.encode(), "text/event-stream")

    def send(self, status: int, body: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        if status == 200 and self.server.mcp.sessions:
            self.send_header("mcp-session-id", f"s{self.server.mcp.sessions}")
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    server = Server(json.loads(sys.argv[2]))
    if sys.argv[1] == "stdio":
        over_stdio(server)
    else:
        listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        listening.mcp = server  # type: ignore[attr-defined]
        print(f"http://127.0.0.1:{listening.server_port}/mcp", flush=True)
        listening.serve_forever()
