"""Calls as markup, one element per argument: Qwen3-Coder, MiniMax M2 and DeepSeek V3.2.

    SECTION  CALL_OPEN name>  PARAMETER_OPEN key>value PARAMETER_CLOSE …  CALL_CLOSE  SECTION_END

For those families' grammars. A section holds calls until its end tag, and text between them is text. Values are bare
text, quoted by nothing, so the end of one is the first end tag after which the markup goes on: an end tag inside code
stays in the value. Invariants: a value that was never closed breaks its call, it never takes up the next argument or
the next call, which begins where the first end tag in the value could be meant; a broken call ends after the place
where it broke, so reading always goes on.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from palaestra.core.types import JSON
from palaestra.inference.parsers.parser import Malformed, Reason, bare
from palaestra.inference.parsers.reader import Grammar, Output, mentioned
from palaestra.inference.parsers.syntax.json_calls import CUT_OFF
from palaestra.inference.parsers.syntax.json_text import decode_object, scan_value
from palaestra.inference.parsers.text_source import Mark, Markers, Reading, Source, closing, marks


@dataclass(frozen=True, slots=True)
class Element:
    """One call as far as it was read. `problem` says why it must not run."""

    name: str
    arguments: dict[str, JSON]
    end: int
    problem: Malformed | None = None


class Markup(Grammar):
    """The tags of one family. Opening tags are given up to where the name begins."""

    section: ClassVar[tuple[str, str]]
    call: ClassVar[tuple[str, str]]
    parameter: ClassVar[tuple[str, str]]

    @abstractmethod
    def named(self, head: str) -> str:
        """The name that the rest of an opening tag, up to `>`, gives. Raises `Malformed`."""

    @abstractmethod
    def argument(self, output: Output, call: str, head: str, value: str) -> tuple[str, JSON]:
        """Key and value of an argument. Raises `Malformed`."""

    def read(self, output: Output, mark: Mark) -> Reading[int | None]:
        """One call of a section that is open, or the section's own tags; text may stand between the calls."""
        source, begin = output.source, mark.start
        if mark.text == self.section[1]:
            return output.leave_section(mark)
        if mark.text == self.section[0]:
            begin = yield from source.skip(mark.end)
            if not (yield from source.at(begin, self.call[0])):
                return (yield from mentioned(output, mark, self.section[1]))
            output.page.skip_to(begin)
            output.in_section = True
        if not output.in_section:
            return None
        element = yield from self.element(output, begin)
        write_element(output, element, begin)
        return element.end

    def element(self, output: Output, start: int) -> Reading[Element]:
        """The call whose opening tag begins at `start`."""
        source = output.source
        name, arguments = "", dict[str, JSON]()
        position, closes_itself = start + len(self.call[0]), False
        try:
            head = yield from _head(source, position)
            position, closes_itself = head.end, head.text.endswith("/")
            name = self.named(head.text.removesuffix("/").rstrip())
            if not closes_itself:
                position = yield from self._arguments(output, name, position, arguments)
            return Element(name, arguments, position)
        except Malformed as problem:
            if closes_itself:
                return Element(name, {}, position, problem)
            broken, begins = max(position, problem.at), (self.section[1], self.call[0])
            return Element(name, {}, (yield from end_of_broken(source, broken, self.call[1], *begins)), problem)

    def _arguments(self, output: Output, name: str, start: int, arguments: dict[str, JSON]) -> Reading[int]:
        """Fill `arguments` and return the end of the call. Raises `Malformed`."""
        source = output.source
        position = yield from source.skip(start)
        if (yield from source.at(position, "{")):
            position = yield from self._object(source, position, arguments)
        while not (yield from source.at(position, self.call[1])):
            if not (yield from source.at(position, self.parameter[0])):
                ended = source.breaks_off(position, self.parameter[0], self.call[1])
                raise Malformed(
                    Reason.UNCLOSED if ended else Reason.MALFORMED_MARKUP,
                    CUT_OFF if ended else f"{self.parameter[0]!r} or {self.call[1]!r} is missing",
                    position,
                )
            head = yield from _head(source, position + len(self.parameter[0]))
            end, position = yield from self._value_end(source, head.end)
            try:
                key, value = self.argument(output, name, head.text, source.read(head.end, end))
            except Malformed as problem:
                problem.at = position
                raise
            if key in arguments:
                raise Malformed(Reason.DUPLICATE_KEY, f"the argument {key!r} is there twice", position)
            arguments[key] = value
        return position + len(self.call[1])

    def _object(self, source: Source, start: int, arguments: dict[str, JSON]) -> Reading[int]:
        """All arguments as one JSON object."""
        scan = yield from scan_value(source, start)
        try:
            arguments.update(decode_object(source.read(start, scan.end + (not scan.complete))))
        except Malformed as problem:
            problem.at = scan.end
            raise
        if not scan.complete:
            raise Malformed(Reason.UNCLOSED, "the JSON does not end", scan.end)
        return (yield from source.skip(scan.end))

    def _value_end(self, source: Source, start: int) -> Reading[tuple[int, int]]:
        """Where the value that begins at `start` ends, and where the markup goes on. Raises `Malformed`.

        `meant` is where a value without an end seems to be over: an end tag that another call or the section's end
        follows. It is, if more markup comes before an end that fits.
        """
        found = marks(self.parameter[1], self.parameter[0], self.call[1])
        position, meant = start, -1
        while True:
            mark = yield from source.find(found, position)
            if mark is None:
                end = source.end if source.cut or meant < 0 else meant
                raise Malformed(Reason.UNCLOSED, CUT_OFF if source.cut else "an argument is not closed", end)
            after = yield from source.skip(mark.end)
            if mark.text == self.parameter[1]:
                goes_on = yield from source.at(after, self.parameter[0])
                if goes_on or (yield from source.at(after, self.call[1])):
                    return mark.start, after
            elif meant >= 0:
                raise Malformed(Reason.UNCLOSED, "an argument is not closed", meant)
            elif mark.text == self.parameter[0]:
                if source.read(mark.start - 1, mark.start) == "\n":
                    raise Malformed(Reason.UNCLOSED, "an argument is not closed", mark.start)
            elif (yield from self._is_over(source, after)):
                raise Malformed(Reason.UNCLOSED, "an argument is not closed", mark.start)
            if meant < 0 and (yield from self._begins_next(source, after)):
                meant = after if mark.text == self.parameter[1] else mark.start
            position = mark.end

    def _begins_next(self, source: Source, after: int) -> Reading[bool]:
        """Whether the section ends or another call begins there."""
        over = yield from source.at(after, self.section[1])
        return over or (yield from source.at(after, self.call[0]))

    def _is_over(self, source: Source, after: int) -> Reading[bool]:
        """Whether what follows an end tag of a call shows that it is none inside a value."""
        return (yield from source.at(after, self.section[1]))


def end_of_broken(source: Source, broken: int, close: str, *begins: str) -> Reading[int]:
    """After the next end tag of a call; right at `broken` where one of `begins` stands there."""
    for tag in begins:
        if (yield from source.at(broken, tag)):
            return broken
    found = yield from source.find(marks(close), broken)
    return source.end if found is None else found.end


def write_element(output: Output, element: Element, start: int) -> None:
    """Put a call on the page, or why it is broken."""
    if element.problem is not None:
        output.page.broken(element.problem, element.name, start, element.end)
    else:
        output.page.call(element.name, element.arguments, bare(element.arguments), start, element.end)


class _Head:
    __slots__ = ("end", "text")

    def __init__(self, text: str, end: int) -> None:
        self.text, self.end = text, end


_HEAD_ENDS = Markers(">", "<", "\n")


def _head(source: Source, start: int) -> Reading[_Head]:
    """The rest of an opening tag. Raises `Malformed`."""
    mark = yield from source.find(_HEAD_ENDS, start)
    if mark is None or mark.text != ">":
        at = source.end if mark is None else mark.start
        raise Malformed(Reason.UNCLOSED if mark is None else Reason.MALFORMED_MARKUP, "a tag is not closed", at)
    return _Head(source.read(start, mark.start), mark.end)


_NAME = re.compile(r'\s+name="([^"]+)"\s*')


def name_attribute(head: str) -> str:
    """The name where the rest of an opening tag is `name="…"` and nothing else. Raises `Malformed`."""
    found = _NAME.fullmatch(head)
    if found is None:
        raise Malformed(Reason.NO_NAME, "a name is missing or not quoted")
    return found[1]


def quoted(head: str) -> str:
    """What stands before the closing quote that must end an attribute. Raises `Malformed`."""
    text, quote, rest = head.partition('"')
    if not quote or rest.strip() or not text:
        raise Malformed(Reason.NO_NAME, "a name is missing or not quoted")
    return text


def ending(source: Source, position: int, *tags: str) -> Reading[tuple[int, Malformed | None]]:
    """The end of a call that needs these tags after it, and why it is broken without."""
    ended = yield from closing(source, position, *tags)
    if ended.how == "else":
        return ended.end, Malformed(Reason.UNCLOSED, f"{tags[-1]!r} does not follow the call")
    cut = ended.how == "output" and source.cut
    return ended.end, Malformed(Reason.UNCLOSED, CUT_OFF) if cut else None
