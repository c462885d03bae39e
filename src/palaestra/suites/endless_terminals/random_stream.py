"""Random streams that are the same everywhere: bytes of SHA-256 over a name and a counter.

For: every choice of the generator. Not for `random.Random`'s users elsewhere: its `choice` and `sample` may change with
the Python version, and here the same seed must give the same bytes on every machine. A stream is named by what it is
for, so that adding a choice in one place changes no other.

What a family draws from: a stream, and values of the vocabulary that read like those of real work.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TypeVar

from palaestra.suites.endless_terminals.words import NOUNS

T = TypeVar("T")

_WORD = 8
"""Bytes of one draw."""


class Stream:
    """One stream of choices, named by `name`: equal names give equal choices."""

    def __init__(self, *name: str | int) -> None:
        self._name = name
        self._words = _words("\x1f".join(map(str, name)).encode())

    def child(self, *name: str | int) -> Stream:
        """A stream of its own for one purpose; drawing from it changes nothing here."""
        return Stream(*self._name, *name)

    def below(self, end: int) -> int:
        """A number from 0 to `end` - 1, each as likely as the others."""
        if end < 1:
            raise ValueError(f"nothing lies below {end}")
        space = 1 << 8 * _WORD
        limit = space - space % end
        return next(word for word in self._words if word < limit) % end

    def between(self, first: int, last: int) -> int:
        """A number from `first` to `last`, both included."""
        return first + self.below(last - first + 1)

    def pick(self, values: Sequence[T]) -> T:
        """One of `values`."""
        return values[self.below(len(values))]

    def sample(self, values: Sequence[T], count: int) -> list[T]:
        """`count` of `values`, in drawn order, no place twice."""
        left = list(values)
        if count > len(left):
            raise ValueError(f"cannot draw {count} of {len(left)}")
        return [left.pop(self.below(len(left))) for _ in range(count)]

    def shuffled(self, values: Sequence[T]) -> list[T]:
        """All of `values`, in drawn order."""
        return self.sample(values, len(values))

    def chance(self, percent: int) -> bool:
        """True in `percent` of a hundred draws."""
        return self.below(100) < percent


def _words(key: bytes) -> Iterator[int]:
    counter = 0
    while True:
        block = hashlib.sha256(key + counter.to_bytes(8, "big")).digest()
        for start in range(0, len(block), _WORD):
            yield int.from_bytes(block[start : start + _WORD], "big")
        counter += 1


class Draw(Stream):
    """A stream that knows words. `fresh` gives each word once, so that names in one part never collide."""

    def __init__(self, *name: str | int) -> None:
        super().__init__(*name)
        self._left: list[str] = list(NOUNS)

    def fresh(self) -> str:
        """A word that this part does not use yet."""
        return self._left.pop(self.below(len(self._left)))

    def words(self, count: int) -> list[str]:
        """So many fresh words."""
        return [self.fresh() for _ in range(count)]

    def sentence(self, words: Sequence[str] = NOUNS, shortest: int = 4, longest: int = 9) -> str:
        """Words in a row, without punctuation."""
        return " ".join(self.pick(words) for _ in range(self.between(shortest, longest)))

    def prose(self, lines: int) -> str:
        """So many lines of words, each ended by a newline."""
        return "".join(f"{self.sentence()}\n" for _ in range(lines))

    def date(self, year: int = 2024) -> str:
        """A day as YYYY-MM-DD; no month has more than 28 days."""
        return f"{year}-{self.between(1, 12):02}-{self.between(1, 28):02}"

    def instants(self, count: int, day: str) -> list[str]:
        """So many different times of one day, rising, as `YYYY-MM-DDTHH:MM:SS`."""
        seconds = sorted(self.sample(range(86_400), count))
        return [f"{day}T{s // 3600:02}:{s % 3600 // 60:02}:{s % 60:02}" for s in seconds]
