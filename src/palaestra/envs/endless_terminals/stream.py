"""Random streams that are the same everywhere: bytes of SHA-256 over a name and a counter.

For: every choice of the generator. Not for `random.Random`'s users elsewhere: its `choice` and `sample` may change with
the Python version, and here the same seed must give the same bytes on every machine. A stream is named by what it is
for, so that adding a choice in one place changes no other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TypeVar

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
