"""Makes pipes and other descriptors for commands, receives descriptors over a unix socket, and captures output up to a
limit.

Received descriptors are never inheritable. `socket.recv_fds` is not used, because it ignores its flags: every program
would inherit a second copy of each pipe, including the verdict's pipe, which a grader closes before it runs untrusted
code.

Spill files hold the output that is not kept in memory. They are files of the slot below /tmp, so they are in no
snapshot and count against the slot's disk limit. Each file gets the output from the first byte up to `MAX_SPILL_BYTES`.
A slot keeps only the newest `_MAX_FILES` files.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import functools
import os
import socket
import termios
from collections import deque
from collections.abc import Callable

from .. import files
from ..protocol.frames import Fields
from ..rung import SlotPath

PIPE_BYTES = 256 << 10
READ_BYTES = 64 << 10  # the capacity of a pipe, unless its writer has changed it
_NO_BYTES = bytes(4)  # zero in the form in which FIONREAD returns it


def pipe() -> tuple[int, int]:
    """Return a pipe whose reading end, which this process keeps, does not block. The writing end blocks, as programs
    expect."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(reader, False)
    return reader, writer


def input_pipe() -> tuple[int, int]:
    """Return a pipe whose writing end, which this process keeps, does not block. The reading end blocks."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writer, False)
    return reader, writer


def is_empty(fd: int) -> bool:
    """Return whether a pipe is empty now. This is cheaper than a read that raises."""
    return fcntl.ioctl(fd, termios.FIONREAD, _NO_BYTES) == _NO_BYTES


def read(fd: int) -> bytes | None:
    """Return the next piece of data: empty at the end, None if there is no data now. The error EIO, with which a
    terminal reports its end, counts as the end."""
    try:
        return os.read(fd, READ_BYTES)
    except BlockingIOError:
        return None
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return b""


@functools.cache
def nothing() -> int:
    """Return a descriptor of /dev/null for reading and writing. It is opened once, before the server has its own
    root."""
    return os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)


class MemoryFile:
    """A file in memory. A process of the slot opens `/proc/self/fd/N` each time it reads new content."""

    def __init__(self) -> None:
        self.fd = -1

    def open(self) -> None:
        """Make the empty file. Raises OSError."""
        self.fd = os.memfd_create("input", os.MFD_CLOEXEC)

    def put(self, data: bytes) -> None:
        """Replace the content."""
        position = os.pwrite(self.fd, data, 0)
        while position < len(data):
            position += os.pwrite(self.fd, memoryview(data)[position:], position)
        os.ftruncate(self.fd, position)  # after writing, so that the file's pages are reused

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def memory_file(data: bytes) -> int:
    """Return a descriptor from which the data can be read."""
    memory = os.memfd_create("input", os.MFD_CLOEXEC)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(memory, view) :]
        # Opened again, because the descriptor that has written stands at the end of the data.
        return os.open(f"/proc/self/fd/{memory}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(memory)


def close(*fds: int) -> None:
    """Close descriptors; ignore negative numbers."""
    for fd in fds:
        if fd >= 0:
            try:  # noqa: SIM105 - runs for every command, and the shorter form costs three calls
                os.close(fd)
            except OSError:
                pass


def receive(channel: socket.socket, size: int, count: int) -> tuple[bytes, list[int]]:
    """Receive one message and at most `count` descriptors, all close-on-exec."""
    fds = array.array("i")
    space = socket.CMSG_SPACE(count * fds.itemsize)
    data, ancillary, _, _ = channel.recvmsg(size, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            # The kernel cuts the list if more descriptors were sent than fit, and a cut number is not a descriptor.
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds)


class Capture:
    """Keeps at most `limit` bytes of a stream of any length, half of them from its start and half from its end."""

    def __init__(self, limit: int) -> None:
        self.total = 0
        self._head_limit = limit - limit // 2
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_size = 0

    def add(self, data: bytes) -> None:
        """Take the next piece of the stream."""
        self.total += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if not data:
            return
        self._tail.append(data)
        self._tail_size += len(data)
        while self._tail and self._tail_size - len(self._tail[0]) >= self._tail_limit:
            self._tail_size -= len(self._tail.popleft())
        if len(self._tail) > 1024:
            self._join()

    @property
    def truncated(self) -> bool:
        """Whether anything was dropped."""
        return self.total > self._head_limit + self._tail_limit

    def parts(self) -> tuple[bytes, bytes]:
        """Return the head and the tail. Together they are the whole stream if nothing was dropped."""
        if not self._tail:
            return bytes(self._head), b""
        self._join()
        return bytes(self._head), self._tail[0]

    def _join(self) -> None:
        """Join the pieces, so that a stream of single bytes takes no more memory than the limit."""
        tail = b"".join(self._tail)
        self._tail = deque([tail[len(tail) - self._tail_limit :] if len(tail) > self._tail_limit else tail])
        self._tail_size = len(self._tail[0])


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
        """Return the cursor of the first returned byte, and the kept bytes from `cursor`; a negative cursor counts back
        from the end."""
        start = max(cursor if cursor >= 0 else self.total + cursor, self.start)
        offset = start - self.start
        return min(start, self.total), bytes(self._kept[offset : offset + max_bytes])


DIRECTORY = "/tmp/full-output"  # noqa: S108 - in the slot
MAX_SPILL_BYTES = 4 << 20  # per file. The file's pages are charged to the server, not to the slot, so it stays small
_MAX_FILES = 8


class Shelf:
    """The spill files of one slot. `locate` returns where the server can write a path of the slot."""

    def __init__(self, locate: Callable[[str], SlotPath]) -> None:
        self._locate = locate
        self._paths: deque[str] = deque()
        self._count = 0

    def open(self, name: str) -> tuple[int, str] | None:
        """Return a descriptor of a new file, open for writing, and the path by which commands find the file; None if
        the file cannot be made in the slot."""
        self._count += 1
        path = f"{DIRECTORY}/{self._count}-{name}.txt"
        with contextlib.suppress(OSError):
            place = self._locate(path)
            fd = files.create(place.root, place.path, place.owner)
            if place.prefix:  # commands and the client use different paths for the file
                path = os.readlink(f"/proc/self/fd/{fd}")
            self._paths.append(path)
            if len(self._paths) > _MAX_FILES:
                self._remove(self._paths.popleft())
            return fd, path
        return None

    def _remove(self, path: str) -> None:
        with contextlib.suppress(OSError):
            place = self._locate(path)
            files.unlink(place.root, place.path)


class Spill:
    """Follows one stream and opens its file once the stream is longer than `limit`."""

    def __init__(self, shelf: Shelf, name: str, limit: int) -> None:
        self._shelf, self._name, self._limit = shelf, name, limit
        self.fd = -1  # the file, while it is open
        self._over = False
        self.path: str | None = None
        self.size = 0  # the number of bytes in the file

    def add(self, data: bytes, before: Capture) -> None:
        """Take the next piece of the stream. `before` does not have this piece yet; until the file is opened, `before`
        holds all earlier pieces."""
        if self._over or before.total + len(data) <= self._limit:
            return
        if self.path is None:
            opened = self._shelf.open(self._name)
            if opened is None:
                self._over = True
                return
            self.fd, self.path = opened
            for part in before.parts():
                self._write(part)
        self._write(data)

    def close(self) -> None:
        """Close the file; later pieces are ignored. Idempotent."""
        self._over = True
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def fields(self) -> Fields:
        """Return the file's path and size for a result; empty if nothing was spilled."""
        return {"full_output_path": self.path, "full_output_bytes": self.size} if self.path is not None else {}

    def _write(self, data: bytes) -> None:
        view = memoryview(data)[: MAX_SPILL_BYTES - self.size]
        try:
            while view and not self._over:
                written = os.write(self.fd, view)
                view, self.size = view[written:], self.size + written
        except OSError:
            self.close()  # the slot's disk limit is reached
        if self.size == MAX_SPILL_BYTES:
            self.close()
