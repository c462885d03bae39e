"""Which groups make up a batch: choices of sizes that sum to an exact number, the oldest first. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def exact(sizes: Sequence[int], target: int) -> list[int] | None:
    """Places of `sizes` (each at least 1), in order, that sum to `target`; None where no choice does.

    It looks no further than it must, and of the ways to the target it takes the one with the oldest entries. Bit `s` of
    `reached[n]` says whether some of the first n sizes sum to s.
    """
    if target <= 0:
        return [] if target == 0 else None
    wanted, reached = 1 << target, [1]
    for size in sizes:
        reached.append((reached[-1] | reached[-1] << size) & (2 * wanted - 1))
        if reached[-1] & wanted:
            return _walk_back(sizes, reached, target)
    return None


def _walk_back(sizes: Sequence[int], reached: Sequence[int], left: int) -> list[int]:
    taken: list[int] = []
    for place in range(len(reached) - 2, -1, -1):
        if not reached[place] >> left & 1:
            taken.append(place)
            left -= sizes[place]
    return taken[::-1]


def whole(sizes: Sequence[int], unit: int) -> list[int] | None:
    """Places of `sizes` that sum to `unit`, else to the smallest multiple of it that can be made; None where none can.

    Of any `unit` sizes some sum to a multiple of it, so that fewer than `unit` ever have to wait.
    """
    for target in range(unit, sum(sizes) + 1, unit):
        if (found := exact(sizes, target)) is not None:
            return found
    return None
