"""A chat completions server for tests that returns a list of replies in turn.

Use it to try engines, environments and error handling without a model. Unlike a scripted policy
(`engines/scripted.py`), this server ignores the content of requests, except for the probe that is sent before a run. It
listens on 127.0.0.1 only.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from aiohttp import web

from palaestra_slots.core.io.http_server import listening
from palaestra_slots.core.types import JSON
from palaestra_tokens.engines.openai import PROBE


@dataclass
class FakeAnswer:
    """One reply: a value to send as JSON, bytes to send whole, or a list of bytes to send in chunks.

    If `cut` is true, the server breaks the connection, after the chunks if there are any. If `hang` is true, the server
    never answers.
    """

    body: JSON = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: bool = False
    hang: bool = False


@dataclass
class Seen:
    """One request; `path` includes its query."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: JSON


class LoopbackServer:
    """Returns its answers in turn, and then the last one repeatedly. An async context manager; `url` is its address.

    `models` is the answer to every GET. `probe` is the answer to the test request that a client sends before a run;
    `probes` lists the bodies of these requests. `seen` lists the other requests. While `gate` is an event that is not
    set, requests wait for it. `at_once` is the number of requests in progress, and `most_at_once` its maximum so far.
    """

    def __init__(self, *answers: FakeAnswer, models: FakeAnswer | None = None, probe: FakeAnswer | None = None) -> None:
        self.answers = list(answers)
        self.probe = probe or FakeAnswer(completion("ready"))
        self.probes: list[JSON] = []
        self.models = models or FakeAnswer({"object": "list", "data": [{"id": "m", "object": "model"}]})
        self.seen: list[Seen] = []
        self.at_once = self.most_at_once = 0
        self.gate: asyncio.Event | None = None
        self._changed = asyncio.Condition()
        self._answered = 0

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._listening = listening(app, "127.0.0.1", 0, shutdown_s=0.01)
        self.url = await self._listening.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._listening.__aexit__(None, None, None)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = json.loads(raw) if raw else None
        if isinstance(body, dict) and body.get("messages") == [PROBE]:
            self.probes.append(body)
            return await self._send_answer(request, self.probe)
        self.seen.append(Seen(request.method, request.path_qs, request.headers.copy(), body))
        await self._count(1)
        try:
            if self.gate is not None:
                await self.gate.wait()
            return await self._answer(request)
        finally:
            await self._count(-1)

    async def under_way(self, requests: int) -> None:
        """Wait until this many requests are in progress."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.at_once >= requests)

    async def _count(self, change: int) -> None:
        async with self._changed:
            self.at_once += change
            self.most_at_once = max(self.most_at_once, self.at_once)
            self._changed.notify_all()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            answer = self.models
        else:
            answer = self.answers[min(self._answered, len(self.answers) - 1)]
            self._answered += 1
        return await self._send_answer(request, answer)

    async def _send_answer(self, request: web.Request, answer: FakeAnswer) -> web.StreamResponse:
        if isinstance(answer.body, list) and answer.body and all(isinstance(piece, bytes) for piece in answer.body):
            return await _in_pieces(request, answer)
        if answer.cut:
            assert request.transport is not None
            request.transport.abort()
        if answer.hang:
            await asyncio.Event().wait()
        body = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
        return web.Response(body=body, status=answer.status, headers=answer.headers, content_type="application/json")


async def _in_pieces(request: web.Request, answer: FakeAnswer) -> web.StreamResponse:
    """Send the chunks of an answer as a stream, each with its own write."""
    response = web.StreamResponse(status=answer.status, headers={"Content-Type": "text/event-stream", **answer.headers})
    await response.prepare(request)
    for piece in answer.body:
        await response.write(piece)
    if answer.cut:
        assert request.transport is not None
        request.transport.close()
    return response


def completion(content: str | None = "hi", finish: str = "stop", **message: JSON) -> JSON:
    """Return a chat completion as a server returns it."""
    return {
        "id": "c1",
        "object": "chat.completion",
        "model": "m",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": content, **message}, "finish_reason": finish}
        ],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
    }
