"""Reading costs in proportion to the length: eight times the text, not much more than eight times the work.

Work is counted, not timed: calls of the library's functions, and the distance that its searches cover. So a busy
machine cannot change the answer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import pytest

from inference.parsers.corpus import TOOLS
from inference.parsers.forms import FORMS, MARK, Form
from palaestra.inference.parsers import get_parser
from palaestra.inference.parsers.syntax.json_text import scan_brackets, scan_value
from palaestra.inference.parsers.syntax.python_calls import scan_parentheses
from palaestra.inference.parsers.text_source import Source

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


SEARCHES = {
    Source.find.__code__,
    Source.skip.__code__,
    scan_value.__code__,
    scan_brackets.__code__,
    scan_parentheses.__code__,
}


class Work:
    """Counts calls into the parsers, and how far their searches go."""

    def __init__(self) -> None:
        self.done = 0

    def __call__(self, frame: FrameType, event: str, result: object) -> None:
        if event == "call" and "parsers" in frame.f_code.co_filename:
            self.done += 1
        elif event == "return" and frame.f_code is Source.read.__code__:
            self.done += len(str(result)) // 32
        elif event == "return" and frame.f_code in SEARCHES:
            seen = frame.f_locals
            end = result if isinstance(result, int) else getattr(result, "end", None)
            if end is None:
                end = min(seen["self"].end, seen["stop"] or sys.maxsize)
            self.done += max(0, end - seen["start"]) // 32


def work(read: Callable[[], object]) -> int:
    counter = Work()
    before = sys.getprofile()
    sys.setprofile(counter)
    try:
        read()
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
            few = work(lambda text=small: parser.parse(text, tools=TOOLS))
            many = work(lambda text=large: parser.parse(text, tools=TOOLS))
            assert many < 13 * few + 500, (unit, start)


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
            few = work(lambda text=small: parser.parse(text, tools=TOOLS))
            many = work(lambda text=large: parser.parse(text, tools=TOOLS))
            assert many < 13 * few + 500, repeated


@pytest.mark.parametrize("form", {form.format: form for form in FORMS}.values(), ids=lambda form: form.format)
def test_a_megabyte_in_one_argument_is_read_whole_and_in_chunks(form: Form) -> None:
    content = "def f(x):\n    return {'a': [1, \"b\"]}\n" * 27_000
    call = ("write_file", {"path": "a", "content": content})
    text = form.block([call])
    parser = get_parser(form.format)
    parsed = parser.parse(text, tools=TOOLS)
    assert [(found.name, found.arguments) for found in parsed.calls] == [call]
    stream = parser.stream(tools=TOOLS)
    for start in range(0, len(text), 1000):
        assert not [event for event in stream.feed(text[start : start + 1000]) if start < len(text) // 2]
    assert stream.end() == parsed
