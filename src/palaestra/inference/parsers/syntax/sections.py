"""Calls in a section of their own, each a header and JSON arguments between tags: DeepSeek V3 and Kimi K2.

    SECTION_BEGIN (CALL_BEGIN header json CALL_END)* SECTION_END

For those families' grammars, which say how a header looks. Invariant: a call counts by its own end tag, so one that is
whole survives a section that is not closed.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, NamedTuple

from palaestra.inference.parsers.parser import Malformed, Reason
from palaestra.inference.parsers.reader import Grammar, Output, mentioned
from palaestra.inference.parsers.syntax.json_calls import Tags, json_body
from palaestra.inference.parsers.syntax.json_text import decode_object
from palaestra.inference.parsers.text_source import Mark, Reading, Source, marks


class Header(NamedTuple):
    """What stands before the arguments. `id` is empty where the format has none.

    A header in which the output ends is `UNCLOSED`.
    """

    name: str
    id: str
    end: int
    problem: Malformed | None = None


class Sections(Grammar):
    """`section` is the pair of tags around all calls, `tags` those of one call."""

    section: ClassVar[tuple[str, str]]
    tags: ClassVar[Tags]

    @abstractmethod
    def header(self, source: Source, start: int) -> Reading[Header | None]:
        """The header that begins at `start`; None when there is none."""

    def read(self, output: Output, mark: Mark) -> Reading[int | None]:
        """One call, in a section or without, or the tags of a section; text may stand between the calls."""
        source, begin = output.source, mark.start
        if mark.text == self.section[1]:
            return output.leave_section(mark)
        if mark.text == self.section[0]:
            begin = yield from source.skip(mark.end)
            if not (yield from source.at(begin, self.tags.open)):
                return (yield from self._no_call(output, mark))
            output.page.skip_to(begin)
            output.in_section = True
        return (yield from self._call(output, begin, lone=not output.in_section))

    def _call(self, output: Output, start: int, lone: bool) -> Reading[int | None]:
        source, page = output.source, output.page
        header = yield from self.header(source, start + len(self.tags.open))
        if header is None or (header.problem is not None and header.problem.reason is Reason.UNCLOSED):
            after = yield from source.skip(start + len(self.tags.open))
            if lone and not (yield from source.ends(after)):
                return None  # prose that mentions the tag
            header = header or Header("", "", after, Malformed(Reason.MALFORMED_MARKUP, "the call has no header"))
        body = yield from json_body(source, header.end, self.tags)
        problem = header.problem or body.problem
        if problem is None:
            try:
                arguments = decode_object(body.text)
            except Malformed as malformed:
                problem = malformed
            else:
                page.call(header.name, arguments, body.text, start, body.end, header.id)
                return body.end
        page.broken(problem, header.name, start, body.end, header.id)
        return body.end

    def _no_call(self, output: Output, mark: Mark) -> Reading[int | None]:
        """A section that does not begin with a call: text may stand before it. Without any it is a broken one, if it
        is not only mentioned."""
        found = yield from output.source.find(marks(*self.section, self.tags.open), mark.end)
        if found is not None and found.text == self.tags.open:
            return None
        return (yield from mentioned(output, mark, self.section[1]))


def head(source: Source, start: int, end_mark: str, tags: Tags) -> Reading[Mark | Header | None]:
    """The mark that ends a header; None when another tag comes first, an unclosed header when the output ends."""
    found = yield from source.find(marks(end_mark, tags.open, tags.last), start)
    if found is None:
        return Header("", "", source.end, Malformed(Reason.UNCLOSED, "the output ends in the header of a call"))
    return found if found.text == end_mark else None
