"""Finds the text that a model meant to replace, even if the model wrote it slightly differently.

Strategies from exact to loose are tried in order, and the first that finds anything decides. If it finds several
places, even overlapping ones, `Ambiguous` is raised: no looser strategy is tried, and no place is chosen. The caller
normalises files whose line ends are all CRLF.

Invariants: a place differs from the model's text only in white space, quotes and dashes, never in its words, because a
model's memory of a file may be stale. Text outside the replaced spans, and every line that the old and the new text
share, stays as the file has it, character for character.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from palaestra.tools.patching.kept_text import Rewrite
from palaestra.tools.patching.lines import carriage_return, nearest, places

_MAX_LINES_LOOKED_AT = 2_000_000
"""The maximum number of lines, summed over all places, whose indentation is compared."""
_MOST_NAMED = 10
"""The maximum number of places that an `Ambiguous` error names."""


class NoMatch(ValueError):
    """The text was not found in any form. The message shows the nearest lines, if any are similar."""


class Ambiguous(ValueError):
    """The text was found more than once. The message names the lines."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """A finished edit: the new text, the strategy that found the place, and how many places were replaced."""

    text: str
    strategy: str
    count: int


@dataclass(frozen=True, slots=True)
class EditSpan:
    """Characters `[start, end)` of the file and their replacement."""

    start: int
    end: int
    new: str


def replace(text: str, old: str, new: str, *, replace_all: bool = False) -> Replacement:
    """Return `text` with `old` replaced by `new`, everywhere if `replace_all` is true. `old` must not be empty. Raises
    `NoMatch` or `Ambiguous`."""
    if not old.strip():
        strategies: tuple[tuple[str, Strategy], ...] = STRATEGIES[:1]  # a looser match of blank text means nothing
    else:
        strategies = STRATEGIES
    for name, strategy in strategies:
        # There may be millions of ambiguous places; the search stops after those that the error names.
        spans = list(itertools.islice(strategy(text, old, new, replace_all), None if replace_all else _MOST_NAMED + 1))
        if not spans:
            continue
        if len(spans) > 1 and not replace_all:
            raise Ambiguous(_ambiguous(text, spans, name))
        return Replacement(_apply(text, spans), name, len(spans))
    raise NoMatch(f"old_string was not found. {nearest(text, old)}")


Strategy: TypeAlias = Callable[[str, str, str, bool], Iterable[EditSpan]]
"""`strategy(text, old, new, apart)` finds the places, in order, including overlapping ones. If `apart` is true, because
all places are to be replaced, each place begins after the end of the previous place."""


def _exact(text: str, old: str, new: str, apart: bool) -> Iterator[EditSpan]:
    for start in _offsets(text, old, len(old) if apart else 1):
        yield EditSpan(start, start + len(old), new)


def _offsets(text: str, wanted: str, step: int) -> Iterator[int]:
    """Yield the offsets where `wanted` begins. The search continues `step` characters after each of them."""
    at = text.find(wanted)
    while at >= 0:
        yield at
        at = text.find(wanted, at + step)


def _by_lines(same: Callable[[str], str]) -> Strategy:
    """Return a strategy that finds whole lines that are equal once `same` is applied to them."""

    def strategy(text: str, old: str, new: str, apart: bool) -> Iterator[EditSpan]:
        wanted, ends_line = _split_lines(old)
        rewrite = Rewrite.of(old, new)
        for window in _windows(text, [same(line) for line in wanted], same, apart):
            yield window.span(rewrite, ends_line)

    return strategy


def _indentation(text: str, old: str, new: str, apart: bool) -> Iterator[EditSpan]:
    """Find the same lines at a different depth: equal without their common indentation."""
    wanted, ends_line = _split_lines(old)
    dedented = _dedent(wanted)
    keys, rewrite = [line.strip() for line in wanted], Rewrite.of(old, new)
    for window in _windows(text, keys, str.strip, apart, lambda lines: _dedent(lines) == dedented):
        yield window.span(rewrite, ends_line)


def _blank_edges(text: str, old: str, new: str, apart: bool) -> Iterable[EditSpan]:
    """Find the text without its blank lines at the beginning and the end. These lines are removed from both `old` and
    `new`."""
    begins, ends = old.startswith("\n"), old.endswith("\n")
    if not (begins or ends):
        return ()
    return _of_lines(text, old.strip("\n"), new.strip("\n"), apart, begins=begins, ends=ends)


def _line_numbers(text: str, old: str, new: str, apart: bool) -> Iterable[EditSpan]:
    """Find whole lines that were copied with the `12|` prefixes of read_file."""
    bare_old, bare_new = _without_numbers(old), _without_numbers(new)
    if bare_old is None or not bare_old.strip():
        return ()
    return _of_lines(text, bare_old, new if bare_new is None else bare_new, apart, ends=not bare_old.endswith("\n"))


def _of_lines(
    text: str, old: str, new: str, apart: bool, *, begins: bool = True, ends: bool = True
) -> Iterator[EditSpan]:
    """Yield the places of `old` that begin at the start of a line (`begins`) and end at the end of one (`ends`)."""
    # The line ends around the text let one search also find places at the edges of the file.
    wanted = "\n" * begins + old + "\n" * ends
    for at in _offsets(f"\n{text}\n", wanted, len(old) if apart else 1):
        start = at + begins - 1
        yield EditSpan(start, start + len(old), new)


def _escapes(text: str, old: str, new: str, apart: bool) -> Iterable[EditSpan]:
    """Find text that was escaped once too often, such as `\\n` for a line end. Unescapes both texts."""
    bare = _unescape(old)
    return _exact(text, bare, _unescape(new), apart) if bare != old and bare.strip() else ()


@dataclass(frozen=True, slots=True)
class _Window:
    """Consecutive whole lines of the file, from offset `start` to `end`, without the last line end."""

    lines: list[str]
    start: int
    end: int
    text_length: int

    def span(self, rewrite: Rewrite, ends_line: bool) -> EditSpan:
        """Return the span that rewrites the window. If the model's text ended with a line end, the span includes the
        line end after the window."""
        takes_end = ends_line and self.end < self.text_length
        new = rewrite.apply([*self.lines, ""] if ends_line else self.lines)
        new = new if takes_end or not ends_line else new.removesuffix("\n")
        if end := carriage_return(self.lines):
            new = new.replace("\r\n", "\n").removesuffix("\r")
            new = new.replace("\n", f"{end}\n") + ("" if takes_end else end)
        return EditSpan(self.start, self.end + takes_end, new)


def _windows(
    text: str,
    keys: list[str],
    same: Callable[[str], str],
    apart: bool,
    fits: Callable[[list[str]], bool] | None = None,
) -> Iterator[_Window]:
    """Yield the windows whose lines equal `keys` once `same` is applied to them, and pass `fits`. If too many lines
    would have to be compared, yield nothing."""
    lines = text.split("\n")
    starts = places([same(line) for line in lines], keys)
    # A file of equal lines would otherwise be compared for each of its lines.
    if fits is not None and len(starts) * len(keys) > _MAX_LINES_LOOKED_AT:
        return
    end, located = 0, _located(text, lines, len(keys))
    for start in starts:
        if (start >= end or not apart) and (fits is None or fits(lines[start : start + len(keys)])):
            yield located(start)
            end = start + len(keys)


def _located(text: str, lines: list[str], size: int) -> Callable[[int], _Window]:
    """Return a function from the index of a line to the window of `size` lines that begins there."""
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line) + 1)
    return lambda at: _Window(lines[at : at + size], offsets[at], offsets[at + size] - 1, len(text))


def _split_lines(old: str) -> tuple[list[str], bool]:
    """Return the lines of a model's text, and whether it ends with a line end."""
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


def _without_typography(line: str) -> str:
    return line.translate(_TYPOGRAPHY).rstrip()


_NUMBERED = re.compile(r" *(\d+)\|(.*)", re.DOTALL)


def _without_numbers(text: str) -> str | None:
    """Return the text without `12|` prefixes if every line has such a prefix and the numbers are consecutive.
    Otherwise, return None."""
    lines, ends_line = _split_lines(text)
    matches = [_NUMBERED.fullmatch(line) for line in lines]
    parts = [(int(match[1]), match[2]) for match in matches if match is not None]
    if len(parts) < len(lines) or any(b[0] != a[0] + 1 for a, b in itertools.pairwise(parts)):
        return None
    return "\n".join(part[1] for part in parts) + ("\n" if ends_line else "")


_ESCAPE = re.compile(r"\\([nrt\"'\\])")
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda match: _ESCAPED.get(match[1], match[1]), text)


def _apply(text: str, spans: list[EditSpan]) -> str:
    parts, at = [], 0
    for span in spans:
        parts += [text[at : span.start], span.new]
        at = span.end
    return "".join([*parts, text[at:]])


def _ambiguous(text: str, spans: list[EditSpan], strategy: str) -> str:
    numbers = [str(text.count("\n", 0, span.start) + 1) for span in spans[:_MOST_NAMED]]
    count, more = (f"more than {_MOST_NAMED}", ", …") if len(spans) > _MOST_NAMED else (str(len(spans)), "")
    return (
        f"old_string occurs {count} times (at lines {', '.join(numbers)}{more}; match: {strategy}). "
        "Add surrounding lines until it is unique, or set replace_all to replace all of them."
    )


STRATEGIES: tuple[tuple[str, Strategy], ...] = (
    ("exact", _exact),
    ("trailing_whitespace", _by_lines(str.rstrip)),
    ("indentation", _indentation),
    ("blank_edges", _blank_edges),
    ("line_numbers", _line_numbers),
    ("typography", _by_lines(_without_typography)),
    ("whitespace", _by_lines(_collapse)),
    ("escapes", _escapes),
)
"""The strategies from exact to loose. All accept only differences in form."""
