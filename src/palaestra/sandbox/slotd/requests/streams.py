"""Lists that a slot can make as long as it likes: the entries of a directory, what has changed.

The JSON is written to a file in memory, some entries at a time, and goes to the client as a file does: at its pace, so
that no list is too long for a message and none holds the others up.

Files on their way: a download sends as much as the client has asked for, an upload takes what comes.

Not for files of one piece, which come or go with the request and are no conversation.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator
from typing import Protocol

from ..files import Writing
from ..protocol.connection import Link
from ..protocol.frames import CHUNK, WINDOW, Fields, Frame, Kind

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


class Conversation(Protocol):
    """A request that goes on: CREDIT, CANCEL, DATA and END frames of its number come to it until it has answered."""

    def on_frame(self, frame: Frame) -> None: ...


class Download:
    """Sends a file as DATA, the last piece with the RESULT. Its descriptor is read only as fast as the client takes.

    With `holes`, a hole is a DATA frame that only says how long it is: a slot may claim terabytes that are not there.
    """

    def __init__(
        self, number: int, fd: int, size: int, link: Link, transfers: dict[int, Conversation], holes: bool = False
    ) -> None:
        self._number, self._fd, self._left, self._link, self._transfers = number, fd, size, link, transfers
        self._holes = holes
        self._credit = WINDOW
        transfers[number] = self

    def on_frame(self, frame: Frame) -> None:
        """The client has taken so much, or wants no more."""
        if frame.kind is Kind.CREDIT:
            self._credit += frame.fields["bytes"]
            self.pump()
        elif frame.kind is Kind.CANCEL:
            self._end()

    def pump(self) -> None:
        """Send what there is credit for. A file that has shrunk meanwhile ends early."""
        while self._left > CHUNK and self._credit > 0:
            most = CHUNK
            if self._holes:
                hole, most = self._extent()
                if hole:
                    self._left -= hole
                    self._link.send(Kind.DATA, self._number, {"hole": hole})
                    continue
            data = self._next(most)
            if not data:
                break
            self._credit -= len(data)
            self._link.send(Kind.DATA, self._number, None, data)
        else:
            if self._left > CHUNK:
                return
        self._end(self._next())

    def _extent(self) -> tuple[int, int]:
        """How long a hole is that begins here, which is passed over; else how much of a piece there is before one."""
        here = os.lseek(self._fd, 0, os.SEEK_CUR)
        try:
            data = os.lseek(self._fd, here, os.SEEK_DATA)
        except OSError:  # nothing but a hole is left
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

    def _end(self, data: bytes = b"") -> None:
        del self._transfers[self._number]
        os.close(self._fd)
        self._link.send(Kind.RESULT, self._number, None, data)


class Upload:
    """Takes DATA into a new file; END puts it in its place, CANCEL forgets it. `uploads` are those of its slot."""

    def __init__(
        self, number: int, writing: Writing, link: Link, transfers: dict[int, Conversation], uploads: set[Upload]
    ) -> None:
        self._number, self._writing, self._link, self._transfers = number, writing, link, transfers
        self._uploads = uploads
        transfers[number] = self
        uploads.add(self)

    def on_frame(self, frame: Frame) -> None:
        """The next piece, or the end. After an error the rest of the client's frames name nobody and are dropped."""
        if frame.kind is Kind.DATA:
            try:
                self._writing.add(frame.data)
            except OSError:
                self._forget()
                self._writing.discard()
                raise
        elif frame.kind in (Kind.END, Kind.CANCEL):
            self._forget()
            if frame.kind is Kind.END:
                self._writing.finish()
                self._writing.close()
            else:
                self._writing.discard()
            self._link.send(Kind.RESULT, self._number)

    def lose(self, slot: str) -> None:
        """The slot has ended, and its files may be a snapshot's now: nothing of this one is to be in it."""
        self._forget()
        self._writing.discard()
        lost = {"error": "lost", "message": f"{slot} ended while a file was written to it"}
        self._link.send(Kind.ERROR, self._number, lost)

    def _forget(self) -> None:
        del self._transfers[self._number]
        self._uploads.discard(self)
