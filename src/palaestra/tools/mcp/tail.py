"""What a server that is a command writes to stderr: its last words, and the sign that it has ended.

Invariant: reading never blocks the loop, and no more than a few kilobytes are kept, however much is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TextIO

_TAIL_BYTES = 4096


class Tail:
    """The last few kilobytes that a server wrote to stderr, and whether all who could write there are gone."""

    def __init__(self) -> None:
        self.ended = False
        self._data = b""
        self._reading: int | None = None
        self._writing: TextIO | None = None
        self._at_end = asyncio.Event()

    def opened(self) -> TextIO:
        """The end for the server to write to."""
        self._reading, writing = os.pipe()
        os.set_blocking(self._reading, False)
        asyncio.get_running_loop().add_reader(self._reading, self._read)
        self._writing = os.fdopen(writing, "w")
        return self._writing

    def let_go(self) -> None:
        """Close our copy of the server's end: from now on its last copy is the server's."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.close()

    async def settled(self, wait_s: float = 1.0) -> None:
        """Wait a moment for the last words of a server that has ended."""
        self.let_go()
        if self._reading is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._at_end.wait()

    def text(self) -> str:
        """The last words."""
        return self._data.decode(errors="replace").strip()

    def close(self) -> None:
        """Stop reading. Idempotent."""
        self.let_go()
        reading, self._reading = self._reading, None
        if reading is not None:
            asyncio.get_running_loop().remove_reader(reading)
            os.close(reading)

    def _read(self) -> None:
        assert self._reading is not None
        try:
            piece = os.read(self._reading, 1 << 16)
        except BlockingIOError:
            return
        self._data = (self._data + piece)[-_TAIL_BYTES:]
        if not piece:
            self.ended = True
            self._at_end.set()
            self.close()
