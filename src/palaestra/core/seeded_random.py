"""Random choices determined by a seed."""

from __future__ import annotations

import random


class Seeded:
    """One random generator, made when first used: it takes 2.5 KB, and most rollouts never use it."""

    __slots__ = ("_generator", "_seed")

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._generator: random.Random | None = None

    def __call__(self) -> random.Random:
        """The generator, the same at every call."""
        if self._generator is None:
            self._generator = random.Random(self._seed)
        return self._generator
