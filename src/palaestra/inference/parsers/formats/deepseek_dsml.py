"""DeepSeek V3.2 and V4: markup whose values say themselves whether they are text or JSON.

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="f">
    <｜DSML｜parameter name="key" string="true">value</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

Source: the encoding published with deepseek-ai/DeepSeek-V3.2; V4 names the section `tool_calls`. `string="true"` is
text, whatever the schema says; `string="false"` is JSON, and a call with other JSON than that is malformed. White space
belongs to the value. An `invoke` may close itself, or hold one JSON object instead of parameters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from palaestra.core.types import JSON
from palaestra.inference.parsers.parser import Call, Malformed, Reason, bare
from palaestra.inference.parsers.reader import Output
from palaestra.inference.parsers.syntax.json_text import decode
from palaestra.inference.parsers.syntax.xml_calls import Markup, name_attribute
from palaestra.inference.parsers.text_source import Markers

_HEAD = re.compile(r'([^"]+)"(?:\s+string="(true|false)")?\s*')


class DeepSeekV32(Markup):
    """Several calls per section."""

    section = ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")
    call = ("<｜DSML｜invoke", "</｜DSML｜invoke>")
    parameter = ('<｜DSML｜parameter name="', "</｜DSML｜parameter>")
    openers: ClassVar[Markers] = Markers(*section, "<｜DSML｜invoke")

    def named(self, head: str) -> str:
        """`f` of `<｜DSML｜invoke name="f">`."""
        return name_attribute(head)

    def argument(self, output: Output, call: str, head: str, value: str) -> tuple[str, JSON]:
        """Text or JSON as the attribute says; without it, typed by the tool's schema."""
        found = _HEAD.fullmatch(head)
        if found is None:
            raise Malformed(Reason.MALFORMED_MARKUP, "a parameter's tag is malformed")
        key, is_text = found[1], found[2]
        if is_text is None:
            return key, output.types.value(call, key, value)
        return key, value if is_text == "true" else decode(value)

    def render(self, calls: Sequence[Call], text: str) -> str:
        """All calls in one section."""
        if not calls:
            return text
        lines = [self.section[0]]
        for call in calls:
            lines.append(f'{self.call[0]} name="{call.name}">')
            for key, value in call.arguments.items():
                is_text = "true" if isinstance(value, str) else "false"
                lines.append(f'{self.parameter[0]}{key}" string="{is_text}">{bare(value)}{self.parameter[1]}')
            lines.append(self.call[1])
        return "\n".join([*([text] if text else []), *lines, self.section[1]])


class DeepSeekV4(DeepSeekV32):
    """The same with another section tag."""

    section = ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>")
    openers = Markers(*section, "<｜DSML｜invoke")
