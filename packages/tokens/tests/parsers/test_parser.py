"""What parsers return and how they are found: the contract's pair, ids, names."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from corpus import TOOLS
from golden_messages import check_message, raises
from palaestra_slots.core.errors import ConfigError
from palaestra_tokens.engine import ToolCallMessage
from palaestra_tokens.parsers import (
    BrokenCall,
    ParsedCall,
    ParsedOutput,
    ReasoningPiece,
    TextPiece,
    UnknownParser,
    Unwritable,
    get_parser,
    list_parsers,
    register_parser,
    registry,
)

ONE = '<tool_call>\n{"name": "run", "arguments": {"command":"ls"}}\n</tool_call>'
BAD = "<tool_call>\n{'name': 'run', 'arguments': {}}\n</tool_call>"


def test_the_contract_unpacks_content_and_calls() -> None:
    content, calls = get_parser("hermes").parse(f"I look.\n{ONE}\nDone.")
    assert content == "I look.\n\nDone."
    assert isinstance(calls[0], ToolCallMessage)
    assert (calls[0].function.name, calls[0].function.arguments) == ("run", '{"command":"ls"}')
    assert calls[0]["function"]["name"] == "run"
    assert tuple(get_parser("hermes").parse("hello\n")) == ("hello\n", None)
    assert next(iter(get_parser("hermes").parse(ONE))) is None
    parsed = get_parser("hermes").parse(ONE)
    assert parsed[0] is None
    assert len(parsed) == 2


def test_pieces_are_in_order_and_say_where_they_are() -> None:
    text = f"<think>hm</think>I look.\n{ONE}\n{BAD} Done."
    pieces = get_parser("hermes").parse(text).pieces
    assert [type(piece) for piece in pieces] == [ReasoningPiece, TextPiece, ParsedCall, BrokenCall, TextPiece]
    assert [text[piece.start : piece.end] for piece in pieces] == ["<think>hm</think>", "I look.\n", ONE, BAD, " Done."]


def test_broken_calls_become_messages_that_no_loop_can_run() -> None:
    text = '{"name": "run", "parameters": "ls"}; {"name": "noop", "parameters": {}}'
    parsed = get_parser("llama3_json").parse(text)
    broken, good = parsed.all_tool_calls or []
    assert parsed.tool_calls == [good]
    assert broken.function.name == "run"
    assert not isinstance(json.loads(broken.function.arguments), dict)
    assert good.function.arguments == "{}"
    assert (get_parser("hermes").parse(BAD).all_tool_calls or [])[0].function.arguments == BAD
    assert ParsedOutput(()).all_tool_calls is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama4_pythonic", r"[run(command='\ud800 x')]"),
        ("deepseek_v3_2", '<｜DSML｜function_calls><｜DSML｜invoke name="run">'
         r'<｜DSML｜parameter name="command" string="false">["\ud800 x"]</｜DSML｜parameter>'
         "</｜DSML｜invoke></｜DSML｜function_calls>"),
    ],
)  # fmt: skip
def test_arguments_are_text_that_can_be_written_anywhere(name: str, text: str) -> None:
    (call,) = get_parser(name).parse(text).calls
    assert call.arguments_text.encode()
    assert json.loads(call.arguments_text) == call.arguments


def test_ids_follow_content_and_place() -> None:
    parser = get_parser("hermes")
    first, second = parser.parse(ONE + ONE).calls
    assert first.id != second.id
    assert first.id.startswith("call_")
    assert len(first.id) == len("call_") + 8
    assert parser.parse(f"text\n{ONE}").calls[0].id == first.id
    assert parser.parse(ONE.replace("ls", "id")).calls[0].id != first.id
    mistral = get_parser("mistral")
    made = mistral.parse("[TOOL_CALLS]noop[ARGS]{}").calls[0].id
    assert len(made) == 9
    assert made.isalnum()
    assert mistral.parse("[TOOL_CALLS]noop[CALL_ID]abcDEF123[ARGS]{}").calls[0].id == "abcDEF123"
    kimi = "<|tool_call_begin|>functions.a.b:7<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert [(call.name, call.id) for call in get_parser("kimi_k2").parse(kimi).calls] == [("a.b", "functions.a.b:7")]


def test_ids_that_the_model_gave_are_kept_where_they_can_be_ids() -> None:
    kimi = "<|tool_call_begin|>functions.run:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    found = get_parser("kimi_k2").parse(f"{kimi}{kimi.replace('{}', '{')}{kimi.replace(':0', ':1')}{kimi}", turn=2)
    assert [call.id for call in found.calls] == ["functions.run:0", "functions.run:1", "call_2_3"]
    assert [error.id for error in found.errors] == ["call_2_1"]
    (broken,) = get_parser("kimi_k2").parse(kimi.replace("{}", "{")).errors
    assert broken.id == "functions.run:0"
    mistral = get_parser("mistral")
    listed = '[TOOL_CALLS] [{"name": "run", "arguments": {}, "id": "§"}]'
    for text in (listed, "[TOOL_CALLS]run[CALL_ID]§[ARGS]{}", "[TOOL_CALLS]run[CALL_ID]§[ARGS]{]"):
        for given in ("abcDEF123", "short", "much_longer_than_nine"):
            (piece,) = mistral.parse(text.replace("§", given)).pieces
            assert isinstance(piece, ParsedCall | BrokenCall)
            assert (piece.id == given) == (given == "abcDEF123")
            assert len(piece.id) == 9
            assert piece.id.isalnum()
    (one,), (two,) = (mistral.parse("[TOOL_CALLS]run[ARGS]{}", turn=turn).calls for turn in (1, 2))
    assert one.id != two.id
    assert get_parser("hermes").parse(ONE, turn=3).calls[0].id == "call_3_0"


def test_thinking_that_began_in_the_prompt() -> None:
    parser, text = get_parser("hermes"), f"maybe {ONE} no</think>{ONE}"
    for parsed in (parser.parse(text), parser.parse(text, thinking=True)):
        assert len(parsed.calls) == 1
        assert parsed.reasoning == f"maybe {ONE} no"
    assert parser.parse(ONE, thinking=True).calls == []


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        (f"I wrote `<think>` first. {ONE} So", [TextPiece, ParsedCall, TextPiece]),
        (f"I wrote `<think>` first. {ONE} Then `</think>`.", [TextPiece, BrokenCall, TextPiece]),
        (f"I see.\n<think>maybe {ONE}</think>{ONE}", [TextPiece, ReasoningPiece, ParsedCall]),
    ],
)
def test_a_thinking_tag_amid_text(text: str, kinds: list[type]) -> None:
    assert [type(piece) for piece in get_parser("hermes").parse(text).pieces] == kinds


def test_a_call_without_its_end_counts_unless_the_output_was_cut() -> None:
    parser, text = get_parser("hermes"), ONE.removesuffix("</tool_call>")
    assert len(parser.parse(text).calls) == 1
    assert len(parser.parse(text + "</tool_").calls) == 1
    cut = parser.parse(text, cut=True)
    assert cut.calls == []
    assert [(error.reason.value, error.name) for error in cut.errors] == [("unclosed", "run")]


def test_rendering_refuses_what_would_be_read_differently() -> None:
    written = ParsedCall.of("search", {"query": "a\n<parameter=x>\nb"})
    with pytest.raises(Unwritable, match="qwen3_coder"):
        get_parser("qwen3_coder").render([written], tools=TOOLS)
    with pytest.raises(Unwritable):
        get_parser("glm45").render([ParsedCall.of("unknown", {"n": 1})])
    with pytest.raises(Unwritable):
        get_parser("hermes").render([], "<think> I mean")
    assert get_parser("hermes").render([], "Hello.") == "Hello."


def test_an_unknown_name_is_told_the_nearest() -> None:
    with raises(KeyError, "hermes"):
        get_parser("hermess")
    with pytest.raises(ConfigError) as caught:
        get_parser("nothing like it")
    check_message(str(caught.value), "tool-call", "nothing", "like", "Available")
    assert issubclass(UnknownParser, KeyError)


def test_a_script_brings_its_own_parser() -> None:
    @register_parser("shouting")
    class Shouting:
        def parse(self, text: str) -> tuple[str | None, None]:
            return text.upper(), None

    try:
        assert tuple(get_parser("shouting").parse("hi")) == ("HI", None)
        assert "shouting" in list_parsers()
    finally:
        del registry._registered["shouting"]  # other tests list what there is


def test_a_format_is_loaded_when_it_is_asked_for() -> None:
    code = """
import sys
from palaestra_tokens.parsers import get_parser
assert not any(name.startswith("palaestra_tokens.parsers.formats.") for name in sys.modules)
get_parser("gpt_oss")
assert "palaestra_tokens.parsers.formats.gpt_oss" in sys.modules
assert "palaestra_tokens.parsers.formats.markup" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", list_parsers())
def test_every_name_has_a_parser_of_that_name(name: str) -> None:
    assert get_parser(name).name == name
    assert get_parser(name).parse("").pieces == ()
