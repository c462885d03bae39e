"""Granite 3: a mark and a JSON list of calls.

    <|tool_call|>[{"name": "f", "arguments": {...}}, ...]

Source: the chat templates of ibm-granite/granite-3.0 to 3.3; 3.1 to 3.3 also write `<tool_call>`. Granite 4 writes the
Hermes form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from palaestra.inference.parsers.parser import Call, Malformed, Reason, named_object
from palaestra.inference.parsers.reader import Grammar, Output
from palaestra.inference.parsers.syntax.arrays import read_array
from palaestra.inference.parsers.syntax.json_text import scan_brackets
from palaestra.inference.parsers.text_source import Mark, Markers, Reading


class Granite(Grammar):
    """One list per mark."""

    openers: ClassVar[Markers] = Markers("<|tool_call|>", "<tool_call>")

    def read(self, output: Output, mark: Mark) -> Reading[int | None]:
        """All calls of one list."""
        source = output.source
        begin = yield from source.skip(mark.end)
        if (yield from source.at(begin, "[")):
            return (yield from read_array(output, mark.start, begin))
        problem = Malformed(Reason.MALFORMED_JSON, "the calls are not a list")
        if (yield from source.at(begin, "{")):
            end = yield from scan_brackets(source, begin)
        elif (yield from source.ends(begin)):
            end, problem = source.end, Malformed(Reason.UNCLOSED, "the output ends where the calls begin")
        else:
            return None
        output.page.broken(problem, "", mark.start, end)
        return end

    def render(self, calls: Sequence[Call], text: str) -> str:
        """All calls in one list."""
        return f"{text}<|tool_call|>[{', '.join(map(named_object, calls))}]" if calls else text
