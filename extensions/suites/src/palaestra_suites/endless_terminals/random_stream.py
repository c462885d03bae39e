"""Random streams that are the same on every machine. Their bytes are SHA-256 digests of a name and a counter.

`random.Random` is not suitable, because `choice` and `sample` may change with the Python version. A stream is named by
its purpose, so that a new choice in one place does not change the choices elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TypeVar

from palaestra_suites.endless_terminals.words import NOUNS

T = TypeVar("T")

_WORD = 8
"""Bytes per draw."""


class Stream:
    """One stream of choices. Streams with the same name give the same choices."""

    def __init__(self, *name: str | int) -> None:
        self._name = name
        self._words = _random_words("\x1f".join(map(str, name)).encode())

    def child(self, *name: str | int) -> Stream:
        """Return a separate stream for one purpose. Draws from the new stream do not change this stream."""
        return Stream(*self._name, *name)

    def below(self, end: int) -> int:
        """Return an integer from 0 to `end` - 1; each is equally likely."""
        if end < 1:
            raise ValueError(f"there is no number below {end}")
        space = 1 << 8 * _WORD
        limit = space - space % end
        return next(word for word in self._words if word < limit) % end

    def between(self, first: int, last: int) -> int:
        """Return an integer from `first` to `last`, both included; each is equally likely."""
        return first + self.below(last - first + 1)

    def pick(self, values: Sequence[T]) -> T:
        """Return one of `values`."""
        return values[self.below(len(values))]

    def sample(self, values: Sequence[T], count: int) -> list[T]:
        """Return `count` different elements of `values`, in random order."""
        left = list(values)
        if count > len(left):
            raise ValueError(f"cannot draw {count} of {len(left)}")
        return [left.pop(self.below(len(left))) for _ in range(count)]

    def shuffled(self, values: Sequence[T]) -> list[T]:
        """Return all of `values` in random order."""
        return self.sample(values, len(values))

    def chance(self, percent: int) -> bool:
        """Return True with a probability of `percent` percent."""
        return self.below(100) < percent


def _random_words(key: bytes) -> Iterator[int]:
    counter = 0
    while True:
        block = hashlib.sha256(key + counter.to_bytes(8, "big")).digest()
        for start in range(0, len(block), _WORD):
            yield int.from_bytes(block[start : start + _WORD], "big")
        counter += 1


class Draw(Stream):
    """A stream that draws words. `fresh` returns each word once, so that names in one part never collide."""

    def __init__(self, *name: str | int) -> None:
        super().__init__(*name)
        self._left: list[str] = list(NOUNS)

    def fresh(self) -> str:
        """Return a word that was not drawn before."""
        return self._left.pop(self.below(len(self._left)))

    def words(self, count: int) -> list[str]:
        """Return `count` fresh words."""
        return [self.fresh() for _ in range(count)]

    def sentence(self, words: Sequence[str] = NOUNS, shortest: int = 4, longest: int = 9) -> str:
        """Return random words, separated by spaces."""
        return " ".join(self.pick(words) for _ in range(self.between(shortest, longest)))

    def prose(self, lines: int) -> str:
        """Return lines of random words, each with a newline at its end."""
        return "".join(f"{self.sentence()}\n" for _ in range(lines))

    def date(self) -> str:
        """Return a day of 2024 as YYYY-MM-DD, no later than the 28th of a month."""
        return f"2024-{self.between(1, 12):02}-{self.between(1, 28):02}"

    def instants(self, count: int, day: str) -> list[str]:
        """Return different times of one day, ascending, as `YYYY-MM-DDTHH:MM:SS`."""
        seconds = sorted(self.sample(range(86_400), count))
        return [f"{day}T{s // 3600:02}:{s % 3600 // 60:02}:{s % 60:02}" for s in seconds]
