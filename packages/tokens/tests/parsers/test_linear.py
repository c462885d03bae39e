"""Reading costs in proportion to the length: eight times the text, not much more than eight times the work.

Work is counted, not timed: calls of the library's functions, and the distance that its searches cover. So a busy
machine cannot change the answer.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import SupportsIndex

import pytest

from corpus import TOOLS
from forms import FORMS, MARK, Form
from palaestra_tokens.parsers import GrammarParser, get_parser
from palaestra_tokens.parsers.formats.json_calls import string_end
from palaestra_tokens.parsers.formats.llama import scan_parentheses
from palaestra_tokens.parsers.scan import find, scan_brackets, scan_value, skip

SMALL, LARGE = 500, 4_000

HOSTILE = [
    "<tool_call>",
    '<tool_call>{"x": "',
    '<tool_call>{"</tool_call>',
    "<tool_call>{'</tool_call>",
    '{"a":',
    "[[[[",
    '{"a":{\'',
    "<think>",
    "</think>",
    "x <think>",
    "x\n<think>",
    "x\n<think></think>",
    "x <think></think>",
    'x <think><tool_call>{"name": "f", "arguments": {}}</tool_call>',
    "x [THINK]",
    "[TOOL_CALLS]a{'",
    '[TOOL_CALLS]a{"x": "',
    '[TOOL_CALLS] [{"a": ',
    "[TOOL_CALLS]a",
    "[f(a='",
    "[f(), ",
    '<|python_tag|>{"',
    '{"name": "a", "parameters": {\'',
    "[f(a='''",
    "<tool_call><function=f><parameter=a>",
    "</parameter> ",
    "<function=f><parameter=a></parameter>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>x<｜tool▁sep｜>{'",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    "<｜tool▁call▁begin｜>",
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="a">\n',
    '<|tool_call_begin|>functions.a:0<|tool_call_argument_begin|>{"',
    "<tool_call>f<arg_key>k</arg_key><arg_value>",
    "</arg_value> ",
    '<minimax:tool_call><invoke name="a"><parameter name="k">',
    '<|channel|>commentary to=functions.f<|message|>{"',
    "<|start|>assistant",
    "<|channel|>",
    "<|start|>assistant<|channel|>",
    "<|channel|>commentary to=functions.f",
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n",
    '<|tool_call|>[{"',
    "<|tool_call|>[{'",
    '<invoke name="a"><parameter name="k">x</invoke>',
    '<invoke name="a"><parameter name="k">x</parameter>',
    '<invoke name="a"><parameter name="k">x</invoke></parameter>',
    "<tool_call><function=f><parameter=a>x</parameter></tool_call>",
    "<tool_call><function=f><parameter=a>x</function>",
    "<tool_call>f<arg_key>k</arg_key><arg_value>x</tool_call>",
    "<tool_call>f<arg_key>k</arg_key><arg_value>x</arg_value>",
    "<tool_call>f<arg_key>k",
    '[TOOL_CALLS] [{"a": 1}, "',
    '<|tool_call|>[{"a": 1} ',
    "<|tool_call|>[5, ",
    "[f(), 'x', ",
    "[f(), (",
    "x\n<think>[f()]</think> y",
    " to=functions.f<|channel|>",
    "<|tool_calls_section_begin|><|tool_calls_section_end|>",
    " \n",
    "\\",
    '"',
    "word ",
]


SEARCHES = {search.__code__ for search in (find, skip, scan_value, scan_brackets, scan_parentheses, string_end)}
_CHARS_PER_UNIT = 32


class Work:
    """Counts calls into the parsers, how far their searches go, and how much text they copy."""

    def __init__(self) -> None:
        self.done = 0

    def __call__(self, frame: FrameType, event: str, result: object) -> None:
        if event == "call" and "parsers" in frame.f_code.co_filename:
            self.done += 1
        elif event == "return" and frame.f_code in SEARCHES:
            seen = frame.f_locals
            end = abs(result) if isinstance(result, int) else getattr(result, "end", None)
            if end is None:
                end = min(len(seen["text"]), seen["before"] or sys.maxsize)
            self.done += max(0, end - seen["start"]) // _CHARS_PER_UNIT


class Counted(str):
    """An output that counts what is copied out of it."""

    __slots__ = ("work",)
    work: Work

    def __getitem__(self, place: SupportsIndex | slice) -> str:
        copied = super().__getitem__(place)
        self.work.done += len(copied) // _CHARS_PER_UNIT
        return copied


def work(parser: GrammarParser, text: str) -> int:
    counter = Work()
    counted = Counted(text)
    counted.work = counter
    before = sys.getprofile()
    sys.setprofile(counter)
    try:
        parser.parse(counted, tools=TOOLS)
    finally:
        sys.setprofile(before)
    return counter.done


@pytest.mark.parametrize("form", {form.format: form for form in FORMS}.values(), ids=lambda form: form.format)
def test_hostile_outputs_cost_no_more_than_their_length(form: Form) -> None:
    parser = get_parser(form.format)
    opened = form.block([("write_file", {"content": "§"})]).partition("§")[0]
    for unit in [*HOSTILE, *form.tags]:
        for start in ("", opened):
            small, large = (start + unit * (size // len(unit)) for size in (SMALL, LARGE))
            assert work(parser, large) < 13 * work(parser, small) + 500, (unit, start)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.id)
def test_any_marks_repeated_cost_no_more_than_their_length(form: Form) -> None:
    """Every mark of the form alone, after every other, and what comes before its arguments: over and over again."""
    parser = get_parser(form.format)
    block = form.block([("f", {"a": "§"})])
    marks = sorted({*MARK.findall(block), *form.tags, "<think>"})
    parts = [block.partition("§")[0], *(block[: found.end()] for found in MARK.finditer(block))]
    for unit in [*marks, *(one + other for one in marks for other in marks), *parts]:
        for repeated in (unit, f"x {unit}"):
            small, large = (repeated * (size // len(repeated)) for size in (SMALL, LARGE))
            assert work(parser, large) < 13 * work(parser, small) + 500, repeated


@pytest.mark.parametrize("form", {form.format: form for form in FORMS}.values(), ids=lambda form: form.format)
def test_a_megabyte_in_one_argument_is_read_whole(form: Form) -> None:
    content = "def f(x):\n    return {'a': [1, \"b\"]}\n" * 27_000
    call = ("write_file", {"path": "a", "content": content})
    text = form.block([call])
    parser = get_parser(form.format)
    parsed = parser.parse(text, tools=TOOLS)
    assert [(found.name, found.arguments) for found in parsed.calls] == [call]
