"""Reading replies of any shape: objects, dicts, records; odd values never get past it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra.agent.replies import read_reply, text_of
from palaestra_slots.core.errors import EngineReplyError
from palaestra_slots.core.types import JSON
from palaestra_tokens.engine import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    CompletionUsage,
    FunctionCall,
    ToolCallMessage,
    assistant_message,
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def as_objects(value: JSON) -> JSON:
    """The same reply as attributes instead of keys."""
    if isinstance(value, dict):
        return SimpleNamespace(**{key: as_objects(part) for key, part in value.items()})
    return [as_objects(part) for part in value] if isinstance(value, list) else value


REPLY: dict[str, JSON] = {
    "choices": [
        {
            "message": {
                "content": "c",
                "reasoning": "r",
                "tool_calls": [{"id": "i", "function": {"name": "n", "arguments": '{"a'}}],
            },
            "finish_reason": "tool_calls",
        }
    ],
    "usage": {"prompt_tokens": 5, "completion_tokens": 6},
}
RECORD = ChatCompletion(
    choices=[
        ChatChoice(
            message=AssistantMessage(
                content="c",
                reasoning="r",
                tool_calls=[ToolCallMessage(id="i", function=FunctionCall(name="n", arguments='{"a'))],
            ),
            finish_reason="tool_calls",
        )
    ],
    usage=CompletionUsage(prompt_tokens=5, completion_tokens=6),
)


def test_the_three_shapes_read_alike() -> None:
    assert read_reply(REPLY, 1) == read_reply(as_objects(REPLY), 1) == read_reply(RECORD, 1)
    assert read_reply(REPLY, 1).message() == {
        "role": "assistant",
        "content": "c",
        "reasoning_content": "r",
        "tool_calls": [{"id": "i", "type": "function", "function": {"name": "n", "arguments": '{"a'}}],
    }


@pytest.mark.parametrize("completion", [None, {}, {"choices": []}, {"choices": [{}]}, {"choices": 3}, "text"])
def test_what_is_no_completion(completion: JSON) -> None:
    with pytest.raises(EngineReplyError):
        read_reply(completion, 1)


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_reply_that_the_server_broke_off_is_not_the_models(reason: str) -> None:
    with pytest.raises(EngineReplyError, match=reason):
        read_reply({"choices": [{"message": {"content": "half a"}, "finish_reason": reason}]}, 1)


def test_two_calls_of_one_id_are_told_apart() -> None:
    calls = [{"id": "x", "function": {"name": str(i), "arguments": "{}"}} for i in range(3)]
    reply = read_reply({"choices": [{"message": {"tool_calls": calls}}]}, 7)
    assert [call.id for call in reply.calls] == ["x", "call_7_1", "call_7_2"]
    assert [call.name for call in reply.calls] == ["0", "1", "2"]


def test_a_refusal_is_content() -> None:
    message = {"content": None, "refusal": "I will not."}
    assert read_reply({"choices": [{"message": message}]}, 1).content == "I will not."


@pytest.mark.parametrize(
    ("content", "text"),
    [(None, ""), ("a", "a"), ([{"type": "text", "text": "a"}, "b", {"type": "image_url"}, 4], "ab"), (5, ""), ({}, "")],
)
def test_text_of_content(content: JSON, text: str) -> None:
    assert text_of(content) == text


@given(json_values, json_values, json_values, json_values, json_values)
def test_any_values_give_a_message_that_json_can_carry(
    content: JSON, calls: JSON, reasoning: JSON, details: JSON, usage: JSON
) -> None:
    message = {"content": content, "tool_calls": calls, "reasoning": reasoning, "reasoning_details": details}
    reply = read_reply({"choices": [{"message": message, "finish_reason": content}], "usage": usage}, 1)
    sent = json.loads(json.dumps(reply.message()))
    assert sent["content"] == reply.content
    assert len({call.id for call in reply.calls}) == len(reply.calls)
    assert reply.prompt_tokens >= 0


def test_what_only_the_provider_knows_is_in_the_history_and_survives_it() -> None:
    call = {
        "id": "i",
        "type": "function",
        "function": {"name": "n", "arguments": "{}", "seal": "f"},
        "extra_content": {"g": 1},
    }
    said = {"role": "assistant", "content": "c", "reasoning_details": [{"text": "r", "signature": "s"}], "seal": "m"}
    history = read_reply({"choices": [{"message": {**said, "tool_calls": [call]}}]}, 1).message()
    assert history == {**said, "reasoning_content": "r", "tool_calls": [call]}
    # A resumed or replayed rollout makes the reply from the journal, and another message from the reply.
    again = ChatCompletion(choices=[ChatChoice(message=assistant_message(json.loads(json.dumps(history))))])
    assert read_reply(again, 1).message() == history
    assert read_reply(again.model_dump(), 1).message() == history
