"""A chat completions server whose replies follow from the last message of the user, for tests of the gateway.

`run CMD` calls the terminal, `aloud run CMD` says so first; `start CMD` starts CMD in the background and `watch CMD`
with a check every second; `call TOOL JSON` calls any tool; `ask QUESTION` asks, and `twice QUESTION` asks again after
the answer. The answer to a tool's result is `done: RESULT`. `slowly TEXT` streams TEXT a word every 50 ms. Everything
else is answered with `echo N: TEXT`, where N is the number of messages of the user.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from palaestra_slots.core.io.http_server import listening


class EchoModel:
    """`requests` are the bodies of the requests; `url` is the address while `serving` runs. While `failing`, requests
    are refused."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.url = ""
        self.failing = False

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[EchoModel]:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        async with listening(app, "127.0.0.1", port, shutdown_s=0.1) as url:
            self.url = f"{url}/v1"
            yield self

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        if self.failing:
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        content, calls, delay_s = _reply(body["messages"])
        head = {"id": "c", "created": 0, "model": "m"}
        reason = "tool_calls" if calls else "stop"
        usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
        if not body.get("stream"):
            message = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
            choice = {"index": 0, "message": message, "finish_reason": reason}
            return web.json_response({**head, "object": "chat.completion", "choices": [choice], "usage": usage})
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)

        async def send(delta: dict[str, Any], finish: str | None = None, **more: Any) -> None:
            choice = {"index": 0, "delta": delta, "finish_reason": finish}
            line = json.dumps({**head, "object": "chat.completion.chunk", "choices": [choice], **more})
            await reply.write(f"data: {line}\n\n".encode())

        await send({"role": "assistant", "content": ""})
        words = [f"{word} " for word in (content or "").split(" ")] if delay_s else [content or ""]
        for word in words:
            await send({"content": word})
            await asyncio.sleep(delay_s)
        for number, call in enumerate(calls):
            await send({"tool_calls": [{"index": number, **call}]})
        await send({}, reason, usage=usage)
        await reply.write(b"data: [DONE]\n\n")
        return reply


def _reply(messages: list[Any]) -> tuple[str | None, list[Any], float]:
    last = messages[-1]
    asked = [message["content"] for message in messages if message["role"] == "user"]
    if last["role"] == "tool" and messages[-3]["role"] == "user" and str(asked[-1]).startswith("twice "):
        last = {"role": "user", "content": f"ask {asked[-1]} again"}
    if last["role"] == "tool":
        return f"done: {last['content']}", [], 0.0
    said = last["content"]
    text = said if isinstance(said, str) else next(part["text"] for part in said if part["type"] == "text")
    number = sum(message["role"] == "user" for message in messages)
    word, _, rest = text.split("]\n\n")[-1].partition(" ")
    before = None
    if word == "aloud":
        before, (word, _, rest) = "I run it.", rest.partition(" ")
    options = {"run": {}, "start": {"background": True}, "watch": {"background": True, "check_interval": 30}}
    if word in options and rest:
        arguments = {"command": rest, **options[word]}
        function = {"name": "terminal", "arguments": json.dumps(arguments)}
        return before, [{"id": f"call_{len(messages)}", "type": "function", "function": function}], 0.0
    if word == "call":
        name, _, given = rest.partition(" ")
        function = {"name": name, "arguments": given}
        return None, [{"id": f"call_{len(messages)}", "type": "function", "function": function}], 0.0
    if word in ("ask", "twice"):
        function = {"name": "clarify", "arguments": json.dumps({"question": rest})}
        return None, [{"id": f"call_{len(messages)}", "type": "function", "function": function}], 0.0
    if word == "slowly":
        return rest, [], 0.05
    if word == "say":
        return rest, [], 0.0
    return f"echo {number}: {text}", [], 0.0
