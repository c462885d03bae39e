"""DeepSeek V3, R1 and V3.1: a section of calls between special tokens.

    V3, R1   <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
             ```json
             {...}
             ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
    V3.1     <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

Source: the chat templates of deepseek-ai/DeepSeek-V3, -R1 and -V3.1. Line ends may be CRLF.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from palaestra.inference.parsers.parser import Call, Malformed, Reason
from palaestra.inference.parsers.syntax.json_calls import Tags
from palaestra.inference.parsers.syntax.sections import Header, Sections, head
from palaestra.inference.parsers.text_source import Mark, Markers, Reading, Source

_BEGIN, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_NAME = re.compile(r"[^\r\n<]*")


class DeepSeekV31(Sections):
    """The name is the header."""

    section: ClassVar[tuple[str, str]] = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    tags: ClassVar[Tags] = Tags(_BEGIN, (_END,))
    openers: ClassVar[Markers] = Markers(*section, _BEGIN)

    def header(self, source: Source, start: int) -> Reading[Header | None]:
        """`NAME<｜tool▁sep｜>`."""
        mark = yield from head(source, start, _SEPARATOR, self.tags)
        return _named(source.read(start, mark.start).strip(), mark.end) if isinstance(mark, Mark) else mark

    def render(self, calls: Sequence[Call], text: str) -> str:
        """No white space anywhere."""
        blocks = [f"{_BEGIN}{call.name}{_SEPARATOR}{call.arguments_text}{_END}" for call in calls]
        return f"{text}{self.section[0]}{''.join(blocks)}{self.section[1]}" if calls else text


class DeepSeekV3(DeepSeekV31):
    """The type, the name and a code fence are the header; the fence is closed before the end tag."""

    tags = Tags(_BEGIN, ("```", _END))

    def header(self, source: Source, start: int) -> Reading[Header | None]:
        """`function<｜tool▁sep｜>NAME`, a new line and the opening fence."""
        mark = yield from head(source, start, _SEPARATOR, self.tags)
        if not isinstance(mark, Mark):
            return mark
        end = yield from source.skip(mark.end, _NAME)
        named = _named(source.read(mark.end, end).strip(), end)
        fence = yield from source.skip(end)
        if not (yield from source.at(fence, "```json")):
            reason = Reason.UNCLOSED if source.breaks_off(fence, "```json") else Reason.MALFORMED_MARKUP
            return named._replace(problem=Malformed(reason, "the arguments are not in a json block"))
        return named._replace(end=fence + len("```json"))

    def render(self, calls: Sequence[Call], text: str) -> str:
        """The fence on lines of its own, the calls too."""
        blocks = [
            f"{_BEGIN}function{_SEPARATOR}{call.name}\n```json\n{call.arguments_text}\n```{_END}" for call in calls
        ]
        return "".join([text, self.section[0], "\n".join(blocks), self.section[1]]) if calls else text


def _named(name: str, end: int) -> Header:
    return Header(name, "", end, None if name else Malformed(Reason.NO_NAME, "the call has no name"))
