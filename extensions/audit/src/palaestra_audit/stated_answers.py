"""Texts that state an answer of one letter or digit. Does no I/O.

A line such as `Answer: B` does. A letter alone says nothing, because every text and every list of choices has it.
"""

from __future__ import annotations

import re

_CALLED = (
    "(answer|solution|correct|expected|gold(en)?|truth|target|oracle|(right|true)[ _-]?(answer|choice|option))"
    "(s|[ _-]?(answer|choice|option|letter|key|label|index|value)){0,5}"
)
CALLED = f"(^|[^A-Za-z]){_CALLED}[^A-Za-z0-9]*(is[^A-Za-z0-9]+)?[A-Za-z0-9]([^A-Za-z0-9]|$)"
"""A pattern of `grep -iE` that finds all lines that may state an answer."""

_STATED = re.compile(
    rf"(?<![a-z]){_CALLED}[\"'`*)\]]*\s*(?::|=|->|\bis\b)+\s*[\"'`*(\[\\]*(?P<value>[A-Za-z0-9])"
    r"(?=[\"'`*)\].,;}\\]*(?:\s*[^\w\s]|\s*$))",
    re.MULTILINE | re.IGNORECASE,
)
"""Behind the value may be a comment in brackets, but no further word: `answer: a number` states nothing."""
_FORM = re.compile(r"\b(form|format|example|e\.g|such as|like|write|reply|respond|ends?|line|say)\b", re.IGNORECASE)
"""Words before a statement that only shows in which form to answer."""
_CLAUSE = re.compile(r"(?<!e\.g)[.?!;]\s|[,{]\s*\"")
"""The end of what belongs to other words than the statement: of a sentence, or of a field of JSON."""
_MOST_BEFORE = 500
"""The number of characters before a statement that are read."""
_OPEN = re.compile(r"\b(answer|a)\W*$", re.IGNORECASE)


def single_sign(answer: object, reply: str | None) -> str | None:
    """Return the letter or digit of which an answer consists, or the reply that gives it; None for another answer."""
    text = str(answer) if isinstance(answer, str | int) and not isinstance(answer, bool) else reply or ""
    found = re.fullmatch(r"\W*(?:(?:answer|boxed)\W*)?([A-Za-z0-9])\W*", text.strip(), re.IGNORECASE)
    return found[1] if found else None


def states(text: str, sign: str) -> bool:
    """Return whether a text states this answer, and no other one: several are examples, or of several questions."""
    values = set()
    for each in _STATED.finditer(text):
        first = max(0, each.start() - _MOST_BEFORE)
        before = text[max(first, text.rfind("\n", first, each.start()) + 1) : each.start()]
        if not _FORM.search(_CLAUSE.split(before)[-1]):
            values.add(each["value"].upper())
    return values == {sign.upper()}


def tells(asked: str, sign: str) -> bool:
    """Return whether a prompt states the answer. One that ends with `Answer:` shows solved examples before."""
    return states(asked, sign) and not _OPEN.search(asked)
