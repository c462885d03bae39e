"""The chat completions engine against a real server on the loopback: requests, the look at the start, odd servers."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from golden_messages import check_message
from manual_clock import ManualClock
from palaestra_slots.core.errors import (
    ConfigError,
    ContextExceeded,
    EngineRefused,
    EngineReplyError,
    EngineUnavailable,
    ReplyWithheld,
)
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.chat_server import SessionContext
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engine import ChatCompletion
from palaestra_tokens.engines.openai import OpenAIEngine, parse_base_url
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer, completion

T = TypeVar("T")
EVENTS = {"Content-Type": "text/event-stream"}
HI: list[Message] = [{"role": "user", "content": "hi"}]


def with_engine(server: LoopbackServer, work: Callable[[OpenAIEngine], Awaitable[T]], **config: JSON) -> T:
    async def go() -> T:
        async with server:
            engine = OpenAIEngine(APIServerConfig(base_url=server.url, model_name="m", **config), clock=ManualClock())
            try:
                return await work(engine)
            finally:
                await engine.aclose()

    return asyncio.run(go())


def ask(server: LoopbackServer, **request: JSON) -> ChatCompletion:
    config = request.pop("config", {})
    return with_engine(server, lambda engine: engine.chat_completion(**{"messages": HI, **request}), **config)


def test_a_request_holds_what_was_asked_and_nothing_more() -> None:
    server = LoopbackServer(FakeAnswer(completion("hello")))
    reply = ask(server)
    assert reply.choices[0].message.content == "hello"
    assert (server.seen[0].method, server.seen[0].path) == ("POST", "/v1/chat/completions")
    assert server.seen[0].body == {"model": "m", "messages": HI}
    assert "Authorization" not in server.seen[0].headers


FAILED = {"error": {"message": "Provider returned error", "code": 502}}


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_within_a_reply_counts_as_the_status_that_it_says(stream: bool) -> None:
    """OpenRouter answers 200 once a provider has begun; vLLM and SGLang once they stream."""

    def answer(error: JSON) -> FakeAnswer:
        return FakeAnswer([b"data: " + json.dumps(error).encode() + b"\n\n"] if stream else error)

    server = LoopbackServer(answer(FAILED), answer(FAILED), FakeAnswer(completion("hello")))
    assert ask(server, stream=stream).choices[0].message.content == "hello"
    assert len(server.seen) == 3
    too_long = {"error": {"message": "Input length (9) exceeds the maximum allowed length (8).", "code": 400}}
    with pytest.raises(ContextExceeded):
        ask(LoopbackServer(answer(too_long)), stream=stream)
    with pytest.raises(EngineReplyError, match="no status"):
        ask(LoopbackServer(answer({"error": {"message": "no status"}})), stream=stream)


def test_a_reply_that_speaks_of_errors_is_a_reply() -> None:
    told = {**completion('{"error": {"code": 502}}'), "error": None}
    assert ask(LoopbackServer(FakeAnswer(told))).choices[0].message.content == '{"error": {"code": 502}}'


def test_every_setting_arrives_and_extra_body_wins() -> None:
    server = LoopbackServer(FakeAnswer(completion()))
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    ask(
        server,
        tools=[tool],
        temperature=0.5,
        max_tokens=9,
        n=2,
        top_p=0.9,
        split="eval",
        extra_body={"temperature": 0.1, "chat_template_kwargs": {"enable_thinking": False}},
        config={"api_key": "k"},
    )
    assert server.seen[0].body == {
        "model": "m",
        "messages": HI,
        "tools": [tool],
        "temperature": 0.1,
        "max_tokens": 9,
        "n": 2,
        "top_p": 0.9,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert server.seen[0].headers["Authorization"] == "Bearer k"


@pytest.mark.parametrize(
    ("given", "api"),
    [
        ("http://h:1", "http://h:1/v1"),
        ("http://h:1/", "http://h:1/v1"),
        ("http://h:1/v1/", "http://h:1/v1"),
        ("https://h/api/v1", "https://h/api/v1"),
        ("https://h/v1beta/openai", "https://h/v1beta/openai"),
        ("http://h/v1/chat/completions", "http://h/v1"),
        ("http://h:1/chat/completions", "http://h:1"),
    ],
)
def test_base_urls(given: str, api: str) -> None:
    assert str(parse_base_url(given)) == api


async def test_the_query_of_a_base_url_is_in_every_request_and_in_no_message(caplog) -> None:
    refusal = FakeAnswer({"error": {"message": "no"}}, 400)
    async with LoopbackServer(FakeAnswer(completion()), refusal) as server:
        base = f"{server.url}/openai/v1?api-version=preview&sig=s%2B1"
        engine = OpenAIEngine(APIServerConfig(base_url=base, model_name="m"), clock=ManualClock())
        await engine.start()
        await engine.chat_completion(messages=HI)
        with pytest.raises(EngineRefused) as refused:
            await engine.chat_completion(messages=HI)
        await engine.aclose()
        message, *paths = [f"{refused.value}", *(seen.path for seen in server.seen)]
    query = "?api-version=preview&sig=s%2B1"
    assert paths == [f"/openai/v1/{name}{query}" for name in ("models", "chat/completions", "chat/completions")]
    assert "sig" not in message + caplog.text


@pytest.mark.parametrize("given", [None, "", "localhost:8000", "ftp://h/v1", "http://", "http://[::1", "http://h:x/"])
def test_what_is_no_base_url(given: str | None) -> None:
    with pytest.raises(ConfigError, match=r"base_url|base-url"):
        parse_base_url(given)


def test_the_look_at_the_start_is_one_cheap_request() -> None:
    server = LoopbackServer(FakeAnswer(completion()))
    with_engine(server, OpenAIEngine.start)
    assert [(seen.method, seen.path) for seen in server.seen] == [("GET", "/v1/models")]


def test_no_look_when_told_not_to() -> None:
    server = LoopbackServer(FakeAnswer(completion()))
    with_engine(server, OpenAIEngine.start, health_check=False)
    assert server.seen == []


@pytest.mark.parametrize(
    "models", [FakeAnswer({}, 404), FakeAnswer({}, 405), FakeAnswer({}, 400), FakeAnswer(b"hello"), FakeAnswer([])]
)
def test_servers_without_a_list_of_models_are_fine(models: FakeAnswer) -> None:
    with_engine(LoopbackServer(FakeAnswer(completion()), models=models), OpenAIEngine.start)


def test_a_model_that_is_not_listed_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    models = FakeAnswer({"data": [{"id": "other"}]})
    with caplog.at_level(logging.WARNING):
        with_engine(LoopbackServer(FakeAnswer(completion()), models=models), OpenAIEngine.start)
    check_message(caplog.text, "other")


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_ends_the_start(status: int) -> None:
    models = FakeAnswer({"error": {"message": "bad key"}}, status)
    with pytest.raises(EngineRefused, match="bad key"):
        with_engine(LoopbackServer(FakeAnswer(completion()), models=models), OpenAIEngine.start)


async def test_an_unreachable_server_ends_the_start_within_seconds() -> None:
    clock = ManualClock()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

        async def go() -> None:
            engine = OpenAIEngine(APIServerConfig(base_url=f"http://127.0.0.1:{port}"), clock=clock)
            try:
                await engine.start()
            finally:
                await engine.aclose()

        with pytest.raises(EngineUnavailable, match=f"127.0.0.1:{port}") as caught:
            await go()
    assert sum(clock.slept) < 5
    assert caught.value.exit_code == 4


BROKEN: dict[str, JSON] = {
    "empty": b"",
    "html": b"<html>busy</html>",
    "half": b'{"choices": [{"message": {"content": "he',
    "null": None,
    "a list": [],
    "no choices": {"id": "1", "choices": []},
    "no choices field": {"id": "1", "object": "chat.completion"},
    "an error": {"error": {"message": "upstream gone"}},
    "an error's text": {"error": "upstream gone"},
    "an error with a word": {"error": {"message": "upstream gone", "code": "server_error"}},
    "network_error": completion("he", finish="network_error"),
    "insufficient": completion("he", finish="insufficient_system_resource"),
    "provider": completion("he", finish="error"),
    "abort": completion("he", finish="abort"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_reply_with_status_200_is_tried_again(broken: str) -> None:
    bad = FakeAnswer(BROKEN[broken] if BROKEN[broken] is not None else b"null")
    server = LoopbackServer(bad, bad, FakeAnswer(completion("hello")))
    assert ask(server).choices[0].message.content == "hello"
    assert len(server.seen) == 3


def test_a_server_that_sends_only_garbage_is_named_after_the_last_try() -> None:
    server = LoopbackServer(FakeAnswer(b"<html>"))
    with pytest.raises(EngineReplyError, match=r"model 'm'.*not JSON.*<html>"):
        ask(server)
    assert len(server.seen) == 8


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("word", ["content_filter", "SAFETY", "sensitive", "refusal"])
def test_a_withheld_reply_is_not_tried_again(word: str, stream: bool) -> None:
    chunk = {"choices": [{"index": 0, "delta": {"content": "he"}, "finish_reason": word}]}
    streamed = FakeAnswer([b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n\n"], 200, EVENTS)
    server = LoopbackServer(streamed if stream else FakeAnswer(completion("he", word)))
    with pytest.raises(ReplyWithheld, match=rf"filter.*{word}"):
        ask(server, stream=stream)
    assert len(server.seen) == 1


def test_a_continued_text_is_tried_again_too() -> None:
    good = {"choices": [{"index": 0, "text": "b", "finish_reason": "stop"}]}
    server = LoopbackServer(FakeAnswer(b""), FakeAnswer({"choices": []}), FakeAnswer(good))
    reply = with_engine(server, lambda engine: engine.completion(prompt="a"))
    assert (reply.choices[0].text, len(server.seen)) == ("b", 3)


def test_ids_of_calls_follow_from_the_conversation() -> None:
    calls = [{"function": {"name": "f", "arguments": "{}"}}] * 2
    messages = [*HI, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    reply = ask(LoopbackServer(FakeAnswer(completion(None, tool_calls=calls))), messages=messages)
    assert [call.id for call in reply.choices[0].message.tool_calls or ()] == ["call_2_0", "call_2_1"]


def test_n_from_a_server_that_ignores_it() -> None:
    server = LoopbackServer(FakeAnswer(completion()))
    reply = ask(server, n=3, config={"n_kwarg_is_ignored": True})
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert len(server.seen) == 3
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (7, 9, 16)


def test_a_key_read_from_a_file_is_sent_without_its_new_line() -> None:
    server = LoopbackServer(FakeAnswer(completion()))
    ask(server, config={"api_key": "sk-1\n"})
    assert server.seen[0].headers["Authorization"] == "Bearer sk-1"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"api_key": "sk\n1"}, "contains a control character"),
        ({"api_key": "sk-1", "base_url": "http://me:secret@127.0.0.1:1"}, "remove one of them"),
    ],
)
def test_a_key_that_cannot_be_sent_is_a_mistake_of_the_configuration(config: JSON, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        OpenAIEngine(APIServerConfig(**{"base_url": "http://127.0.0.1:1", **config}))
    assert "secret" not in str(caught.value)


def test_texts_too_are_asked_for_one_by_one() -> None:
    one = {"choices": [{"text": "so"}], "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}}
    server = LoopbackServer(FakeAnswer(one))
    reply = with_engine(server, lambda engine: engine.completion(prompt="and", n=3), n_kwarg_is_ignored=True)
    assert [(choice.index, choice.text) for choice in reply.choices] == [(0, "so"), (1, "so"), (2, "so")]
    assert [seen.body for seen in server.seen] == [{"model": "m", "prompt": "and"}] * 3
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (7, 9, 16)


def test_a_replys_own_message_and_calls_may_be_sent_back() -> None:
    malformed = completion(None, tool_calls=[{"id": "1", "function": {"name": "f", "arguments": "{"}}])
    answers = [
        FakeAnswer(malformed),
        FakeAnswer({"error": "Expecting property name"}, 400),
        FakeAnswer(completion("now")),
    ]
    server = LoopbackServer(*answers)

    async def go(engine: OpenAIEngine) -> ChatCompletion:
        reply = (await engine.chat_completion(messages=HI)).choices[0].message
        again = {"role": "assistant", "content": None, "tool_calls": reply.tool_calls}
        return await engine.chat_completion(messages=[*HI, reply, *HI, again])

    assert with_engine(server, go).choices[0].message.content == "now"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}
    sent = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert server.seen[1].body["messages"] == [*HI, sent, *HI, sent]


def test_what_is_no_call_in_a_history_is_left_to_the_server_to_refuse() -> None:
    history = [*HI, {"role": "assistant", "tool_calls": [{"name": "f"}, 5]}]
    with pytest.raises(EngineRefused, match="no function"):
        ask(LoopbackServer(FakeAnswer({"error": "a call with no function"}, 400)), messages=history)


@pytest.mark.parametrize(
    "refusal",
    [
        FakeAnswer({"detail": "Expecting value"}, 400),
        FakeAnswer({"error": {"code": 500, "message": "Failed to parse tool call arguments as JSON: [json.exce"}}, 500),
    ],
    ids=["vllm", "llama.cpp"],
)
def test_a_server_that_refuses_malformed_history_is_given_it_wrapped(refusal: FakeAnswer) -> None:
    bad = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": '}}
    history = [*HI, {"role": "assistant", "content": "", "tool_calls": [bad]}]
    server = LoopbackServer(refusal, FakeAnswer(completion()))

    async def twice(engine: OpenAIEngine) -> None:
        await engine.chat_completion(messages=history)
        await engine.chat_completion(messages=history)

    with_engine(server, twice)
    sent = [seen.body["messages"][1]["tool_calls"][0]["function"]["arguments"] for seen in server.seen]
    assert sent == ['{"a": ', '{"malformed":"{\\"a\\": "}', '{"malformed":"{\\"a\\": "}']
    assert bad["function"]["arguments"] == '{"a": '  # type: ignore[index]


def test_a_plain_refusal_is_not_asked_twice() -> None:
    server = LoopbackServer(FakeAnswer({"detail": "no such parameter"}, 400))
    with pytest.raises(EngineRefused, match="no such parameter"):
        ask(server)
    assert len(server.seen) == 1


def test_a_session_is_the_engine() -> None:
    engine = OpenAIEngine(APIServerConfig(base_url="http://h"))
    assert engine.session(SessionContext()) is engine
    assert engine.name == "default"


@pytest.mark.parametrize(("owner", "sent"), [("vllm", True), ("sglang", True), ("palaestra", True), ("openai", False)])
def test_vllm_and_sglang_get_every_sampling_setting_with_a_temperature(owner: str, sent: bool) -> None:
    """They take a missing one from the model's generation_config.json; other servers refuse unknown ones."""
    listed = FakeAnswer({"object": "list", "data": [{"id": "m", "owned_by": owner}]})
    text = FakeAnswer({"choices": [{"index": 0, "text": "b"}]})
    server = LoopbackServer(FakeAnswer(completion()), FakeAnswer(completion()), text, models=listed)

    async def work(engine: OpenAIEngine) -> None:
        await engine.start()
        await engine.chat_completion(messages=HI, temperature=0.7, extra_body={"top_k": 5})
        await engine.chat_completion(messages=HI)
        await engine.completion(prompt="a", temperature=0.7, top_p=0.5)

    with_engine(server, work)
    chat, plain, texts = [seen.body for seen in server.seen if seen.method == "POST"]
    rest = {"top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"}
    assert (chat.keys() & rest == rest, chat["top_k"], chat["temperature"]) == (sent, 5, 0.7)
    assert not plain.keys() & {*rest, "temperature"}
    assert (texts.keys() & rest == rest, texts["top_p"]) == (sent, 0.5)
