"""Replies in every odd shape: a ChatCompletion or an EngineReplyError, and what the model wrote stays as it was."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra_slots.core.errors import EngineReplyError
from palaestra_slots.core.types import JSON
from palaestra_tokens.engine import AssistantMessage, ChatCompletion
from palaestra_tokens.http.chat_completions import decode_completion, plainer_history
from palaestra_tokens.http.transport import encode_json
from palaestra_tokens.testing.fake_chat_server import completion

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def decode(value: JSON) -> ChatCompletion:
    return decode_completion(json.dumps(value).encode(), 4, "s")


def message(**fields: JSON) -> AssistantMessage:
    return decode(completion(None, **fields)).choices[0].message


def test_the_promised_shape() -> None:
    reply = decode(completion("hi", "length"))
    assert reply.choices[0].finish_reason == "length"
    assert reply["choices"][0]["message"]["content"] == "hi"
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.get("completion_tokens")) == (7, 3)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ({"id": "x", "type": "function", "function": {"name": "f", "arguments": "{bad"}}, ("x", "f", "{bad")),
        ({"id": "x", "function": {"name": "f", "arguments": {"a": 1}}}, ("x", "f", '{"a":1}')),
        ({"id": None, "function": {"name": "f", "arguments": None}}, ("call_4_0", "f", "")),
        ({"function": {"name": "f"}}, ("call_4_0", "f", "")),
        ({"id": 7, "function": {"name": None, "arguments": [1]}}, ("call_4_0", "", "[1]")),
        ({"id": "x", "name": "f", "arguments": "{}"}, ("x", "f", "{}")),
        ("f()", ("call_4_0", "", '"f()"')),
    ],
)
def test_odd_calls_are_kept(call: JSON, expected: tuple[str, str, str]) -> None:
    if isinstance(call, dict) and "name" in call:
        call = {**call, "id": call["id"], "function": None}
    found = (message(tool_calls=[call]).tool_calls or [])[0]
    assert (found.id, found.function.name, found.function.arguments) == expected


@pytest.mark.parametrize("calls", [None, [], "none", 3])
def test_no_calls_in_any_spelling(calls: JSON) -> None:
    assert not message(tool_calls=calls).tool_calls


def test_content_as_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url"}, "b", {"type": "text", "text": "c"}]
    assert decode(completion(parts)).choices[0].message.content == "abc"  # type: ignore[arg-type]


def test_missing_and_odd_usage() -> None:
    value = completion("hi")
    del value["usage"]
    assert decode(value).usage is None
    value["usage"] = {"prompt_tokens": 12.0, "completion_tokens": None}
    usage = decode(value).usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (12, 0)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"<html>Bad gateway</html>",
        b"[]",
        b"null",
        b"{}",
        b'{"choices": []}',
        b'{"choices": [1]}',
        b'{"choices": null}',
        b'{"error": {"message": "overloaded"}}',
        b'{"choices": [{"message": {"content": "cut off',
        b"\xff\xfe",
        b'{"choices": [{"message": {"content": "\xff"}}]}',
        b'{"choices": [{"message": {"content": 5}}], "id": "\xe9"}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_reply_says_who_sent_what(raw: bytes) -> None:
    with pytest.raises(EngineReplyError, match=r"^the server sent"):
        decode_completion(raw, 1, "the server")


@given(st.binary(max_size=60))
def test_any_bytes_are_a_reply_or_an_error(raw: bytes) -> None:
    with pytest.raises(EngineReplyError):
        decode_completion(raw, 1, "s")


@given(
    st.fixed_dictionaries(
        {"message": json_values}, optional={"finish_reason": json_values, "index": json_values, "logprobs": json_values}
    ),
    json_values,
)
def test_any_json_in_the_outer_fields_is_a_reply(choice: JSON, usage: JSON) -> None:
    reply = decode({"choices": [choice], "usage": usage})
    msgspec.convert(reply.model_dump(), ChatCompletion)


@given(
    st.fixed_dictionaries(
        {"content": json_values},
        optional={
            "tool_calls": json_values
            | st.lists(
                st.fixed_dictionaries(
                    {"function": json_values | st.fixed_dictionaries({"name": json_values, "arguments": json_values})},
                    optional={"id": json_values, "type": json_values},
                ),
                max_size=3,
            ),
            "reasoning": json_values,
            "reasoning_content": json_values,
            "reasoning_details": json_values,
            "refusal": json_values,
        },
    )
)
def test_any_json_in_a_message_keeps_the_types_the_loop_relies_on(fields: dict[str, JSON]) -> None:
    found = decode({"choices": [{"message": fields}]}).choices[0].message
    msgspec.convert(found.model_dump(), AssistantMessage)
    assert found.content is None or isinstance(found.content, str)
    if isinstance(fields["content"], str):
        assert found.content == fields["content"]
    for call in found.tool_calls or ():
        assert call.id
        assert isinstance(call.function.arguments, str)


@given(json_values)
def test_requests_survive_the_wire(value: JSON) -> None:
    assert json.loads(encode_json(value)) == value


def test_half_a_surrogate_pair_in_tool_output_can_be_sent() -> None:
    assert json.loads(encode_json({"content": "a\ud800é"})) == {"content": "a?é"}


def test_a_plainer_history_wraps_only_what_does_not_parse() -> None:
    def call(arguments: str) -> JSON:
        return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}

    history = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": [call('{"a": 1}'), call('{"a')]},
    ]
    plain = plainer_history(history, "Expecting ',' delimiter")
    assert plain is not None
    assert plain[0] is history[0]
    sent = [each["function"]["arguments"] for each in plain[1]["tool_calls"]]
    assert sent == ['{"a": 1}', '{"malformed":"{\\"a"}']
    assert history[1]["tool_calls"][1]["function"]["arguments"] == '{"a'  # the history itself is untouched
    assert plain[1]["reasoning_content"] == "r"
    assert "reasoning_content" not in (plainer_history(history, "Extra inputs: reasoning_content") or history)[1]
    assert plainer_history(history[:1], "whatever reasoning_content") is None


class Told(str):
    """Text of a subclass, as numpy's and the cells of some data sets are."""

    __slots__ = ()


def test_texts_of_a_subclass_can_be_sent() -> None:
    assert json.loads(encode_json({"content": Told("é")})) == {"content": "é"}
