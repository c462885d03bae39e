"""What an engine is asked to continue: token ids that know their checksum and their JSON without making them anew.

Not for deciding what stands in a prompt. A prompt grows with the conversation while a turn adds little to it, so its
ids stay where they are, in the segment, and what is costly to make of them is kept there and extended. Invariant:
`checksum` and `json` are always those of the ids.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import overload

import msgspec

from palaestra.inference.ledger.records import packed

LONG = 2048
"""From how many ids on their JSON is kept: it takes more room than they do, and so many are written in 0.03 ms."""


class WrittenIds:
    """The ids of a segment as JSON numbers, as far as somebody asked for them and they are many."""

    __slots__ = ("_count", "_text")

    def __init__(self) -> None:
        self._text = bytearray()
        self._count = 0

    def with_rest(self, segment: array[int], kept: int, rest: array[int]) -> bytes:
        """The first `kept` ids of the segment, which will be asked for again, and `rest[T]`, as one JSON list."""
        if kept < LONG or self._count > kept:  # the latter: asked for by an earlier prompt than the last
            return msgspec.json.encode((segment[:kept] + rest).tolist())
        if self._count < kept:
            self._text += _numbers(segment[self._count : kept], first=not self._count)
            self._count = kept
        return b"".join((b"[", self._text, _numbers(rest, first=False), b"]"))


class Prompt(Sequence[int]):
    """The ids `[T]` of one request: a segment as it is now and `rest` after it. `checksum` is their CRC-32
    (`sent_checksum`).

    The segment is not copied: it only grows, and what is appended to it later is not in this prompt.
    """

    __slots__ = ("_kept", "_rest", "_segment", "_written", "checksum")

    def __init__(self, segment: array[int], checksum: int, written: WrittenIds, rest: array[int]) -> None:
        self.checksum = sent_checksum(rest, checksum)
        self._segment, self._kept, self._written = segment, len(segment), written
        self._rest = rest

    def __len__(self) -> int:
        return self._kept + len(self._rest)

    def __iter__(self) -> Iterator[int]:
        return chain(islice(self._segment, self._kept), self._rest)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return list(self)[index]
        at = range(len(self))[index]
        return self._segment[at] if at < self._kept else self._rest[at - self._kept]

    def grow(self, ids: array[int]) -> None:
        """Add ids at the end."""
        self._rest = self._rest + ids
        self.checksum = sent_checksum(ids, self.checksum)

    def json(self) -> bytes:
        """The ids as a JSON list."""
        return self._written.with_rest(self._segment, self._kept, self._rest)


def sent_checksum(ids: array[int], before: int = 0) -> int:
    """The CRC-32 of the ids that an engine is given; `before` is that of the ids ahead of these."""
    return zlib.crc32(packed(ids), before)


def ids_json(ids: Sequence[int]) -> bytes:
    """Ids `[T]` as a JSON list."""
    return ids.json() if isinstance(ids, Prompt) else msgspec.json.encode(list(ids))


def _numbers(ids: array[int], *, first: bool) -> bytes:
    """Ids separated by commas, with one ahead unless they are the first."""
    text = msgspec.json.encode(ids.tolist())[1:-1]
    return text if first or not text else b"," + text
