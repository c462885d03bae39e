"""Lists that a slot can make as long as it likes: the entries of a directory, what has changed.

The JSON is written to a file in memory, some entries at a time, and goes to the client as a file does: at its pace, so
that no list is too long for a message and none holds the others up.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator

from .frames import CHUNK, Fields, Kind
from .link import Link
from .transfers import Conversation, Download

MAX_BYTES = 512 << 20
"""Of one list. Paths may have thousands of characters each: without a bound a slot could fill the machine's memory."""

_PIECE = 256


class Listing:
    """One list: filled, sent, closed."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("listing", os.MFD_CLOEXEC)
        self._size = 0

    def fill(self, entries: Iterable[Fields | None]) -> Iterator[None]:
        """Take all entries, as a job; None among them is a pause. Raises OSError (EFBIG) for too long a list."""
        self._write(b"[")
        piece: list[str] = []
        comma = ""
        for entry in entries:
            if entry is not None:
                piece.append(comma + json.dumps(entry, separators=(",", ":")))
                comma = ","
            if entry is None or len(piece) == _PIECE:
                self._write("".join(piece).encode())
                piece.clear()
                yield
        self._write("".join(piece).encode() + b"]")

    def send(self, request: int, link: Link, transfers: dict[int, Conversation]) -> None:
        """Answer a request with it."""
        if self._size > CHUNK:
            os.lseek(self._fd, 0, os.SEEK_SET)
            Download(request, os.dup(self._fd), self._size, link, transfers).pump()
        else:
            link.send(Kind.RESULT, request, None, os.pread(self._fd, self._size, 0))

    def close(self) -> None:
        """Let go of it; what is being sent is held by who sends it."""
        os.close(self._fd)

    def _write(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > MAX_BYTES:
            raise OSError(errno.EFBIG, f"the list has more than {MAX_BYTES} bytes")
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]
