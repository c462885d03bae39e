"""From text to message: thinking first, then calls, nothing repaired."""

from __future__ import annotations

import pytest

from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON
from palaestra_tokens.engine import AssistantMessage
from palaestra_tokens.parsers import ToolCallParser
from palaestra_tokens.token_exact.replies import ReplyReader, split_thinking

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def read(parser: ToolCallParser | str | None, text: str, **options: JSON) -> AssistantMessage:
    return ReplyReader(parser).read(text, **{"thinking": False, "cut": False, "tools": TOOLS, "turn": 3, **options})


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("hello", False, None, "hello"),
        ("<think>\nhm\n</think>\n\nhello", False, "hm", "hello"),
        ("\n<think>hm</think>hello", False, "hm", "hello"),
        ("hm\n</think>\n\nhello", True, "hm", "hello"),
        ("<think>\n\n</think>\n\nhello", False, None, "hello"),
        ("<think>\nnever closed", False, "never closed", ""),
        ("never closed", True, "never closed", ""),
        ("I write <think> in the text", False, None, "I write <think> in the text"),
    ],
)
def test_thinking(text: str, inside: bool, reasoning: str | None, content: str) -> None:
    assert split_thinking(text, inside) == (reasoning, content)


def test_a_contract_parser_gets_the_text_without_thinking() -> None:
    seen: list[str] = []

    class Contract:
        def parse(self, text: str) -> tuple[str | None, JSON]:
            seen.append(text)
            return "rest", [{"function": {"name": "f", "arguments": {"a": 1}}}]

    message = read(Contract(), "<think>\n" + CALL + "\n</think>\n\nhello")
    assert seen == ["hello"]
    assert message.reasoning_content == CALL
    assert message.tool_calls is not None
    assert (message.tool_calls[0].id, message.tool_calls[0].function.arguments) == ("call_3_0", '{"a":1}')


def test_a_parser_by_name_keeps_broken_calls_as_the_model_wrote_them() -> None:
    broken = '<tool_call>\n{"name": "f", "arguments": {"a": \n</tool_call>'
    message = read("hermes", f"I look.\n{CALL}\n{broken}")
    assert message.content == "I look."
    assert message.tool_calls is not None
    good, bad = message.tool_calls
    assert (good.id, good.function.name, good.function.arguments) == ("call_3_0", "f", '{"a": 1}')
    assert bad.id == "call_3_1"
    assert '"arguments": {"a": ' in bad.function.arguments


def test_calls_inside_thinking_are_none() -> None:
    message = read("hermes", f"I could {CALL} but\n</think>\n\nno", thinking=True)
    assert message.tool_calls is None
    assert message.content == "no"
    assert CALL in (message.reasoning_content or "")


@pytest.mark.parametrize("parser", ["none", None])
def test_no_parser_leaves_calls_in_the_text(parser: str | None) -> None:
    message = read(parser, CALL)
    assert (message.content, message.tool_calls) == (CALL, None)


def test_without_tools_nothing_is_a_call() -> None:
    message = read("hermes", f"<think>hm</think>\n{CALL}\nand {CALL}", tools=[])
    assert message.tool_calls is None
    assert (message.reasoning_content, message.content) == ("hm", f"{CALL}\nand {CALL}")


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("gpt_oss", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>42"),
        ("mistral", "[THINK]hm[/THINK]42"),
        ("hermes", "<think>\nhm\n</think>\n\n42"),
    ],
)
@pytest.mark.parametrize("tools", [[], TOOLS], ids=["without tools", "with tools"])
def test_a_familys_own_thinking_is_none_of_the_content(parser: str, text: str, tools: list[JSON]) -> None:
    message = read(parser, text, tools=tools)
    assert (message.reasoning_content, message.content) == ("hm", "42")


def test_a_parser_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match="hermess"):
        ReplyReader("hermess")
