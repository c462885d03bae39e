"""Conversations as alternating turns: read back, they say the same; what cannot alternate is said."""

from __future__ import annotations

import io
import json
import re

import pytest
from hypothesis import given
from recorded import MALFORMED, META, TOOL, TWO_CALLS, call, histories, reply, result, rollout

from palaestra.rollouts.export.chat_messages import MessageCall, chat_messages
from palaestra.rollouts.export.openai import OpenAIExporter
from palaestra.rollouts.export.sharegpt import Unfit, alternating
from palaestra.rollouts.records import Group
from palaestra_slots.core.types import JSON, Message

FOLLOWS = {"": {"system", "human"}, "system": {"human"}, "human": {"gpt"}, "gpt": {"human", "tool"}, "tool": {"gpt"}}
USER: Message = {"role": "user", "content": "go"}


def turns_of(messages: list[Message]) -> tuple[list[dict[str, str]], set[str]]:
    return alternating(chat_messages(messages), [])


def bodies(tag: str, text: str) -> list[JSON]:
    """What a reader of tags finds: each from its opening to the first closing tag."""
    return [json.loads(body) for body in re.findall(rf"<{tag}>\n(.*?)\n</{tag}>", text, re.DOTALL)]


def assert_alternates(turns: list[dict[str, str]]) -> None:
    before = ""
    for turn in turns:
        assert turn["from"] in FOLLOWS[before]
        before = turn["from"]
    assert before == "gpt"


@given(histories())
def test_any_valid_conversation_alternates_and_can_be_read_back(messages: list[Message]) -> None:
    turns, remarks = turns_of(messages)
    assert_alternates(turns)
    assert remarks <= {"has text that looks like a call"}
    said = [turn["value"] for turn in turns if turn["from"] in ("system", "human")]
    assert said == [message["content"] for message in messages if message["role"] in ("system", "user")]
    replies = [message for message in messages if message["role"] == "assistant"]
    spoken = [turn["value"] for turn in turns if turn["from"] == "gpt"]
    for message, value in zip(replies, spoken, strict=True):
        asked = [as_called(each) for each in message.get("tool_calls", ())]
        assert value == "\n".join(filter(None, [thought(message), message["content"], *map(tagged, asked)]))
        assert not asked or json_equal(bodies("tool_call", value)[-len(asked) :], asked)
    answers = {m["tool_call_id"]: m["content"] for m in messages if m["role"] == "tool"}
    told = [
        body["content"] for turn in turns if turn["from"] == "tool" for body in bodies("tool_response", turn["value"])
    ]
    assert told == [answers[each["id"]] for message in replies for each in message.get("tool_calls", ())]


def thought(message: Message) -> str:
    return f"<think>\n{message['reasoning_content']}\n</think>" if "reasoning_content" in message else ""


def as_called(each: Message) -> dict[str, JSON]:
    written = MessageCall("", "", each["function"]["arguments"])
    parsed = written.parsed()
    return {"name": each["function"]["name"], "arguments": written.arguments if parsed is None else parsed}


def tagged(body: JSON) -> str:
    text = json.dumps(body, ensure_ascii=False).replace("</tool", "\\u003c/tool")
    return f"<tool_call>\n{text}\n</tool_call>"


def json_equal(left: JSON, right: JSON) -> bool:
    return json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)


def test_the_results_of_one_batch_are_one_turn_in_the_order_of_the_calls() -> None:
    swapped = [*TWO_CALLS[:3], TWO_CALLS[4], TWO_CALLS[3], TWO_CALLS[5]]
    assert turns_of(swapped) == turns_of(TWO_CALLS)
    turns, _ = turns_of(TWO_CALLS)
    assert [turn["from"] for turn in turns] == ["system", "human", "gpt", "tool", "gpt"]
    assert bodies("tool_response", turns[3]["value"]) == [
        {"name": "weather", "content": '{"degrees": -3}'},
        {"name": "weather", "content": "sunny </tool_response> & 21°"},
    ]


def test_the_tools_stand_in_the_system_turn() -> None:
    turns, _ = alternating(chat_messages(TWO_CALLS), [TOOL])
    assert turns[0]["value"].startswith("Be brief.\n\n")
    (listed,) = re.findall(r"^<tools>\n(.*)\n</tools>$", turns[0]["value"], re.MULTILINE)
    assert json.loads(listed) == [TOOL]
    without_system, _ = alternating(chat_messages(TWO_CALLS[1:]), [TOOL])
    assert without_system[0]["from"] == "system"


def test_a_tool_cannot_end_the_list_of_tools() -> None:
    sly = {"type": "function", "function": {"name": "f", "description": "</tools> and then"}}
    turns, _ = alternating(chat_messages(TWO_CALLS), [sly])
    (listed,) = re.findall(r"^<tools>\n(.*?)\n</tools>", turns[0]["value"], re.MULTILINE)
    assert json.loads(listed) == [sly]
    assert turns[0]["value"].count("</tools>") == 1


def test_malformed_arguments_stay_text() -> None:
    turns, remarks = turns_of([*MALFORMED, reply("Sorry.", "")])
    assert bodies("tool_call", turns[1]["value"]) == [{"name": "weather", "arguments": '{"city": '}]
    assert remarks == set()


@pytest.mark.parametrize(
    ("messages", "speakers", "remark"),
    [
        ([USER, USER, reply("a", "")], "human gpt", "a human message is joined to the human turn before it"),
        ([USER, reply("a", ""), reply("b", "")], "human gpt", "replies without anything between them are joined"),
        ([USER, reply("a", ""), USER], "human gpt", "without the messages after the last reply"),
        (MALFORMED, "human gpt", "without the messages after the last reply"),
        (
            [*MALFORMED, USER, reply("a", "")],
            "human gpt tool gpt",
            "a human message is joined to the tool turn before it",
        ),
        (
            [USER, {"role": "system", "content": "s"}, reply("a", "")],
            "human gpt",
            "a later system message is written as a human turn",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, reply("a", "")],
            "human gpt",
            "without message parts that are not text",
        ),
        ([USER, reply("<tool_call>", "")], "human gpt", "has text that looks like a call"),
        ([USER | {"name": "ann"}, reply("a", "")], "human gpt", "without the speaker's name"),
        ([USER, reply("a", "") | {"refusal": "no"}], "human gpt", "without the message field 'refusal'"),
    ],
)
def test_what_has_to_give_is_said(messages: list[Message], speakers: str, remark: str) -> None:
    turns, remarks = turns_of(messages)
    assert_alternates(turns)
    assert " ".join(turn["from"] for turn in turns) == speakers
    assert remark in remarks


def test_joined_texts_are_all_there() -> None:
    turns, _ = turns_of([USER, {"role": "user", "content": "now"}, reply("a", ""), reply("b", "because")])
    assert turns[0]["value"] == "go\n\nnow"
    assert turns[1]["value"] == "a\n\n<think>\nbecause\n</think>\nb"


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([reply("a", "")], "begins with the model"),
        ([], "no reply"),
        ([USER], "no reply"),
        ([USER, result(1, "x")], "a tool result without a call"),
        ([USER, reply("a", ""), result(1, "x")], "a tool result without a call"),
        ([USER, {"role": "critic", "content": "x"}], "the role 'critic'"),
    ],
)
def test_what_cannot_alternate_is_left_out_with_its_reason(messages: list[Message], why: str) -> None:
    with pytest.raises(Unfit, match=why):
        turns_of(messages)


def test_calls_of_the_same_id_keep_the_order_of_their_results() -> None:
    twice = reply("", "") | {"tool_calls": [call(1, "{}"), call(1, "{}")]}
    turns, _ = turns_of([USER, twice, result(1, "first"), result(1, "second"), reply("a", "")])
    assert [body["content"] for body in bodies("tool_response", turns[2]["value"])] == ["first", "second"]


IN_TEXT: list[Message] = [
    {"role": "system", "content": "Work.\n<tools>\n{}\n</tools>"},
    {"role": "user", "content": "Copy it."},
    {"role": "assistant", "content": '<tool_call>\n{"name": "cp", "arguments": {}}\n</tool_call>'},
    {"role": "user", "content": '<tool_response>{"success": true, "output": ""}</tool_response>'},
    {"role": "assistant", "content": "Copied."},
]


def test_an_agent_that_writes_its_calls_as_text_is_told_its_tools_once() -> None:
    turns, remarks = alternating(chat_messages(IN_TEXT), [TOOL])
    assert [turn["from"] for turn in turns] == ["system", "human", "gpt", "tool", "gpt"]
    assert [turn["value"] for turn in turns] == [message["content"] for message in IN_TEXT]
    assert not remarks
    out = io.BytesIO()
    group = Group(group_id="g", number=0, task_id="t", tools=[TOOL], trajectories=[rollout(0, IN_TEXT)])
    OpenAIExporter().export([group], out, META)
    line = json.loads(out.getvalue())
    assert (line["messages"], line["tools"]) == (IN_TEXT, "[]")
