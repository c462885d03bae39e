"""What the server gives a client that may have it: of each slot the root, and a line to its init.

With them neither files nor commands need the server. They go as descriptors over a SOCK_SEQPACKET of their own, with
the epoch of the slot's lease and the user to whom the slot's files belong. Shared by both sides, as `frames.py` is.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import NamedTuple

from ..exec import pipes

_LAYOUT = struct.Struct("!QQ")
_DESCRIPTORS = 3


class Line(NamedTuple):
    """A socket over which orders can be given to an init, and the descriptor of the init's process."""

    socket: socket.socket
    process: int


class Handed(NamedTuple):
    """What came for one slot: `fds` are its root and, where its init takes one, the line and the init's process; fewer
    where no more files may be open here."""

    epoch: int
    owner: int
    fds: list[int]


def give(channel: socket.socket, epoch: int, owner: int, root: int, line: Line | None) -> None:
    """Hand over copies, if the client takes them and has not too many waiting. The line is closed here."""
    with contextlib.suppress(OSError), contextlib.nullcontext() if line is None else line.socket:
        fds = [root] if line is None else [root, line.socket.fileno(), line.process]
        socket.send_fds(channel, [_LAYOUT.pack(epoch, owner)], fds)


def take(channel: socket.socket) -> Handed | None:
    """The next one; None when there is none now, or none will come."""
    try:
        data, fds = pipes.receive(channel, _LAYOUT.size, _DESCRIPTORS)
    except OSError:
        return None
    if not data:
        return None
    epoch, owner = _LAYOUT.unpack(data)
    return Handed(epoch, owner, fds)
