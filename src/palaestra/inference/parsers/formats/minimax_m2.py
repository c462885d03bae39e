"""MiniMax M2: markup with quoted names, values typed by the tool's schema.

    <minimax:tool_call>
    <invoke name="f">
    <parameter name="key">value</parameter>
    </invoke>
    </minimax:tool_call>

Source: the chat template and the tool-calling guide of MiniMaxAI/MiniMax-M2. White space belongs to the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from palaestra.core.types import JSON
from palaestra.inference.parsers.parser import Call, bare
from palaestra.inference.parsers.reader import Output
from palaestra.inference.parsers.syntax.xml_calls import Markup, name_attribute, quoted
from palaestra.inference.parsers.text_source import Markers


class MiniMaxM2(Markup):
    """Several calls per section."""

    section = ("<minimax:tool_call>", "</minimax:tool_call>")
    call = ("<invoke", "</invoke>")
    parameter = ('<parameter name="', "</parameter>")
    openers: ClassVar[Markers] = Markers(*section, "<invoke")

    def named(self, head: str) -> str:
        """`f` of `<invoke name="f">`."""
        return name_attribute(head)

    def argument(self, output: Output, call: str, head: str, value: str) -> tuple[str, JSON]:
        """Typed by the tool's schema."""
        key = quoted(head)
        return key, output.types.value(call, key, value)

    def render(self, calls: Sequence[Call], text: str) -> str:
        """All calls in one section."""
        if not calls:
            return text
        lines = [self.section[0]]
        for call in calls:
            lines.append(f'<invoke name="{call.name}">')
            lines += [f'<parameter name="{key}">{bare(value)}</parameter>' for key, value in call.arguments.items()]
            lines.append("</invoke>")
        return "\n".join([*([text] if text else []), *lines, self.section[1]])
