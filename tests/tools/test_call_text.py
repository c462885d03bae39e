"""Calls in text: none is dropped, none is mended, ids repeat."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra.tools.call_text import result_of
from palaestra.tools.tool import ToolCall, ToolResult
from palaestra_contract.hermes_text import observation, result_in, result_text
from palaestra_slots.core.types import JSON

CALL = '<tool_call>{"name": "terminal", "arguments": {"command": "ls"}}</tool_call>'


def test_tags_in_strings_are_parts_of_them() -> None:
    content = "<think>a</think> </tool_call> <tool_call>{} b"
    body = json.dumps({"name": "write_file", "arguments": {"content": content}})
    text = f"<think>{CALL}</think>so\n<tool_call>\n{body}\n</tool_call>\n{CALL}"
    first, second = ToolCall.parse_from_text(text)
    assert (first.error, first.arguments) == ("", {"content": content})
    assert first.raw_text == f"<tool_call>\n{body}\n</tool_call>"
    assert second.error == ""
    (alone,) = ToolCall.parse_from_text(f"<tool_call>{body}")
    assert alone.arguments == {"content": content}


def test_calls_come_in_order_with_the_text_they_were_read_from() -> None:
    first, second = ToolCall.parse_from_text(f"I look.\n{CALL}\n{CALL}")
    assert (first.name, first.arguments, first.raw_text, first.error) == ("terminal", {"command": "ls"}, CALL, "")
    assert first.uniq_id != second.uniq_id


def test_ids_derive_from_content() -> None:
    ids = [[call.uniq_id for call in ToolCall.parse_from_text(CALL * 2)] for _ in range(2)]
    assert ids[0] == ids[1]
    assert ToolCall("a", {"x": 1}).uniq_id == ToolCall("a", {"x": 1}).uniq_id != ToolCall("a", {"x": 2}).uniq_id


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "[]",
        "[" * 100_000,
        '{"name": 3}',
        '{"arguments": {}}',
        '{"name": "a", "arguments": "{}"}',
        '{"name": "a", "arguments": {"x": }}',
    ],
)
def test_a_malformed_call_is_kept_with_its_error(body: str) -> None:
    bad, good = ToolCall.parse_from_text(f"<tool_call>{body}</tool_call>{CALL}")
    assert bad.error.startswith("Malformed tool call")
    assert bad.arguments == {}
    assert (good.name, good.error) == ("terminal", "")


def test_a_last_call_without_its_tag_counts_unless_the_reply_was_cut() -> None:
    text = CALL.removesuffix("</tool_call>")
    assert ToolCall.parse_from_text(text)[0].error == ""
    assert "cut off" in ToolCall.parse_from_text(text, cut=True)[0].error
    assert ToolCall.parse_from_text(text[:-3])[0].error


@pytest.mark.parametrize("text", [f"<think>{CALL}</think>done", f"<think>{CALL}", "plain"])
def test_thinking_holds_no_calls(text: str) -> None:
    assert ToolCall.parse_from_text(text) == []
    assert not ToolCall.has_tool_call(text)


def test_a_result_as_text_leaves_empty_fields_out() -> None:
    assert ToolResult(True, "a\nb").to_xml() == '<tool_response>{"success": true, "output": "a\\nb"}</tool_response>'
    full = ToolResult(False, "", "gone", {"exit_code": 1}, "call_1").to_xml()
    body = json.loads(full.removeprefix("<tool_response>").removesuffix("</tool_response>"))
    assert body == {"success": False, "output": "", "error": "gone", "metadata": {"exit_code": 1}, "uniq_id": "call_1"}


@pytest.mark.parametrize(
    "reply",
    [
        {"results": [{"url": "http://x", "text": "long " * 100}]},
        {"matches": [], "total_count": 0, "error": "no such folder"},
        {"todos": [{"id": "1"}], "exit_code": 3},
        {"output": "hello", "exit_code": 0, "error": None},
        {"content": "text", "total_lines": 1},
        {"output": "", "exit_code": 0},
        "plain",
        '{"a": 1}',
        {},
    ],
)
def test_the_model_reads_each_field_of_a_reply_once(reply: JSON) -> None:
    result = result_of(reply)
    shown = observation(result_text(result.success, result.output, result.error, result.metadata))
    assert shown.count("long long") <= 99
    fields = [] if isinstance(reply, str) else [name for name, value in reply.items() if value not in (None, "")]
    assert all(shown.count(f'{name}\\"') + shown.count(f'"{name}"') == 1 for name in fields if name != "content")
    again = result_in(shown)
    assert again.to_xml() == result.to_xml()
    assert isinstance(reply, str) or again.metadata == result.metadata


def test_a_result_as_a_dict_has_every_field() -> None:
    assert set(ToolResult(True).to_dict()) == {"success", "output", "error", "metadata", "uniq_id"}


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "a"}', "{", "text"])))
def test_has_tool_call_agrees_with_parsing(parts: list[str]) -> None:
    text = "".join(parts)
    assert ToolCall.has_tool_call(text) == bool(ToolCall.parse_from_text(text))
