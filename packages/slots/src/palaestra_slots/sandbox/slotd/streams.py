"""Transfers contents that do not fit into one frame: files, and lists whose length a slot controls.

A list's JSON is written to a file in memory, some entries at a time, and sent like a file at the client's pace, so that
no list exceeds the size of a message or delays other answers.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator

from .files import Writing
from .protocol.frames import CHUNK, WINDOW, Fields, Frame, FrameConnection, FrameKind, OpenRequest

# The size limit of one list. Without it, a slot could fill the machine's memory with paths of thousands of characters.
MAX_LIST_BYTES = 512 << 20
_ENTRIES_PER_STEP = 256


class Listing:
    """One list: call `fill`, `send` and `close` in this order."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("listing", os.MFD_CLOEXEC)
        self._size = 0

    def fill(self, entries: Iterable[Fields | None]) -> Iterator[None]:
        """Collect all entries, as a job; None among them stands for a pause. Raises OSError (EFBIG) if the list is
        longer than `MAX_LIST_BYTES`."""
        self._write(b"[")
        piece: list[str] = []
        comma = ""
        for entry in entries:
            if entry is not None:
                piece.append(comma + json.dumps(entry, separators=(",", ":")))
                comma = ","
            if entry is None or len(piece) == _ENTRIES_PER_STEP:
                self._write("".join(piece).encode())
                piece.clear()
                yield
        self._write("".join(piece).encode() + b"]")

    def send(self, request: int, connection: FrameConnection, open_requests: dict[int, OpenRequest]) -> None:
        """Answer a request with the list."""
        if self._size > CHUNK:
            os.lseek(self._fd, 0, os.SEEK_SET)
            Download(request, os.dup(self._fd), self._size, connection, open_requests).pump()
        else:
            connection.send(FrameKind.RESULT, request, None, os.pread(self._fd, self._size, 0))

    def close(self) -> None:
        """Close the file; a download has a descriptor of its own."""
        os.close(self._fd)

    def _write(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > MAX_LIST_BYTES:
            raise OSError(errno.EFBIG, f"the list has more than {MAX_LIST_BYTES} bytes")
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]


class Download:
    """Sends a file as DATA frames, with the last piece in the RESULT, as fast as the client reads it. If `holes` is
    true, a hole is sent as a DATA frame with only its length, because a sparse file may claim terabytes."""

    def __init__(
        self, number: int, fd: int, size: int, connection: FrameConnection, open_requests: dict[int, OpenRequest],
        holes: bool = False,
    ) -> None:  # fmt: skip
        self._number, self._fd, self._left, self._connection, self._open = number, fd, size, connection, open_requests
        self._holes = holes
        self._credit = WINDOW
        open_requests[number] = self

    def on_frame(self, frame: Frame) -> None:
        """Handle the client's frame, which grants credit or cancels the request."""
        if frame.kind is FrameKind.CREDIT:
            self._credit += frame.fields["bytes"]
            self.pump()
        elif frame.kind is FrameKind.CANCEL:
            self._end_download()

    def pump(self) -> None:
        """Send as much as the credit allows. A file that has shrunk meanwhile ends early."""
        while self._left > CHUNK and self._credit > 0:
            most = CHUNK
            if self._holes:
                hole, most = self._extent()
                if hole:
                    self._left -= hole
                    self._connection.send(FrameKind.DATA, self._number, {"hole": hole})
                    continue
            data = self._next(most)
            if not data:
                break
            self._credit -= len(data)
            self._connection.send(FrameKind.DATA, self._number, None, data)
        else:
            # There is no credit left; the next one from the client continues here.
            if self._left > CHUNK:
                return
        self._end_download(self._next())

    def _extent(self) -> tuple[int, int]:
        """If there is a hole at the current position, skip it and return its length and 0. Otherwise, return 0 and the
        number of bytes to send now, which is at most `CHUNK` and ends before the next hole."""
        here = os.lseek(self._fd, 0, os.SEEK_CUR)
        try:
            data = os.lseek(self._fd, here, os.SEEK_DATA)
        except OSError:  # the rest is a hole
            data = here + self._left
        if data > here:
            return os.lseek(self._fd, min(data, here + self._left), os.SEEK_SET) - here, 0
        most = min(CHUNK, os.lseek(self._fd, here, os.SEEK_HOLE) - here)
        os.lseek(self._fd, here, os.SEEK_SET)
        return 0, most

    def _next(self, most: int = CHUNK) -> bytes:
        try:
            data = os.read(self._fd, min(most, self._left)) if self._left else b""
        except OSError:
            data = b""
        self._left -= len(data)
        return data

    def _end_download(self, data: bytes = b"") -> None:
        del self._open[self._number]
        os.close(self._fd)
        self._connection.send(FrameKind.RESULT, self._number, None, data)


class Upload:
    """Writes DATA frames to a new file; END puts the file in place, and CANCEL drops it. `uploads` are the slot's
    uploads."""

    def __init__(
        self, number: int, writing: Writing, connection: FrameConnection, open_requests: dict[int, OpenRequest],
        uploads: set[Upload],
    ) -> None:  # fmt: skip
        self._number, self._writing, self._connection, self._open = number, writing, connection, open_requests
        self._uploads = uploads
        open_requests[number] = self
        uploads.add(self)

    def on_frame(self, frame: Frame) -> None:
        """Handle the next piece of the file, or its end. After an error, the client's remaining frames are ignored."""
        if frame.kind is FrameKind.DATA:
            try:
                self._writing.add(frame.data)
            except OSError:
                self._unregister()
                self._writing.discard()
                raise
        elif frame.kind in (FrameKind.END, FrameKind.CANCEL):
            self._unregister()
            if frame.kind is FrameKind.END:
                self._writing.finish()
                self._writing.close()
            else:
                self._writing.discard()
            self._connection.send(FrameKind.RESULT, self._number)

    def lose(self, slot: str, loss: str) -> None:
        """Drop the file because the slot has ended and its files may belong to a snapshot now. `loss` is the kind of
        the error."""
        self._unregister()
        self._writing.discard()
        lost = {"error": loss, "message": f"{slot} ended while a file was being written to it"}
        self._connection.send(FrameKind.ERROR, self._number, lost)

    def _unregister(self) -> None:
        del self._open[self._number]
        self._uploads.discard(self)
