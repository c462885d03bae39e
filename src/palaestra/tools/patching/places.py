"""Where some lines stand among others, in time that grows with their number alone, whatever they are."""

from __future__ import annotations

from collections.abc import Sequence


def places(lines: Sequence[str], wanted: Sequence[str], start: int = 0) -> list[int]:
    """Every index from `start` on where `wanted` begins in `lines`; places may overlap.

    Source: Knuth, Morris, Pratt: Fast pattern matching in strings (1977).
    """
    falls, matched, found = _falls(wanted), 0, []
    for index in range(start, len(lines)):
        while matched and (matched == len(wanted) or lines[index] != wanted[matched]):
            matched = falls[matched - 1]
        matched += lines[index] == wanted[matched]
        if matched == len(wanted):
            found.append(index - matched + 1)
    return found


def _falls(wanted: Sequence[str]) -> list[int]:
    """For each beginning of `wanted`, how long its longest shorter beginning is that also ends it."""
    falls, matched = [0] * len(wanted), 0
    for index in range(1, len(wanted)):
        while matched and wanted[index] != wanted[matched]:
            matched = falls[matched - 1]
        matched += wanted[index] == wanted[matched]
        falls[index] = matched
    return falls
