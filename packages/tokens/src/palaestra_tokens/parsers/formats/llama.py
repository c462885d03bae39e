"""Llama 3.1 to 4: JSON objects, bare or after a mark, or a Python list of calls with literal keyword arguments.

    JSON     {"name": "f", "parameters": {...}}
             <|python_tag|>{"name": "f", "parameters": {...}}; {"name": "g", "parameters": {...}}
    Python   [f(key='value', n=1), g()]
             <|python_start|>[f(key='value')]<|python_end|>

Source: Meta's prompt formats for JSON and pythonic tool calling (JSON specifies `parameters`; models write `arguments`
too). A bare object is a call only if it has a string `name` and an object under one of the two keys. A bare list is a
call only if it begins with a name and keyword arguments or empty parentheses. Other JSON, other brackets and code after
the mark are text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from palaestra_slots.core.types import JSON
from palaestra_tokens.parsers.formats.json_calls import (
    CUT_OFF,
    STRAY,
    add_named,
    after_element,
    extent,
    named_call,
    other_element,
    string_end,
    untagged_body,
)
from palaestra_tokens.parsers.literals import literal
from palaestra_tokens.parsers.output_reader import FoundCall, Grammar, OutputReader
from palaestra_tokens.parsers.parser import BrokenReason, Malformed, ParsedCall, named_object
from palaestra_tokens.parsers.scan import Mark, Scan, decode_members, scan_value, skip

_TAG = "<|python_tag|>"
_KEYS = ("parameters", "arguments")
_NAMED = re.compile(r'\{\s*"name"\s*:')
_NAMED_CHARS = 64


class LlamaJson(Grammar):
    """Calls end with their JSON, without an end tag."""

    openers = (_TAG, "{")

    def read(self, output: OutputReader, mark: Mark) -> int | None:
        text, begin = output.text, mark.start
        if mark.text == _TAG:
            begin = skip(text, mark.end)
            if begin >= output.end:
                output.broken(Malformed(BrokenReason.UNCLOSED, "no call follows"), "", mark.start, begin)
                return begin
            if not text.startswith("{", begin):
                return None
        end, called = self._object(output, mark.start, begin, marked=mark.text == _TAG)
        while called:
            after = skip(text, end)
            # These models put a semicolon between the calls of one reply.
            if not text.startswith(";", after):
                return end
            begin = skip(text, after + 1)
            if text.startswith(_TAG, begin):
                output.skip_to(begin)
                return begin
            if not text.startswith("{", begin):
                return end
            output.skip_to(begin)
            end, called = self._object(output, begin, begin, marked=True)
        return end

    def _object(self, output: OutputReader, start: int, begin: int, marked: bool) -> tuple[int, bool]:
        """Return where the object ends, and whether it is a call; if not, it is text."""
        if not marked and not output.text.startswith('"', skip(output.text, begin + 1)):
            output.text_to(begin + 1)
            return begin + 1, False
        scan = scan_value(output.text, begin)
        if not marked and not _is_call(output.text[begin : scan.end], scan.complete):
            output.text_to(scan.end)
            return scan.end, False
        return add_named(output, start, untagged_body(output, begin, scan), _KEYS), True

    def render(self, calls: Sequence[ParsedCall], text: str) -> str:
        objects = "; ".join(named_object(call, "parameters") for call in calls)
        return f"{text}{_TAG}{objects}" if calls else text


def _is_call(text: str, complete: bool) -> bool:
    """Return whether a bare object is a call, which may be broken if the object begins with `name`. Any other object is
    text."""
    # Only so far, because a long run of white space may follow each brace of a text.
    named = _NAMED.match(text[:_NAMED_CHARS]) is not None
    if not complete:
        return named
    try:
        named_call(decode_members(text), _KEYS)
    except Malformed as problem:
        return named and problem.reason not in (BrokenReason.NO_NAME, BrokenReason.NO_ARGUMENTS)
    return True


_START, _END = "<|python_start|>", "<|python_end|>"
_LETTER = re.compile(r"[^\W\d]")
_NAME = re.compile(r"[\w.\-]*")
_KEY = re.compile(r"\w*")
_NO_NAME = frozenset("[](){}<>\"'0123456789-+.,:;")


class Llama4Pythonic(Grammar):
    """Reads one list of calls at a time, anywhere in the text."""

    openers = (_START, "[")

    def read(self, output: OutputReader, mark: Mark) -> int | None:
        text = output.text
        if mark.text == "[":
            return self._read_calls(output, mark.start, mark.start) if _begins_calls(text, mark.end) else None
        begin = skip(text, mark.end)
        if not text.startswith("[", begin):
            return output.mentioned(mark, _END)
        end = self._read_calls(output, mark.start, begin)
        after = skip(text, end)
        return after + len(_END) if text.startswith(_END, after) else end

    def _read_calls(self, output: OutputReader, start: int, bracket: int) -> int:
        text, position = output.text, bracket + 1
        while True:
            begin = skip(text, position)
            if text.startswith("]", begin):
                return begin + 1
            found = _element(output, begin)
            after, sign = after_element(text, found.end)
            # There is text between this element and the next sign, so the element is not a whole call, even if it can
            # be read.
            if sign and skip(text, found.end) < after:
                problem = found.problem or Malformed(BrokenReason.MALFORMED_MARKUP, STRAY)
                found = found._replace(end=after, problem=problem)
            elif not sign and found.problem is None:
                found = found._replace(problem=_unfollowed(output, after))
            end = output.add(found, start if position == bracket + 1 else begin)
            if sign == "]":
                return after + 1
            # A missing comma does not end the list, as long as another call follows.
            if not sign and not _begins_calls(text, after):
                return end
            position = after + len(sign)
            output.skip_to(position)

    def render(self, calls: Sequence[ParsedCall], text: str) -> str:
        written = [
            f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})" for call in calls
        ]
        return f"{text}[{', '.join(written)}]" if calls else text


def _begins_calls(text: str, position: int) -> bool:
    """Return whether a name with keyword arguments, or without arguments, begins at `position`."""
    if text[position : position + 1] in _NO_NAME:
        return False
    begin = skip(text, position)
    end = _name_end(text, begin)
    if end == begin or not text.startswith("(", end):
        return False
    inner = skip(text, end + 1)
    if text.startswith(")", inner):
        return True
    key_end = skip(text, inner, _KEY)
    equals = skip(text, key_end)
    # `==` is a comparison, so the brackets hold code.
    return key_end > inner and text.startswith("=", equals) and not text.startswith("==", equals)


def _element(output: OutputReader, begin: int) -> FoundCall:
    text = output.text
    end = _name_end(text, begin)
    name = text[begin:end]
    if not text.startswith("(", end):
        reason = BrokenReason.UNCLOSED if end >= output.end else BrokenReason.MALFORMED_MARKUP
        stop, _ = other_element(output, begin, "'\"", scan_parentheses)
        return FoundCall(name, {}, stop, Malformed(reason, "an element is not a call"))
    scan = scan_parentheses(text, end)
    if not scan.complete:
        reason = BrokenReason.UNCLOSED if scan.end >= output.end else BrokenReason.MALFORMED_MARKUP
        return FoundCall(name, {}, extent(output, end, scan), Malformed(reason, "a call does not end"))
    try:
        if not name:
            raise Malformed(BrokenReason.NO_NAME, "the call has no name")
        return FoundCall(name, keyword_arguments(text[end : scan.end]), scan.end)
    except Malformed as problem:
        return FoundCall(name, {}, scan.end, problem)


def _name_end(text: str, begin: int) -> int:
    """Return the end of the name at `begin`; `begin` itself if there is none."""
    return skip(text, begin + 1, _NAME) if _LETTER.match(text, begin) else begin


def _unfollowed(output: OutputReader, after: int) -> Malformed | None:
    """Return the problem of a call that neither `,` nor `]` follows, or None if an uncut output ends with the call."""
    if after < output.end:
        return Malformed(BrokenReason.MALFORMED_MARKUP, "the list does not continue after a call")
    return Malformed(BrokenReason.UNCLOSED, CUT_OFF) if output.cut else None


# Values are parsed as Python and never evaluated; only values that JSON can express are accepted. Argument names are
# read without Python's parser, because some are reserved words in Python (`from`, `class`).

_OUTSIDE = re.compile(r"[^'\"()\[\]{}]*")
_VALUE = re.compile(r"[^'\"()\[\]{},]*")
_SPACE = re.compile(r"\s*")
_ARGUMENT = re.compile(r"\s*([^\W\d]\w*)\s*=\s*")


def scan_parentheses(text: str, start: int) -> Scan:
    """Return where the bracket that opens at `start` closes, ignoring brackets in strings. If a string is not closed,
    return where it breaks off."""
    depth, position = 0, start
    while True:
        position = skip(text, position, _OUTSIDE)
        character = text[position : position + 1]
        if not character:
            return Scan(len(text), False)
        if character in "'\"":
            position = string_end(text, position, character)
            if position < 0:
                return Scan(-position, False)
            continue
        position += 1
        depth += 1 if character in "([{" else -1
        if depth == 0:
            return Scan(position, True)


def keyword_arguments(text: str) -> dict[str, JSON]:
    """Return the arguments between the parentheses that `text` begins and ends with. Raises `Malformed`."""
    arguments: dict[str, JSON] = {}
    if not text.endswith(")"):
        raise Malformed(BrokenReason.MALFORMED_MARKUP, "the call does not end with a parenthesis")
    at = skip(text, 1, _SPACE)
    while at < len(text) - 1:
        key = _ARGUMENT.match(text, at)
        if key is None or text.startswith("=", key.end()):
            raise Malformed(BrokenReason.MALFORMED_MARKUP, f"not a keyword argument at character {at}")
        if key[1] in arguments:
            raise Malformed(BrokenReason.DUPLICATE_KEY, f"the argument {key[1]!r} is a duplicate")
        end = _value_end(text, key.end())
        arguments[key[1]] = literal(text[key.end() : end])
        at = skip(text, end + 1, _SPACE)
    return arguments


def _value_end(text: str, at: int) -> int:
    """Return where the value at `at` ends: at a comma, at a closing bracket or at the end of the text."""
    while True:
        at = skip(text, at, _VALUE)
        sign = text[at : at + 1] or ","
        if sign in "'\"":
            at = abs(string_end(text, at, sign))
        elif sign in "([{":
            at = scan_parentheses(text, at).end
        else:
            return at
