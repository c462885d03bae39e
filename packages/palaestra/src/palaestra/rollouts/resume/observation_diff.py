"""`classify` finds the reason why an observation differs from the recorded one: time, pid, order, randomness or other.

It compares two texts, given the agent's calls. In case of doubt, the reason is `other`. A different exit code, or a
difference outside the strings of a JSON reply, is always `other`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import StrEnum

import msgspec

from palaestra_slots.core.types import JSON


class Kind(StrEnum):
    """The reason why two observations differ. Every reason except `other` follows from the form or the order of the
    differing text, or from the agent's calls."""

    TIME = "time"
    PID = "pid"
    ORDER = "order"
    RANDOMNESS = "randomness"
    OTHER = "other"


HARMLESS = frozenset({Kind.TIME, Kind.ORDER})
"""The kinds of difference in an observation that do not prevent resuming."""

_UNIT = r"(?:ns|us|µs|ms|s|secs?|seconds?|m|mins?|minutes?|h|hours?)"
_SHAPES: dict[Kind, re.Pattern[str]] = {
    Kind.TIME: re.compile(
        r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?: ?(?:Z\b|UTC\b|[+-]\d\d:?\d\d))?)?"
        r"|\b\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?\b"
        r"|\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*\b"
        r"|\b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]* +\d{1,2}\b(?:,? +\d{4}\b)?"
        r"|\b(?:1[6-9]|2[0-2])\d{8}(?:\d{3}|\d{6}|\d{9})?(?:\.\d+)?\b"  # seconds since the epoch, ms, µs, ns
        rf"|\b\d+m\d+(?:\.\d+)?s\b|\b\d+(?:\.\d+)?(?:e-?\d+)? ?{_UNIT}\b"
    ),
    Kind.PID: re.compile(
        r"(?i:\b(?:p?pid|pgid|process)\b[ =:#]*)\d+|^\[\d+\]\s+\d+|/proc/\d+"
        r"|(?<=: )\s*\d+ (?=Killed|Terminated|Aborted)",
        re.MULTILINE,
    ),
    Kind.RANDOMNESS: re.compile(
        r"\b0x[0-9a-fA-F]{6,}\b|\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b|\btmp[._]?\w{6,}"
    ),
}
"""For each kind of difference, a pattern for texts whose form alone shows that the difference is of this kind."""

_HINTS: dict[Kind, tuple[re.Pattern[str], re.Pattern[str]]] = {
    Kind.PID: (re.compile(r"\$\$|\$!|\b\w*pids?\b|\bps\b|\bpgrep\b|\bpstree\b|\btop\b|\bjobs\b"), re.compile(r"\d+")),
    Kind.TIME: (
        re.compile(r"\bdate|time|\bstat\b|\bls -\w*l|\bclock|monotonic|perf_counter|now\(|\bgit\b", re.IGNORECASE),
        re.compile(r"\b[0-9a-f]{7,40}\b|\d+(?:\.\d+)?(?:e-?\d+)?"),
    ),
    Kind.RANDOMNESS: (
        re.compile(r"random|\buuid|\bmktemp|tempfile|\bshuf\b|\bsecrets\b|\brand\b|\bhash\(|\bid\(", re.IGNORECASE),
        re.compile(r"[^\s\[\](){},:'\"]+"),
    ),
}
"""For each kind, a pattern to find in the agent's calls, and a pattern for the text that may differ if it is found."""

_CODE = re.compile(r'"(?:exit_code|returncode|success)": ?(-?\w+)')


def classify(recorded: str, replayed: str, asked: str) -> Kind:
    """Return the reason why two texts differ. `asked` has all text that the agent had written in its calls so far."""
    if _numbers(recorded) != _numbers(replayed):
        return Kind.OTHER
    was, now = _reply_strings(recorded), _reply_strings(replayed)
    for kind, shape in _SHAPES.items():
        if _masked(was, [shape]) == _masked(now, [shape]):
            return kind
    shapes = list(_SHAPES.values())
    was, now = _masked(was, shapes), _masked(now, shapes)
    if was == now:
        return next(kind for kind, shape in _SHAPES.items() if shape.findall(recorded) != shape.findall(replayed))
    if sorted(was.splitlines()) == sorted(now.splitlines()) or sorted(_bare_words(was)) == sorted(_bare_words(now)):
        return Kind.ORDER
    # Numbers and words may be results of the work. They count as ids, times or random only if a call asks for such.
    for kind, (hint, varying) in _HINTS.items():
        if hint.search(asked) and _masked(was, [varying]) == _masked(now, [varying]):
            return kind
    return Kind.OTHER


def first_difference(recorded: str, replayed: str, most: int = 200) -> tuple[str, str]:
    """Return the first line that differs, from each of the two texts, cut to `most` characters around the
    difference."""
    was, now = _reply_strings(recorded).splitlines() or [""], _reply_strings(replayed).splitlines() or [""]
    place = next((n for n, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), min(len(was), len(now)))
    one, other = (lines[place] if place < len(lines) else "" for lines in (was, now))
    if one == other:  # the difference is in a part that is not shown, such as a number
        one, other = recorded, replayed
    at = max(0, next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0) - most // 2)
    return one[at : at + most], other[at : at + most]


def _masked(text: str, shapes: Sequence[re.Pattern[str]]) -> str:
    for shape in shapes:
        text = shape.sub("\N{BULLET}", text)
    return re.sub(r"[ \t]+", " ", text)  # columns are padded to the width of their content


def _bare_words(text: str) -> list[str]:
    return [word.strip(",;[](){}") for word in text.split()]


def _reply_strings(content: str) -> str:
    """Return the strings of a tool's reply, one per line."""
    reply = _json_reply(content)
    return content.replace("\\n", "\n") if reply is None else "\n".join(_strings(reply))


def _numbers(content: str) -> JSON:
    """Return a tool's reply without its strings, or only its exit codes if the reply is not JSON. Any difference here
    is `other`."""
    reply = _json_reply(content)
    return _CODE.findall(content) if reply is None else _without_strings(reply)


def _json_reply(content: str) -> JSON:
    try:
        reply = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None
    return reply if isinstance(reply, dict | list) else None


def _strings(value: JSON) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)


def _without_strings(value: JSON) -> JSON:
    if isinstance(value, dict):
        return {key: _without_strings(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_without_strings(part) for part in value]
    return None if isinstance(value, str) else value
