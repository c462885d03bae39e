"""Calls whose arguments are JSON: between tags, or as elements of a list. This module covers Hermes, Qwen, Granite 4
and LongCat.

    <tool_call>
    {"name": "f", "arguments": {...}}
    </tool_call>

Source: the chat templates of Hermes 2 Pro and 3, Qwen2.5, Qwen3, Granite 4 and LongCat-Flash. Line ends and spaces
around the object do not matter. The last end tag may be missing unless the output was cut, because stop strings remove
it.

Invariants: the end of a broken call is chosen so that a valid sibling after it survives and a call quoted inside it is
ignored; in an output that was cut, the last call of a list counts only if a comma or bracket follows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from palaestra_slots.core.types import JSON
from palaestra_tokens.parsers.output_reader import Grammar, OutputReader
from palaestra_tokens.parsers.parser import BrokenReason, Malformed, ParsedCall, named_object
from palaestra_tokens.parsers.scan import (
    Closing,
    Mark,
    Member,
    Scan,
    closing,
    decode_members,
    decode_object,
    find,
    scan_brackets,
    scan_value,
    skip,
)

CUT_OFF = "the output was cut off before the end of the call"
STRAY = "a closing bracket has no opening bracket"

_PLAIN = {quotes: re.compile(rf"[^,\[\](){{}}{quotes}]*") for quotes in ('"', "'\"")}
_STRAY = re.compile(r"[)} \t\r\n]*")


@dataclass(frozen=True, slots=True)
class Tags:
    """The tag that begins a call, and the tags that end it, which may have white space between them. `last` is the tag
    that ends the call."""

    open: str
    close: tuple[str, ...]

    @property
    def last(self) -> str:
        return self.close[-1]


class JsonBody(NamedTuple):
    """The JSON of one call, where the call ends, and why it is broken, if it is."""

    text: str
    end: int
    problem: Malformed | None = None


def tagged_body(output: OutputReader, start: int, tags: Tags) -> JsonBody:
    """Return the body of the call whose object begins at `start`. The call ends after its end tags."""
    text = output.text
    begin = skip(text, start)
    if not text.startswith("{", begin):
        end = _next_end(text, begin, tags)
        reason = BrokenReason.UNCLOSED if begin == output.end else BrokenReason.MALFORMED_JSON
        return JsonBody(text[begin:end], end, Malformed(reason, "there is no JSON object"))
    scan = scan_value(text, begin)
    if not scan.complete:
        end = _end_of_broken(text, begin, scan.end, tags)
        return JsonBody(text[begin:end], end, why_not_json(output, begin, scan.end))
    ending = closing(text, scan.end, *tags.close)
    if ending.how == "else":
        problem = Malformed(BrokenReason.UNCLOSED, "the end tag does not follow the JSON")
        return JsonBody(text[begin : scan.end], _next_end(text, scan.end, tags), problem)
    return JsonBody(text[begin : scan.end], ending.end, cut_off(output, ending))


def untagged_body(output: OutputReader, begin: int, scan: Scan) -> JsonBody:
    """Return the scanned object that begins at `begin`. A broken object ends where its brackets are balanced."""
    end = extent(output, begin, scan)
    return JsonBody(output.text[begin:end], end, None if scan.complete else why_not_json(output, begin, scan.end))


def cut_off(output: OutputReader, ending: Closing) -> Malformed | None:
    """Return the problem of a call with this end, if any: the end tag may be missing after a stop token, but not after
    a cut."""
    return Malformed(BrokenReason.UNCLOSED, CUT_OFF) if ending.how == "output" and output.cut else None


def _next_end(text: str, start: int, tags: Tags) -> int:
    """Return the position after the next end tag. If another call begins earlier, return its start; if neither follows,
    the end of the output."""
    found = find(text, start, tags.open, tags.last)
    if found is None:
        return len(text)
    return found.end if found.text == tags.last else found.start


def _end_of_broken(text: str, start: int, failed: int, tags: Tags) -> int:
    """Return the end of a call whose JSON begins at `start` and stops being JSON at `failed`.

    The call ends after the first end tag that follows `failed`, because earlier end tags are inside strings. But if a
    string was never closed, the true end tag may be inside it: if another call begins before `failed`, the first end
    tag after `start` counts.
    """
    if failed >= len(text):
        return len(text)
    first = find(text, start, tags.last, before=failed)
    if first is not None and find(text, first.end, tags.open, before=failed) is not None:
        return first.end
    found = find(text, failed, tags.last) or first
    return len(text) if found is None else found.end


def extent(output: OutputReader, begin: int, scan: Scan) -> int:
    """Return the end of a scanned value. If it is not JSON, it ends where its brackets are balanced, or with the
    output."""
    return scan.end if scan.complete or scan.end >= output.end else scan_brackets(output.text, begin)


def why_not_json(output: OutputReader, begin: int, failed: int) -> Malformed:
    """Return the problem of an object that begins at `begin` and stops being JSON at `failed`."""
    if failed >= output.end:
        return Malformed(BrokenReason.UNCLOSED, CUT_OFF if output.cut else "the JSON does not end")
    try:
        # With the character at which the scan stopped, so that the decoder meets it and names the problem.
        decode_object(output.text[begin : failed + 1])
    except Malformed as problem:
        return problem
    return Malformed(BrokenReason.MALFORMED_JSON, f"not JSON at character {failed - begin}")


class NamedCall(NamedTuple):
    """The call that a JSON object describes; `id` is empty if the object has none."""

    name: str
    arguments: dict[str, JSON]
    text: str
    id: str


def named_call(members: Mapping[str, Member], keys: Sequence[str] = ("arguments",)) -> NamedCall:
    """Read the name, the arguments and their text from an object with `name` and one of `keys`. Raises `Malformed`."""
    name = members.get("name")
    if name is None or not isinstance(name.value, str) or not name.value:
        raise Malformed(BrokenReason.NO_NAME, "the call has no name")
    found = [members[key] for key in keys if key in members]
    # With two of the keys, it would be a guess which of them the model means.
    if len(found) != 1:
        raise Malformed(BrokenReason.NO_ARGUMENTS, f"the call must have exactly one of {', '.join(keys)}")
    if not isinstance(found[0].value, dict):
        raise Malformed(BrokenReason.NOT_AN_OBJECT, "the arguments are not a JSON object")
    given = members["id"].value if "id" in members else ""
    return NamedCall(name.value, found[0].value, found[0].text, given if isinstance(given, str) else "")


def _name_in(text: str) -> str:
    """Return the name in a broken object, or the empty string. The name only shows the model which call is meant."""
    try:
        name = decode_members(text).get("name")
    except Malformed:
        head, _, rest = text[:400].partition('"name"')
        found = rest.lstrip(" \t\r\n:").removeprefix('"').partition('"')
        return found[0] if not head.strip(" \t\r\n{[") and found[1] else ""
    return name.value if name is not None and isinstance(name.value, str) else ""


def add_named(
    output: OutputReader, start: int, body: JsonBody, keys: Sequence[str] = ("arguments",), with_id: bool = False
) -> int:
    """Add the call that the object itself names, broken or not; return its end. If `with_id` is true, the object's `id`
    is used."""
    problem = body.problem
    if problem is None:
        try:
            call = named_call(decode_members(body.text), keys)
        except Malformed as malformed:
            problem = malformed
        else:
            output.call(call.name, call.arguments, call.text, start, body.end, call.id if with_id else "")
            return body.end
    output.broken(problem, _name_in(body.text), start, body.end)
    return body.end


def add_json(output: OutputReader, start: int, name: str, body: JsonBody, call_id: str = "") -> int:
    """Add the call `name`, whose arguments are the object in `body`, broken or not; return its end."""
    problem = body.problem
    if problem is None:
        try:
            if not name:
                raise Malformed(BrokenReason.NO_NAME, "the call has no name")
            output.call(name, decode_object(body.text), body.text, start, body.end, call_id)
        except Malformed as malformed:
            problem = malformed
        else:
            return body.end
    output.broken(problem, name, start, body.end, call_id)
    return body.end


# Lists: [ call, call, … ]. Elements are read one by one, so a broken one does not affect the others.


def read_array(output: OutputReader, start: int, bracket: int, with_ids: bool = False) -> int:
    """Read the list whose `[` is at `bracket`; the first call's span begins at `start`. Returns the end of the list, or
    of the element after which the list breaks off. If `with_ids` is true, the calls' own ids are used."""
    text, position = output.text, bracket + 1
    while True:
        begin = skip(text, position)
        first = position == bracket + 1
        if first and text.startswith("]", begin):
            return begin + 1
        body = _element(output, begin)
        after, sign = after_element(text, body.end)
        body = _settled(output, body, sign, after)
        end = add_named(output, min(start, begin) if first else begin, body, with_id=with_ids)
        if sign == "]":
            return after + 1
        if not sign and not text.startswith("{", after):
            return end
        position = after + len(sign)
        output.skip_to(position)


def _element(output: OutputReader, begin: int) -> JsonBody:
    if output.text.startswith("{", begin):
        return untagged_body(output, begin, scan_value(output.text, begin))
    end, problem = other_element(output, begin, '"', scan_value)
    return JsonBody(output.text[begin:end], end, problem)


def other_element(
    output: OutputReader, begin: int, quotes: str, nested: Callable[[str, int], Scan]
) -> tuple[int, Malformed]:
    """Return where an element that is not a call ends, and its problem. Commas in strings and brackets do not end
    it."""
    text, position = output.text, begin
    problem = Malformed(BrokenReason.MALFORMED_JSON, "an element of the list is not a call")
    while True:
        position = skip(text, position, _PLAIN[quotes])
        character = text[position : position + 1]
        if character and character in quotes:
            position = string_end(text, position, character)
            if position < 0:  # an unclosed string: only brackets show how far the list extends
                end = scan_brackets(text, begin)
                return end - (text[end - 1 : end] == "]"), problem
        elif character and character in "[{(":
            scan = nested(text, position)
            if not scan.complete:
                return extent(output, position, scan), problem
            position = scan.end
        elif not character and position == begin:
            return position, Malformed(BrokenReason.UNCLOSED, "the output ends in the list")
        else:
            return position, problem


def after_element(text: str, end: int) -> tuple[int, str]:
    """Return where a list continues after the element that ends at `end`, and the `,` or `]` there, if any. Unmatched
    closing brackets belong to the element and break it."""
    after = skip(text, end, _STRAY)
    if text[after : after + 1] in (",", "]"):
        return after, text[after]
    return skip(text, end), ""


def _settled(output: OutputReader, body: JsonBody, sign: str, after: int) -> JsonBody:
    """Return the element, marked as broken if the text after it is invalid."""
    if sign and skip(output.text, body.end) < after:
        return JsonBody(body.text, after, body.problem or Malformed(BrokenReason.MALFORMED_JSON, STRAY))
    if body.problem is not None or sign:
        return body
    if after < output.end:
        problem = Malformed(BrokenReason.MALFORMED_JSON, "the list does not continue after an element")
        return body._replace(problem=problem)
    return body._replace(problem=Malformed(BrokenReason.UNCLOSED, CUT_OFF)) if output.cut else body


# A string in single or double quotes ends at the latest with its line, in JSON as in Python.
_INSIDE = {quote: re.compile(rf"[^\\\n{quote}]*") for quote in "'\""}
_INSIDE_LONG = {quote: re.compile(rf"[^\\{quote}]*") for quote in "'\""}


def string_end(text: str, start: int, quote: str) -> int:
    """Return the end of the string that begins at `start` with one or three of `quote`. For a string that is never
    closed, return the negated position where it stops."""
    long = text.startswith(quote * 3, start)
    run = (_INSIDE_LONG if long else _INSIDE)[quote]
    ends = quote * 3 if long else quote
    position = start + len(ends)
    while True:
        position = skip(text, position, run)
        if text.startswith("\\", position):
            if position + 1 >= len(text):
                return -len(text)
            position += 2
        elif text.startswith(ends, position):
            return position + len(ends)
        elif text.startswith(quote, position):
            position += 1
        else:
            return -position


class Hermes(Grammar):
    """Reads calls between `<tool_call>` and `</tool_call>`."""

    tags: ClassVar[Tags] = Tags("<tool_call>", ("</tool_call>",))
    openers = ("<tool_call>",)

    def read(self, output: OutputReader, mark: Mark) -> int | None:
        begin = skip(output.text, mark.end)
        if not output.text.startswith("{", begin):
            return output.mentioned(mark, self.tags.last)
        return add_named(output, mark.start, tagged_body(output, begin, self.tags))

    def render(self, calls: Sequence[ParsedCall], text: str) -> str:
        blocks = [f"{self.tags.open}\n{named_object(call)}\n{self.tags.last}" for call in calls]
        return "\n".join([text, *blocks] if text else blocks)


class LongCat(Hermes):
    """Reads calls between `<longcat_tool_call>` and `</longcat_tool_call>`, and thinking also in LongCat's own tags."""

    tags = Tags("<longcat_tool_call>", ("</longcat_tool_call>",))
    openers = ("<longcat_tool_call>",)
    thinking = (("<think>", "</think>"), ("<longcat_think>", "</longcat_think>"))
