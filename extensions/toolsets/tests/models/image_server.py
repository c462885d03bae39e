"""A chat server that really looks: it decodes the PNG that it is sent and answers with what it saw."""

from __future__ import annotations

import base64
import struct
import zlib

from aiohttp import web

from palaestra_slots.core.types import JSON


def png(width: int, height: int, colour: tuple[int, int, int]) -> bytes:
    """A PNG of one colour (https://www.w3.org/TR/png/)."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = (b"\0" + bytes(colour) * width) * height
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def seen(data: bytes) -> str:
    """Size and first pixel of a PNG: `40x30 ff0000`. Reads 8 bits of RGB or RGBA, as screens and `png` write them."""
    assert data.startswith(b"\x89PNG\r\n\x1a\n"), data[:16]
    place, body, size = 8, b"", (0, 0)
    while place < len(data):
        (length,) = struct.unpack_from(">I", data, place)
        kind, content = data[place + 4 : place + 8], data[place + 8 : place + 8 + length]
        assert zlib.crc32(kind + content) == struct.unpack_from(">I", data, place + 8 + length)[0]
        if kind == b"IHDR":
            size = struct.unpack_from(">II", content)
        body += content if kind == b"IDAT" else b""
        place += 12 + length
    # In the first row every filter (none, sub, up, average, Paeth) leaves the first pixel as it is.
    return f"{size[0]}x{size[1]} {zlib.decompress(body)[1:4].hex()}"


class SeeingServer:
    """Answers `/v1/chat/completions` on 127.0.0.1. `status` other than 200 refuses; `asked` has the requests."""

    def __init__(self) -> None:
        self.status = 200
        self.reason = "stop"
        self.asked: list[tuple[web.Request, JSON]] = []
        self.files: dict[str, tuple[bytes, str]] = {}

    async def __aenter__(self) -> SeeingServer:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_get("/files/{name}", self._file)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _file(self, request: web.Request) -> web.Response:
        body, kind = self.files[request.match_info["name"]]
        return web.Response(body=body, content_type=kind)

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append((request, body))
        if self.status != 200:
            return web.json_response({"error": {"message": "no such model"}}, status=self.status)
        assert body.keys() == {"model", "messages", "max_tokens"}
        ((role, content),) = [(message["role"], message["content"]) for message in body["messages"]]
        text, image = content
        assert (role, text["type"], image["type"]) == ("user", "text", "image_url")
        head, _, data = image["image_url"]["url"].partition(",")
        assert head == "data:image/png;base64"
        said = f"{text['text']} {seen(base64.b64decode(data, validate=True))}"
        choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": self.reason}
        usage = {"prompt_tokens": 85, "completion_tokens": 3, "total_tokens": 88, "prompt_tokens_details": None}
        return web.json_response({"id": "x", "object": "chat.completion", "choices": [choice], "usage": usage})
