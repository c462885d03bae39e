"""ATIF: what is written passes the rules and reads back as it was; what breaks a rule is refused with its place."""

from __future__ import annotations

import io
import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from recorded import MALFORMED, META, TOOL, TWO_CALLS, call, groups, histories, reply, result, rollout, sky, turns

from palaestra.core.errors import ConfigError
from palaestra.core.types import JSON, Message
from palaestra.rollouts.export.atif.convert import AtifExporter, atif_document, facts_of, messages_of, read_atif
from palaestra.rollouts.export.atif.schema import READ_VERSIONS, WRITE_VERSION, Document, read_document
from palaestra.rollouts.records import Group

IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/gif;base64,R0lGOD"}}


def written(messages: list[Message], **fields: JSON) -> Document:
    """The document of a conversation, by way of its bytes."""
    document, _ = atif_document(rollout(0, messages, **fields), [TOOL], META)
    return read_document(msgspec.json.encode(document))


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
        "without a part of a message, of the kind 'input_audio'",
        "without a part of a message, of the kind 'image_url'",
    }


def test_a_turn_has_its_cost_and_the_tokens_that_were_sampled() -> None:
    document, _ = atif_document(sky().trajectories[1], [TOOL], META)
    first, last = (step.metrics for step in document.steps if step.source == "agent")
    assert first is not None
    assert last is not None
    assert (first.prompt_tokens, first.completion_token_ids, first.logprobs) == (9, [10, 9], [-0.5, -0.75])
    assert (last.completion_token_ids, last.extra) == ([11, 9], {"palaestra": {"finish_reason": "stop"}})
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
    assert document.schema_version == WRITE_VERSION == "ATIF-v1.7"
    assert (facts_of(document)["reward"], facts_of(document)["outcome"]) == (1.0, "natural")
    raw = json.loads(msgspec.json.encode(document))
    assert raw.keys() <= {"schema_version", "session_id", "trajectory_id", "agent", "steps", "final_metrics", "extra"}
    assert raw["extra"].keys() == {"palaestra"}


def test_a_rollout_without_messages_is_left_out() -> None:
    group = Group(group_id="g", number=0, task_id="t", trajectories=[rollout(0, [])])
    out = io.BytesIO()
    assert AtifExporter().export([group], out, META).left_out == {"without messages": 1}
    assert out.getvalue() == b""


PLAIN: dict[str, JSON] = {
    "schema_version": "ATIF-v1.0",
    "session_id": "s",
    "agent": {"name": "a", "version": "1"},
    "steps": [
        {"step_id": 1, "source": "user", "message": "hi", "timestamp": "2026-01-02T03:04:05Z"},
        {
            "step_id": 2,
            "source": "agent",
            "message": "look",
            "tool_calls": [{"tool_call_id": "c", "function_name": "f", "arguments": {"a": 1}}],
            "observation": {"results": [{"source_call_id": "c", "content": "done"}]},
        },
        {"step_id": 3, "source": "agent", "message": "ls", "observation": {"results": [{"content": "a.txt"}]}},
    ],
}


def changed(path: str, value: JSON) -> str:
    """`PLAIN` with a value at a dotted path; numbers are places in lists."""
    document: JSON = json.loads(json.dumps(PLAIN))
    *way, last = path.split(".")
    at = document
    for name in way:
        at = at[int(name)] if name.isdigit() else at.setdefault(name, {})
    at[int(last) if last.isdigit() else last] = value
    return json.dumps(document)


@pytest.mark.parametrize("version", READ_VERSIONS)
def test_all_versions_are_read(version: str) -> None:
    assert messages_of(read_document(changed("schema_version", version))) == [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "look",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "done"},
        {"role": "assistant", "content": "ls"},
        {"role": "user", "content": "a.txt"},
    ]


SOUND = {"type": "audio", "source": {"media_type": "audio/MP3", "path": "a.mp3", "duration_sec": 1.5}}
INNER = json.loads(changed("trajectory_id", "inner"))

GOOD = [
    ("steps.0.message", [SOUND]),
    ("steps.0.message", [{"type": "image", "source": {"media_type": "image/png", "path": "a.png"}}]),
    ("subagent_trajectories", [INNER]),
    ("steps.1.llm_call_count", 0),
    ("steps.0.observation", {"results": [{"subagent_trajectory_ref": [{"trajectory_path": "x.json"}]}]}),
    ("final_metrics", {"total_steps": 3, "total_cost_usd": 1}),
    ("steps.1.reasoning_effort", 0.5),
    ("steps.1.tool_calls.0.extra", {"timeout": 3}),
]
BAD = [
    ("schema_version", "ATIF-v2.0", "schema_version"),
    ("steps", [], "steps is empty"),
    ("surprise", 1, "surprise"),
    ("steps.0.surprise", 1, "surprise"),
    ("steps.1.step_id", 3, "steps[1].step_id is 3, not 2"),
    ("steps.0.source", "tool", "steps[0].source"),
    ("steps.0.model_name", "m", "steps[0].model_name"),
    ("steps.0.metrics", {}, "steps[0].metrics"),
    ("steps.0.timestamp", "yesterday", "steps[0].timestamp"),
    ("steps.0.message", None, "message"),
    ("steps.0.message", [{"type": "text"}], "steps[0].message[0]"),
    ("steps.0.message", [{"type": "film", "source": {"media_type": "video/mp4", "path": "x"}}], "'film'"),
    ("steps.0.message", [{"type": "image", "source": {"media_type": "image/bmp", "path": "x"}}], "image/bmp"),
    ("steps.0.message", [SOUND | {"type": "image"}], "steps[0].message[0]"),
    ("steps.0.message", [SOUND | {"text": "x"}], "steps[0].message[0]"),
    ("steps.1.tool_calls.0.arguments", "{}", "arguments"),
    ("steps.1.observation.results.0.source_call_id", "d", "'d' is not a call of this step"),
    (
        "steps.0.observation",
        {"results": [{"subagent_trajectory_ref": [{"session_id": "s"}]}]},
        "subagent_trajectory_ref",
    ),
    ("steps.1.llm_call_count", -1, "llm_call_count"),
    ("steps.2", {"step_id": 3, "source": "agent", "message": "", "llm_call_count": 0, "metrics": {}}, "no model call"),
    ("subagent_trajectories", [json.loads(json.dumps(PLAIN))], "subagent_trajectories[0].trajectory_id"),
    ("subagent_trajectories", [INNER, INNER], "stands twice"),
    ("final_metrics", {"total_steps": -1}, "total_steps"),
]


@pytest.mark.parametrize(("path", "value"), GOOD)
def test_what_the_rules_allow_is_read(path: str, value: JSON) -> None:
    assert messages_of(read_document(changed(path, value)))


@pytest.mark.parametrize(("path", "value", "named"), BAD)
def test_what_breaks_a_rule_is_refused_with_its_place(path: str, value: JSON, named: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_document(changed(path, value))
    assert named in str(raised.value)


def test_files_of_one_and_of_many(tmp_path: Path) -> None:
    one, many = tmp_path / "trajectory.json", tmp_path / "many.jsonl"
    one.write_text(json.dumps(PLAIN, indent=2))
    many.write_text(f"{json.dumps(PLAIN)}\n\n{json.dumps(PLAIN)}\n" + '{"steps": 1}\n')
    assert len(list(read_atif(one))) == 1
    documents = read_atif(many)
    assert next(documents) == next(documents)
    with pytest.raises(ConfigError, match=r"many\.jsonl, line 4: not an ATIF trajectory"):
        next(documents)


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


def test_harbors_own_models_judge_as_these_do() -> None:
    model = harbor().Trajectory
    for path, value in GOOD:
        model.model_validate_json(changed(path, value))
    for path, value, _ in BAD:
        with pytest.raises(ValueError):
            model.model_validate_json(changed(path, value))
