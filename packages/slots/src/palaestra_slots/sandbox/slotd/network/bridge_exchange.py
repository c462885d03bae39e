"""Lets several slot servers of one machine, such as those in several containers, join slots to the same group.

The server with a group's first slot listens at a socket in a folder that all these servers have, and that no slot has.
To a server that connects, it sends a descriptor of the network namespace with the group's bridge. Servers serve one
request at a time, so a server that waits for another one answers meanwhile, because the other one may wait for it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import select
import socket
import time

from ..event_loop import Watcher
from ..exec import pipes

_LONGEST_S = 30.0
_ENDED = "the slot server that made the group's network has ended"


class BridgeExchange:
    """The bridges that this server offers to the others, and its requests for theirs, each of which waits at most
    `longest_s` seconds. Without a folder, there are no other servers."""

    def __init__(self, loop: Watcher, folder: str = "", longest_s: float = _LONGEST_S) -> None:
        self._loop, self._folder, self._longest_s = loop, folder, longest_s
        self._offers: dict[str, tuple[socket.socket, int]] = {}

    @property
    def alone(self) -> bool:
        """Whether there are no other servers."""
        return not self._folder

    def offer_bridge(self, group: str, bridge: int) -> None:
        """Send a bridge to each server that asks for it, until `withdraw`. Raises OSError."""
        if self.alone:
            return
        door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            door.setblocking(False)
            door.bind(self._socket_path(group))
            door.listen()
        except OSError:
            door.close()
            raise
        self._offers[group] = door, bridge
        self._loop.watch(door.fileno(), lambda: _send_bridge(door, bridge))

    def withdraw(self, group: str) -> None:
        """End an offer. Does nothing if this server offers no such bridge."""
        if group in self._offers:
            door, _ = self._offers.pop(group)
            self._loop.unwatch(door.fileno())
            door.close()
            with contextlib.suppress(OSError):
                os.unlink(self._socket_path(group))

    def ask(self, group: str) -> int | None:
        """Return a descriptor of the bridge that another server offers; None if no server does. Raises OSError."""
        if self.alone:
            return None
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
            try:
                asking.connect(self._socket_path(group))
            except FileNotFoundError:
                return None
            except ConnectionRefusedError:  # a second network would keep the slots of the group apart
                raise OSError(errno.ECONNREFUSED, _ENDED) from None
            self._wait_for_answer(asking)
            _, bridges = pipes.receive(asking, 1, 1)
        if not bridges:
            raise OSError(errno.ECONNRESET, _ENDED)
        return bridges[0]

    def _wait_for_answer(self, asking: socket.socket) -> None:
        """Wait for an answer, and answer the others meanwhile. Raises TimeoutError."""
        offers = {door.fileno(): (door, bridge) for door, bridge in self._offers.values()}
        poll = select.poll()
        for fd in (asking.fileno(), *offers):
            poll.register(fd, select.POLLIN)
        deadline = time.monotonic() + self._longest_s
        while (left_s := deadline - time.monotonic()) > 0:
            ready = [fd for fd, _ in poll.poll(left_s * 1000)]
            if asking.fileno() in ready:
                return
            for fd in ready:
                _send_bridge(*offers[fd])
        raise TimeoutError(errno.ETIMEDOUT, "the slot server with the group's network does not answer")

    def _socket_path(self, group: str) -> str:
        return f"{self._folder}/{hashlib.sha256(group.encode()).hexdigest()[:32]}"


def _send_bridge(door: socket.socket, bridge: int) -> None:
    """Send the bridge to a server that has connected."""
    with contextlib.suppress(OSError), door.accept()[0] as asked:  # which may have ended
        socket.send_fds(asked, [b"b"], [bridge])
