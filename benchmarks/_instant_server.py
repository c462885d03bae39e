"""A model server that answers immediately, so that a benchmark measures only the client's cost.

`serve(conversation)` implements chat completions and SGLang's `/generate`. The number of replies that a request already
contains decides which reply the server returns. The module imports nothing from Palaestra, so that peers can use it
too.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable, Sequence

Conversation = Sequence[bytes]
"""The replies in order, each a whole body. The last reply repeats without end."""

_STREAM = re.compile(rb'"stream": ?true')


def chat_reply(
    content: str | None,
    calls: Sequence[tuple[str, dict[str, object]]] = (),
    turn: int = 0,
    reasoning: str | None = None,
) -> bytes:
    """Return a chat completion with text or with tool calls, each given by name and arguments."""
    message: dict[str, object] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call_{turn}_{number}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for number, (name, arguments) in enumerate(calls)
        ]
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}
    usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
    return json.dumps(
        {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}
    ).encode()


def streamed(reply: bytes) -> bytes:
    """Return the same chat completion as server-sent events, in one piece."""
    body = json.loads(reply)
    (choice,) = body["choices"]
    delta = choice.pop("message")
    for index, call in enumerate(delta.get("tool_calls", ())):
        call["index"] = index
    choice["delta"] = delta
    chunk = json.dumps(body | {"object": "chat.completion.chunk"}).encode()
    return b"data: " + chunk + b"\n\ndata: [DONE]\n\n"


def token_reply(ids: Sequence[int]) -> bytes:
    """Return an answer of SGLang's `/generate` with these ids, each with a log-probability."""
    info = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-0.1, number, None] for number in ids]}
    return json.dumps({"text": "", "meta_info": info}).encode()


class InstantServer(asyncio.Protocol):
    """Implements enough HTTP to answer requests that have a Content-Length."""

    def __init__(
        self, chat: Conversation, tokens: Conversation, turns: Callable[[bytes], int], delay_s: float = 0.0
    ) -> None:
        self._chat, self._tokens, self._turns, self._delay_s = chat, tokens, turns, delay_s
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (head_end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:head_end].lower()
            length_at = head.find(b"content-length:")
            length = int(head[length_at + 15 :].split(b"\r\n", 1)[0]) if length_at >= 0 else 0
            end = head_end + 4 + length
            if len(self._buffer) < end:
                return
            body, path = self._buffer[head_end + 4 : end], head.split(b" ", 2)[1]
            self._buffer = self._buffer[end:]
            reply, kind = self._reply(path, body), b"application/json"
            if path.endswith(b"/chat/completions") and _STREAM.search(body):
                reply, kind = streamed(reply), b"text/event-stream"
            start = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n" % (kind, len(reply))
            if self._delay_s and path.endswith((b"/generate", b"/chat/completions")):
                asyncio.get_running_loop().call_later(self._delay_s, self._transport.write, start + reply)
            else:
                self._transport.write(start + reply)

    def _reply(self, path: bytes, body: bytes) -> bytes:
        if path.endswith(b"/generate"):
            return self._tokens[min(self._turns(body), len(self._tokens) - 1)]
        if path.endswith(b"/chat/completions"):
            return self._chat[min(body.count(b'"assistant"'), len(self._chat) - 1)]
        return b'{"object": "list", "data": [{"id": "m", "object": "model"}]}'


async def serve(
    chat: Conversation,
    tokens: Conversation = (),
    turns: Callable[[bytes], int] = lambda body: 0,
    *,
    delay_s: float = 0.0,
) -> None:
    """Print the address, and answer until standard input ends. `turns` counts the replies in a body of token ids; the
    server waits `delay_s` before each reply."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: InstantServer(chat, tokens, turns, delay_s), "127.0.0.1", 0, backlog=2048)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()
