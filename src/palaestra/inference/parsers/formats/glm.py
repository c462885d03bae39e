"""GLM 4.5 to 4.7: a name and pairs of key and value between tags.

    4.5     <tool_call>f
            <arg_key>key</arg_key>
            <arg_value>value</arg_value>
            </tool_call>
    4.7     <tool_call>f<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>

Source: the chat templates of zai-org/GLM-4.5 and GLM-4.7. Both forms are read alike, because line ends between tags do
not matter; they differ in how they are written. Values are typed by the tool's schema and keep their white space.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from palaestra.core.types import JSON
from palaestra.inference.parsers.formats.json_calls import CUT_OFF
from palaestra.inference.parsers.formats.markup import end_of_broken
from palaestra.inference.parsers.parser import BrokenReason, Malformed, ParsedCall, bare
from palaestra.inference.parsers.reader import FoundCall, Grammar, OutputReader
from palaestra.inference.parsers.scan import Mark, breaks_off, find, skip

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_NAME = re.compile(r"[^\s<>{}\[\]()\"',;]+")


class Glm47(Grammar):
    """Nothing between the tags."""

    openers = (_OPEN,)
    newline: ClassVar[str] = ""

    def read(self, output: OutputReader, mark: Mark) -> int | None:
        """One call; a tag that neither a pair nor the end tag follows is only mentioned."""
        found = find(output.text, mark.end, _KEY, _CLOSE, _OPEN)
        if found is None or found.text == _OPEN:
            return self._unfinished(output, mark, output.end if found is None else found.start)
        name = output.text[mark.end : found.start].strip()
        try:
            if _NAME.fullmatch(name) is None:
                raise Malformed(BrokenReason.NO_NAME, "the call does not begin with a name", found.start)
            call = FoundCall(name, *self._pairs(output, name, found.start))
        except Malformed as problem:
            name = name if _NAME.fullmatch(name) else ""
            call = FoundCall(name, {}, end_of_broken(output.text, problem.at, _CLOSE, _OPEN), problem)
        return output.add(call, mark.start)

    def _unfinished(self, output: OutputReader, mark: Mark, end: int) -> int | None:
        """A lone name at the end of an output is the beginning of a call."""
        name = output.text[mark.end : end].strip()
        if end < output.end or (name and not (output.cut and _NAME.fullmatch(name))):
            return None
        problem = Malformed(BrokenReason.UNCLOSED, "the output ends where a call begins")
        output.broken(problem, name, mark.start, end)
        return end

    def _pairs(self, output: OutputReader, name: str, start: int) -> tuple[dict[str, JSON], int]:
        """The arguments and the end of the call. Raises `Malformed`."""
        text, position = output.text, start
        arguments: dict[str, JSON] = {}
        while not text.startswith(_CLOSE, position):
            if not text.startswith(_KEY, position):
                if not output.cut and breaks_off(text, position, _CLOSE):
                    return arguments, output.end
                if breaks_off(text, position, _KEY, _CLOSE):
                    raise Malformed(BrokenReason.UNCLOSED, CUT_OFF, position)
                raise Malformed(BrokenReason.MALFORMED_MARKUP, "a pair is missing", position)
            key_start = position + len(_KEY)
            key_end = find(text, key_start, _KEY_END, _CLOSE, _KEY, _VALUE)
            if key_end is None or key_end.text != _KEY_END:
                at = output.end if key_end is None else key_end.start
                raise Malformed(BrokenReason.UNCLOSED, "a key is not closed", at)
            key, begin = text[key_start : key_end.start].strip(), skip(text, key_end.end)
            if not text.startswith(_VALUE, begin):
                ended = breaks_off(text, begin, _VALUE)
                reason = BrokenReason.UNCLOSED if ended else BrokenReason.MALFORMED_MARKUP
                raise Malformed(reason, "a key has no value", begin)
            begin += len(_VALUE)
            end, position = self._value_end(output, begin)
            if key in arguments:
                raise Malformed(BrokenReason.DUPLICATE_KEY, f"the argument {key!r} is there twice", position)
            arguments[key] = output.types.value(name, key, text[begin:end])
        return arguments, position + len(_CLOSE)

    def _value_end(self, output: OutputReader, start: int) -> tuple[int, int]:
        """Where a value ends, and where the pairs continue: an end tag that nothing fitting follows is in the value.

        `meant` is where a value without an end seems to end, because another call or nothing follows. Raises
        `Malformed`.
        """
        text, position, meant = output.text, start, -1
        tags = (_VALUE_END, _CLOSE, f"{_KEY_END}{_VALUE}", f"{_KEY_END}\n{_VALUE}")
        while (mark := find(text, position, *tags)) is not None:
            if mark.text not in (_VALUE_END, _CLOSE) or (meant >= 0 and mark.text == _CLOSE):
                raise Malformed(BrokenReason.UNCLOSED, "a value is not closed", start if meant < 0 else meant)
            after = skip(text, mark.end)
            ends = text.startswith((_KEY, _CLOSE), after) or breaks_off(text, after, _KEY, _CLOSE)
            if ends and mark.text == _VALUE_END:
                return mark.start, after
            if meant < 0 and (text.startswith(_OPEN, after) or after >= output.end):
                meant = after if mark.text == _VALUE_END else mark.start
            position = mark.end
        detail = CUT_OFF if output.cut else "a value is not closed"
        raise Malformed(BrokenReason.UNCLOSED, detail, output.end if output.cut or meant < 0 else meant)

    def render(self, calls: Sequence[ParsedCall], text: str) -> str:
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
