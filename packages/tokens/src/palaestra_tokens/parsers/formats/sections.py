"""Calls in a section, each a header and JSON arguments between tags: DeepSeek V3, R1 and V3.1, and Kimi K2.

    V3, R1   <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
             ```json
             {...}
             ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
    V3.1     <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
    Kimi     <|tool_calls_section_begin|>
             <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
             <|tool_calls_section_end|>

Sources: the chat templates of deepseek-ai/DeepSeek-V3, -R1 and -V3.1; the chat template and the tool-use guide of
moonshotai/Kimi-K2-Instruct. Kimi's id is kept whole, because tool messages must repeat it; its prefix `functions.` may
be missing, but its index may not. Invariant: a call needs only its own end tag, so a complete call in an unclosed
section is still read.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from palaestra_tokens.parsers.formats.json_calls import Tags, add_json, tagged_body
from palaestra_tokens.parsers.output_reader import Grammar, OutputReader
from palaestra_tokens.parsers.parser import BrokenReason, Malformed, ParsedCall
from palaestra_tokens.parsers.scan import Mark, breaks_off, find, skip


class Header(NamedTuple):
    """The text before the arguments. `id` is empty if the format has no ids. If the output ends inside the header, the
    problem is `UNCLOSED`."""

    name: str
    id: str
    end: int
    problem: Malformed | None = None


class Sections(Grammar):
    """Calls in a section: `section` holds the tags around all calls, `tags` the tags of one call."""

    section: ClassVar[tuple[str, str]]
    tags: ClassVar[Tags]

    @abstractmethod
    def header(self, text: str, start: int) -> Header | None:
        """Return the header that begins at `start`, or None."""

    def read(self, output: OutputReader, mark: Mark) -> int | None:
        begin = mark.start
        if mark.text == self.section[1]:
            return output.leave_section(mark)
        if mark.text == self.section[0]:
            begin = skip(output.text, mark.end)
            if not output.text.startswith(self.tags.open, begin):
                return self._no_call(output, mark)
            output.skip_to(begin)
            output.in_section = True
        return self._read_call(output, begin, lone=not output.in_section)

    def _read_call(self, output: OutputReader, start: int, lone: bool) -> int | None:
        header = self.header(output.text, start + len(self.tags.open))
        if header is None or (header.problem is not None and header.problem.reason is BrokenReason.UNCLOSED):
            after = skip(output.text, start + len(self.tags.open))
            if lone and after < output.end:
                return None  # prose that mentions the tag
            missing = Malformed(BrokenReason.MALFORMED_MARKUP, "the call has no header")
            header = header or Header("", "", after, missing)
        body = tagged_body(output, header.end, self.tags)
        if header.problem is not None:
            body = body._replace(problem=header.problem)
        return add_json(output, start, header.name, body, header.id)

    def _no_call(self, output: OutputReader, mark: Mark) -> int | None:
        """Read a section that does not begin with a call. Text may precede its first call; without any call, the tag is
        a mention or a broken call."""
        found = find(output.text, mark.end, *self.section, self.tags.open)
        if found is not None and found.text == self.tags.open:
            return None
        return output.mentioned(mark, self.section[1])


def header_end(text: str, start: int, end_tag: str, tags: Tags) -> Mark | Header | None:
    """Return the tag that ends a header. Returns None if a different tag comes first, and an unclosed header if the
    output ends before any tag."""
    found = find(text, start, end_tag, tags.open, tags.last)
    if found is None:
        return Header("", "", len(text), Malformed(BrokenReason.UNCLOSED, "the output ends in the header of a call"))
    return found if found.text == end_tag else None


_BEGIN, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_NAME = re.compile(r"[^\r\n<]*")
_FENCE = "```json"


class DeepSeekV31(Sections):
    """The header is the name."""

    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    tags = Tags(_BEGIN, (_END,))
    openers = (*section, _BEGIN)

    def header(self, text: str, start: int) -> Header | None:
        """Read `NAME<｜tool▁sep｜>`."""
        mark = header_end(text, start, _SEPARATOR, self.tags)
        return _header(text[start : mark.start], mark.end) if isinstance(mark, Mark) else mark

    def render(self, calls: Sequence[ParsedCall], text: str) -> str:
        blocks = [f"{_BEGIN}{call.name}{_SEPARATOR}{call.arguments_text}{_END}" for call in calls]
        return f"{text}{self.section[0]}{''.join(blocks)}{self.section[1]}" if calls else text


class DeepSeekV3(DeepSeekV31):
    """The header is the type, the name and a code fence; the fence is closed before the end tag."""

    tags = Tags(_BEGIN, ("```", _END))

    def header(self, text: str, start: int) -> Header | None:
        """Read `function<｜tool▁sep｜>NAME`, a line end and the opening fence."""
        mark = header_end(text, start, _SEPARATOR, self.tags)
        if not isinstance(mark, Mark):
            return mark
        end = skip(text, mark.end, _NAME)
        named, fence = _header(text[mark.end : end], end), skip(text, end)
        if not text.startswith(_FENCE, fence):
            ended = breaks_off(text, fence, _FENCE)
            reason = BrokenReason.UNCLOSED if ended else BrokenReason.MALFORMED_MARKUP
            return named._replace(problem=Malformed(reason, "the arguments are not in a json block"))
        return named._replace(end=fence + len(_FENCE))

    def render(self, calls: Sequence[ParsedCall], text: str) -> str:
        blocks = [
            f"{_BEGIN}function{_SEPARATOR}{call.name}\n{_FENCE}\n{call.arguments_text}\n```{_END}" for call in calls
        ]
        return "".join([text, self.section[0], "\n".join(blocks), self.section[1]]) if calls else text


def _header(name: str, end: int) -> Header:
    name = name.strip()
    return Header(name, "", end, None if name else Malformed(BrokenReason.NO_NAME, "the call has no name"))


_KIMI_BEGIN, _KIMI_ARGUMENTS, _KIMI_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID = re.compile(r"(?!functions\.:)(?:functions\.)?([^\s:]+):\d+")


class KimiK2(Sections):
    """The header is the id before the arguments."""

    section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    tags = Tags(_KIMI_BEGIN, (_KIMI_END,))
    openers = (*section, _KIMI_BEGIN)

    def header(self, text: str, start: int) -> Header | None:
        """Read `functions.NAME:INDEX<|tool_call_argument_begin|>`."""
        mark = header_end(text, start, _KIMI_ARGUMENTS, self.tags)
        if not isinstance(mark, Mark):
            return mark
        call_id = text[start : mark.start].strip()
        found = _ID.fullmatch(call_id)
        if found is None:
            problem = Malformed(BrokenReason.NO_NAME, "the id of the call is not functions.NAME:INDEX")
            return Header("", "", mark.end, problem)
        return Header(found[1], call_id, mark.end)

    def render(self, calls: Sequence[ParsedCall], text: str) -> str:
        """Write the calls. A call without an id of this form gets an id made from its position."""
        blocks = []
        for index, call in enumerate(calls):
            found = _ID.fullmatch(call.id)
            call_id = call.id if found and found[1] == call.name else f"functions.{call.name}:{index}"
            blocks.append(f"{_KIMI_BEGIN}{call_id}{_KIMI_ARGUMENTS}{call.arguments_text}{_KIMI_END}")
        return f"{text}{self.section[0]}{''.join(blocks)}{self.section[1]}" if calls else text
