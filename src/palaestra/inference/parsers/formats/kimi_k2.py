"""Kimi K2: a section of calls whose id is `functions.NAME:INDEX`.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
    <|tool_calls_section_end|>

Source: the chat template and the tool-use guide of moonshotai/Kimi-K2-Instruct. The id is kept whole, since tool
messages must echo it; the `functions.` in front may be missing. Without an index there is no id, so no call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from palaestra.inference.parsers.parser import Call, Malformed, Reason
from palaestra.inference.parsers.syntax.json_calls import Tags
from palaestra.inference.parsers.syntax.sections import Header, Sections, head
from palaestra.inference.parsers.text_source import Mark, Markers, Reading, Source

_BEGIN, _ARGUMENTS, _END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID = re.compile(r"(?!functions\.:)(?:functions\.)?([^\s:]+):\d+")


class KimiK2(Sections):
    """The id before the arguments is the header."""

    section: ClassVar[tuple[str, str]] = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    tags: ClassVar[Tags] = Tags(_BEGIN, (_END,))
    openers: ClassVar[Markers] = Markers(*section, _BEGIN)

    def header(self, source: Source, start: int) -> Reading[Header | None]:
        """`functions.NAME:INDEX<|tool_call_argument_begin|>`."""
        mark = yield from head(source, start, _ARGUMENTS, self.tags)
        if not isinstance(mark, Mark):
            return mark
        call_id = source.read(start, mark.start).strip()
        found = _ID.fullmatch(call_id)
        if found is None:
            problem = Malformed(Reason.NO_NAME, "the id of the call is not functions.NAME:INDEX")
            return Header("", "", mark.end, problem)
        return Header(found[1], call_id, mark.end)

    def render(self, calls: Sequence[Call], text: str) -> str:
        """Calls without an id of this form get one of their place."""
        blocks = []
        for index, call in enumerate(calls):
            found = _ID.fullmatch(call.id)
            call_id = call.id if found and found[1] == call.name else f"functions.{call.name}:{index}"
            blocks.append(f"{_BEGIN}{call_id}{_ARGUMENTS}{call.arguments_text}{_END}")
        return f"{text}{self.section[0]}{''.join(blocks)}{self.section[1]}" if calls else text
