"""Llama 3.1 to 4 in JSON: bare objects, or objects after a mark, several joined by `;`.

    {"name": "f", "parameters": {...}}
    <|python_tag|>{"name": "f", "parameters": {...}}; {"name": "g", "parameters": {...}}

Source: Meta's prompt format for JSON tool calling (which says `parameters`; models write `arguments` too). A bare
object in prose is a call only if it has a string `name` and an object under one of the two keys; other JSON is text.
Code after the mark is text, too: the built-in interpreter is no tool of ours.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from palaestra.inference.parsers.parser import Call, Malformed, Reason, named_object
from palaestra.inference.parsers.reader import Grammar, Output
from palaestra.inference.parsers.syntax.arrays import extent, why_not_json
from palaestra.inference.parsers.syntax.json_calls import Body, named_call, write_call
from palaestra.inference.parsers.syntax.json_text import scan_value
from palaestra.inference.parsers.text_source import Mark, Markers, Reading

_TAG = "<|python_tag|>"
_KEYS = ("parameters", "arguments")
_NAMED = re.compile(r'\{\s*"name"\s*:')
_LOOK = 64


class LlamaJson(Grammar):
    """Calls end with their JSON; there is no end tag."""

    openers: ClassVar[Markers] = Markers(_TAG, "{")

    def read(self, output: Output, mark: Mark) -> Reading[int | None]:
        """One call or several, or a bare object that is none."""
        source = output.source
        begin = mark.start
        if mark.text == _TAG:
            begin = yield from source.skip(mark.end)
            if (yield from source.ends(begin)):
                output.page.broken(Malformed(Reason.UNCLOSED, "the output ends here"), "", mark.start, begin)
                return begin
            if not (yield from source.at(begin, "{")):
                return None
        end, called = yield from self._object(output, mark.start, begin, marked=mark.text == _TAG)
        while called:
            after = yield from source.skip(end)
            if not (yield from source.at(after, ";")):
                return end
            begin = yield from source.skip(after + 1)
            if (yield from source.at(begin, _TAG)):
                output.page.skip_to(begin)
                return begin
            if not (yield from source.at(begin, "{")):
                return end
            output.page.skip_to(begin)
            end, called = yield from self._object(output, begin, begin, marked=True)
        return end

    def _object(self, output: Output, start: int, begin: int, marked: bool) -> Reading[tuple[int, bool]]:
        """Where the object ends, and whether it is a call: text is written as text."""
        source = output.source
        inner = yield from source.skip(begin + 1)
        if not marked and not (yield from source.at(inner, '"')):
            output.page.text_to(begin + 1)
            return begin + 1, False
        scan = yield from scan_value(source, begin)
        text = source.read(begin, scan.end)
        if not scan.complete:
            if not marked and _NAMED.match(text[:_LOOK]) is None:
                output.page.text_to(scan.end)
                return scan.end, False
            end = yield from extent(source, begin, scan)
            why = why_not_json(source.read(begin, scan.end + 1), scan.end >= source.end)
            body = Body(source.read(begin, end), end, why)
        else:
            body = Body(text, scan.end)
            if not marked and not _is_call(text):
                output.page.text_to(scan.end)
                return scan.end, False
        write_call(output, start, body, _KEYS)
        return body.end, True

    def render(self, calls: Sequence[Call], text: str) -> str:
        """After the mark, joined by `; `."""
        objects = "; ".join(named_object(call, "parameters") for call in calls)
        return f"{text}{_TAG}{objects}" if calls else text


def _is_call(text: str) -> bool:
    """Whether a bare object asks for a call: what else it may be is text, not a mistake."""
    try:
        named_call(text, _KEYS)
    except Malformed as problem:
        return problem.reason not in (Reason.NO_NAME, Reason.NO_ARGUMENTS) and _NAMED.match(text[:_LOOK]) is not None
    return True
