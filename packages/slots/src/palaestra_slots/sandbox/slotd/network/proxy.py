"""The process that runs in the host's network and connects slots to it.

A slot with a list of hosts has an empty network with one listening socket on its loopback, on which this process
accepts connections. The process answers CONNECT requests, and HTTP requests in absolute form, according to the list;
the slot has no other connection, not even DNS. For a slot with the network on, the process serves the slot's network
device (`tunnel.py`).

The process reads untrusted input, so it holds nothing of value: after the server has forked it, it closes all
descriptors but its control socket, gives up root, and gets only lists, listeners and devices. In an encrypted
connection it cannot distinguish several hosts behind the same address and name, so whoever lists a name trusts the
operator of that name.
"""

from __future__ import annotations

import asyncio
import contextlib
import encodings.idna  # noqa: F401 - imported now, because the user `nobody` may not be able to read modules
import json
import os
import resource
import signal
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, Protocol

from .. import syscalls
from ..exec import pipes
from . import allowlist
from .allowlist import HostRule
from .forward import HEAD_BYTES, Forwarder
from .tunnel import Tunnel, connections_per_tunnel, is_own

_MAX_NAME = 256
MAX_CONNECTIONS = 64  # per slot
_NOBODY = 65534


def run(control: socket.socket) -> NoReturn:
    """Run the process, in the child of a fork whose root is the host's root. Never returns."""
    status = 1
    try:
        os.dup2(control.fileno(), 3, inheritable=False)
        control.detach()
        syscalls.close_from(4)
        resolver = ThreadPoolExecutor(4, thread_name_prefix="resolver")
        with contextlib.suppress(OSError):  # a server without root cannot become another user
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)  # becoming another user would clear it
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
        asyncio.run(_Proxy(socket.socket(fileno=3), resolver).serve())
        status = 0
    finally:
        os._exit(status)


class _Rules:
    """The list of hosts of one slot. Implements `Judge`."""

    def __init__(self, rules: Sequence[HostRule]) -> None:
        self._rules = rules

    def refusal(self, host: str, port: int) -> str | None:
        return allowlist.refusal(self._rules, host, port)

    def address_refusal(self, host: str, port: int, address: allowlist.Address) -> str | None:
        refused = allowlist.address_refusal(host, address)
        named = allowlist.literal(host) is not None or host == "localhost"
        if refused is None and not named and any(is_own(one) for one in allowlist.meanings(address)):
            return f"{host} resolves to {address}, which is this host; list the address if you mean it"
        return refused


class _Closes(Protocol):
    def close(self) -> None: ...


def _read_settings(fd: int) -> dict[str, Any]:
    with open(fd, encoding="utf-8") as file:
        file.seek(0)  # an earlier proxy may have read it
        settings: dict[str, Any] = json.load(file)
    return settings


class _Proxy:
    def __init__(self, control: socket.socket, resolver: ThreadPoolExecutor) -> None:
        self._control, self._resolver = control, resolver
        self._gates: dict[str, tuple[_Closes, ...]] = {}
        self._over = asyncio.Event()

    async def serve(self) -> None:
        """Serve until the slot server is gone."""
        loop = asyncio.get_running_loop()
        self._control.setblocking(False)
        self._orders: asyncio.Queue[tuple[str, list[int]]] = asyncio.Queue()
        loop.add_reader(self._control.fileno(), self._take_tunnel)
        while not self._over.is_set():
            name, fds = await self._orders.get()
            if fds:
                await self._open_gate(name, _read_settings(fds[0]), fds[1:])
            elif name in self._gates:
                for part in self._gates.pop(name):
                    part.close()
                self._divide()

    def _take_tunnel(self) -> None:
        data, fds = pipes.receive(self._control, _MAX_NAME, 4)
        if not data:
            self._over.set()
        # At the end of the socket, the empty order wakes `serve`, which then ends.
        self._orders.put_nowait((data.decode(), fds))

    def _divide(self) -> None:
        """Divide the descriptors of this process among the slots."""
        tunnels = [part for parts in self._gates.values() for part in parts if isinstance(part, Tunnel)]
        for tunnel in tunnels:
            tunnel.most = connections_per_tunnel(resource.getrlimit(resource.RLIMIT_NOFILE)[0], len(tunnels))

    async def _open_gate(self, name: str, settings: dict[str, Any], fds: list[int]) -> None:
        if "ports" in settings:
            tunnel = Tunnel(fds[0], [socket.socket(fileno=fd) for fd in fds[1:]], settings["ports"])
            await tunnel.start()
            self._gates[name] = (tunnel,)
            self._divide()
            return
        fd, entries = fds[0], settings["allow"]
        rules = _Rules([allowlist.parse(entry) for entry in entries])
        forwarder = Forwarder(rules, self._resolver, most=MAX_CONNECTIONS)
        listener = socket.socket(fileno=fd)
        listener.setblocking(False)
        server = await asyncio.start_server(forwarder.accept, sock=listener, limit=HEAD_BYTES)
        self._gates[name] = server, forwarder
