"""Descriptors for commands (pipes, memory files, /dev/null), and receiving descriptors over a unix socket.

Received descriptors are never inheritable. `socket.recv_fds` ignores its flags, so every program would inherit a second
copy of each pipe, also of the verdict's, which a grader closes before it runs untrusted code.
"""

from __future__ import annotations

import array
import errno
import fcntl
import functools
import os
import socket
import termios

PIPE_BYTES = 256 << 10
READ_BYTES = 64 << 10  # what a pipe holds unless its writer has changed that
_NO_BYTES = bytes(4)  # zero as FIONREAD gives it


def pipe() -> tuple[int, int]:
    """A pipe whose reading end, ours, does not block. The writing end does, as programs expect."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(reader, False)
    return reader, writer


def input_pipe() -> tuple[int, int]:
    """A pipe whose writing end, ours, does not block; the reading end does."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writer, False)
    return reader, writer


def is_empty(fd: int) -> bool:
    """Whether a pipe is empty now; cheaper than a read that raises."""
    return fcntl.ioctl(fd, termios.FIONREAD, _NO_BYTES) == _NO_BYTES


def read(fd: int) -> bytes | None:
    """The next piece; empty at the end, None if there is nothing now. A terminal reports its end as an error."""
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
    """/dev/null for reading and writing, opened once, before the server has a root of its own."""
    return os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)


class MemoryFile:
    """A file in memory that a process of the slot reads by opening `/proc/self/fd/N` for each content."""

    def __init__(self) -> None:
        self.fd = -1

    def open(self) -> None:
        """Make the file, empty. Raises OSError."""
        self.fd = os.memfd_create("input", os.MFD_CLOEXEC)

    def put(self, data: bytes) -> None:
        """Replace the content."""
        position = os.pwrite(self.fd, data, 0)
        while position < len(data):
            position += os.pwrite(self.fd, memoryview(data)[position:], position)
        os.ftruncate(self.fd, position)  # afterwards, so that its pages are used again

    def close(self) -> None:
        """Close it. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def memory_file(data: bytes) -> int:
    """A descriptor from which the data can be read."""
    memory = os.memfd_create("input", os.MFD_CLOEXEC)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(memory, view) :]
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
    """One message and at most `count` descriptors, all close-on-exec."""
    fds = array.array("i")
    space = socket.CMSG_SPACE(count * fds.itemsize)
    data, ancillary, _, _ = channel.recvmsg(size, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds)
