"""Streamed replies at the recording endpoint: pieces are sent as they come, and a whole reply in one write."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

import palaestra_tokens.recording.endpoint as endpoint_module
from palaestra_slots.core.types import JSON
from palaestra_tokens.chat_server import ChatServer
from palaestra_tokens.engine import AssistantMessage, ChatChoice, ChatCompletion
from palaestra_tokens.http.sse import Delta
from palaestra_tokens.recording import Conversations, RecordingEndpoint


class Paced(ChatServer):
    """Shows its first piece, and its `rest` when it may `go_on`."""

    features = frozenset({"on_delta"})

    def __init__(self, *rest: Delta) -> None:
        self.go_on = asyncio.Event()
        self._rest = rest

    async def chat_completion(self, *, on_delta: JSON, **_: JSON) -> ChatCompletion:
        on_delta(Delta(content="one "))
        await self.go_on.wait()
        for delta in self._rest:
            on_delta(delta)
        return ChatCompletion(choices=[ChatChoice(message=AssistantMessage(content="one two"), finish_reason="stop")])


def streamed(server: Paced, *, early: bool = False) -> tuple[str, str | None, list[JSON]]:
    """The text of a streamed reply, its Content-Length, and its events that are not choices. The rest of the reply
    comes only after the client has read the first piece and a keep-alive, or is ready `early`."""

    async def main() -> tuple[str, str | None, list[JSON]]:
        text, others = "", []
        async with RecordingEndpoint() as endpoint, aiohttp.ClientSession() as session, asyncio.timeout(20):
            with endpoint.open(Conversations(server)) as address:
                if early:
                    server.go_on.set()
                body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
                headers = {"Authorization": f"Bearer {address.key}"}
                async with session.post(f"{address.openai_url}/chat/completions", json=body, headers=headers) as reply:
                    async for line in reply.content:
                        if line == b": waiting\n":
                            assert text == "one "
                            server.go_on.set()
                        elif line.startswith(b"data: {"):
                            event = json.loads(line[6:])
                            if event.get("choices"):
                                text += event["choices"][0]["delta"].get("content") or ""
                            else:
                                others.append(event)
                    return text, reply.headers.get("Content-Length"), others

    return asyncio.run(main())


def test_a_piece_is_sent_before_the_next_one_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "PING_S", 0.05)
    for rest in ([Delta(content="two")], [Delta(content="t"), Delta(index=1, content="x"), Delta(content="wo")], []):
        assert streamed(Paced(*rest)) == ("one two", None, [])


def test_a_reply_that_is_complete_at_once_is_sent_in_one_piece() -> None:
    text, length, others = streamed(Paced(Delta(content="two")), early=True)
    assert (text, others) == ("one two", [])
    assert length is not None


def test_a_reply_that_begins_again_after_a_piece_was_sent_is_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "PING_S", 0.05)
    text, _, (error,) = streamed(Paced(Delta(restarted=True), Delta(content="one two")))
    assert text == "one "
    assert "broke off" in error["error"]["message"]
