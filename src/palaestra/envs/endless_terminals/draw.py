"""What a family draws from: a stream, and values of the vocabulary that read like those of real work."""

from __future__ import annotations

from collections.abc import Sequence

from palaestra.envs.endless_terminals.stream import Stream
from palaestra.envs.endless_terminals.words import NOUNS


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
