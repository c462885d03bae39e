"""A real MCP server for the tests: `mcp_server.py stdio [WORD …]`, or `http [TOKEN]`, which prints its address.

It writes its WORDs to stderr first; with a TOKEN it wants that of every request.
"""

from __future__ import annotations

import asyncio
import base64
import os
import socket
import subprocess
import sys
from typing import Any

from mcp import types
from mcp.server.mcpserver import Context, MCPServer
from pydantic import BaseModel

server = MCPServer("test-server")
gate = asyncio.Event()
READS = types.ToolAnnotations(read_only_hint=True)


class Place(BaseModel):
    """Where something is."""

    city: str
    floor: int = 0


@server.tool(annotations=READS)
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def visit(place: Place, tags: list[str] | None = None) -> dict[str, Any]:
    """Go to a place."""
    return {"city": place.city, "floor": place.floor, "tags": tags or []}


@server.tool()
def fail(why: str) -> str:
    """Fail."""
    raise ValueError(why)


@server.tool(structured_output=False)
def show() -> list[Any]:
    """Text, an image, and files."""
    blob = base64.b64encode(b"\x89PNG" + bytes(96)).decode()
    return [
        types.TextContent(text="look:"),
        types.ImageContent(data=blob, mime_type="image/png"),
        types.ResourceLink(uri="file:///notes.txt", name="notes", mime_type="text/plain"),
        types.EmbeddedResource(resource=types.TextResourceContents(uri="mem://a", text="inside")),
        types.EmbeddedResource(resource=types.BlobResourceContents(uri="mem://b", blob=blob, mime_type="image/png")),
    ]


@server.tool()
def long(chars: int) -> str:
    """Much text."""
    return "x" * chars


@server.tool()
async def wait() -> str:
    """Wait until `release` is called."""
    await gate.wait()
    return "released"


@server.tool()
async def release() -> str:
    """Let `wait` go on."""
    gate.set()
    return "ok"


@server.tool()
def pid() -> int:
    """The server's process."""
    return os.getpid()


@server.tool()
def variable(name: str) -> str:
    """One of the server's variables."""
    return os.environ.get(name, "(none)")


@server.tool()
def child() -> int:
    """Start a process that outlives the call and has nothing of the server's."""
    nothing = subprocess.DEVNULL
    command = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"]
    started = subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)
    return started.pid


@server.tool()
def die() -> str:
    """End the server in the middle of the call."""
    sys.stderr.write("I am dying\n")
    sys.stderr.flush()
    os._exit(3)


@server.tool(name="die-once", annotations=types.ToolAnnotations(idempotent_hint=True))
def die_once(marker: str) -> str:
    """End the server in the middle of the first call."""
    if not os.path.exists(marker):
        with open(marker, "w", encoding="utf-8"):
            os._exit(3)
    return "second time"


@server.tool()
async def grow(ctx: Context[Any, Any]) -> str:
    """Have one tool more, and say so."""
    server.add_tool(pid, name="pid_again")
    await ctx.session.send_tool_list_changed()
    return "grown"


def main(how: str, *words: str) -> None:
    sys.stderr.write("\n".join(words) + "\n")
    sys.stderr.flush()
    if how == "stdio":
        server.run("stdio")
    else:
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        serve(listening, words)


def serve(listening: socket.socket, words: tuple[str, ...]) -> None:
    import uvicorn

    app = server.streamable_http_app()
    token = words[0] if words else None

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers") or ())
        if token and scope["type"] == "http" and headers.get(b"authorization") != f"Bearer {token}".encode():
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"no"})
            return
        await app(scope, receive, send)

    print(f"http://127.0.0.1:{listening.getsockname()[1]}/mcp", flush=True)
    listening.listen()
    config = uvicorn.Config(guarded, log_level="warning")
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main(*sys.argv[1:])
