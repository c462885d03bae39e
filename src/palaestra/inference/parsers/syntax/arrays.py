"""A JSON list of calls after one mark: Granite 3 and Mistral's older models.

For those grammars. Invariant: elements are read one by one, so a broken one costs none of those before it, nor those
after it where its end can be seen. In an output that was cut the last one counts only if a comma or bracket follows.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from palaestra.inference.parsers.parser import Malformed, Reason
from palaestra.inference.parsers.reader import Output
from palaestra.inference.parsers.syntax.json_calls import CUT_OFF, Body, write_call
from palaestra.inference.parsers.syntax.json_text import Scan, decode_object, scan_brackets, scan_value
from palaestra.inference.parsers.syntax.python_calls import string_end
from palaestra.inference.parsers.text_source import Reading, Source

_PLAIN = {quotes: re.compile(rf"[^,\[\](){{}}{quotes}]*") for quotes in ('"', "'\"")}
_STRAY = re.compile(r"[)} \t\r\n]*")
STRAY = "a bracket closes nothing"


def read_array(output: Output, start: int, bracket: int, with_ids: bool = False) -> Reading[int]:
    """Read the list whose `[` is at `bracket`; the first call's span begins at `start`. Returns where the list ends.

    `with_ids`: the calls' own ids count, in a format that has them.
    """
    source = output.source
    position = bracket + 1
    while True:
        begin = yield from source.skip(position)
        if (yield from source.at(begin, "]")) and position == bracket + 1:
            return begin + 1
        first = min(start, begin) if position == bracket + 1 else begin
        body = yield from _element(source, begin)
        after, sign = yield from going_on(source, body.end)
        body = yield from _settled(output, body, sign, after)
        write_call(output, first, body, with_id=with_ids)
        if sign == "]":
            return after + 1
        if not sign and not (yield from source.at(after, "{")):
            return body.end
        position = after + len(sign)
        output.page.skip_to(position)


def _element(source: Source, begin: int) -> Reading[Body]:
    if not (yield from source.at(begin, "{")):
        end, problem = yield from no_call(source, begin, '"', scan_value)
        return Body(source.read(begin, end), end, problem)
    scan = yield from scan_value(source, begin)
    if scan.complete:
        return Body(source.read(begin, scan.end), scan.end)
    end = yield from extent(source, begin, scan)
    return Body(source.read(begin, end), end, why_not_json(source.read(begin, scan.end + 1), scan.end >= source.end))


def no_call(
    source: Source, begin: int, quotes: str, nested: Callable[[Source, int], Reading[Scan]]
) -> Reading[tuple[int, Malformed]]:
    """Where an element that is no call ends, and what to say of it. Commas in strings and brackets end nothing."""
    position, problem = begin, Malformed(Reason.MALFORMED_JSON, "an element of the list is no call")
    while True:
        position = yield from source.skip(position, _PLAIN[quotes])
        character = source.read(position, position + 1)
        if character and character in quotes:
            position = yield from string_end(source, position, character)
            if position < 0:  # a string that breaks off: what belongs to the list is told by brackets alone
                end = yield from scan_brackets(source, begin)
                return end - (source.read(end - 1, end) == "]"), problem
        elif character and character in "[{(":
            scan = yield from nested(source, position)
            if not scan.complete:
                return (yield from extent(source, position, scan)), problem
            position = scan.end
        elif not character and position == begin:
            return position, Malformed(Reason.UNCLOSED, "the output ends in the list")
        else:
            return position, problem


def going_on(source: Source, end: int) -> Reading[tuple[int, str]]:
    """Where a list goes on after the element that ends at `end`, and whether with `,` or `]` or neither.

    Closing brackets that close nothing do not end a list: they belong to the element, which they break.
    """
    after = yield from source.skip(end, _STRAY)
    for sign in (",", "]"):
        if (yield from source.at(after, sign)):
            return after, sign
    return (yield from source.skip(end)), ""


def _settled(output: Output, body: Body, sign: str, after: int) -> Reading[Body]:
    """The element, broken if what follows it says so."""
    if sign and (yield from output.source.skip(body.end)) < after:
        return Body(body.text, after, body.problem or Malformed(Reason.MALFORMED_JSON, STRAY))
    if body.problem is not None or sign:
        return body
    if after < output.source.end:
        return Body(body.text, body.end, Malformed(Reason.MALFORMED_JSON, "the list does not go on after an element"))
    return Body(body.text, body.end, Malformed(Reason.UNCLOSED, CUT_OFF)) if output.source.cut else body


def extent(source: Source, begin: int, scan: Scan) -> Reading[int]:
    """Where what `scan` found not to be JSON ends: by its brackets, or with the output if it goes on so long."""
    return source.end if scan.end >= source.end else (yield from scan_brackets(source, begin))


def why_not_json(text: str, ended: bool) -> Malformed:
    """What is wrong with the beginning of an object that does not end as one."""
    if ended:
        return Malformed(Reason.UNCLOSED, "the JSON does not end")
    try:
        decode_object(text)
    except Malformed as problem:
        return problem
    return Malformed(Reason.MALFORMED_JSON, "not JSON")
