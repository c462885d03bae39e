"""Find the text that a model meant to replace, although it wrote it down a little differently.

Not for guessing: strategies from exact to loose are tried in order, the first that finds anything decides, and if it
finds more than one place the answer is `Ambiguous`, never a looser try and never the first hit. The strategy that
matched is part of the result. Files with CRLF line ends are normalised by the caller.

Invariant: text outside the replaced spans is returned unchanged, character for character.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from palaestra.tools.patching.indents import Reindent
from palaestra.tools.patching.nearest import nearest
from palaestra.tools.patching.places import places

BLOCK_SIMILARITY = 0.8
"""How alike the inner lines of a block must be when only its first and last line match exactly."""
_MAX_BLOCK_LINES, _MAX_COMPARED_PAIRS = 100_000, 10_000_000
"""Up to how many lines, and pairs of letters, such blocks are looked at: more are never a certain place."""


class NoMatch(ValueError):
    """The text is not there in any form; the message shows the nearest lines."""


class Ambiguous(ValueError):
    """The text is there more than once; the message names the lines."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """A finished edit: the new text, the strategy that found the place, and how many places were replaced."""

    text: str
    strategy: str
    count: int


@dataclass(frozen=True, slots=True)
class Span:
    """Characters `[start, end)` of the file and what goes there."""

    start: int
    end: int
    new: str


def replace(text: str, old: str, new: str, *, replace_all: bool = False) -> Replacement:
    """`text` with `old` replaced by `new`. Raises `NoMatch` or `Ambiguous`; `old` must not be empty."""
    if not old.strip():
        strategies: tuple[tuple[str, Strategy], ...] = STRATEGIES[:1]  # blank text has no features to be fuzzy about
    else:
        strategies = STRATEGIES
    for name, strategy in strategies:
        spans = strategy(text, old, new)
        if not spans:
            continue
        if len(spans) > 1 and (name == "block_anchor" or not replace_all):
            raise Ambiguous(_ambiguous(text, spans, name))
        return Replacement(_apply(text, spans), name, len(spans))
    raise NoMatch(f"old_string was not found. {nearest(text, old)}")


Strategy: TypeAlias = Callable[[str, str, str], list[Span]]


def _exact(text: str, old: str, new: str) -> list[Span]:
    spans, start = [], text.find(old)
    while start >= 0:
        spans.append(Span(start, start + len(old), new))
        start = text.find(old, start + len(old))
    return spans


def _by_lines(same: Callable[[str], str], *, reindent: bool) -> Strategy:
    """Whole lines that are equal after `same`. With `reindent` the new text takes over the file's indentation."""

    def strategy(text: str, old: str, new: str) -> list[Span]:
        wanted, ends_line = _split(old)
        keys = [same(line) for line in wanted]
        found = []
        for window in _windows(text, keys, same):
            adapted = Reindent.between(wanted, window.lines).apply(new) if reindent else new
            found.append(window.span(adapted, ends_line))
        return found

    return strategy


def _indentation(text: str, old: str, new: str) -> list[Span]:
    """The same lines at another depth: equal once the common indentation is taken from both."""
    wanted, ends_line = _split(old)
    dedented = _dedent(wanted)
    return [
        window.span(Reindent.between(wanted, window.lines).apply(new), ends_line)
        for window in _windows(text, [line.strip() for line in wanted], str.strip)
        if _dedent(window.lines) == dedented
    ]


def _blank_edges(text: str, old: str, new: str) -> list[Span]:
    """Superfluous blank lines before or after the text, taken from old and new alike."""
    if old.strip("\n") == old:
        return []
    return _exact(text, old.strip("\n"), new.strip("\n"))


def _line_numbers(text: str, old: str, new: str) -> list[Span]:
    """Text copied together with the `12|` prefixes of read_file."""
    bare_old = _without_numbers(old)
    if bare_old is None:
        return []
    bare_new = _without_numbers(new)
    return _exact(text, bare_old, new if bare_new is None else bare_new)


def _escapes(text: str, old: str, new: str) -> list[Span]:
    """Text escaped once too often: a backslash and n where a line end was meant. Both texts are unescaped alike."""
    bare = _unescape(old)
    return _exact(text, bare, _unescape(new)) if bare != old else []


def _block_anchor(text: str, old: str, new: str) -> list[Span]:
    """First and last line match, the lines between are as many and nearly the same."""
    wanted, ends_line = _split(old)
    if len(wanted) < 3:
        return []
    bare, lines = [line.strip() for line in wanted], text.split("\n")
    last_start = len(lines) - len(bare)
    starts = [at for at in range(last_start + 1) if lines[at].strip() == bare[0]]
    starts = [at for at in starts if lines[at + len(bare) - 1].strip() == bare[-1]]
    if len(starts) * len(bare) > _MAX_BLOCK_LINES:
        return []
    windows = _located(text, lines, starts, len(bare))
    pairs = [_unlike(bare, [line.strip() for line in window.lines]) for window in windows]
    if sum(len(a) * len(b) for unlike in pairs for a, b in unlike) > _MAX_COMPARED_PAIRS:
        return []
    return [
        window.span(Reindent.between(wanted, window.lines).apply(new), ends_line)
        for window, unlike in zip(windows, pairs, strict=True)
        if _similarity(unlike, len(bare) - 2) >= BLOCK_SIMILARITY
    ]


@dataclass(frozen=True, slots=True)
class _Window:
    """Consecutive whole lines of the file; `start` is the offset of the first, `end` that after the last's text."""

    lines: list[str]
    start: int
    end: int
    text_length: int

    def span(self, new: str, ends_line: bool) -> Span:
        """The window as a span; the line end after it belongs to it when the model's text ended with one."""
        takes_end = ends_line and self.end < self.text_length
        return Span(self.start, self.end + takes_end, new if takes_end or not ends_line else new.removesuffix("\n"))


def _windows(text: str, keys: list[str], same: Callable[[str], str]) -> list[_Window]:
    """Windows whose lines equal `keys` after `same`, none overlapping another."""
    lines = text.split("\n")
    found: list[int] = []
    for at in places([same(line) for line in lines], keys):
        if not found or at >= found[-1] + len(keys):
            found.append(at)
    return _located(text, lines, found, len(keys))


def _located(text: str, lines: list[str], starts: list[int], size: int) -> list[_Window]:
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line) + 1)
    return [_Window(lines[at : at + size], offsets[at], offsets[at + size] - 1, len(text)) for at in starts]


def _split(old: str) -> tuple[list[str], bool]:
    """The lines of a model's text, and whether it ended with a line end."""
    lines = old.split("\n")
    ends_line = len(lines) > 1 and lines[-1] == ""
    return (lines[:-1] if ends_line else lines), ends_line


def _dedent(lines: list[str]) -> list[str]:
    depths = [len(line) - len(line.lstrip()) for line in lines if line.strip()]
    common = min(depths, default=0)
    return [line[common:].rstrip() if line.strip() else "" for line in lines]


def _collapse(line: str) -> str:
    return " ".join(line.split())


_TYPOGRAPHY = str.maketrans(
    {"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "−": "-", "…": "...", "\u00a0": " ", "\u2002": " "}
)


def _plain(line: str) -> str:
    return line.translate(_TYPOGRAPHY).rstrip()


_NUMBERED = re.compile(r" *(\d+)\|(.*)", re.DOTALL)


def _without_numbers(text: str) -> str | None:
    """The text without `12|` prefixes when every line has one and they count up, else None."""
    lines, ends_line = _split(text)
    matches = [_NUMBERED.fullmatch(line) for line in lines]
    parts = [(int(match[1]), match[2]) for match in matches if match is not None]
    if len(parts) < len(lines) or any(b[0] != a[0] + 1 for a, b in itertools.pairwise(parts)):
        return None
    return "\n".join(part[1] for part in parts) + ("\n" if ends_line else "")


_ESCAPE = re.compile(r"\\([nrt\"'\\])")
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda match: _ESCAPED.get(match[1], match[1]), text)


def _unlike(a: list[str], b: list[str]) -> list[tuple[str, str]]:
    """The pairs of lines at equal places that differ, as far as they are compared."""
    return [(x[:500], y[:500]) for x, y in zip(a, b, strict=True) if x != y]


def _similarity(unlike: list[tuple[str, str]], count: int) -> float:
    """Mean likeness of `count` pairs of lines, 0 to 1, of which these are the ones that differ."""
    ratios = [difflib.SequenceMatcher(None, x, y, autojunk=False).ratio() for x, y in unlike]
    return (count - len(unlike) + sum(ratios)) / count


def _apply(text: str, spans: list[Span]) -> str:
    parts, at = [], 0
    for span in spans:
        parts += [text[at : span.start], span.new]
        at = span.end
    return "".join([*parts, text[at:]])


def _ambiguous(text: str, spans: list[Span], strategy: str) -> str:
    numbers = [str(text.count("\n", 0, span.start) + 1) for span in spans[:10]]
    more = ", …" if len(spans) > 10 else ""
    return (
        f"old_string is there {len(spans)} times (at lines {', '.join(numbers)}{more}; match: {strategy}). "
        "Add surrounding lines until it is unique, or set replace_all to replace every one."
    )


STRATEGIES: tuple[tuple[str, Strategy], ...] = (
    ("exact", _exact),
    ("trailing_whitespace", _by_lines(str.rstrip, reindent=False)),
    ("indentation", _indentation),
    ("blank_edges", _blank_edges),
    ("line_numbers", _line_numbers),
    ("typography", _by_lines(_plain, reindent=False)),
    ("whitespace", _by_lines(_collapse, reindent=True)),
    ("escapes", _escapes),
    ("block_anchor", _block_anchor),
)
"""From exact to loose; all but the last replace only text that differs in form."""
