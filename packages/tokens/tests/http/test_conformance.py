"""The documented shapes of each model server, over a real connection: streamed and whole replies mean the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence

import pytest

from documented_servers import SERVERS, Refusal, Server, as_stream, as_whole
from manual_clock import ManualClock
from palaestra_slots.core.errors import ContextExceeded, EngineError, EngineReplyError, EngineUnavailable, ReplyWithheld
from palaestra_slots.core.types import JSON
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engine import ChatCompletion
from palaestra_tokens.engines.openai import OpenAIEngine
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer, Seen, completion

YES = FakeAnswer(completion("ok"))
ASKED = 65535


def ask(*answers: FakeAnswer, stream: bool = False, models: JSON = None, **request: JSON) -> tuple[JSON, list[Seen]]:
    """Return the reply, or the error, and the requests that the server has seen."""

    async def go() -> tuple[JSON, list[Seen]]:
        listed = FakeAnswer({"object": "list", "data": [{"id": "m", **(models or {})}]})
        async with LoopbackServer(*answers, models=listed) as server:
            config = APIServerConfig(base_url=server.url, model_name="m", stream=stream)
            engine = OpenAIEngine(config, clock=ManualClock())
            try:
                if models is not None:
                    await engine.start()
                    return engine.window_tokens, server.seen
                said = await engine.chat_completion(messages=[{"role": "user", "content": "hi"}], **request)
            except EngineError as error:
                return error, server.seen
            finally:
                await engine.aclose()
            return said, server.seen

    return asyncio.run(go())


def whole(message: JSON, finish: str | None = "stop") -> FakeAnswer:
    return FakeAnswer({"id": "x", "choices": [{"index": 0, "message": message, "finish_reason": finish}]})


def streamed(deltas: Sequence[JSON], finish: str | None = "stop") -> FakeAnswer:
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    ends = {"index": 0, "delta": {}, "finish_reason": finish}
    events = [b"data: " + json.dumps({"id": "x", "choices": [each]}).encode() + b"\n\n" for each in [*choices, ends]]
    return FakeAnswer([b": PROCESSING\n\n", *events, b"data: [DONE]\n\n"])


def ways(refusal: Refusal) -> Iterator[tuple[bool, FakeAnswer]]:
    """Yield the answer to a whole request and to a streamed one. A refusal within a reply comes in both forms."""
    status, body = refusal
    yield False, FakeAnswer(body, status)
    yield True, FakeAnswer(as_stream(body)) if status == 200 else FakeAnswer(body, status)


def rows(name: str) -> list[object]:
    return [
        pytest.param(server, row, id=f"{title}, {number}")
        for title, server in SERVERS.items()
        for number, row in enumerate(getattr(server, name))
    ]


def meaning(said: JSON) -> str | None:
    if isinstance(said, ReplyWithheld):
        return "withheld"
    if isinstance(said, EngineReplyError):
        return "failed"
    assert isinstance(said, ChatCompletion), said
    return said.choices[0].finish_reason


def test_the_table_has_every_server_with_its_sources() -> None:
    assert len(SERVERS) >= 17
    assert all(server.sources for server in SERVERS.values())


@pytest.mark.parametrize("title", SERVERS)
def test_who_ended_a_reply(title: str) -> None:
    for word, wanted in SERVERS[title].finish.items():
        message = {"role": "assistant", "content": "x"}
        found = [ask(whole(message, word))[0], ask(streamed([message], word), stream=True)[0]]
        assert [meaning(each) for each in found] == [wanted, wanted], word


@pytest.mark.parametrize(("server", "row"), rows("calls"))
def test_calls(server: Server, row: tuple[Sequence[JSON], Sequence[tuple[str, str]]]) -> None:
    deltas, wanted = row
    for answer, stream in ((streamed(deltas, "tool_calls"), True), (whole(as_whole(wanted), "tool_calls"), False)):
        reply, _ = ask(answer, stream=stream)
        assert isinstance(reply, ChatCompletion), reply
        found = reply.choices[0].message.tool_calls or []
        assert [(each.function.name, each.function.arguments) for each in found] == wanted
        assert all(each.id for each in found)


@pytest.mark.parametrize(("server", "row"), rows("thinking"))
def test_thinking(server: Server, row: tuple[Sequence[JSON], JSON, str, str]) -> None:
    deltas, message, thinking, text = row
    for answer, stream in ((streamed(deltas), True), (whole(message), False)):
        reply, _ = ask(answer, stream=stream)
        assert isinstance(reply, ChatCompletion), reply
        said = reply.choices[0].message
        assert (said.reasoning_content or said.reasoning, said.content) == (thinking, text)


@pytest.mark.parametrize(("server", "row"), rows("full"))
def test_a_full_context(server: Server, row: tuple[Refusal, int | None]) -> None:
    refusal, window = row
    for stream, answer in ways(refusal):
        said, seen = ask(answer, stream=stream)
        assert isinstance(said, ContextExceeded), said
        assert said.window_tokens == window
        assert len(seen) == 1


@pytest.mark.parametrize(("server", "row"), rows("too_large"))
def test_a_limit_that_is_too_large(server: Server, row: tuple[Refusal, int]) -> None:
    refusal, wanted = row
    for stream, answer in ways(refusal):
        said, seen = ask(answer, YES, stream=stream, max_tokens=ASKED)
        assert isinstance(said, ChatCompletion), said
        assert [each.body["max_tokens"] for each in seen] == [ASKED, wanted]


@pytest.mark.parametrize("title", SERVERS)
def test_the_name_of_the_limit(title: str) -> None:
    server = SERVERS[title]
    first = [FakeAnswer({"error": {"message": server.wants_limit}}, 400)] if server.wants_limit else []
    said, seen = ask(*first, YES, max_tokens=9)
    assert isinstance(said, ChatCompletion), said
    assert seen[-1].body[server.limit] == 9


@pytest.mark.parametrize(("server", "row"), rows("withheld"))
def test_a_prompt_that_a_filter_refuses(server: Server, row: Refusal) -> None:
    for stream, answer in ways(row):
        said, seen = ask(answer, stream=stream)
        assert isinstance(said, ReplyWithheld), said
        assert len(seen) == 1


@pytest.mark.parametrize(("server", "row"), rows("broken"))
def test_a_broken_reply_with_status_200_is_retried(server: Server, row: JSON) -> None:
    for stream, answer in ways((200, row)):
        said, seen = ask(answer, YES, stream=stream)
        assert isinstance(said, ChatCompletion), said
        assert said.choices[0].message.content == "ok"
        assert len(seen) == 2
        said, _ = ask(answer, stream=stream)
        assert isinstance(said, EngineReplyError | EngineUnavailable), said


@pytest.mark.parametrize("title", SERVERS)
def test_the_listed_window(title: str) -> None:
    models: Mapping[str, JSON] = SERVERS[title].models
    assert ask(YES, models=models)[0] == SERVERS[title].listed
