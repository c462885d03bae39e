"""No host code reads text of an agent in time that grows faster than the text: each function that has patterns over
such text is fed texts of 1 MB."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from palaestra.rollouts.grading.tampering import _PATH
from palaestra.rollouts.observe.failures import _VARIES
from palaestra.tools.human.approval import dangers
from palaestra_chat.batch.json_schema import JsonSchema
from palaestra_contract.helpers.tool_call_text import extract_tool_call
from palaestra_slots.core.printable import one_line, printable
from palaestra_slots.core.redaction import redacted
from palaestra_slots.sandbox.terminal.screen import plain
from palaestra_suites.grading.log_parsers import PARSERS, counted, has_run, without_duration
from palaestra_suites.swe.failure_cause import cause_of, exceeds_limit_of_runner
from palaestra_suites.terminal_bench.offline_script import lacks_network
from palaestra_tokens.parsers import get_parser, list_parsers
from palaestra_tokens.token_exact.streaming import _settled
from palaestra_view.imports.conversations import _assistant_message, _results
from suites.grading.hostile_text import MOST_CPU_S, slowest

Read = Callable[[str], object]
_LONG = 200_000
"""A reply of over 60,000 tokens. Linear code with many patterns needs some microseconds for each character."""


def parse(name: str) -> Read:
    return lambda text: get_parser(name).parse(text[:_LONG])


READERS: Mapping[str, Read] = {
    **{f"log {name}": read for name, read in PARSERS.items()},
    **{f"calls {name}": parse(name) for name in list_parsers()},
    "has_run": has_run,
    "counted": counted,
    "without_duration": without_duration,
    "exceeds_limit_of_runner": exceeds_limit_of_runner,
    "cause_of": cause_of,
    "lacks_network": lambda text: lacks_network("curl x", ["import openai"], text),
    "redacted": lambda text: redacted(text[:_LONG]),
    "one_line": lambda text: one_line(text, 200),
    "printable": printable,
    "screen": lambda text: plain(text.encode("utf-8", "surrogateescape")),
    "schema": JsonSchema({"type": "object"}, "s").problem,
    "settled": _settled,
    "tool call text": extract_tool_call,
    "conversation": lambda text: (_assistant_message(text, 0), list(_results(text, []))),
    "paths": _PATH.findall,
    "failures": lambda text: _VARIES.sub("", text),
    "dangers": dangers,
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", READERS)
def test_a_reader_of_agent_text_takes_time_that_grows_with_its_size(name: str) -> None:
    seconds, text = slowest(READERS[name])
    assert seconds < MOST_CPU_S, text


@pytest.mark.parametrize("name", PARSERS)
def test_a_long_line_costs_nothing(name: str) -> None:
    for part in (" ", "1", "( ", ". =", "#"):
        assert PARSERS[name](f"✔ {part * 200_000}") == {}


@pytest.mark.parametrize(
    ("text", "settled"),
    [("a b", "a b"), ("a b  \n", "a b"), ("a <tool", "a"), ("a  [TOOL_", "a"), ("a \ufffd\ufffd", "a "), ("", ""),
     (" " * 99, ""), ("\ufffd" * 99, ""), ("a < b > c", "a < b > c"), ("a [b]", "a [b]")],
)  # fmt: skip
def test_the_end_of_a_text_that_may_become_a_marker_is_held_back(text: str, settled: str) -> None:
    assert _settled(text) == settled


@pytest.mark.parametrize(
    "text", ['{"a": 1}', '```json\n{"a": 1}\n```', ' ``` \n{"a": 1}\n  ```\n', '```json\n\n{"a":\n1}\n```']
)
def test_a_reply_may_be_fenced(text: str) -> None:
    assert not JsonSchema({"type": "object"}, "s").problem(text)
    assert JsonSchema({"type": "object"}, "s").problem(f"{text}x")


def test_the_first_pair_of_a_tag_is_read() -> None:
    assert extract_tool_call("a <tool_call> b </tool_call> c </tool_call>") == "b"
    assert extract_tool_call("</tool_call> <tool_call> b") is None
    assert (
        _assistant_message('x\n<tool_call> {"name": "a"} </tool_call>\n<tool_call>', 0)["content"] == "x\n<tool_call>"
    )
    assert [each["content"] for each in _results("<tool_response>\n1\n</tool_response>", ["i"])] == ["1"]
