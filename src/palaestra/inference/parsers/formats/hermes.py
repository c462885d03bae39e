"""Hermes, Qwen 2.5 and 3, Granite 4 and LongCat: one JSON object between tags per call.

    <tool_call>
    {"name": "f", "arguments": {...}}
    </tool_call>

Source: the chat templates of Hermes 2 Pro and 3, Qwen2.5, Qwen3, Granite 4 and LongCat-Flash. Lines, spaces and CRLF
around the object do not matter. The last end tag may be missing where the output was not cut: stop strings take it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from palaestra.inference.parsers.parser import Call, named_object
from palaestra.inference.parsers.reader import Grammar, Output, mentioned
from palaestra.inference.parsers.syntax.json_calls import Tags, json_body, write_call
from palaestra.inference.parsers.text_source import Mark, Markers, Reading


class Hermes(Grammar):
    """`<tool_call>` … `</tool_call>`."""

    tags: ClassVar[Tags] = Tags("<tool_call>", ("</tool_call>",))
    openers: ClassVar[Markers] = Markers("<tool_call>")

    def read(self, output: Output, mark: Mark) -> Reading[int | None]:
        """One call."""
        begin = yield from output.source.skip(mark.end)
        if not (yield from output.source.at(begin, "{")):
            return (yield from mentioned(output, mark, self.tags.last))
        body = yield from json_body(output.source, begin, self.tags)
        write_call(output, mark.start, body)
        return body.end

    def render(self, calls: Sequence[Call], text: str) -> str:
        """Each call on three lines."""
        blocks = [f"{self.tags.open}\n{named_object(call)}\n{self.tags.last}" for call in calls]
        return "\n".join([text, *blocks] if text else blocks)


class LongCat(Hermes):
    """`<longcat_tool_call>` … `</longcat_tool_call>`, and thinking in tags of its own."""

    tags = Tags("<longcat_tool_call>", ("</longcat_tool_call>",))
    openers = Markers("<longcat_tool_call>")
    thinking = (("<think>", "</think>"), ("<longcat_think>", "</longcat_think>"))
