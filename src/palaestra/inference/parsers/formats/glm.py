"""GLM 4.5 to 4.7: a name and pairs of key and value between tags.

    4.5     <tool_call>f
            <arg_key>key</arg_key>
            <arg_value>value</arg_value>
            </tool_call>
    4.7     <tool_call>f<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>

Source: the chat templates of zai-org/GLM-4.5 and GLM-4.7. Line ends between tags do not matter, so both forms are read
alike; they differ in how they are written. Values are typed by the tool's schema, and white space belongs to them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from palaestra.core.types import JSON
from palaestra.inference.parsers.parser import Call, Malformed, Reason, bare
from palaestra.inference.parsers.reader import Grammar, Output
from palaestra.inference.parsers.syntax.json_calls import CUT_OFF
from palaestra.inference.parsers.syntax.xml_calls import Element, end_of_broken, write_element
from palaestra.inference.parsers.text_source import Mark, Markers, Reading, Source, marks

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_NAME = re.compile(r"[^\s<>{}\[\]()\"',;]+")


class Glm47(Grammar):
    """Nothing between the tags."""

    openers: ClassVar[Markers] = Markers(_OPEN)
    newline: ClassVar[str] = ""

    def read(self, output: Output, mark: Mark) -> Reading[int | None]:
        """One call; a tag that neither a pair nor the end tag follows is only mentioned."""
        source = output.source
        found = yield from source.find(marks(_KEY, _CLOSE, _OPEN), mark.end)
        if found is None or found.text == _OPEN:
            return (yield from self._unfinished(output, mark, source.end if found is None else found.start))
        name = source.read(mark.end, found.start).strip()
        try:
            if _NAME.fullmatch(name) is None:
                raise Malformed(Reason.NO_NAME, "the call does not begin with a name", found.start)
            arguments, end = yield from self._pairs(output, name, found.start)
            element = Element(name, arguments, end)
        except Malformed as problem:
            name = name if _NAME.fullmatch(name) else ""
            element = Element(name, {}, (yield from end_of_broken(source, problem.at, _CLOSE, _OPEN)), problem)
        write_element(output, element, mark.start)
        return element.end

    def _unfinished(self, output: Output, mark: Mark, end: int) -> Reading[int | None]:
        """At the end of an output a lone name is a call that was begun."""
        yield from ()
        name = output.source.read(mark.end, end).strip()
        if end < output.source.end or (name and not (output.source.cut and _NAME.fullmatch(name))):
            return None
        output.page.broken(Malformed(Reason.UNCLOSED, "the output ends where a call begins"), name, mark.start, end)
        return end

    def _pairs(self, output: Output, name: str, start: int) -> Reading[tuple[dict[str, JSON], int]]:
        source = output.source
        arguments: dict[str, JSON] = {}
        position = start
        while not (yield from source.at(position, _CLOSE)):
            if not (yield from source.at(position, _KEY)):
                if not source.cut and source.breaks_off(position, _CLOSE):
                    return arguments, source.end
                ended = source.breaks_off(position, _KEY, _CLOSE)
                reason, why = (Reason.UNCLOSED, CUT_OFF) if ended else (Reason.MALFORMED_MARKUP, "a pair is missing")
                raise Malformed(reason, why, position)
            key_end = yield from source.find(marks(_KEY_END, _CLOSE, _KEY, _VALUE), position + len(_KEY))
            if key_end is None or key_end.text != _KEY_END:
                at = source.end if key_end is None else key_end.start
                raise Malformed(Reason.UNCLOSED, "a key is not closed", at)
            key = source.read(position + len(_KEY), key_end.start).strip()
            begin = yield from source.skip(key_end.end)
            if not (yield from source.at(begin, _VALUE)):
                ended = source.breaks_off(begin, _VALUE)
                raise Malformed(Reason.UNCLOSED if ended else Reason.MALFORMED_MARKUP, "a key has no value", begin)
            begin += len(_VALUE)
            end, position = yield from self._value_end(source, begin)
            if key in arguments:
                raise Malformed(Reason.DUPLICATE_KEY, f"the argument {key!r} is there twice", position)
            arguments[key] = output.types.value(name, key, source.read(begin, end))
        return arguments, position + len(_CLOSE)

    def _value_end(self, source: Source, start: int) -> Reading[tuple[int, int]]:
        """Where a value ends, and where the pairs go on: an end tag that nothing fitting follows is in the value.

        `meant` is where a value without an end seems to be over, since another call follows or nothing does.
        """
        found = marks(_VALUE_END, _CLOSE, f"{_KEY_END}{_VALUE}", f"{_KEY_END}\n{_VALUE}")
        position, meant = start, -1
        while True:
            mark = yield from source.find(found, position)
            if mark is None:
                end = source.end if source.cut or meant < 0 else meant
                raise Malformed(Reason.UNCLOSED, CUT_OFF if source.cut else "a value is not closed", end)
            if mark.text not in (_VALUE_END, _CLOSE) or (meant >= 0 and mark.text == _CLOSE):
                raise Malformed(Reason.UNCLOSED, "a value is not closed", start if meant < 0 else meant)
            after = yield from source.skip(mark.end)
            if mark.text == _VALUE_END:
                for tag in (_KEY, _CLOSE):
                    if (yield from source.at(after, tag)):
                        return mark.start, after
                if source.breaks_off(after, _KEY, _CLOSE):
                    return mark.start, after
            if meant < 0 and ((yield from source.at(after, _OPEN)) or (yield from source.ends(after))):
                meant = after if mark.text == _VALUE_END else mark.start
            position = mark.end

    def render(self, calls: Sequence[Call], text: str) -> str:
        """One call after the other."""
        line = self.newline
        blocks = []
        for call in calls:
            pairs = "".join(
                f"{_KEY}{key}{_KEY_END}{line}{_VALUE}{bare(value)}{_VALUE_END}{line}"
                for key, value in call.arguments.items()
            )
            blocks.append(f"{_OPEN}{call.name}{line}{pairs}{_CLOSE}")
        return line.join([text, *blocks] if text else blocks)


class Glm45(Glm47):
    """Every tag on a line of its own."""

    newline = "\n"
