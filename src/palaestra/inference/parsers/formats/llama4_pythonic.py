"""Llama 4 (and 3.2) as Python: a list of calls with literal keyword arguments.

    [f(key='value', n=1), g()]
    <|python_start|>[f(key='value')]<|python_end|>

Source: Meta's prompt format for pythonic tool calling. A bare list is taken for calls where it begins with a name and
keyword arguments (or none); other brackets in prose are text. The list may stand anywhere in the text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from palaestra.inference.parsers.parser import Call, Malformed, Reason
from palaestra.inference.parsers.reader import Grammar, Output, mentioned
from palaestra.inference.parsers.syntax.arrays import STRAY, extent, going_on, no_call
from palaestra.inference.parsers.syntax.json_calls import CUT_OFF
from palaestra.inference.parsers.syntax.python_calls import keyword_arguments, scan_parentheses
from palaestra.inference.parsers.syntax.xml_calls import Element, write_element
from palaestra.inference.parsers.text_source import Mark, Markers, Reading, Source

_START, _END = "<|python_start|>", "<|python_end|>"
_LETTER = re.compile(r"[^\W\d]")
_NAME = re.compile(r"[\w.\-]*")
_KEY = re.compile(r"\w*")
_NO_NAME = frozenset("[](){}<>\"'0123456789-+.,:;")


class Llama4Pythonic(Grammar):
    """One list at a time."""

    openers: ClassVar[Markers] = Markers(_START, "[")

    def read(self, output: Output, mark: Mark) -> Reading[int | None]:
        """All calls of one list."""
        source = output.source
        if mark.text == "[":
            if not (yield from self._begins_calls(source, mark.end)):
                return None
            return (yield from self._list(output, mark.start, mark.start))
        begin = yield from source.skip(mark.end)
        if not (yield from source.at(begin, "[")):
            return (yield from mentioned(output, mark, _END))
        end = yield from self._list(output, mark.start, begin)
        after = yield from source.skip(end)
        return after + len(_END) if (yield from source.at(after, _END)) else end

    def _begins_calls(self, source: Source, position: int) -> Reading[bool]:
        if source.read(position, position + 1) in _NO_NAME:
            return False
        begin = yield from source.skip(position)
        end = yield from _name_end(source, begin)
        if end == begin or not (yield from source.at(end, "(")):
            return False
        inner = yield from source.skip(end + 1)
        if (yield from source.at(inner, ")")):
            return True
        key_end = yield from source.skip(inner, _KEY)
        equals = yield from source.skip(key_end)
        if key_end == inner or not (yield from source.at(equals, "=")):
            return False
        return not (yield from source.at(equals, "=="))

    def _list(self, output: Output, start: int, bracket: int) -> Reading[int]:
        source = output.source
        position = bracket + 1
        while True:
            begin = yield from source.skip(position)
            if (yield from source.at(begin, "]")):
                return begin + 1
            element = yield from self._element(source, begin)
            after, sign = yield from going_on(source, element.end)
            if sign and (yield from source.skip(element.end)) < after:
                problem = element.problem or Malformed(Reason.MALFORMED_MARKUP, STRAY)
                element = Element(element.name, element.arguments, after, problem)
            elif not sign and element.problem is None:
                element = _unfollowed(source, element, after)
            write_element(output, element, start if position == bracket + 1 else begin)
            if sign == "]":
                return after + 1
            if not sign and not (yield from self._begins_calls(source, after)):
                return element.end
            position = after + len(sign)
            output.page.skip_to(position)

    def _element(self, source: Source, begin: int) -> Reading[Element]:
        end = yield from _name_end(source, begin)
        name = source.read(begin, end)
        if not (yield from source.at(end, "(")):
            ended = yield from source.ends(end)
            stop, _ = yield from no_call(source, begin, "'\"", scan_parentheses)
            problem = Malformed(Reason.UNCLOSED if ended else Reason.MALFORMED_MARKUP, "an element is not a call")
            return Element(name, {}, stop, problem)
        scan = yield from scan_parentheses(source, end)
        if not scan.complete:
            ended = scan.end >= source.end
            stop = yield from extent(source, end, scan)
            problem = Malformed(Reason.UNCLOSED if ended else Reason.MALFORMED_MARKUP, "a call does not end")
            return Element(name, {}, stop, problem)
        try:
            if not name:
                raise Malformed(Reason.NO_NAME, "the call has no name")
            return Element(name, keyword_arguments(source.read(end, scan.end)), scan.end)
        except Malformed as problem:
            return Element(name, {}, scan.end, problem)

    def render(self, calls: Sequence[Call], text: str) -> str:
        """One list, without the marks."""
        written = [
            f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})" for call in calls
        ]
        return f"{text}[{', '.join(written)}]" if calls else text


def _name_end(source: Source, begin: int) -> Reading[int]:
    """Where the name that begins there ends; right there where none does."""
    ended = yield from source.ends(begin)
    if ended or _LETTER.match(source.read(begin, begin + 1)) is None:
        return begin
    return (yield from source.skip(begin + 1, _NAME))


def _unfollowed(source: Source, element: Element, after: int) -> Element:
    """A call after which the list does not go on: well, if it is the last of an output that was not cut."""
    if after < source.end:
        problem = Malformed(Reason.MALFORMED_MARKUP, "the list does not go on after a call")
    elif source.cut:
        problem = Malformed(Reason.UNCLOSED, CUT_OFF)
    else:
        return element
    return Element(element.name, element.arguments, element.end, problem)
