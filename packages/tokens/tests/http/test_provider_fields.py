"""Fields that only a provider knows, such as the signature of a call: they come back to it unchanged, streamed and
whole, and a server that requires or refuses such a field gets a history that it accepts.

Sources: "Thought signatures" and "OpenAI compatibility" in Gemini's docs, OpenRouter's "Preserving reasoning blocks",
LiteLLM's `thinking_blocks`, and the errors of DeepSeek, Kimi, Groq, Mistral and Gemini.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest
from aiohttp import web

from manual_clock import ManualClock
from palaestra_slots.core.errors import EngineRefused
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engine import AssistantMessage, plain_messages
from palaestra_tokens.engines.openai import OpenAIEngine
from palaestra_tokens.http.sse import Delta
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer

SIGNED: JSON = {"google": {"thought_signature": "c2ln"}}


def call(index: int = 0, **extra: JSON) -> JSON:
    return {"id": f"f{index}", "type": "function", "function": {"name": "sh", "arguments": "{}"}, **extra}


def event(delta: JSON, finish: str | None = None) -> bytes:
    return (
        b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}).encode() + b"\n\n"
    )


def answered(*deltas: JSON) -> FakeAnswer:
    return FakeAnswer([*map(event, deltas), event({}, "tool_calls"), b"data: [DONE]\n\n"])


def whole(message: JSON, **more: JSON) -> FakeAnswer:
    choice = {"index": 0, "message": {"role": "assistant", "content": None, **message}, "finish_reason": "tool_calls"}
    return FakeAnswer(json.dumps({"choices": [choice], **more}).encode())


def asked(server: LoopbackServer, *histories: list[Message], told: list[Delta] | None = None) -> list[AssistantMessage]:
    """Return the replies to these histories, one after the other."""

    async def go() -> list[AssistantMessage]:
        async with server:
            config = APIServerConfig(base_url=server.url, model_name="m", stream=told is not None)
            engine = OpenAIEngine(config, clock=ManualClock())
            hook = told.append if told else None
            try:
                replies = [await engine.chat_completion(messages=each, on_delta=hook) for each in histories]
                return [reply.choices[0].message for reply in replies]
            finally:
                await engine.aclose()

    return asyncio.run(go())


class Choosing(LoopbackServer):
    """A server whose answer depends on the request."""

    def __init__(self, choose: Callable[[JSON], FakeAnswer]) -> None:
        super().__init__()
        self.choose = choose

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        return await self._send_answer(request, self.choose(self.seen[-1].body))


HI: list[Message] = [{"role": "user", "content": "hi"}]
BLOCK = {"type": "reasoning.text", "index": 0, "format": "anthropic-claude-v1"}

KINDS: dict[str, tuple[JSON, list[JSON]]] = {
    "Gemini: a signature of the first call": (
        {"tool_calls": [call(extra_content=SIGNED), call(1)]},
        [
            {"tool_calls": [{"index": 0, **call(extra_content=SIGNED)}]},
            {"tool_calls": [{"index": 1, **call(1)}]},
        ],
    ),
    "a signature of the function": (
        {"tool_calls": [{**call(), "function": {"name": "sh", "arguments": "{}", "thought_signature": "s"}}]},
        [
            {"tool_calls": [{"index": 0, "id": "f0", "function": {"name": "sh", "thought_signature": "s"}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]},
        ],
    ),
    "Gemini: a signature of the message": (
        {"content": "x", "extra_content": SIGNED},
        [{"content": "x"}, {"content": "", "extra_content": SIGNED}],
    ),
    "OpenRouter: one block in pieces, with the signature last": (
        {"reasoning_details": [{**BLOCK, "text": "Let me look.", "signature": "S"}]},
        [
            {"reasoning_details": [{**BLOCK, "text": "Let me "}]},
            {"reasoning_details": [{**BLOCK, "text": "look."}]},
            {"reasoning_details": [{**BLOCK, "signature": "S"}]},
        ],
    ),
    "OpenRouter: two blocks and an encrypted one": (
        {
            "reasoning_details": [
                {"type": "reasoning.text", "index": 0, "text": "ab", "signature": "S"},
                {"type": "reasoning.text", "index": 1, "text": "c", "signature": "T"},
                {"type": "reasoning.encrypted", "index": 2, "data": "xyz", "id": "r"},
            ]
        },
        [
            {"reasoning_details": [{"type": "reasoning.text", "index": 0, "text": "a"}]},
            {"reasoning_details": [{"type": "reasoning.text", "index": 0, "text": "b", "signature": "S"}]},
            {"reasoning_details": [{"type": "reasoning.text", "index": 1, "text": "c"}]},
            {"reasoning_details": [{"type": "reasoning.text", "index": 1, "signature": "T"}]},
            {"reasoning_details": [{"type": "reasoning.encrypted", "index": 2, "data": "xyz", "id": "r"}]},
        ],
    ),
    "LiteLLM: blocks without an index": (
        {
            "thinking_blocks": [
                {"type": "thinking", "thinking": "ab", "signature": "S"},
                {"type": "thinking", "thinking": "c", "signature": None},
            ]
        },
        [
            {"thinking_blocks": [{"type": "thinking", "thinking": "a", "signature": None}]},
            {"thinking_blocks": [{"type": "thinking", "thinking": "b"}]},
            {"thinking_blocks": [{"type": "thinking", "thinking": "", "signature": "S"}]},
            {"thinking_blocks": [{"type": "thinking", "thinking": "c", "signature": None}]},
        ],
    ),
    "citations, which are not pieces of one another": (
        {"annotations": [{"type": "url_citation", "url_citation": {"url": url}} for url in ("a", "b")]},
        [{"annotations": [{"type": "url_citation", "url_citation": {"url": url}}]} for url in ("a", "b")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", KINDS)
def test_what_only_the_provider_knows_comes_back_unchanged(what: str) -> None:
    message, deltas = KINDS[what]
    (once,) = asked(LoopbackServer(whole(message)), HI)
    (streamed,) = asked(LoopbackServer(answered(*deltas)), HI, told=[])
    server = LoopbackServer(whole({"content": "ok"}), whole({"content": "ok"}))
    asked(server, [*HI, once], [*HI, streamed])
    for request in server.seen:
        back = request.body["messages"][1]
        assert {name: back[name] for name in message} == message


def test_empty_fields_and_those_that_requests_do_not_have_stay_away() -> None:
    (reply,) = asked(
        LoopbackServer(whole({"content": "x", "annotations": [], "audio": {"id": "a"}, "parsed": None})), HI
    )
    assert plain_messages([reply]) == [{"role": "assistant", "content": "x"}]


def thinks_or_refuses(words: str, holds: Callable[[Message], bool]) -> Callable[[JSON], FakeAnswer]:
    """A server that refuses a history with an assistant message of which `holds` is false."""

    def answer(body: JSON) -> FakeAnswer:
        if all(holds(each) for each in body["messages"] if each["role"] == "assistant"):
            return whole({"content": "ok"})
        return FakeAnswer(json.dumps({"error": {"message": words}}).encode(), status=400)

    return answer


def has_thought(message: Message) -> bool:
    return bool(message.get("reasoning_content", "")) or not message.get("tool_calls")


def is_signed(message: Message) -> bool:
    return all("extra_content" in each for each in message.get("tool_calls") or ())


def lacks(name: str) -> Callable[[Message], bool]:
    return lambda message: name not in json.dumps(message)


OLD: list[Message] = [
    *HI,
    {"role": "assistant", "content": "", "tool_calls": [call()]},
    {"role": "tool", "tool_call_id": "f0", "content": "x"},
]
FULL: list[Message] = [
    *HI,
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "reasoning_details": [{**BLOCK, "text": "hm"}],
        "tool_calls": [call(extra_content=SIGNED)],
    },
    {"role": "tool", "tool_call_id": "f0", "content": "x"},
]


@pytest.mark.parametrize(
    ("words", "holds", "history"),
    [
        ("Missing `reasoning_content` field in the assistant message at message index 1.", has_thought, OLD),
        ("The `reasoning_content` in the thinking mode must be passed back to the API.", has_thought, OLD),
        ("thinking is enabled but reasoning_content is missing in assistant tool call message", has_thought, OLD),
        ("Function call is missing a thought_signature in functionCall parts.", is_signed, OLD),
        ("'messages.1' : property 'reasoning_content' is unsupported", lacks("reasoning_content"), FULL),
        ("body.messages.1.assistant.reasoning_details: Extra inputs are not permitted", lacks("reasoning_det"), FULL),
        ("unknown field extra_content", lacks("extra_content"), FULL),
        ("Bad request", lacks("extra_content"), FULL),
    ],
)
def test_a_server_that_requires_or_refuses_a_field_gets_the_history_that_it_accepts(
    words: str, holds: Callable[[Message], bool], history: list[Message]
) -> None:
    server = Choosing(thinks_or_refuses(words, holds))
    first, second = asked(server, history, history)
    assert (first.content, second.content) == ("ok", "ok")
    assert len(server.seen) == 3  # learned once


def test_a_server_may_require_one_field_and_refuse_another() -> None:
    def answer(body: JSON) -> FakeAnswer:
        refuse = thinks_or_refuses("extra_content: Extra inputs are not permitted", lacks("extra_content"))(body)
        return refuse if refuse.status == 400 else thinks_or_refuses("reasoning_content is missing", has_thought)(body)

    history = [*FULL, *OLD[1:]]
    (reply,) = asked(Choosing(answer), history)
    assert reply.content == "ok"


def test_a_refusal_with_another_cause_is_the_servers_last_word() -> None:
    server = Choosing(lambda body: FakeAnswer(b'{"error": {"message": "no such model"}}', status=400))
    with pytest.raises(EngineRefused, match="no such model"):
        asked(server, FULL)
    assert len(server.seen) == 2


HALVES = [b'{"content": "nice \\ud83d"}', b'{"content": "\\udc4d ok"}']


def raw(delta: bytes) -> bytes:
    return b'data: {"choices": [{"index": 0, "delta": ' + delta + b"}]}\n\n"


def test_halves_of_a_character_in_two_chunks_are_one_character() -> None:
    told: list[Delta] = [Delta()]
    thoughts = [each.replace(b"content", b"reasoning_content") for each in HALVES]
    arguments = [
        b'{"tool_calls": [{"index": 0, "id": "f", "function": {"name": "sh", "arguments": "{\\"a\\": \\"\\ud83d"}}]}',
        b'{"tool_calls": [{"index": 0, "function": {"arguments": "\\udc4d\\"}"}}]}',
    ]
    pieces = [raw(each) for each in (*thoughts, *HALVES, *arguments)]
    server = LoopbackServer(FakeAnswer([*pieces, event({}, "tool_calls"), b"data: [DONE]\n\n"]))
    (reply,) = asked(server, HI, told=told)
    assert (reply.content, reply.reasoning_content) == ("nice 👍 ok", "nice 👍 ok")
    assert reply.tool_calls is not None
    assert reply.tool_calls[0].function.arguments == '{"a": "👍"}'
    assert "".join(each.content for each in told) == "nice 👍 ok" == "".join(each.reasoning for each in told)
    assert len(server.seen) == 1


@pytest.mark.parametrize("half", ["\\ud83d", "\\udc4d"])
def test_a_half_alone_is_the_replacement_character(half: str) -> None:
    text = b'{"content": "a' + half.encode() + b' b"}'
    (streamed,) = asked(LoopbackServer(FakeAnswer([raw(text), event({}, "stop"), b"data: [DONE]\n\n"])), HI, told=[])
    body = b'{"choices": [{"index": 0, "message": ' + text + b', "finish_reason": "stop"}]}'
    (once,) = asked(LoopbackServer(FakeAnswer(body)), HI)
    assert streamed.content == once.content == "a\ufffd b"


def thought(tokens: int) -> JSON:
    return {"completion_tokens_details": {"reasoning_tokens": tokens}}


@pytest.mark.parametrize(
    ("usage", "completion"),
    [
        ({"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 1110}, 1010),
        ({"prompt_tokens": 100, "completion_tokens": 10, **thought(1000)}, 1010),
        ({"prompt_tokens": 5, "completion_tokens": 9, "total_tokens": 14, **thought(8)}, 9),
        ({"prompt_tokens": 5, "completion_tokens": 9, "total_tokens": 14, "completion_tokens_details": None}, 9),
        ({"completion_tokens": 9, "total_tokens": 14}, 9),
    ],
)  # fmt: skip
async def test_reasoning_that_a_provider_counts_apart_is_counted(usage: JSON, completion: int) -> None:
    server = LoopbackServer(whole({"content": "x"}, usage=usage))
    async with server:
        engine = OpenAIEngine(APIServerConfig(base_url=server.url, model_name="m"), clock=ManualClock())
        used = (await engine.chat_completion(messages=HI)).usage
        await engine.aclose()
    assert used is not None
    assert used.completion_tokens == completion
    assert used.total_tokens >= used.prompt_tokens + completion
