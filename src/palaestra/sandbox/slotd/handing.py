"""The roots of slots, from the server to a client that may have them, for which files then need no server.

They go as descriptors over a SOCK_SEQPACKET of their own, each with the epoch of the slot's lease and the user to whom
the slot's files belong. Shared by both sides, as `frames.py` is.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import NamedTuple

from . import descriptors

_LAYOUT = struct.Struct("!QQ")


class Root(NamedTuple):
    """The root of one slot. `fd` is negative where no more files may be open here."""

    epoch: int
    owner: int
    fd: int


def give(channel: socket.socket, epoch: int, owner: int, root: int) -> None:
    """Hand over a copy of a root, if the client takes them and has not too many waiting."""
    with contextlib.suppress(OSError):
        socket.send_fds(channel, [_LAYOUT.pack(epoch, owner)], [root])


def take(channel: socket.socket) -> Root | None:
    """The next one; None when there is none now, or none will come."""
    try:
        data, fds = descriptors.receive(channel, _LAYOUT.size, 1)
    except OSError:
        return None
    return Root(*_LAYOUT.unpack(data), *(fds or [-1])) if data else None
