"""`image_generate` and `text_to_speech` against a real server with OpenAI's two APIs, in real slots."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import web

from models.image_server import png
from palaestra import open_world
from palaestra_contract import ToolSession, ToolSettings
from palaestra_slots.core.errors import ToolUnavailable
from palaestra_slots.core.io.http_server import listening
from palaestra_slots.core.io.threads import LoopThread
from palaestra_slots.core.types import JSON

pytestmark = pytest.mark.slots

IMAGE = png(4, 3, (255, 0, 0))


class MediaServer:
    """`asked` has the requests. `image` is what it makes, `status` other than 200 refuses."""

    def __init__(self) -> None:
        self.asked: list[JSON] = []
        self.image, self.status, self.url = IMAGE, 200, ""

    async def _make(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append({**body, "authorization": request.headers.get("Authorization")})
        if self.status != 200:
            return web.json_response({"error": {"message": "not this"}}, status=self.status)
        if request.path.endswith("speech"):
            return web.Response(body=f"{body['voice']}: {body['input']}".encode(), content_type="audio/mpeg")
        return web.json_response({"data": [{"b64_json": base64.b64encode(self.image).decode()}]})

    @contextmanager
    def running(self) -> Iterator[MediaServer]:
        app = web.Application()
        app.router.add_post("/v1/images/generations", self._make)
        app.router.add_post("/v1/audio/speech", self._make)
        loop, block = LoopThread("media"), listening(app, "127.0.0.1", 0, shutdown_s=0.01)
        try:
            self.url = loop.wait(block.__aenter__())
            yield self
            loop.wait(block.__aexit__(None, None, None))
        finally:
            loop.close()

    def settings(self, **more: JSON) -> ToolSettings:
        return ToolSettings(image_base_url=self.url, image_api_key="k", speech_base_url=f"{self.url}/v1", **more)


def say(session: ToolSession, name: str, **arguments: JSON) -> JSON:
    return json.loads(session.handle(name, arguments, "t"))


def in_slot(session: ToolSession, command: str) -> str:
    return str(say(session, "terminal", command=command)["output"])


def test_files_are_written_into_the_slot() -> None:
    with MediaServer().running() as server, ToolSession(settings=server.settings(image_model="m")) as session:
        image = say(session, "image_generate", prompt="a red field", aspect_ratio="portrait")
        assert image["success"]
        assert image["image"].startswith("images/")
        assert image["image"].endswith(".png")
        assert in_slot(session, f"base64 -w0 {image['image']}") == base64.b64encode(IMAGE).decode()
        assert server.asked[0] == {
            "model": "m", "prompt": "a red field", "n": 1, "size": "1024x1536", "response_format": "b64_json",
            "authorization": "Bearer k",
        }  # fmt: skip
        spoken = say(session, "text_to_speech", text="good morning")
        assert in_slot(session, f"cat {spoken['file_path']}") == "alloy: good morning"
        assert say(session, "text_to_speech", text="hi", output_path="out/a.mp3")["file_path"] == "out/a.mp3"
        assert in_slot(session, "cat out/a.mp3") == "alloy: hi"
        assert "Cannot write" in say(session, "text_to_speech", text="hi", output_path="/proc/a.mp3")["error"]


def test_a_replay_writes_the_same_files_and_asks_nobody(tmp_path: Path) -> None:
    seen = []
    with MediaServer().running() as server:
        for mode in ("record", "replay"):
            settings = server.settings() if mode == "record" else None  # no address, no key
            with ToolSession(settings=settings, world=open_world(mode, tmp_path / "kept")) as session:
                image = say(session, "image_generate", prompt="a red field")
                spoken = say(session, "text_to_speech", text="hi", output_path="a.mp3")
                seen.append((image, spoken, in_slot(session, f"sha256sum {image['image']} a.mp3")))
        assert len(server.asked) == 2
    assert seen[0] == seen[1]
    assert "data" not in seen[0][0]


def test_what_is_not_an_image_is_not_written_and_a_refusal_is_the_models_mistake() -> None:
    with MediaServer().running() as server, ToolSession(settings=server.settings()) as session:
        server.image = b"<html>"
        with pytest.raises(ToolUnavailable, match="the image model"):
            session.handle("image_generate", {"prompt": "x"}, "t")
        server.status = 400
        assert "not this" in say(session, "image_generate", prompt="something forbidden")["error"]
        assert in_slot(session, "ls") == ""


def test_without_a_server_the_tools_are_missing() -> None:
    with ToolSession(settings=ToolSettings()) as session:
        assert "image_base_url" in say(session, "image_generate", prompt="x")["error"]
        assert "speech_base_url" in say(session, "text_to_speech", text="x")["error"]
