"""Any conversation as messages and tools: every text is there, and what is not is said."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from hypothesis import given
from recorded import MALFORMED, META, TOOL, call, histories, reply, rollout

from palaestra.rollouts.export.exporter import ExportReport
from palaestra.rollouts.export.openai import MALFORMED as MALFORMED_ARGUMENTS
from palaestra.rollouts.export.openai import OpenAIExporter
from palaestra.rollouts.records import Group
from palaestra_slots.core.types import JSON, Message

WIRE = {"role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name"}


def tool(name: str, **properties: JSON) -> JSON:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


def exported(*conversations: list[Message]) -> tuple[list[dict[str, JSON]], ExportReport]:
    trajectories = [rollout(index, messages) for index, messages in enumerate(conversations)]
    group = Group(group_id="g", number=0, task_id="t", tools=[TOOL], trajectories=trajectories)
    out = io.BytesIO()
    report = OpenAIExporter().export([group], out, META)
    return [json.loads(line) for line in out.getvalue().splitlines()], report


def blank_as_object(messages: list[Message]) -> list[Message]:
    """The history as the format has it: no text for arguments is an empty object, no text beside calls is null."""
    changed = json.loads(json.dumps(messages))
    for message in changed:
        for each in message.get("tool_calls", ()):
            if not each["function"]["arguments"].strip():
                each["function"]["arguments"] = "{}"
            message["content"] = message["content"] or None
    return changed


@given(histories())
def test_nothing_of_a_valid_conversation_is_lost(messages: list[Message]) -> None:
    (line,), report = exported(messages)
    assert line["messages"] == blank_as_object(messages)
    assert json.loads(line["tools"]) == [TOOL]
    assert all(message.keys() <= WIRE for message in line["messages"])
    assert report.rollouts == report.records == 1
    assert set(report.remarks) <= {"has malformed arguments, kept as text"}


@pytest.mark.parametrize(
    "tools",
    [
        [tool("a", path={"type": "string"}), tool("b", path={"type": ["string", "null"]})],
        [tool("a", n={"type": "integer", "default": 1}), tool("b", n={"type": "string", "default": "x"})],
        [tool("a", o={"additionalProperties": False}), tool("b", o={"additionalProperties": {"type": "string"}})],
        [tool("a", e={"enum": ["x", 1, None]})],
        [tool("a", p={"prefixItems": [{"type": "string"}], "items": False}), tool("b", p={"items": {}})],
        [tool("a", c={"const": {"x": 1}}), tool("b", c={"const": [1]})],
        [tool("a"), {"type": "web_search"}],
        [],
    ],
)
def test_a_file_is_a_table_whatever_the_schemas_of_the_tools(tools: list[JSON]) -> None:
    table = pytest.importorskip("pyarrow.json")
    out = io.BytesIO()
    groups = [
        Group(group_id=str(number), number=number, task_id="t", tools=listed, trajectories=[rollout(0, MALFORMED)])
        for number, listed in enumerate([tools, [tool("z", path={"type": "number"})], tools[:1]])
    ]
    OpenAIExporter().export(groups, out, META)
    rows = table.read_json(io.BytesIO(out.getvalue())).to_pylist()
    assert [json.loads(row["tools"]) for row in rows] == [group.tools for group in groups]


def test_replies_without_content_have_empty_text_on_request() -> None:
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "", "tool_calls": [call("f", "{}")]}]
    for text_content, content in ((False, None), (True, "")):
        out = io.BytesIO()
        group = Group(group_id="g", number=0, task_id="t", tools=[TOOL], trajectories=[rollout(0, messages)])
        OpenAIExporter().export([group], out, replace(META, text_content=text_content))
        assert json.loads(out.getvalue())["messages"][1]["content"] == content


def test_a_malformed_call_keeps_its_text_and_is_remarked_upon() -> None:
    (line,), report = exported(MALFORMED)
    assert line["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"city": '
    assert report.remarks == {"has malformed arguments, kept as text": 1}


def test_fields_without_a_place_are_left_out_and_counted_once_for_a_rollout() -> None:
    odd = {"role": "assistant", "content": "x", "reasoning_details": [{"a": 1}], "refusal": None}
    (line,), report = exported([{"role": "developer", "content": "d"}, odd, odd])
    assert line["messages"][1] == {"role": "assistant", "content": "x"}
    assert line["messages"][0]["role"] == "developer"
    assert report.remarks == {"without the message field 'reasoning_details'": 1}


def test_a_call_without_a_result_is_remarked_upon() -> None:
    cut: list[Message] = [{"role": "user", "content": "?"}, reply("", "") | {"tool_calls": [call(1, "{}")]}]
    _, report = exported(cut, [*cut, {"role": "user", "content": "and?"}, reply("!", "")])
    assert report.remarks == {"has a call without a result": 2}


def test_arguments_that_came_as_an_object_become_text() -> None:
    made = {"id": "c", "function": {"name": "weather", "arguments": {"city": "Århus"}}}
    (line,), _ = exported(
        [{"role": "user", "content": [{"type": "text", "text": "?"}]}, {"role": "assistant", "tool_calls": [made]}]
    )
    assert json.loads(line["messages"][1]["tool_calls"][0]["function"]["arguments"]) == {"city": "Århus"}
    assert line["messages"][0]["content"] == [{"type": "text", "text": "?"}], "parts are part of the format"


def test_blank_arguments_are_no_arguments() -> None:
    (line,), report = exported([reply("", "") | {"tool_calls": [call(1, " \n")]}])
    assert line["messages"][0]["tool_calls"][0]["function"]["arguments"] == "{}"
    assert MALFORMED_ARGUMENTS not in report.remarks


def test_calls_that_are_no_list_are_a_field_without_a_place() -> None:
    """A class that collects its rollouts itself may leave anything in its messages."""
    lines, report = exported([reply("a", "") | {"tool_calls": 1.5}], [reply("b", "") | {"tool_calls": "call"}])
    assert [line["messages"] for line in lines] == [[reply("a", "")], [reply("b", "")]]
    assert report.remarks["without the message field 'tool_calls'"] == 2
