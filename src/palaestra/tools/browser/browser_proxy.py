"""The browser's only way to the network: a proxy on the loopback that judges every host and every address.

Chromium is told to use it for everything, the loopback included, and to look up no name itself. A redirect, a script's
request and a WebSocket come this way like any other. The proxy answers only to who has its key, since programs of slots
with a network could reach its port.

Invariant: no connection is made that the judge did not allow by name and by address (`slotd/forwarding.py`).
"""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from palaestra.sandbox.host_tools import HEAD_BYTES, Forwarder
from palaestra.tools.net.host_policy import Reach

MAX_CONNECTIONS = 512
_REMEMBERED = 256
_USER = "browser"


class Egress:
    """Start it, give Chromium `address`, `user` and `password`, close it."""

    def __init__(self, reach: Reach) -> None:
        self._refused: OrderedDict[tuple[str, int], str] = OrderedDict()
        self.user, self.password = _USER, secrets.token_urlsafe(24)
        self._resolver = ThreadPoolExecutor(4, thread_name_prefix="browser-names")
        key = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
        self._forwarder = Forwarder(reach, self._resolver, most=MAX_CONNECTIONS, key=key, refused=self._note)
        self._server: asyncio.Server | None = None
        self.address = ""

    async def start(self) -> None:
        """Listen at `address`."""
        self._server = await asyncio.start_server(self._forwarder.accept, "127.0.0.1", 0, limit=HEAD_BYTES)
        self.address = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def aclose(self) -> None:
        """Break all connections. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            self._forwarder.close()
        self._resolver.shutdown(wait=False, cancel_futures=True)

    def why(self, host: str, port: int) -> str | None:
        """Why the host was not connected to when that last failed; None where it never did."""
        return self._refused.get((host, port))

    def _note(self, host: str, port: int, why: str) -> None:
        """Chromium tells of a tunnel that it failed and not why, so the reason is kept for who asks."""
        self._refused[host, port] = why
        self._refused.move_to_end((host, port))
        while len(self._refused) > _REMEMBERED:
            self._refused.popitem(last=False)
