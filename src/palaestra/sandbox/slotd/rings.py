"""The last part of an endless stream, addressed by how many bytes came before."""

from __future__ import annotations


class Ring:
    """Keeps at least the last `limit` bytes of a stream and at most twice that. `total` is the cursor of its end."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept = bytearray()
        self.total = 0

    @property
    def start(self) -> int:
        """The cursor of the oldest byte that is kept."""
        return self.total - len(self._kept)

    def add(self, data: bytes) -> None:
        """Take the next piece of the stream."""
        self.total += len(data)
        self._kept += data[-self._limit :] if len(data) > self._limit else data
        if len(data) > self._limit or len(self._kept) > 2 * self._limit:
            del self._kept[: len(self._kept) - self._limit]

    def read(self, cursor: int, max_bytes: int) -> tuple[int, bytes]:
        """What is kept from `cursor` on (negative: so many bytes before the end), and the cursor where that starts."""
        start = max(cursor if cursor >= 0 else self.total + cursor, self.start)
        offset = start - self.start
        return min(start, self.total), bytes(self._kept[offset : offset + max_bytes])
