"""What an engine is asked to continue: token ids that know their checksum and their JSON without making them anew.

Not for deciding what stands in a prompt. A prompt grows with the conversation while a turn adds little to it, so both
are kept with the segment and extended. Invariant: `checksum` and `json` are always those of the ids.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from palaestra.inference.ledger.base import packed

if TYPE_CHECKING:
    _Ids = array[int]
else:
    _Ids = array


class WrittenIds:
    """The ids of a segment as JSON numbers, as far as somebody asked for them."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._count = 0

    def with_rest(self, ids: array[int], kept: int) -> bytes:
        """`ids[T]` as a JSON list. The first `kept` are the segment's, and will be asked for again."""
        if self._count > kept:  # asked for by an earlier prompt: the segment has gone on since
            return msgspec.json.encode(ids.tolist())
        if self._count < kept:
            self._text += _numbers(ids[self._count : kept], first=not self._count)
            self._count = kept
        return b"".join((b"[", self._text, _numbers(ids[kept:], first=not kept), b"]"))


class Prompt(_Ids):
    """The ids `[T]` of one request, as `array("i")`, which they are. `checksum` is their CRC-32 (`sent_checksum`)."""

    checksum: int = 0
    _kept: int = 0
    _written: WrittenIds | None = None

    @classmethod
    def after(cls, segment: array[int], checksum: int, written: WrittenIds, delta: Sequence[int]) -> Prompt:
        """A segment so far, of that checksum, and `delta[D]` after it. A copy."""
        prompt = cls("i", segment)
        prompt.checksum, prompt._kept, prompt._written = checksum, len(segment), written
        prompt.grow(array("i", delta))
        return prompt

    def grow(self, ids: array[int]) -> None:
        """Add ids at the end."""
        self.extend(ids)
        self.checksum = sent_checksum(ids, self.checksum)

    def json(self) -> bytes:
        """The ids as a JSON list."""
        return (self._written or WrittenIds()).with_rest(self, self._kept)


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
