"""Python literals in model text: where a call's parentheses end, and what its keyword arguments are.

For the formats that write calls as Python. Nothing is evaluated, compiled or imported. Accepted is what JSON can
express: strings in all their quotings, numbers, True, False, None, lists, and dicts with string keys. Invariant: an
argument given twice, a positional one, a tuple, a variable or an expression makes a call malformed.
"""

from __future__ import annotations

import math
import re

from palaestra.core.types import JSON
from palaestra.inference.parsers.parser import Malformed, Reason
from palaestra.inference.parsers.syntax.json_text import Scan
from palaestra.inference.parsers.text_source import Reading, Source

_OUTSIDE = re.compile(r"[^'\"()\[\]{}]*")
_INSIDE = {quote: re.compile(rf"[^\\\n{quote}]*") for quote in "'\""}
_INSIDE_LONG = {quote: re.compile(rf"[^\\{quote}]*") for quote in "'\""}
_SPACE = re.compile(r"\s*")
_KEY = re.compile(r"\s*([^\W\d]\w*)\s*=\s*")
_STRING = re.compile(
    r"([rR]?)(?:'''((?:[^\\']|\\.|'(?!''))*+)'''|\"\"\"((?:[^\\\"]|\\.|\"(?!\"\"))*+)\"\"\""
    r"|'((?:[^\\'\n]|\\.)*+)'|\"((?:[^\\\"\n]|\\.)*+)\")",
    re.DOTALL,
)
_NUMBER = re.compile(r"[+-]?(?:0[xX][0-9a-fA-F]+|(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)(?![\w.])")
_WORD = re.compile(r"(?:True|False|None)\b")
_WORDS = {"True": True, "False": False, "None": None}
_ESCAPE = re.compile(r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(\r?\n)|(.))", re.DOTALL)
_ESCAPED = {"\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_DEEPEST = 100


def scan_parentheses(source: Source, start: int) -> Reading[Scan]:
    """Where the bracket that opens at `start` closes, strings left out; or where a string breaks off."""
    depth, position = 0, start
    while True:
        position = yield from source.skip(position, _OUTSIDE)
        character = source.read(position, position + 1)
        if not character:
            return Scan(source.end, False)
        if character in "'\"":
            position = yield from string_end(source, position, character)
            if position < 0:
                return Scan(-position, False)
            continue
        position += 1
        depth += 1 if character in "([{" else -1
        if depth == 0:
            return Scan(position, True)


def string_end(source: Source, start: int, quote: str) -> Reading[int]:
    """The end of the string that begins with `quote` at `start`; where it breaks off, that place with a minus."""
    long = yield from source.at(start, quote * 3)
    run = (_INSIDE_LONG if long else _INSIDE)[quote]
    ends = quote * 3 if long else quote
    position = start + len(ends)
    while True:
        position = yield from source.skip(position, run)
        character = source.read(position, position + 1)
        if character == "\\":
            if (yield from source.ends(position + 1)):
                return -source.end
            position += 2
        elif (yield from source.at(position, ends)):
            return position + len(ends)
        elif character == quote:
            position += 1
        else:
            return -position


def keyword_arguments(text: str) -> dict[str, JSON]:
    """The arguments between the parentheses that `text` begins and ends with. Raises `Malformed`."""
    arguments: dict[str, JSON] = {}
    at = _space(text, 1)
    while at < len(text) - 1:
        key = _KEY.match(text, at)
        if key is None or text.startswith("=", key.end()):
            raise Malformed(Reason.MALFORMED_MARKUP, f"not a keyword argument at character {at}", at)
        if key[1] in arguments:
            raise Malformed(Reason.DUPLICATE_KEY, f"the argument {key[1]!r} is there twice", at)
        arguments[key[1]], at = _value(text, key.end(), 0)
        at = _next(text, at, ")")
    return arguments


def _value(text: str, at: int, depth: int) -> tuple[JSON, int]:
    if depth > _DEEPEST:
        raise Malformed(Reason.TOO_DEEP, "nested too deeply", at)
    first = text[at : at + 1]
    if first == "[":
        return _list(text, at, depth + 1)
    if first == "{":
        return _dict(text, at, depth + 1)
    string = _STRING.match(text, at)
    if string is not None:
        return _strings(text, string)
    number = _NUMBER.match(text, at)
    if number is not None:
        return _number(number[0], at), number.end()
    word = _WORD.match(text, at)
    if word is None:
        raise Malformed(Reason.MALFORMED_MARKUP, f"not a literal at character {at}", at)
    return _WORDS[word[0]], word.end()


def _list(text: str, at: int, depth: int) -> tuple[list[JSON], int]:
    items: list[JSON] = []
    at = _space(text, at + 1)
    while text[at : at + 1] != "]":
        item, at = _value(text, at, depth)
        items.append(item)
        at = _next(text, at, "]")
    return items, at + 1


def _dict(text: str, at: int, depth: int) -> tuple[dict[str, JSON], int]:
    items: dict[str, JSON] = {}
    at = _space(text, at + 1)
    while text[at : at + 1] != "}":
        key, at = _value(text, at, depth)
        at = _space(text, at)
        if not isinstance(key, str) or text[at : at + 1] != ":":
            raise Malformed(Reason.MALFORMED_MARKUP, f"not a string key at character {at}", at)
        if key in items:
            raise Malformed(Reason.DUPLICATE_KEY, f"the key {key[:80]!r} is there twice", at)
        items[key], at = _value(text, _space(text, at + 1), depth)
        at = _next(text, at, "}")
    return items, at + 1


def _strings(text: str, found: re.Match[str] | None) -> tuple[str, int]:
    """Neighbouring strings are one, as in Python."""
    parts: list[str] = []
    end = 0
    while found is not None:
        body = next(group for group in found.groups()[1:] if group is not None)
        parts.append(body if found[1] else _ESCAPE.sub(_unescape, body))
        end = found.end()
        found = _STRING.match(text, _space(text, end))
    return "".join(parts), end


def _unescape(found: re.Match[str]) -> str:
    octal, *hexadecimal, line, other = found.groups()
    if line:
        return ""
    if other:
        if other in "xuUN":
            raise Malformed(Reason.MALFORMED_MARKUP, f"an unfinished escape: {found[0]}")
        return _ESCAPED.get(other, found[0])
    code = int(octal, 8) if octal else int(next(filter(None, hexadecimal)), 16)
    if code > 0x10FFFF:
        raise Malformed(Reason.MALFORMED_MARKUP, f"no character: {found[0]}")
    return chr(code)


def _number(digits: str, at: int) -> int | float:
    try:
        if digits.isdecimal() or not any(mark in digits for mark in ".eE") or "x" in digits.lower():
            return int(digits, 0)
    except ValueError as error:
        raise Malformed(Reason.MALFORMED_MARKUP, f"not a number: {error}"[:200], at) from None
    value = float(digits)
    if math.isinf(value):
        raise Malformed(Reason.NOT_FINITE, f"{digits[:40]} is too large a number", at)
    return value


def _next(text: str, at: int, close: str) -> int:
    """Past a comma, or at the closing bracket."""
    at = _space(text, at)
    if text[at : at + 1] == ",":
        return _space(text, at + 1)
    if text[at : at + 1] != close:
        raise Malformed(Reason.MALFORMED_MARKUP, f"expecting ',' or {close!r} at character {at}", at)
    return at


def _space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at
