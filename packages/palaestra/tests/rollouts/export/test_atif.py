"""ATIF: documents follow the rules of the format, and the recorded messages can be restored from them."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from recorded import MALFORMED, META, TOOL, TWO_CALLS, call, groups, histories, reply, result, rollout, sky, turns

from palaestra.rollouts.export.atif import AtifExporter, AtifStep, AtifToolCall, Content, Document, Extra, atif_document
from palaestra.rollouts.records import Group
from palaestra_slots.core.types import JSON, Message

IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/gif;base64,R0lGOD"}}


def written(messages: list[Message], **fields: JSON) -> Document:
    """The document of a conversation, by way of its bytes."""
    document, _ = atif_document(rollout(0, messages, **fields), [TOOL], META)
    return msgspec.json.decode(msgspec.json.encode(document), type=Document)


def messages_of(document: Document) -> list[Message]:
    """The conversation in the OpenAI shape. Checks the rules of the format on the way."""
    messages: list[Message] = []
    for number, step in enumerate(document.steps, 1):
        assert step.step_id == number
        assert step.source in ("system", "user", "agent")
        assert step.source == "agent" or not (step.reasoning_content or step.tool_calls or step.metrics)
        ours = ours_of(step.extra)
        if not ours.get("only_results"):
            messages.append(message_of(step, ours))
        calls = {each.tool_call_id for each in step.tool_calls or ()}
        for each in step.observation.results if step.observation else ():
            assert each.source_call_id is None or each.source_call_id in calls
            kept = ours_of(each.extra)
            call_id = each.source_call_id or kept.get("tool_call_id")
            called = {} if call_id is None else {"tool_call_id": call_id}
            messages.append({"role": "tool", **called, "content": content_of(each.content), **kept.get("fields", {})})
    return messages


def message_of(step: AtifStep, ours: Mapping[str, JSON]) -> Message:
    message: Message = {
        "role": "assistant" if step.source == "agent" else step.source,
        "content": content_of(step.message),
    }
    if step.reasoning_content:
        message["reasoning_content"] = step.reasoning_content
    if step.tool_calls:
        message["tool_calls"] = [
            {
                "id": each.tool_call_id,
                "type": "function",
                "function": {"name": each.function_name, "arguments": arguments_of(each)},
            }
            for each in step.tool_calls
        ]
    return message | ours.get("fields", {})


def arguments_of(call: AtifToolCall) -> str:
    return ours_of(call.extra).get("arguments", json.dumps(call.arguments, ensure_ascii=False))


def content_of(content: Content) -> JSON:
    if isinstance(content, str):
        return content
    return [
        {"type": "text", "text": part.text}
        if part.source is None
        else {"type": "image_url", "image_url": {"url": part.source.path}}
        for part in content
    ]


def ours_of(extra: Extra | None) -> Mapping[str, JSON]:
    return (extra or {}).get("palaestra", {})


def as_text(messages: list[Message]) -> list[Message]:
    return [{**message, "content": "" if message["content"] is None else message["content"]} for message in messages]


@given(histories())
def test_any_valid_conversation_comes_back_text_for_text(messages: list[Message]) -> None:
    assert messages_of(written(messages)) == messages


ODD: list[list[Message]] = [
    MALFORMED,
    [{"role": "user", "content": "?"}, result(1, "a result of no call"), result(2, "another")],
    [result(1, "a result at the start"), reply("so?", "")],
    [*TWO_CALLS[:3], result(7, "a result of another call")],
    [reply("", "") | {"tool_calls": [call(1, "{}"), call(1, "{}")]}, result(1, "a"), result(1, "b")],
    [{"role": "user", "content": [{"type": "text", "text": "what is"}, IMAGE, PICTURE], "name": "ann"}],
    [*TWO_CALLS[:3], result(1, "x") | {"name": "weather"}],
    [{"role": "developer", "content": "d"}, reply("x", "") | {"reasoning_details": [{"a": 1}]}],
    [{"role": "tool", "content": "no id at all"}],
    [reply("", "") | {"tool_calls": [call(1, '{"big": 123456789012345678901234567890}')]}],
]


@pytest.mark.parametrize("messages", ODD)
def test_odd_conversations_come_back_too(messages: list[Message]) -> None:
    assert messages_of(written(messages)) == as_text(messages)


def test_a_part_that_has_no_place_is_named_and_remarked_upon() -> None:
    odd = [{"type": "text", "text": "hear"}, {"type": "input_audio", "input_audio": {"data": "…"}}]
    detailed = {"type": "image_url", "image_url": {"url": "https://example.org/a.png", "detail": "high"}}
    document, remarks = atif_document(rollout(0, [{"role": "user", "content": [*odd, detailed]}]), [], META)
    assert [part.text for part in document.steps[0].message] == ["hear", "[input_audio]", "[image_url]"]
    assert remarks == {
        "without a message part of the kind 'input_audio'",
        "without a message part of the kind 'image_url'",
    }


def test_a_turn_has_its_cost_and_the_tokens_that_were_sampled() -> None:
    document, _ = atif_document(sky().trajectories[1], [TOOL], META)
    first, last = (step.metrics for step in document.steps if step.source == "agent")
    assert first is not None
    assert last is not None
    assert (first.prompt_tokens, first.completion_token_ids, first.logprobs) == (9, [10, 9], [-0.5, -0.75])
    ours = {"finish_reason": "stop", "sequences": [("000000-sky/1:2", 0, 2)]}
    assert (last.completion_token_ids, last.extra) == ([11, 9], {"palaestra": ours})
    (rewritten, _) = (step.metrics for step in atif_document(sky().trajectories[0], [], META)[0].steps if step.metrics)
    assert rewritten.completion_token_ids == [10, 11, 9]


def test_a_ledger_with_more_calls_than_turns_gives_no_token_ids() -> None:
    source = sky().trajectories[1]
    document, _ = atif_document(msgspec.structs.replace(source, turns=source.turns[1:]), [], META)
    assert [step.metrics.completion_token_ids for step in document.steps if step.metrics] == [None]


def test_replies_that_were_part_of_the_prompt_are_copied_context() -> None:
    shots: list[Message] = [{"role": "user", "content": "1+1"}, reply("2", ""), *TWO_CALLS[1:]]
    agent = [step for step in written(shots, turns=turns(("weather",), ())).steps if step.source == "agent"]
    assert [(step.is_copied_context, step.llm_call_count) for step in agent] == [(True, None), (None, 1), (None, 1)]


def test_what_is_ours_stands_under_extra_alone() -> None:
    document = written(TWO_CALLS)
    assert document.schema_version == "ATIF-v1.7"
    assert (ours_of(document.extra)["reward"], ours_of(document.extra)["outcome"]) == (1.0, "natural")
    raw = json.loads(msgspec.json.encode(document))
    assert raw.keys() <= {"schema_version", "session_id", "trajectory_id", "agent", "steps", "final_metrics", "extra"}
    assert raw["extra"].keys() == {"palaestra"}


def test_a_rollout_without_messages_is_left_out() -> None:
    group = Group(group_id="g", number=0, task_id="t", trajectories=[rollout(0, [])])
    out = io.BytesIO()
    assert AtifExporter().export([group], out, META).left_out == {"without messages": 1}
    assert out.getvalue() == b""


def harbor() -> JSON:
    return pytest.importorskip("harbor.models.trajectories", reason="harbor is not installed (it needs Python 3.12)")


def test_harbors_own_models_take_what_is_written() -> None:
    model = harbor().Trajectory
    out = io.BytesIO()
    AtifExporter().export(groups(), out, META)
    for line in out.getvalue().splitlines():
        again = model.model_validate_json(line)
        assert again.to_json_dict() == json.loads(line)
    for messages in [TWO_CALLS, *ODD]:
        model.model_validate_json(msgspec.json.encode(written(messages)))
