"""Mistral, in the three forms that its tokenizers have had.

    up to v10   [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...], each with an optional "id"
    v11, v12    [TOOL_CALLS]f{...}[TOOL_CALLS]g{...}
    from v13    [TOOL_CALLS]f[ARGS]{...}, with an optional [CALL_ID]id before [ARGS]

Source: mistral-common's instruct tokenizers and the templates of the models. Which form it is shows in the text: a list
begins with a bracket, a name never does. Ids are nine letters and digits, as the templates demand.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from palaestra.inference.parsers.parser import Call, Malformed, Reason
from palaestra.inference.parsers.reader import Grammar, Output
from palaestra.inference.parsers.syntax.arrays import extent, read_array, why_not_json
from palaestra.inference.parsers.syntax.json_text import Scan, decode_object, scan_value
from palaestra.inference.parsers.text_source import Mark, Markers, Reading

_CALLS, _ARGUMENTS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_ARGUMENT_STARTS = frozenset('["')
_NAME = re.compile(r"[^\s\[\]{}\"'(),;]*")


class Mistral(Grammar):
    """Calls end with their JSON; there is no end tag."""

    openers: ClassVar[Markers] = Markers(_CALLS)
    thinking: ClassVar[Sequence[tuple[str, str]]] = (("[THINK]", "[/THINK]"), ("<think>", "</think>"))
    short_ids: ClassVar[bool] = True

    def read(self, output: Output, mark: Mark) -> Reading[int | None]:
        """A list of calls, or one call with its name before the arguments."""
        source = output.source
        begin = yield from source.skip(mark.end)
        nameless = (yield from source.at(begin, _ARGUMENTS)) or (yield from source.at(begin, _ID))
        if not nameless and (yield from source.at(begin, "[")):
            inner = yield from source.skip(begin + 1)
            if not (yield from source.at(inner, "{")) and not (yield from source.ends(inner)):
                return None
            return (yield from read_array(output, mark.start, begin, with_ids=True))
        if (yield from source.ends(begin)):
            output.page.broken(Malformed(Reason.UNCLOSED, "the output ends here"), "", mark.start, begin)
            return begin
        return (yield from self._named(output, mark, begin))

    def _named(self, output: Output, mark: Mark, begin: int) -> Reading[int | None]:
        source = output.source
        end = yield from source.skip(begin, _NAME)
        name = source.read(begin, end)
        position = yield from source.skip(end)
        call_id = ""
        if (yield from source.at(position, _ID)):
            end = yield from source.skip(position + len(_ID), _NAME)
            call_id = source.read(position + len(_ID), end)
            position = yield from source.skip(end)
        marked = yield from source.at(position, _ARGUMENTS)
        if marked:
            position = yield from source.skip(position + len(_ARGUMENTS))
        if (yield from source.at(position, "{")):
            return (yield from self._arguments(output, mark, position, name, call_id))
        again = (yield from source.at(position, _ARGUMENTS)) or (yield from source.at(position, _ID))
        ended = not again and (source.breaks_off(position, _ARGUMENTS, _ID) or (yield from source.ends(position)))
        touching = begin == mark.end and end == position and bool(name)
        meant = source.cut if ended else source.read(position, position + 1) in _ARGUMENT_STARTS
        if not marked and not (touching and meant):
            return None  # prose that mentions the mark
        reason = Reason.UNCLOSED if ended else Reason.MALFORMED_JSON
        found = yield from source.find(self.openers, position)
        end = source.end if found is None else found.start
        output.page.broken(Malformed(reason, "there is no JSON object"), name, mark.start, end)
        return end

    def _arguments(self, output: Output, mark: Mark, begin: int, name: str, call_id: str) -> Reading[int]:
        source = output.source
        scan = yield from scan_value(source, begin)
        end = scan.end
        if not scan.complete:
            problem = why_not_json(source.read(begin, scan.end + 1), scan.end >= source.end)
            end = yield from self._end_of_broken(output, begin, scan)
        elif not name:
            problem = Malformed(Reason.NO_NAME, "the call has no name")
        else:
            text = source.read(begin, end)
            try:
                output.page.call(name, decode_object(text), text, mark.start, end, call_id)
            except Malformed as malformed:
                problem = malformed
            else:
                return end
        output.page.broken(problem, name, mark.start, end, call_id)
        return end

    def _end_of_broken(self, output: Output, begin: int, scan: Scan) -> Reading[int]:
        """Before the mark that made the JSON fail, or else where the brackets are balanced."""
        around = max(begin, scan.end - len(_CALLS))
        found = yield from output.source.find(self.openers, around, stop=scan.end + 1)
        if found is not None and found.end > scan.end:
            return found.start
        return (yield from extent(output.source, begin, scan))

    def render(self, calls: Sequence[Call], text: str) -> str:
        """The newest form."""
        return text + "".join(f"{_CALLS}{call.name}{_ARGUMENTS}{call.arguments_text}" for call in calls)
