"""Text that is still arriving, and the few ways in which grammars look at it.

For: writing a grammar once, as straight-line code that reads a whole text and a stream alike. A reading is a generator:
it yields when the answer depends on text that has not arrived, and is resumed when there is more. Not for deciding what
the text means. Invariant: what a reading returns depends on the text alone, never on how it was cut into chunks, and
each costs no more than the distance it covers.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias, TypeVar

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]

_SPACE = re.compile(r"[ \t\r\n]*")
_BLOCK = 4096


class Mark(NamedTuple):
    """A marker found in the text, from `start` to `end`."""

    text: str
    start: int
    end: int


class Markers:
    """Literal strings to look for together. None may contain another, or which is found would depend on chunks."""

    def __init__(self, *literals: str) -> None:
        assert not any(a != b and a in b for a in literals for b in literals), literals
        self.literals = literals
        self.longest = max(map(len, literals))
        self.pattern = re.compile("|".join(map(re.escape, literals)))
        self._beginnings = frozenset(literal[:size] for literal in literals for size in range(1, len(literal)))
        self._first = re.compile("|".join({re.escape(literal[0]) for literal in literals}))

    def held(self, block: str, offset: int) -> int:
        """How many characters at the block's end, at or after `offset`, may be the beginning of a marker."""
        for found in self._first.finditer(block, max(offset, len(block) - self.longest + 1)):
            if block[found.start() :] in self._beginnings:
                return len(block) - found.start()
        return 0


@lru_cache(maxsize=256)
def marks(*literals: str) -> Markers:
    """The same as `Markers`, made once: for tags that depend on the format, in code that runs per call."""
    return Markers(*literals)


class Source:
    """One output. Positions count characters from its beginning. `cut` is known once it is closed."""

    def __init__(self) -> None:
        self._buffer = io.StringIO(newline="")  # appends and slices in time that does not grow with what it holds
        self._block, self._block_start = "", 0  # what was read last: most looks go where the one before went
        self.end = 0
        self.closed = False
        self.cut = False

    def feed(self, chunk: str) -> None:
        """More text."""
        self._buffer.seek(self.end)
        self._buffer.write(chunk)
        self.end += len(chunk)

    def close(self, cut: bool) -> None:
        """No more text."""
        self.closed, self.cut = True, cut

    def read(self, start: int, end: int) -> str:
        """The text between two positions, as far as it has arrived."""
        end = min(end, self.end)
        if end - start > _BLOCK:
            self._buffer.seek(start)
            return self._buffer.read(end - start)
        block, offset = self._look(start, end - start)
        return block[offset : offset + max(0, end - start)]

    def _look(self, position: int, size: int) -> tuple[str, int]:
        """A block with at least `size` characters from `position`, if there are so many, and where they begin in it."""
        offset = position - self._block_start
        if offset < 0 or offset + size > len(self._block):
            self._buffer.seek(position)
            self._block, self._block_start = self._buffer.read(max(size, _BLOCK)), position
            offset = 0
        return self._block, offset

    def find(
        self, markers: Markers, start: int, stop: int | None = None, passed: Callable[[int], None] | None = None
    ) -> Reading[Mark | None]:
        """The first marker at or after `start` that begins before `stop`; None when the text has none.

        `passed` is told, before each wait, the position before which no marker can begin any more.
        """
        position = start
        while True:
            block, offset = self._look(position, min(markers.longest, self.end - position))
            found = markers.pattern.search(block, offset)
            shift = position - offset
            if found is not None:
                begin = shift + found.start()
                return None if stop is not None and begin >= stop else Mark(found[0], begin, shift + found.end())
            last = shift + len(block)
            if last >= self.end and self.closed:
                return None
            if stop is not None and last >= stop + markers.longest:
                return None
            position = max(position, last - markers.held(block, offset))
            if last >= self.end:
                if passed is not None:
                    passed(position)
                yield

    def skip(self, start: int, run: re.Pattern[str] = _SPACE) -> Reading[int]:
        """Where a run of characters (white space, if nothing else is said) that begins at `start` ends."""
        position = start
        while True:
            block, offset = self._look(position, min(1, self.end - position))
            found = run.match(block, offset)
            end = found.end() if found else offset
            position += end - offset
            if end < len(block) or (position >= self.end and self.closed):
                return position
            if position >= self.end:
                yield

    def at(self, position: int, literal: str) -> Reading[bool]:
        """Whether the text goes on with `literal`."""
        while True:
            seen = self.read(position, position + len(literal))
            if seen == literal:
                return True
            if self.closed or not literal.startswith(seen):
                return False
            yield

    def ends(self, position: int) -> Reading[bool]:
        """Whether the text ends at `position`."""
        while position >= self.end and not self.closed:
            yield
        return position >= self.end

    def breaks_off(self, position: int, *tags: str) -> bool:
        """Whether the output ends in the middle of one of these tags, for which `at` has already said no."""
        rest = self.read(position, self.end) if self.end - position < max(map(len, tags)) else None
        return self.closed and rest is not None and any(tag.startswith(rest) for tag in tags)


class Closing(NamedTuple):
    """How a call ends: with its end tags, with the output, or with something `else`."""

    end: int
    how: Literal["tags", "output", "else"]


def closing(source: Source, position: int, *tags: str) -> Reading[Closing]:
    """Whether the text goes on with the end tags, white space between them. Part of a tag at the end counts as none."""
    for tag in tags:
        begin = yield from source.skip(position)
        if (yield from source.at(begin, tag)):
            position = begin + len(tag)
        elif source.breaks_off(begin, tag):
            return Closing(source.end, "output")
        else:
            return Closing(position, "else")
    return Closing(position, "tags")
