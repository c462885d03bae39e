"""Calls whose arguments are JSON: reading the body up to its end tags, and finding the end of one that is broken.

For the formats that write JSON between tags. Not for naming the call. Invariant: the end of a broken call is looked for
so that a valid sibling after it survives, and so that no call quoted inside it is taken for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from palaestra.core.types import JSON
from palaestra.inference.parsers.parser import Malformed, Reason
from palaestra.inference.parsers.reader import Output
from palaestra.inference.parsers.syntax.json_text import decode_members, decode_object, scan_value
from palaestra.inference.parsers.text_source import Closing, Reading, Source, closing, marks

CUT_OFF = "the output was cut off before the end of the call"


@dataclass(frozen=True, slots=True)
class Tags:
    """What begins a call and what ends it; `close` may be several tags, with white space between them."""

    open: str
    close: tuple[str, ...]

    @property
    def last(self) -> str:
        """The tag after which a call is over."""
        return self.close[-1]


@dataclass(frozen=True, slots=True)
class Body:
    """The JSON of one call, where the call ends, and what is wrong with it."""

    text: str
    end: int
    problem: Malformed | None = None


def json_body(source: Source, start: int, tags: Tags) -> Reading[Body]:
    """The object that begins at `start`, and the end tags after it."""
    begin = yield from source.skip(start)
    if not (yield from source.at(begin, "{")):
        end = yield from _first_end(source, begin, tags)
        reason = Reason.UNCLOSED if begin == source.end else Reason.MALFORMED_JSON
        return Body(source.read(begin, end), end, Malformed(reason, "there is no JSON object"))
    scan = yield from scan_value(source, begin)
    if not scan.complete:
        end = yield from _end_of_broken(source, begin, scan.end, tags)
        return Body(source.read(begin, end), end, _why(source, begin, scan.end))
    text = source.read(begin, scan.end)
    ending = yield from closing(source, scan.end, *tags.close)
    if ending.how == "else":
        end = yield from _first_end(source, scan.end, tags)
        return Body(text, end, Malformed(Reason.UNCLOSED, "the end tag does not follow the JSON"))
    return Body(text, ending.end, cut_off(source, ending))


def cut_off(source: Source, ending: Closing) -> Malformed | None:
    """Why a call that ends so must not run, if it must not: a stop token may take the end tag away, a cut may not."""
    return Malformed(Reason.UNCLOSED, CUT_OFF) if ending.how == "output" and source.cut else None


def _first_end(source: Source, start: int, tags: Tags) -> Reading[int]:
    """After the next end tag, or before the next call where that comes first, or at the end of the output."""
    found = yield from source.find(marks(tags.open, tags.last), start)
    if found is None:
        return source.end
    return found.end if found.text == tags.last else found.start


def _end_of_broken(source: Source, start: int, failed: int, tags: Tags) -> Reading[int]:
    """The end of a call whose JSON begins at `start` and stops being JSON at `failed`.

    That is after the first end tag from there on, since earlier ones stand inside strings. But a string that was never
    closed may have swallowed the true end: then the next call begins before the failure, and the first end tag counts.
    """
    if failed >= source.end:
        return source.end
    first = yield from source.find(marks(tags.last), start, stop=failed)
    if first is not None and (yield from source.find(marks(tags.open), first.end, stop=failed)) is not None:
        return first.end
    found = yield from source.find(marks(tags.last), failed)
    if found is not None:
        return found.end
    return source.end if first is None else first.end


def _why(source: Source, begin: int, failed: int) -> Malformed:
    if failed >= source.end:
        return Malformed(Reason.UNCLOSED, CUT_OFF if source.cut else "the JSON does not end")
    try:
        decode_object(source.read(begin, failed + 1))
    except Malformed as problem:
        return problem
    return Malformed(Reason.MALFORMED_JSON, f"not JSON at character {failed - begin}")


class NamedCall(NamedTuple):
    """What an object says of a call; `id` is empty where it says none."""

    name: str
    arguments: dict[str, JSON]
    text: str
    id: str


def named_call(text: str, keys: Sequence[str] = ("arguments",)) -> NamedCall:
    """Name, arguments and their text, from an object with `name` and one of `keys`. Raises `Malformed`."""
    members = decode_members(text)
    name = members.get("name")
    if name is None or not isinstance(name.value, str) or not name.value:
        raise Malformed(Reason.NO_NAME, "the call has no name")
    found = [members[key] for key in keys if key in members]
    if len(found) != 1:
        raise Malformed(Reason.NO_ARGUMENTS, f"the call has not one of {', '.join(keys)}")
    if not isinstance(found[0].value, dict):
        raise Malformed(Reason.NOT_AN_OBJECT, "the arguments are not a JSON object")
    given = members["id"].value if "id" in members else ""
    return NamedCall(name.value, found[0].value, found[0].text, given if isinstance(given, str) else "")


def name_in(text: str) -> str:
    """The name in the beginning of a broken object, or the empty string: only to tell the model which call it was."""
    try:
        name = decode_members(text).get("name")
    except Malformed:
        return _name_at_start(text)
    return name.value if name is not None and isinstance(name.value, str) else ""


def _name_at_start(text: str) -> str:
    head, _, rest = text[:400].partition('"name"')
    name = rest.lstrip(" \t\r\n:").removeprefix('"').partition('"')
    return name[0] if not head.strip(" \t\r\n{[") and name[1] else ""


def write_call(
    output: Output, start: int, body: Body, keys: Sequence[str] = ("arguments",), with_id: bool = False
) -> None:
    """Put the call that `body` names on the page, or why it is broken. `with_id`: the object's `id` counts."""
    problem = body.problem
    if problem is None:
        try:
            call = named_call(body.text, keys)
        except Malformed as malformed:
            problem = malformed
        else:
            output.page.call(call.name, call.arguments, call.text, start, body.end, call.id if with_id else "")
            return
    output.page.broken(problem, name_in(body.text), start, body.end)
