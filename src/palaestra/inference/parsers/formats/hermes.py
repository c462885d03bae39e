"""Hermes, Qwen 2.5 and 3, Granite 4 and LongCat: one JSON object between tags per call.

    <tool_call>
    {"name": "f", "arguments": {...}}
    </tool_call>

Source: the chat templates of Hermes 2 Pro and 3, Qwen2.5, Qwen3, Granite 4 and LongCat-Flash. Line ends and spaces
around the object do not matter. The last end tag may be missing unless the output was cut: stop strings remove it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from palaestra.inference.parsers.json_calls import Tags, add_named, tagged_body
from palaestra.inference.parsers.parser import ParsedCall, named_object
from palaestra.inference.parsers.reader import Grammar, OutputReader
from palaestra.inference.parsers.scan import Mark, skip


class Hermes(Grammar):
    """`<tool_call>` … `</tool_call>`."""

    tags: ClassVar[Tags] = Tags("<tool_call>", ("</tool_call>",))
    openers = ("<tool_call>",)

    def read(self, output: OutputReader, mark: Mark) -> int | None:
        """One call."""
        begin = skip(output.text, mark.end)
        if not output.text.startswith("{", begin):
            return output.mentioned(mark, self.tags.last)
        return add_named(output, mark.start, tagged_body(output, begin, self.tags))

    def render(self, calls: Sequence[ParsedCall], text: str) -> str:
        """Each call on three lines."""
        blocks = [f"{self.tags.open}\n{named_object(call)}\n{self.tags.last}" for call in calls]
        return "\n".join([text, *blocks] if text else blocks)


class LongCat(Hermes):
    """`<longcat_tool_call>` … `</longcat_tool_call>`, and thinking in tags of its own."""

    tags = Tags("<longcat_tool_call>", ("</longcat_tool_call>",))
    openers = ("<longcat_tool_call>",)
    thinking = (("<think>", "</think>"), ("<longcat_think>", "</longcat_think>"))
