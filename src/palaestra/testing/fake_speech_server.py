"""A server with OpenAI's audio API that recognises and makes no speech, for tests and to try the gateway's voice.

    python -m palaestra.testing.fake_speech_server --port 8001

It checks each request strictly and refuses, with an error in OpenAI's form, what the API does not describe: unknown or
missing fields, wrong values, a file without a known suffix or content type, a wrong key. A transcript is the text that
`texts` has for the audio, by default `TRANSCRIPT`. A recording is silent Ogg with Opus (other formats: bytes without a
meaning), and lasts 50 ms for each character.

Format: https://platform.openai.com/docs/api-reference/audio
"""

from __future__ import annotations

import argparse
import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from aiohttp import BodyPartReader, web

from palaestra.core.exits import told_to_stop
from palaestra.core.io.http_server import listening
from palaestra.core.types import JSON

TRANSCRIPT = "hello"
_SUFFIXES = {"flac", "mp3", "mp4", "mpeg", "mpga", "m4a", "ogg", "wav", "webm"}
_FORMATS = {
    "mp3": "audio/mpeg", "opus": "audio/ogg", "aac": "audio/aac", "flac": "audio/flac", "wav": "audio/wav",
    "pcm": "audio/pcm",
}  # fmt: skip
_FIELDS = {"file", "model", "language", "prompt", "response_format", "temperature"}
_SPOKEN = {"model", "input", "voice", "response_format", "speed", "instructions", "stream_format"}
_MOST_CHARS = 4096
_MOST_BYTES = 25 << 20


class FakeSpeechServer:
    """`url` is the address while `serving` runs. `heard` are the recordings and `said` the JSON bodies of the accepted
    requests, and `forms` the text fields of the transcriptions. `failing` are statuses for the next requests. While
    `gate` is an event that is not set, requests wait for it; `waiting` counts those that arrived."""

    def __init__(self, key: str | None = None) -> None:
        self.key = key
        self.texts: dict[bytes, str] = {}
        self.heard: list[bytes] = []
        self.forms: list[dict[str, str]] = []
        self.said: list[dict[str, JSON]] = []
        self.failing: deque[int] = deque()
        self.gate: asyncio.Event | None = None
        self.waiting = 0
        self.url = ""

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[FakeSpeechServer]:
        app = web.Application(client_max_size=_MOST_BYTES + (1 << 20))
        app.router.add_post("/v1/audio/transcriptions", self._transcribe)
        app.router.add_post("/v1/audio/speech", self._speak)
        async with listening(app, "127.0.0.1", port, shutdown_s=0.1) as url:
            self.url = f"{url}/v1"
            yield self

    async def _admit(self, request: web.Request) -> web.Response | None:
        """Wait for the gate; returns the refusal, if there is one."""
        self.waiting += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return _refused("Incorrect API key provided.", None, status=401)
        return _refused("The server had an error.", None, status=self.failing.popleft()) if self.failing else None

    async def _transcribe(self, request: web.Request) -> web.Response:
        if (refusal := await self._admit(request)) is not None:
            return refusal
        if request.content_type != "multipart/form-data":
            return _refused("The body must be multipart/form-data.", None, status=415)
        fields: dict[str, str] = {}
        audio: bytes | None = None
        async for part in await request.multipart():
            name = part.name if isinstance(part, BodyPartReader) else None
            if not isinstance(part, BodyPartReader) or name not in _FIELDS or name in fields:
                return _refused(f"Unrecognized request argument supplied: {name}", name)
            if name != "file":
                fields[name] = await part.text()
                continue
            suffix = (part.filename or "").rpartition(".")[2]
            kind = part.headers.get("Content-Type", "")
            if suffix not in _SUFFIXES or not kind.startswith(("audio/", "video/")):
                return _refused(f"Invalid file format: {part.filename} ({kind}).", "file")
            audio = bytes(await part.read())
        if audio is None or not fields.get("model"):
            return _refused("Missing required parameter.", "file" if audio is None else "model")
        if not audio or len(audio) > _MOST_BYTES:
            return _refused("The audio is empty or larger than 25 MB.", "file")
        if fields.get("response_format", "json") != "json":
            return _refused("This server knows only the format json.", "response_format")
        language = fields.get("language")
        if language is not None and not (language.isalpha() and language.islower() and len(language) in (2, 3)):
            return _refused("Invalid language.", "language")
        self.heard.append(audio)
        self.forms.append(fields)
        return web.json_response({"text": self.texts.get(audio, TRANSCRIPT)})

    async def _speak(self, request: web.Request) -> web.Response:
        if (refusal := await self._admit(request)) is not None:
            return refusal
        if request.content_type != "application/json":
            return _refused("The body must be JSON.", None, status=415)
        asked = await request.json()
        for name in asked:
            if name not in _SPOKEN:
                return _refused(f"Unrecognized request argument supplied: {name}", name)
        for name in ("model", "input", "voice"):
            if not isinstance(asked.get(name), str) or not asked[name]:
                return _refused(f"Missing required parameter: {name}", name)
        form = asked.get("response_format", "mp3")
        if len(asked["input"]) > _MOST_CHARS or form not in _FORMATS:
            return _refused("Invalid value.", "input" if form in _FORMATS else "response_format")
        self.said.append(asked)
        data = silent_opus(len(asked["input"]) / 20) if form == "opus" else f"audio of {asked['input']}".encode()
        return web.Response(body=data, content_type=_FORMATS[form])


def silent_opus(seconds: float) -> bytes:
    """Return an Ogg file with silent Opus audio of this length, in steps of 20 ms (RFC 7845, RFC 6716)."""
    packets = max(1, round(seconds * 50))
    head = b"OpusHead\x01\x01" + (0).to_bytes(2, "little") + (48_000).to_bytes(4, "little") + b"\0\0\0"
    tags = b"OpusTags" + (4).to_bytes(4, "little") + b"none" + (0).to_bytes(4, "little")
    pages = [_page(0, 2, 0, [head]), _page(1, 0, 0, [tags])]
    for number, count in enumerate(_portions(packets)):
        position, last = (number * 50 + count) * 960, number * 50 + count == packets
        pages.append(_page(number + 2, 4 if last else 0, position, [b"\xf8\xff\xfe"] * count))
    return b"".join(pages)


def _portions(packets: int) -> Iterator[int]:
    for first in range(0, packets, 50):
        yield min(50, packets - first)


def _page(number: int, flags: int, position: int, packets: list[bytes]) -> bytes:
    """Return a page of an Ogg stream (RFC 3533)."""
    numbers = (1).to_bytes(4, "little") + number.to_bytes(4, "little")
    sizes = bytes(len(packet) for packet in packets)
    begin = b"OggS\0" + bytes([flags]) + position.to_bytes(8, "little") + numbers
    rest = bytes([len(packets)]) + sizes + b"".join(packets)
    checksum = 0
    for byte in begin + b"\0\0\0\0" + rest:
        checksum ^= byte << 24
        for _ in range(8):
            checksum = (checksum << 1) ^ (0x04C11DB7 if checksum & 0x80000000 else 0)
        checksum &= 0xFFFFFFFF
    return begin + checksum.to_bytes(4, "little") + rest


def _refused(message: str, parameter: str | None, status: int = 400) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "param": parameter, "code": None}
    return web.json_response({"error": error}, status=status)


async def _serve(port: int, key: str | None) -> None:
    stop = told_to_stop()
    async with FakeSpeechServer(key).serving(port) as server:
        print(server.url, flush=True)  # noqa: T201  the address is the output of this program
        await stop.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serve OpenAI's audio API on 127.0.0.1, without speech.")
    parser.add_argument("--port", type=int, default=0, help="the port (default: a free one)")
    parser.add_argument("--key", help="the key that clients must send")
    given = parser.parse_args()
    asyncio.run(_serve(given.port, given.key))
