"""Descriptors that arrive over a unix socket, never inheritable: what a command gets is named when it is started.

`socket.recv_fds` takes flags and drops them, so every program would inherit a second copy of each pipe: also of the
verdict's, which a grader closes before it lets somebody else's code run.
"""

from __future__ import annotations

import array
import os
import socket


def receive(channel: socket.socket, size: int, count: int) -> tuple[bytes, list[int]]:
    """One message and at most `count` descriptors, all close-on-exec."""
    fds = array.array("i")
    space = socket.CMSG_SPACE(count * fds.itemsize)
    data, ancillary, _, _ = channel.recvmsg(size, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds)


def memory_file(data: bytes) -> int:
    """A file in memory to read the data from."""
    memory = os.memfd_create("input", os.MFD_CLOEXEC)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(memory, view) :]
        return os.open(f"/proc/self/fd/{memory}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(memory)
