"""Reads white space, tags and strict JSON at a position in a text, in time proportional to the distance covered. Also
reads the types of arguments from tool schemas, for formats that write values as bare text.

Duplicate keys, NaN, infinities and numbers that overflow are rejected, because JSON libraries read them differently.
Bare text becomes a value of a different type only if the schema names that type and the text is exactly such a value in
JSON, or in Python (True, False, None, lists and dicts), which templates and models write too; otherwise it stays text,
and the validation of the arguments reports the problem. Sources: the parsers published with Qwen3-Coder and GLM.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, NoReturn

from palaestra_slots.core.types import JSON
from palaestra_tokens.parsers.literals import literal
from palaestra_tokens.parsers.parser import BrokenReason, Malformed, Tools

_SPACE = re.compile(r"[ \t\r\n]*")


class Mark(NamedTuple):
    """A tag found in a text, from `start` to `end`."""

    text: str
    start: int
    end: int


@lru_cache(maxsize=512)
def _any_of(tags: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tags)))


def find(text: str, start: int, *tags: str, before: int | None = None) -> Mark | None:
    """Return the first of `tags` that begins at or after `start` and, if `before` is set, before that position. Returns
    None if there is no such tag."""
    # A tag that begins before `before` may end after it.
    stop = len(text) if before is None else before + max(map(len, tags)) - 1
    found = _any_of(tags).search(text, start, stop)
    if found is None or (before is not None and found.start() >= before):
        return None
    return Mark(found[0], found.start(), found.end())


def skip(text: str, start: int, run: re.Pattern[str] = _SPACE) -> int:
    """Return the end of the white space that begins at `start`, or of the match of a different pattern `run`."""
    found = run.match(text, start)
    return found.end() if found else start


def breaks_off(text: str, position: int, *tags: str) -> bool:
    """Return whether the text ends inside one of these tags, or right before it."""
    return len(text) - position < max(map(len, tags)) and any(tag.startswith(text[position:]) for tag in tags)


class Closing(NamedTuple):
    """Where and how a call ends: at its end tags (`tags`), because the output ended first (`output`), or because other
    text follows (`else`)."""

    end: int
    how: Literal["tags", "output", "else"]


def closing(text: str, position: int, *tags: str) -> Closing:
    """Look for a call's end tags at `position`, with white space between them, and return how the call ends. If the
    output ends inside one of the tags, the call ends with the output."""
    for tag in tags:
        begin = skip(text, position)
        if text.startswith(tag, begin):
            position = begin + len(tag)
        elif breaks_off(text, begin, tag):
            return Closing(len(text), "output")
        else:
            return Closing(position, "else")
    return Closing(position, "tags")


# Possessive (`*+`): for a string without an end, other quantifiers would try every shorter match.
_STRING_REST = re.compile(r'[^"\\\x00-\x1f]*+(?:\\["\\/bfnrtu][^"\\\x00-\x1f]*+)*+')
_TOKEN = re.compile(r'["{}\[\]]|[^ \t\r\nA-Za-z0-9+\-.,:]')
_BRACKET = re.compile(r"[{}\[\]()]")


class Scan(NamedTuple):
    """The end of a value if it is `complete`, otherwise the position at which it stops being JSON, which may be the end
    of the text."""

    end: int
    complete: bool


def scan_value(text: str, start: int) -> Scan:
    """Return where the object or array that begins at `start` ends, judged by its strings and brackets alone."""
    depth, at = 0, start
    while (token := _TOKEN.search(text, at)) is not None:
        at = token.end()
        if token[0] == '"':
            at = skip(text, at, _STRING_REST)
            if not text.startswith('"', at):
                return Scan(at + text.startswith("\\", at), False)
            at = skip(text, at + 1)
            # Nothing else can follow a string, so a quotation mark in the text was not escaped.
            if at < len(text) and text[at] not in ",:]}":
                return Scan(at, False)
        elif token[0] in "{[":
            depth += 1
        elif token[0] in "}]":
            depth -= 1
            if not depth:
                return Scan(at, True)
        else:
            return Scan(token.start(), False)
    return Scan(len(text), False)


def scan_brackets(text: str, start: int) -> int:
    """Return the position where the brackets that open at `start` are balanced, or the end of the text if they never
    are. Quotes are ignored."""
    depth = 0
    for found in _BRACKET.finditer(text, start):
        depth += 1 if found[0] in "{[(" else -1
        if depth <= 0:
            return found.end()
    return len(text)


def _unique(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise Malformed(BrokenReason.DUPLICATE_KEY, f"the key {twice[:80]!r} is a duplicate")
    return value


def _refuse(constant: str) -> NoReturn:
    raise Malformed(BrokenReason.NOT_FINITE, f"{constant} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    # Python reads 1e999 as infinity, which cannot be written as JSON again.
    if math.isinf(value):
        raise Malformed(BrokenReason.NOT_FINITE, f"{digits[:40]} is too large a number")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite)


def parse_json(text: str) -> JSON:
    """Return the JSON value of `text`, with white space allowed around it. Raises `Malformed`."""
    value, end = _decode_at(text, skip(text, 0))
    if skip(text, end) < len(text):
        raise Malformed(BrokenReason.MALFORMED_JSON, f"extra text after the JSON at character {end}", end)
    return value


def decode_object(text: str) -> dict[str, JSON]:
    value = parse_json(text)
    if not isinstance(value, dict):
        raise Malformed(BrokenReason.NOT_AN_OBJECT, "the arguments are not a JSON object")
    return value


class Member(NamedTuple):
    """One value of a JSON object, and the text that encodes it."""

    value: JSON
    text: str


def decode_members(text: str) -> dict[str, Member]:
    """Return the members of the JSON object that `text` encodes. Raises `Malformed`."""
    members: dict[str, Member] = {}
    at = skip(text, _past(text, skip(text, 0), "{"))
    if text.startswith("}", at):
        return members
    while True:
        key, end = _decode_at(text, at)
        if not isinstance(key, str):
            raise Malformed(BrokenReason.MALFORMED_JSON, f"a key is not a string at character {at}", at)
        if key in members:
            raise Malformed(BrokenReason.DUPLICATE_KEY, f"the key {key[:80]!r} is a duplicate", at)
        begin = skip(text, _past(text, skip(text, end), ":"))
        value, end = _decode_at(text, begin)
        members[key] = Member(value, text[begin:end])
        at = skip(text, end)
        if text.startswith("}", at):
            return members
        at = skip(text, _past(text, at, ","))


def _decode_at(text: str, at: int) -> tuple[JSON, int]:
    try:
        return _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        detail = f"not JSON: {error.msg} at character {error.pos}"
        raise Malformed(BrokenReason.MALFORMED_JSON, detail, error.pos) from None
    except RecursionError:
        raise Malformed(BrokenReason.TOO_DEEP, "nested too deeply", at) from None
    except ValueError as error:  # a number with thousands of digits
        raise Malformed(BrokenReason.NOT_FINITE, str(error), at) from None


def _past(text: str, at: int, sign: str) -> int:
    """Return the position after a sign, which must be at `at`. Raises `Malformed`."""
    if not text.startswith(sign, at):
        raise Malformed(BrokenReason.MALFORMED_JSON, f"not JSON: expecting {sign!r} at character {at}", at)
    return at + 1


_PRINTED: Mapping[str, tuple[str, JSON]] = {
    "True": ("boolean", True),
    "False": ("boolean", False),
    "None": ("null", None),
}
_PYTHON_NAMES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
}
"""Python's type names, which schemas written by hand may contain, and the JSON Schema types that they stand for."""
_MAX_DEPTH = 16


class ArgumentTypes:
    """The types of each tool's arguments, with JSON Schema's names."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._parameters: dict[str, Mapping[str, JSON]] | None = None

    def value(self, tool: str, argument: str, text: str) -> JSON:
        """Return `text` as a value of this argument's type; it stays text if the type is unknown."""
        return typed(text, self._types(tool, argument))

    def _types(self, tool: str, argument: str) -> frozenset[str]:
        if self._parameters is None:
            self._parameters = dict(_parameters(self._tools))
        parameters = self._parameters.get(tool)
        if parameters is None:
            return frozenset()
        properties = parameters.get("properties")
        schema = properties.get(argument) if isinstance(properties, Mapping) else None
        if schema is None:
            schema = parameters.get("additionalProperties")
        return frozenset(_types(schema, parameters, _MAX_DEPTH))


def typed(text: str, types: frozenset[str]) -> JSON:
    """Return `text` as a value of one of these types, or unchanged if it is not such a value."""
    if not types or types == {"string"}:
        return text
    name, printed = _PRINTED.get(text.strip(), ("", None))
    # If the argument may be text, the model may mean the word itself.
    if name in types and "string" not in types:
        return printed
    try:
        value = parse_json(text)
    except Malformed:
        if "string" in types or not types & {"array", "object"} or not text.lstrip().startswith(("[", "{")):
            return text
        try:
            value = literal(text.strip())
        except Malformed:
            return text
    return value if not isinstance(value, str) and _types_of(value) & types else text


def _types_of(value: JSON) -> set[str]:
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number", "integer"} if value.is_integer() else {"number"}
    return {"object"} if isinstance(value, dict) else {"array"}


def _parameters(tools: Tools) -> Iterator[tuple[str, Mapping[str, JSON]]]:
    for tool in tools:
        function = tool.get("function", tool)
        parameters = function.get("parameters") if isinstance(function, Mapping) else None
        if isinstance(parameters, Mapping):
            yield str(function.get("name", "")), parameters


def _types(schema: JSON, root: Mapping[str, JSON], depth: int) -> Iterator[str]:
    """Yield the types that a schema allows, through its unions, references, enumerations and constants."""
    # References may be circular; the depth ends them.
    if not isinstance(schema, Mapping) or depth == 0:
        return
    declared = schema.get("type")
    yield from (_PYTHON_NAMES.get(name, name) for name in (declared, *_as_sequence(declared)) if isinstance(name, str))
    if schema.get("nullable") is True:
        yield "null"
    if declared is None:
        for constant in [*_as_sequence(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]:
            yield from ["string"] if isinstance(constant, str) else _types_of(constant)
        if "properties" in schema:
            yield "object"
        if "items" in schema:
            yield "array"
    for union in ("anyOf", "oneOf", "allOf"):
        for member in _as_sequence(schema.get(union)):
            yield from _types(member, root, depth - 1)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        yield from _types(_referenced(root, reference[2:]), root, depth - 1)


def _referenced(root: Mapping[str, JSON], pointer: str) -> JSON:
    target: JSON = root
    for step in pointer.split("/"):
        target = target.get(step) if isinstance(target, Mapping) else None
    return target


def _as_sequence(value: JSON) -> Sequence[JSON]:
    return value if isinstance(value, Sequence) and not isinstance(value, str) else ()
