"""Streamed replies of a real server on the loopback: the same as whole ones, whatever the pieces, and never half."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manual_clock import ManualClock
from palaestra_slots.core.errors import EngineReplyError, EngineUnavailable
from palaestra_slots.core.types import JSON
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engine import ChatCompletion
from palaestra_tokens.engines.openai import OpenAIEngine
from palaestra_tokens.http.sse import Delta, events
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer, completion

DONE = b"data: [DONE]\n\n"


def event(delta: JSON, finish: str | None = None, index: int = 0, **more: JSON) -> bytes:
    chunk = {"id": "c1", "model": "m", "choices": [{"index": index, "delta": delta, "finish_reason": finish}], **more}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def call(name: str | None = None, arguments: JSON = None, **more: JSON) -> JSON:
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    return {"tool_calls": [{**more, "function": function}]}


def ask(server: LoopbackServer, told: list[Delta] | None = None, **request: JSON) -> ChatCompletion:
    async def go() -> ChatCompletion:
        async with server:
            config = request.pop("config", {})
            engine = OpenAIEngine(APIServerConfig(base_url=server.url, model_name="m", **config), clock=ManualClock())
            hook = None if told is None else told.append
            try:
                return await engine.chat_completion(
                    messages=[{"role": "user", "content": "hi"}], on_delta=hook, **request
                )
            finally:
                await engine.aclose()

    return asyncio.run(go())


def streamed(*pieces: bytes) -> ChatCompletion:
    return ask(LoopbackServer(FakeAnswer([*pieces])), config={"stream": True})


def test_pieces_become_what_comes_in_one() -> None:
    told: list[Delta] = []
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10}}\n\n'
    start, end = event({"role": "assistant", "content": ""}), event({}, "stop")
    server = LoopbackServer(FakeAnswer([start, event({"content": "h"}), event({"content": "i"}), end, usage, DONE]))
    reply = ask(server, told)
    whole = ask(LoopbackServer(FakeAnswer(completion("hi"))))
    assert reply.model_dump() == whole.model_dump()
    assert [delta.content for delta in told] == ["h", "i"]
    assert server.seen[0].body["stream"] is True
    assert server.seen[0].body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("request_", [{"stream": True}, {"extra_body": {"stream": True}}])
def test_a_request_may_ask_for_a_stream(request_: JSON) -> None:
    server = LoopbackServer(FakeAnswer([event({"content": "hi"}, "stop"), DONE]))
    assert ask(server, **request_).choices[0].message.content == "hi"


def test_a_server_that_does_not_stream_is_understood() -> None:
    assert ask(LoopbackServer(FakeAnswer(completion("hi"))), []).choices[0].message.content == "hi"


def test_thinking_and_its_details() -> None:
    told: list[Delta] = []
    pieces = [
        event({"reasoning_content": "hm"}),
        event({"reasoning_content": "m", "reasoning_details": [{"text": "x"}]}),
    ]
    reply = ask(LoopbackServer(FakeAnswer([*pieces, event({"content": "so"}, "stop"), DONE])), told)
    message = reply.choices[0].message
    assert (message.reasoning_content, message.content) == ("hmm", "so")
    assert message.reasoning_details == [{"text": "x"}]
    assert [(delta.reasoning, delta.content) for delta in told] == [("hm", ""), ("m", ""), ("", "so")]


WHOLE = '{"command": "ls"}'


@pytest.mark.parametrize(
    "pieces",
    [
        [call("terminal", "", index=0, id="a"), call(None, '{"command": ', index=0), call(None, '"ls"}', index=0)],
        [call("terminal", '{"command": ', index=0, id="a"), call("terminal", '"ls"}', index=0, id="a")],
        [call("terminal", WHOLE, id="a")],
        [call("term", "", index=0, id="a"), call("inal", WHOLE, index=0)],
        [call("terminal", "", id="a"), call(None, '{"command": '), call(None, '"ls"}')],
        [call("terminal", WHOLE, index=0, id="a"), call("terminal", WHOLE, index=0, id="a")],
        [call("terminal", WHOLE, index=0, id="a"), call("terminal", '{"command":"ls"}', index=0, id="a")],
        [call("terminal", WHOLE, index=0, id="a"), call("terminal", WHOLE, index=0)],
        [
            call("terminal", "", index=0, id="a"),
            call("terminal", '{"command": ', index=0, id="b"),
            call("terminal", '"ls"}', index=0, id="c"),
        ],
        [call("terminal", '{"command": ', id="a"), call("terminal", '"l', id="b"), call("terminal", 's"}', id="c")],
        [call("terminal", '{"command": ', index=0, id="a"), call(None, '"ls"}', index=0, id="b")],
        [call("terminal", "{}", index=0, id="a"), call(None, '{"command": ', index=0), call(None, '"ls"}', index=0)],
        [call("terminal", "{}", index=0, id="a"), call("terminal", WHOLE, index=0, id="a")],
        [call("terminal", {}, id="a"), call(None, WHOLE)],
        [call("terminal", None, index=0, id="a"), call(None, {"command": "ls"}, index=0)],
        [call("terminal", "", index=0, id="a"), call(None, WHOLE, index=0, id=""), call(None, "", index=0, id=None)],
    ],
    ids=[
        *("openai", "name repeated", "no index", "name in parts", "no index, in parts", "said once more"),
        *("said once more in other words", "said once more without an id", "a new id in each"),
        *("a new id in each, no index", "a new id without a name", "an empty object first"),
        *("an empty object first, named", "an empty object first, no index", "an object", "empty and null ids"),
    ],
)
def test_a_call_is_the_same_however_it_is_cut(pieces: list[JSON]) -> None:
    reply = streamed(*(event(piece) for piece in pieces), event({}, "tool_calls"), DONE)
    calls = reply.choices[0].message.tool_calls
    assert calls is not None
    assert [(c.id, c.function.name, c.function.arguments) for c in calls] == [("a", "terminal", WHOLE)]


def test_calls_side_by_side_and_calls_with_the_same_arguments() -> None:
    pieces = [call("f", '{"a"', index=0, id="a"), call("g", WHOLE, index=1, id="b"), call(None, ": 1}", index=0)]
    reply = streamed(*(event(piece) for piece in [*pieces, call("g", WHOLE, index=2, id="c")]), event({}, "stop"), DONE)
    calls = reply.choices[0].message.tool_calls or []
    said = [(c.id, c.function.name, c.function.arguments) for c in calls]
    assert said == [("a", "f", '{"a": 1}'), ("b", "g", WHOLE), ("c", "g", WHOLE)]


@pytest.mark.parametrize("name", ["f", "g"])
@pytest.mark.parametrize("arguments", ["{}", '{"a": 1}'])
def test_calls_that_share_an_index_are_told_apart_by_their_ids(name: str, arguments: str) -> None:
    pieces = [call("f", "{}", index=0, id="a"), call(name, "", index=0, id="b"), call(None, arguments, index=0, id="b")]
    reply = streamed(*(event(piece) for piece in pieces), event({}, "tool_calls"), DONE)
    calls = reply.choices[0].message.tool_calls or []
    assert [(each.id, each.function.name, each.function.arguments) for each in calls] == [
        ("a", "f", "{}"),
        ("b", name, arguments),
    ]


OTHER = '{"command": "pwd"}'


@pytest.mark.parametrize(
    "pieces",
    [
        [call("terminal", WHOLE, index=0), call("terminal", OTHER, index=0)],
        [call("terminal", WHOLE, index=0, id=""), call("terminal", OTHER, index=0, id="")],
        [call("terminal", WHOLE, index=0, id=None), call("terminal", OTHER, index=0, id=None)],
        [call("terminal", WHOLE), call("terminal", OTHER)],
        [call("terminal", WHOLE, id="a"), call("terminal", OTHER)],
        [call("terminal", WHOLE), call("terminal", OTHER, id="b")],
        [call("terminal", WHOLE, index=0, id="a"), call("terminal", OTHER, index=0, id="b")],
        [call("terminal", WHOLE, index=0), call("terminal", "", index=0), call(None, OTHER, index=0)],
        [call("terminal", '{"command"', index=0), call(None, ': "ls"}', index=0), call("terminal", OTHER, index=0)],
        [call("terminal", {"command": "ls"}, index=0), call("terminal", {"command": "pwd"}, index=0)],
        [call("terminal", WHOLE, index=None), call("terminal", OTHER, index=None)],
        [call("terminal", WHOLE, index=0), call("terminal", OTHER, index=1)],
    ],
)
@pytest.mark.parametrize("at_once", [False, True])
def test_two_calls_are_two_however_they_are_named_and_numbered(pieces: list[JSON], at_once: bool) -> None:
    deltas = [{"tool_calls": [each for piece in pieces for each in piece["tool_calls"]]}] if at_once else pieces
    reply = streamed(*(event(delta) for delta in deltas), event({}, "tool_calls"), DONE)
    calls = reply.choices[0].message.tool_calls or []
    assert [(each.function.name, each.function.arguments) for each in calls] == [
        ("terminal", WHOLE),
        ("terminal", OTHER),
    ]
    assert len({each.id for each in calls}) == 2


def test_three_calls_without_arguments_and_numbers() -> None:
    pieces = [call("f", "{}", index=0, id="a"), call("g", "{}", index=0, id="b"), call("f", "{}", index=0, id="c")]
    reply = streamed(*(event(piece) for piece in pieces), event({}, "tool_calls"), DONE)
    calls = reply.choices[0].message.tool_calls or []
    said = [(each.id, each.function.name, each.function.arguments) for each in calls]
    assert said == [("a", "f", "{}"), ("b", "g", "{}"), ("c", "f", "{}")]


def test_malformed_arguments_stay_malformed() -> None:
    reply = streamed(event(call("f", '{"a": ', index=0, id="a")), event({}, "length"), DONE)
    calls = reply.choices[0].message.tool_calls or []
    assert calls[0].function.arguments == '{"a": '
    assert reply.choices[0].finish_reason == "length"


def test_several_choices_and_their_log_probabilities() -> None:
    def piece(index: int, text: str, finish: str | None = None) -> bytes:
        logprobs = {"content": [{"token": text, "logprob": -1.0}]}
        choice = {"index": index, "delta": {"content": text}, "finish_reason": finish, "logprobs": logprobs}
        return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"

    reply = streamed(piece(1, "b"), piece(0, "a"), piece(1, "d", "stop"), piece(0, "c", "length"), DONE)
    assert [(choice.index, choice.message.content, choice.finish_reason) for choice in reply.choices] == [
        (0, "ac", "length"),
        (1, "bd", "stop"),
    ]
    assert [entry["token"] for entry in reply.choices[0].logprobs["content"]] == ["a", "c"]


def test_choices_asked_for_one_by_one_are_told_apart() -> None:
    told: list[Delta] = []
    server = LoopbackServer(FakeAnswer([event({"content": "x"}, "stop"), DONE]))
    reply = ask(server, told, n=2, config={"n_kwarg_is_ignored": True})
    assert [choice.message.content for choice in reply.choices] == ["x", "x"]
    assert sorted(delta.index for delta in told) == [0, 1]


def test_a_stream_that_broke_off_is_asked_for_again_and_what_was_told_is_void() -> None:
    told: list[Delta] = []
    server = LoopbackServer(
        FakeAnswer([event({"content": "half"})], cut=True),
        FakeAnswer([event({"content": "half"})]),
        FakeAnswer([event({"content": "whole"}, "stop"), DONE]),
    )
    assert ask(server, told).choices[0].message.content == "whole"
    assert len(server.seen) == 3
    void = Delta(restarted=True)
    assert told == [Delta(content="half"), void, Delta(content="half"), void, Delta(content="whole")]


def test_an_end_without_a_last_event_counts_where_all_was_said() -> None:
    assert streamed(event({"content": "x"}, "stop")).choices[0].message.content == "x"


def test_a_server_that_always_breaks_off_is_an_error_that_names_it() -> None:
    with pytest.raises(EngineUnavailable, match=r"chat/completions .*model 'm', tried 8 times"):
        streamed(event({"content": "half"}))


@pytest.mark.parametrize(
    ("piece", "said"),
    [
        (b'data: {"error": {"message": "out of memory"}}\n\n', "failed in the middle of its reply: out of memory"),
        (b"data: hello\n\n", "invalid chunk of a reply: 'hello'"),
        (b"data: [1]\n\n", "invalid chunk of a reply"),
    ],
)
def test_what_is_no_piece_of_a_reply(piece: bytes, said: str) -> None:
    with pytest.raises(EngineReplyError, match=said):
        streamed(event({"content": "x"}), piece, DONE)


def test_a_stream_without_choices_is_no_reply() -> None:
    with pytest.raises(EngineReplyError, match="no choices"):
        streamed(DONE)


@given(
    st.lists(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n")), min_size=1), max_size=6),
    st.sampled_from(["\n", "\r\n"]),
    st.lists(st.integers(1, 7), min_size=1),
)
def test_events_do_not_depend_on_how_the_stream_is_cut(texts: list[list[str]], end: str, cuts: list[int]) -> None:
    stream = f": a comment{end}{end}".join(
        "".join(f"data: {line}{end}" for line in lines) + f"id: 1{end}{end}" for lines in texts
    ).encode()

    async def read() -> list[bytes]:
        async def pieces():
            rest, sizes = stream, itertools.cycle(cuts)
            while rest:
                size = next(sizes)
                yield rest[:size]
                rest = rest[size:]

        return [data async for data in events(pieces())]

    assert asyncio.run(read()) == ["\n".join(lines).encode() for lines in texts]
