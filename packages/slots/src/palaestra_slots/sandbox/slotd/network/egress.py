"""Gives slots network access: opens their network devices and listening sockets, and starts the process that serves
them.

The server forks the process for the first such slot, and again if the process has died. The server keeps the
descriptors, so that a new process can take over.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable
from functools import partial

from .. import syscalls
from ..event_loop import EpollLoop
from ..exec import pipes
from ..protocol.frames import Fields
from ..rung import HOST
from ..server_slot import ServerSlot
from . import tunnel_device
from .allowlist import PROXY_PORT

_RETRY_S = 0.5


class EgressGates:
    """The network access of all slots of one server. Slots with the network on may reach `ports` on the host's
    loopback."""

    def __init__(self, loop: EpollLoop) -> None:
        self._loop = loop
        self.ports: list[int] = []
        self._gates: dict[str, list[int]] = {}  # for each slot, its settings in a file, and what the process serves
        self._control: socket.socket | None = None
        self._pid = self._process = -1

    def open(self, slot: ServerSlot, allow: list[str] | None) -> None:
        """Open a slot's proxy port or, if the slot has no list of hosts, its network device. Raises OSError if the
        slot's network cannot be entered."""
        settings: Fields = {"allow": allow}
        make: Callable[[], list[int]] = _make_listener
        if allow is None:
            settings, make = {"ports": self.ports}, partial(tunnel_device.make, HOST, tunnel_device.versions())
        memory = pipes.memory_file(json.dumps(settings).encode())  # a list of hosts may be longer than a message
        try:
            fds = slot.make_in_network(make)
        except OSError:
            os.close(memory)
            raise
        self._gates[slot.name] = [memory, *fds]
        if self._control is None:
            self._fork()
        else:
            self._send_gate(slot.name)

    def close(self, slot: str) -> None:
        """Close a dead slot's network access, if it had any."""
        if slot in self._gates:
            pipes.close(*self._gates.pop(slot))
            if self._control is not None:
                with contextlib.suppress(OSError):
                    self._control.send(slot.encode())

    def _fork(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._pid = os.fork()
            if self._pid == 0:
                _become_proxy(theirs)
        try:
            self._process = os.pidfd_open(self._pid)
        except OSError:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            raise
        self._control = ours
        self._loop.watch(self._process, self._on_death)
        for slot in self._gates:
            self._send_gate(slot)

    def _send_gate(self, slot: str) -> None:
        assert self._control is not None
        with contextlib.suppress(OSError):  # the process has died; the next one gets all descriptors
            socket.send_fds(self._control, [slot.encode()], self._gates[slot])

    def _on_death(self) -> None:
        self._loop.unwatch(self._process)
        os.waitpid(self._pid, 0)
        os.close(self._process)
        if self._control is not None:
            self._control.close()
            self._control = None
        # After a pause, because a process that dies while it starts would otherwise be forked again without end.
        self._loop.later(_RETRY_S, self._revive)

    def _revive(self) -> None:
        if self._control is None and self._gates:
            try:
                self._fork()
            except OSError:  # no descriptor or process is left now
                self._loop.later(_RETRY_S, self._revive)


def _make_listener() -> list[int]:
    return [socket.create_server(("127.0.0.1", PROXY_PORT), backlog=128).detach()]


def _become_proxy(control: socket.socket) -> None:
    """Serve as the proxy, in the child, at the host's root, because the proxy needs modules and the resolver's
    settings."""
    try:
        syscalls.set_name("slot-proxy")
        root = HOST if os.path.isdir(HOST) else None
        if root is not None:
            os.chroot(root)
            os.chdir("/")
        from . import proxy

        proxy.run(control)
    finally:
        os._exit(1)
