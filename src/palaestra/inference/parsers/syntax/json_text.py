"""JSON in model text: where a value ends, and what it says when nothing is forgiven.

For: every format whose arguments are JSON. Not for schemas. Invariants: a bracket or a tag inside a string ends
nothing; duplicate keys, NaN, infinities and numbers that become infinite are refused, since two readers would disagree
on them.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import NamedTuple, NoReturn

from palaestra.core.types import JSON
from palaestra.inference.parsers.parser import Malformed, Reason
from palaestra.inference.parsers.text_source import Reading, Source

_IN_STRING = re.compile(r'["\\\x00-\x1f]')
_OUTSIDE = re.compile(r'["{}\[\]]|[^ \t\r\nA-Za-z0-9+\-.,:]')
_SPACE = re.compile(r"[ \t\r\n]*")
_ESCAPES = frozenset('"\\/bfnrtu')
_WINDOW = 65_536


class Scan(NamedTuple):
    """Where a value ends (`complete`), or where it stops being JSON; the end of the output is such a place too."""

    end: int
    complete: bool


class Outline:
    """Follows strings and brackets through text given in windows. `failed`: what came last cannot stand in JSON."""

    def __init__(self) -> None:
        self.failed = False
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._after_string = False

    def follow(self, window: str) -> int | None:
        """How much of the window belongs to the value, when it ends or fails in it; None when it goes on."""
        at = 0
        while at < len(window):
            if self._escaped:
                if window[at] not in _ESCAPES:
                    return self._fail(at)
                self._escaped, at = False, at + 1
            elif self._in_string:
                found = _IN_STRING.search(window, at)
                if found is None:
                    return None
                at = found.end()
                if found[0] == "\\":
                    self._escaped = True
                elif found[0] == '"':
                    self._in_string, self._after_string = False, True
                else:
                    return self._fail(found.start())
            else:
                ended = self._outside(window, at)
                if ended is None:
                    return None
                at = ended
                if self.failed or (not self._depth and not self._in_string):
                    return at
        return None

    def _outside(self, window: str, at: int) -> int | None:
        if self._after_string:
            at = _SPACE.match(window, at).end()  # type: ignore[union-attr]  # it matches nothing too
            if at == len(window):
                return None
            self._after_string = False
            if window[at] not in ",:]}":
                return self._fail(at)
        found = _OUTSIDE.search(window, at)
        if found is None:
            return None
        if found[0] == '"':
            self._in_string = True
        elif found[0] in "{[":
            self._depth += 1
        elif found[0] in "}]":
            self._depth -= 1
        else:
            return self._fail(found.start())
        return found.end()

    def _fail(self, at: int) -> int:
        self.failed = True
        return at


def scan_value(source: Source, start: int) -> Reading[Scan]:
    """Where the object or array that begins at `start` ends, by its strings and brackets alone."""
    outline = Outline()
    position, size = start, 256
    while True:
        window = source.read(position, position + size)
        length = outline.follow(window)
        if length is not None:
            return Scan(position + length, not outline.failed)
        position += len(window)
        if position < source.end:
            size = min(2 * size, _WINDOW)
        elif source.closed:
            return Scan(source.end, False)
        else:
            yield


_BRACES = {"{": 1, "[": 1, "(": 1, "}": -1, "]": -1, ")": -1}
_BRACE = re.compile(r"[{}\[\]()]")


def scan_brackets(source: Source, start: int) -> Reading[int]:
    """Where the brackets that open at `start` are balanced, quotes disregarded: the extent of what is not JSON.

    The end of the output when they never are.
    """
    depth, position, size = 0, start, 256
    while True:
        window = source.read(position, position + size)
        for found in _BRACE.finditer(window):
            depth += _BRACES[found[0]]
            if depth <= 0:
                return position + found.end()
        position += len(window)
        if position < source.end:
            size = min(2 * size, _WINDOW)
        elif source.closed:
            return source.end
        else:
            yield


def _unique(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise Malformed(Reason.DUPLICATE_KEY, f"the key {twice[:80]!r} is there twice")
    return value


def _refuse(constant: str) -> NoReturn:
    raise Malformed(Reason.NOT_FINITE, f"{constant} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise Malformed(Reason.NOT_FINITE, f"{digits[:40]} is too large a number")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite)


def decode(text: str) -> JSON:
    """The value that `text` is, white space around it allowed. Raises `Malformed`."""
    value, end = _decode_at(text, _space(text, 0))
    if _space(text, end) < len(text):
        raise Malformed(Reason.MALFORMED_JSON, f"something follows the JSON at character {end}", end)
    return value


def decode_object(text: str) -> dict[str, JSON]:
    """The object that `text` is. Raises `Malformed`."""
    value = decode(text)
    if not isinstance(value, dict):
        raise Malformed(Reason.NOT_AN_OBJECT, "the arguments are not a JSON object")
    return value


class Member(NamedTuple):
    """One value of an object, and its text."""

    value: JSON
    text: str


def decode_members(text: str) -> dict[str, Member]:
    """The members of the object that `text` is, values with their text. Raises `Malformed`."""
    members: dict[str, Member] = {}
    at = _expect(text, _space(text, 0), "{")
    if text[at : at + 1] == "}":
        return members
    while True:
        key, end = _decode_at(text, at)
        if not isinstance(key, str):
            raise Malformed(Reason.MALFORMED_JSON, f"a key is not a string at character {at}", at)
        if key in members:
            raise Malformed(Reason.DUPLICATE_KEY, f"the key {key[:80]!r} is there twice", at)
        begin = _expect(text, _space(text, end), ":")
        value, end = _decode_at(text, begin)
        members[key] = Member(value, text[begin:end])
        at = _space(text, end)
        if text[at : at + 1] == "}":
            return members
        at = _expect(text, at, ",")


def _decode_at(text: str, at: int) -> tuple[JSON, int]:
    try:
        return _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise Malformed(Reason.MALFORMED_JSON, f"not JSON: {error.msg} at character {error.pos}", error.pos) from None
    except RecursionError:
        raise Malformed(Reason.TOO_DEEP, "nested too deeply", at) from None
    except ValueError as error:  # a number of thousands of digits
        raise Malformed(Reason.NOT_FINITE, str(error), at) from None


def _space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _expect(text: str, at: int, mark: str) -> int:
    if text[at : at + 1] != mark:
        raise Malformed(Reason.MALFORMED_JSON, f"not JSON: expecting {mark!r} at character {at}", at)
    return _space(text, at + 1)
