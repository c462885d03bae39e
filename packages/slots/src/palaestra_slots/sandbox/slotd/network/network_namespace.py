"""Opens descriptors, such as sockets and devices, in the network namespace of a slot."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import NoReturn

from .. import syscalls
from ..exec import pipes

_ERRNO = struct.Struct("=i")
_MOST_OPENED = 4  # the maximum number of descriptors that `open_in` returns


def open_network(process: int) -> list[int]:
    """Return descriptors of a process's network namespace and user namespace, for `open_in`."""
    network = os.open(f"/proc/{process}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return [network, os.open(f"/proc/{process}/ns/user", os.O_RDONLY | os.O_CLOEXEC)]
    except OSError:
        os.close(network)
        raise


def open_in(places: Sequence[int], make: Callable[[], Sequence[int]]) -> list[int]:
    """Return the descriptors that `make` opens in a network namespace from `open_network`. A child enters the
    namespace, because a process without root could not return to its own. Raises OSError if the namespace cannot be
    entered, or if `make` raises it."""
    network, user = places
    with contextlib.ExitStack() as opened:
        ours, theirs = map(opened.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        child = os.fork()
        if child == 0:
            _hand_over(theirs, network, user, make)
        theirs.close()
        said, fds = pipes.receive(ours, _ERRNO.size, _MOST_OPENED)
        os.waitpid(child, 0)
    if not fds:
        number = _ERRNO.unpack(said)[0] if said else errno.ECHILD
        raise OSError(number, f"the slot's network cannot be entered: {os.strerror(number)}")
    return fds


def _hand_over(channel: socket.socket, network: int, user: int, make: Callable[[], Sequence[int]]) -> NoReturn:
    """Open the descriptors in the child and send them. Without root, the child enters the user namespace first, because
    the namespace's owner has rights only inside it."""
    try:
        try:
            syscalls.setns(network, syscalls.CLONE_NEWNET)
        except PermissionError:
            syscalls.setns(user, syscalls.CLONE_NEWUSER)
            syscalls.setns(network, syscalls.CLONE_NEWNET)
        socket.send_fds(channel, [_ERRNO.pack(0)], make())
    except OSError as error:
        channel.send(_ERRNO.pack(error.errno or errno.EINVAL))
    finally:
        os._exit(0)
