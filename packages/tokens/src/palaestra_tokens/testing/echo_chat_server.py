"""A chat completions server on 127.0.0.1 whose replies, streamed or not, are determined by the user's last message.

Use it to try `palaestra chat`, `batch` and `gateway` without a model, in a program, in tests, or as a process:

    python -m palaestra_tokens.testing.echo_chat_server --port 8000
    palaestra chat --base-url http://127.0.0.1:8000/v1 --model echo

The message is a list of lines:

    call terminal {"command": "ls"}       one tool call per model call, in the order of the lines
    both terminal {…} ;; terminal {…}     several calls in one reply
    say some words                        the answer; without such a line, it is the last tool result or the message
    think some words                      thinking before the answer

`reply`, if given, replaces these rules: it returns the assistant message for a conversation. `window` is the size of
the context window: a longer request is refused with HTTP 400, in the words of `refuses` (openai, vllm, or silent, which
does not name the size). A token is four characters of the messages and tools, and `max_tokens` counts, too. A reply
that is longer than `max_tokens`, or than the rest of the window, is cut off. The list of models has the window if
`lists_window` is true. Unless the server `takes_images`, a request with images is refused.
`delay_s` is the pause before each piece of a streamed reply. While `gate` is an event that is not set, a streamed reply
waits after its first piece. `asked` lists the requests, and `refused` counts those that were too long.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, Self

from aiohttp import web

from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.exits import told_to_stop
from palaestra_slots.core.io.http_server import listening
from palaestra_slots.core.types import JSON, Message

MODEL = "echo"
Reply = Callable[[Sequence[Message]], dict[str, JSON]]


class EchoChatServer:
    """An async context manager; `url` is its address."""

    def __init__(
        self,
        *,
        delay_s: float = 0.0,
        reply: Reply | None = None,
        port: int = 0,
        window: int | None = None,
        refuses: Literal["openai", "vllm", "silent"] = "openai",
        lists_window: bool = False,
        takes_images: bool = True,
        models: Sequence[str] = (MODEL,),
    ) -> None:
        self.delay_s = delay_s
        self.window, self.lists_window = window, lists_window
        self.takes_images = takes_images
        self.models = models
        self._refuses = refuses
        self.refused = 0
        self._reply = reply or reply_to
        self._port = port
        self.gate: asyncio.Event | None = None
        self.asked: list[dict[str, JSON]] = []

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        self._listening = listening(app, "127.0.0.1", self._port, shutdown_s=0.01)
        self.url = await self._listening.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._listening.__aexit__(None, None, None)

    async def _models(self, request: web.Request) -> web.Response:
        listed = {"max_model_len": self.window} if self.lists_window else {}
        data = [{"id": name, "object": "model", **listed} for name in self.models]
        return web.json_response({"object": "list", "data": data})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        tokens, reply_tokens = _tokens(body), int(body.get("max_tokens") or 0)
        if self.window is not None and tokens + max(1, reply_tokens) > self.window:
            self.refused += 1
            return web.json_response(_too_long(self.window, tokens, reply_tokens, self._refuses), status=400)
        if not self.takes_images and '"image_url"' in json.dumps(body["messages"]):
            return web.json_response({"error": {"message": f"{MODEL} is not a multimodal model"}}, status=400)
        message = self._reply(body["messages"])
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        length = 1 + len(str(message)) // 4
        room = reply_tokens or length if self.window is None else min(reply_tokens or length, self.window - tokens)
        if length > room:
            message, length, finish = _truncated_message(message, 4 * room), room, "length"
        usage = {"prompt_tokens": tokens, "completion_tokens": length, "total_tokens": tokens + length}
        if not body.get("stream"):
            choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
            return web.json_response({"id": "e", "object": "chat.completion", "choices": [choice], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        with contextlib.suppress(ConnectionResetError):  # the client disconnected
            await self._stream_reply(response, message, finish, usage)
        return response

    async def _stream_reply(
        self, response: web.StreamResponse, message: Mapping[str, JSON], finish: str, usage: JSON
    ) -> None:
        for number, delta in enumerate(_pieces(message)):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            if number == 1 and self.gate is not None:
                await self.gate.wait()
            await response.write(_event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}))
        end = {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}
        for data in (_event(end), _event({"choices": [], "usage": usage}), b"data: [DONE]\n\n"):
            await response.write(data)


def reply_to(messages: Sequence[Message]) -> dict[str, JSON]:
    """Return the assistant message for a conversation, by the rules in this module's docstring."""
    asked = max((n for n, message in enumerate(messages) if message.get("role") == "user"), default=-1)
    lines = _content_text(messages[asked].get("content") if asked >= 0 else "").splitlines()
    steps = [line for line in lines if line.startswith(("call ", "both "))]
    done = sum(message.get("role") == "assistant" for message in messages[asked + 1 :])
    thought = [line.removeprefix("think ") for line in lines if line.startswith("think ")]
    message: dict[str, JSON] = {"reasoning_content": " ".join(thought)} if thought else {}
    if done < len(steps):
        calls = steps[done].partition(" ")[2].split(" ;; ")
        return {**message, "content": None, "tool_calls": [_call_delta(each, done, n) for n, each in enumerate(calls)]}
    said = [line.removeprefix("say ") for line in lines if line.startswith("say ")]
    last = messages[-1] if messages else {}
    came = _content_text(last.get("content")) if last.get("role") == "tool" else "\n".join(lines)
    return {**message, "content": "\n".join(said) if said else came}


def _call_delta(text: str, turn: int, number: int) -> dict[str, JSON]:
    name, _, arguments = text.strip().partition(" ")
    function = {"name": name, "arguments": arguments or "{}"}
    return {"index": number, "id": f"call_{turn}_{number}", "type": "function", "function": function}


def _pieces(message: Mapping[str, JSON]) -> Iterator[dict[str, JSON]]:
    for name in ("reasoning_content", "content"):
        for word in re.findall(r"\s*\S+\s*$|\s*\S+", str(message.get(name) or "")):
            yield {name: word}
    for call in message.get("tool_calls") or ():
        yield {"tool_calls": [call]}


def _tokens(body: Mapping[str, JSON]) -> int:
    return sum(len(str(each)) for each in (*body["messages"], *(body.get("tools") or ()))) // 4


def _too_long(window: int, tokens: int, reply_tokens: int, words: str) -> dict[str, JSON]:
    """Return the body with which OpenAI or vLLM refuses a request that is too long."""
    if words == "vllm":
        text = (
            f"This model's maximum context length is {window} tokens. However, you requested {tokens + reply_tokens} "
            f"tokens ({tokens} in the messages, {reply_tokens} in the completion). Please reduce the length of the "
            "messages or completion."
        )
        return {"object": "error", "message": text, "type": "BadRequestError", "param": None, "code": 400}
    if words == "silent":
        return {"error": {"message": "Please reduce the length of the messages.", "code": "context_length_exceeded"}}
    text = (
        f"This model's maximum context length is {window} tokens. However, your messages resulted in {tokens} tokens. "
        "Please reduce the length of the messages."
    )
    error = {"message": text, "type": "invalid_request_error", "param": "messages", "code": "context_length_exceeded"}
    return {"error": error}


def _truncated_message(message: Mapping[str, JSON], chars: int) -> dict[str, JSON]:
    """Return the beginning of a reply. A tool call that is not complete is lost."""
    return {name: message[name][:chars] for name in ("reasoning_content", "content") if message.get(name)}


def _content_text(content: JSON) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", "")) for part in content or () if isinstance(part, Mapping))


def _event(data: JSON) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


async def _serve_until_stopped(port: int, delay_s: float, window: int | None) -> None:
    stop = told_to_stop()
    async with EchoChatServer(delay_s=delay_s, port=port, window=window, lists_window=True) as server:
        print(f"{server.url}/v1", flush=True)  # noqa: T201  the address is the output of this program
        await stop.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serve a fake model on 127.0.0.1. Your message determines its answer.")
    parser.add_argument("--port", type=int, default=8000, help="the port; 0 selects a free one [8000]")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds before each piece of an answer [0]")
    parser.add_argument("--window", type=int, help="the size of the context window in tokens [unlimited]")
    given = parser.parse_args()
    try:
        asyncio.run(_serve_until_stopped(given.port, given.delay, given.window))
    except ConfigError as error:
        parser.error(str(error))
