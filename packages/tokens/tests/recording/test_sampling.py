"""What an agent may choose of its sampling: the run's own settings count, which training assumes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp
import pytest

from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.chat_server import ChatServer
from palaestra_tokens.engine import AssistantMessage, ChatChoice, ChatCompletion, TextChoice, TextCompletion
from palaestra_tokens.recording import CallLimits, Conversations, RecordingEndpoint

MESSAGES = [{"role": "user", "content": "hello"}]
RUNS: JSON = {"temperature": 1.0, "top_k": 20}
AGENTS: JSON = {"temperature": 0.0, "top_p": 0.1, "top_k": 1}
OPENAIS: JSON = {
    **AGENTS,
    "min_p": 0.5,
    "seed": 1,
    "presence_penalty": 2,
    "frequency_penalty": 2,
    "repetition_penalty": 2,
    "min_tokens": 5,
    "stop_token_ids": [3],
    "chat_template_kwargs": {"enable_thinking": False},
}


class Asked(ChatServer):
    """Keeps the settings of its requests."""

    def __init__(self) -> None:
        self.settings: list[dict[str, JSON]] = []

    async def chat_completion(self, *, messages: Sequence[Message], **request: JSON) -> ChatCompletion:
        self.settings.append(request)
        return ChatCompletion(choices=[ChatChoice(message=AssistantMessage(content="hi"))])

    async def completion(self, *, prompt: str, **request: JSON) -> TextCompletion:
        self.settings.append(request)
        return TextCompletion(choices=[TextChoice(text="hi")])


def asked(path: str, body: JSON) -> tuple[int, str, list[dict[str, JSON]]]:
    """The status, the fields that are named as ignored, and the settings that reach the engine."""
    server = Asked()

    async def main() -> tuple[int, str, list[dict[str, JSON]]]:
        conversations = Conversations(server, sampling=RUNS, limits=CallLimits(max_tokens=100))
        async with RecordingEndpoint() as endpoint, aiohttp.ClientSession() as session:
            with endpoint.open(conversations) as address:
                headers = {"Authorization": f"Bearer {address.key}"}
                async with session.post(f"{address.url}/{path}", json={"model": "m", **body}, headers=headers) as reply:
                    return reply.status, reply.headers.get("x-ignored-fields", ""), server.settings

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "body", "limit", "stop"),
    [
        ("v1/chat/completions", {**OPENAIS, "messages": MESSAGES}, "max_completion_tokens", "stop"),
        ("v1/completions", {**OPENAIS, "prompt": "hello"}, "max_tokens", "stop"),
        ("v1/responses", {**OPENAIS, "input": "hello"}, "max_output_tokens", "stop"),
        ("v1/messages", {**AGENTS, "messages": MESSAGES}, "max_tokens", "stop_sequences"),
    ],
)
def test_a_request_only_shortens_its_reply(path: str, body: dict[str, JSON], limit: str, stop: str) -> None:
    status, ignored, settings = asked(path, {**body, limit: 50, stop: ["END"]})
    assert (status, settings) == (200, [{**RUNS, "max_tokens": 50, "stop": ["END"]}])
    assert set(ignored.split(",")) == {*body} & {*OPENAIS}
    assert asked(path, {**body, limit: 5000})[2] == [{**RUNS, "max_tokens": 100}]


def test_a_biased_distribution_is_refused() -> None:
    status, _, settings = asked("v1/chat/completions", {"messages": MESSAGES, "logit_bias": {"5": 100}})
    assert (status, settings) == (400, [])


def test_each_of_several_replies_is_a_call_with_the_runs_settings() -> None:
    status, _, settings = asked("v1/chat/completions", {"messages": MESSAGES, "n": 3, "temperature": 2})
    assert (status, settings) == (200, [{**RUNS, "max_tokens": 100}] * 3)
