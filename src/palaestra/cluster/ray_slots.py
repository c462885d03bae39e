"""Runs slots on the nodes of a Ray cluster, for one agent loop in this process: `--backend ray`.

Each node runs one slot server, as a child of an actor that carries the server's stream. Its slots have the same
isolation levels as slots on this machine: at best `full` if Ray runs as root there, otherwise `userns` or `confined`,
as the node's kernel allows. What a level keeps from a slot, such as other processes, it keeps on the node too; nothing
more separates a slot from the node's other Ray workers. The stream passes through Ray's connections, which are
encrypted only if you configure Ray's TLS.

Ray ends an actor when this process ends or the node dies, and the server ends with its stream, so nothing is left on a
node. A node needs the same build of Palaestra with the extra `ray`. `--on ray` moves the agent loops to the nodes too,
and suits more rollouts than one process can drive.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from palaestra.cluster.launcher import NodeAddress, NodeLost
from palaestra.cluster.opened import ray_launcher
from palaestra.core.errors import ConfigError, SandboxError
from palaestra.core.types import JSON
from palaestra.sandbox.backends.remote import MachineBackend, Place, PlaceSpec
from palaestra.sandbox.local.client import OnLost
from palaestra.sandbox.remote.remote_client import DistantClient, call_of, send_server
from palaestra.sandbox.server_backend import levels
from palaestra.sandbox.slot import Rung, Slot, SlotSpec, Snapshot

if TYPE_CHECKING:
    from palaestra.cluster.ray_launcher import RayLauncher, RayLink

_PIECE = 256 << 10
_START_S = 60.0
_LOOK_AGAIN_S = 10.0
"""Seconds between two looks for nodes that have joined or left the cluster."""

_log = logging.getLogger(__name__)

_Run: TypeAlias = "Callable[[Sequence[str]], Awaitable[RayLink]]"
"""Runs Python with these arguments on a node, and returns the link to its standard input and output."""


class RayBackend(MachineBackend):
    """Slots on the nodes with a CPU of the Ray cluster at `address`, HOST:PORT. Without an address, the cluster is that
    of `RAY_ADDRESS`, which a Ray job sets, or the one that runs on this machine. Nodes may join and leave."""

    name = "ray"
    with_images = "docker"

    def __init__(
        self, address: str = "", *, slots_per_node: int = 64, rung: Rung | None = None, require: Rung | None = None
    ) -> None:
        super().__init__(slots_per_place=slots_per_node, rung=rung, require=require)
        self._address = address
        self._launcher: RayLauncher | None = None
        self._nodes: dict[str, NodeAddress] = {}
        self._looked_at = 0.0

    @property
    def credentials(self) -> str:
        return f"the Ray cluster {self._address or 'of this machine or job'}"

    async def aclose(self) -> None:
        await super().aclose()
        launcher, self._launcher = self._launcher, None
        if launcher is not None:
            await launcher.aclose()

    async def check_hosts(self) -> None:
        await self._look()

    async def check(self, host: str) -> None:
        await self._look()
        if host not in self._nodes:
            raise ConfigError(f"the Ray cluster has no node {host} any more")

    async def create(self, spec: SlotSpec, trajectory_id: str, snapshot: Snapshot | None = None) -> Slot:
        if time.monotonic() > self._looked_at + _LOOK_AGAIN_S:
            with contextlib.suppress(ConfigError):  # the nodes that are known are tried
                await self._look()
        return await super().create(spec, trajectory_id, snapshot)

    async def _look(self) -> None:
        """Join the cluster, and find the nodes that are there now. Raises `ConfigError` if there is none."""
        if self._launcher is None:
            self._launcher = ray_launcher(self._address, "--backend ray")
        self._looked_at = time.monotonic()
        nodes = {f"{each.host} ({each.id[:8]})": each for each in await self._launcher.nodes()}
        if not nodes:
            raise ConfigError(f"the cluster {self._launcher.name} has no node with a CPU for slots")
        self._nodes = nodes
        self.hosts.names = tuple(nodes)
        self._most = len(nodes)

    def make_place(self, spec: PlaceSpec, number: int, rung: Rung | None) -> Place:
        return _RayPlace(self, spec, number, rung=rung, require=self._required)

    async def run_on(self, host: str, arguments: Sequence[str]) -> RayLink:
        """Run Python with these arguments on a node. Raises `SandboxError` if the node is gone or does not answer."""
        node = self._nodes.get(host)
        if self._launcher is None or node is None:
            raise SandboxError(f"the Ray cluster has no node {host} any more")
        try:
            async with asyncio.timeout(_START_S):
                return await self._launcher.start(node, tuple(arguments))
        except NodeLost as error:
            raise SandboxError(f"no slot server starts on the Ray node {host}: {error}") from error
        except TimeoutError:
            raise SandboxError(f"the Ray node {host} has not started an actor within {_START_S:g} s") from None


class _RayPlace(Place):
    """One node, and the slot server on it."""

    _backend: RayBackend

    async def _start_server(self, rung: Rung) -> None:
        client = _RayClient(
            self._on_lost, lambda arguments: self._backend.run_on(self.spec.host, arguments), self._backend.gone_s
        )
        settings = {"prefix": "", "first_epoch": self._last_epoch + 1}
        await client.launch_within(_START_S, rung.label, settings, self._backend.silence_s)
        self._server = client


class _RayClient(DistantClient):
    """A client of a server whose stream an actor carries. Two tasks pass the bytes on between the actor and the
    client's socket."""

    def __init__(self, on_lost: OnLost, run: _Run, gone_s: float) -> None:
        super().__init__(on_lost)
        self._run, self._gone_s = run, gone_s
        self._carrying: list[asyncio.Task[None]] = []
        self._link: RayLink | None = None

    async def _spawn(self, stream: socket.socket, rung: str) -> None:
        self._link = link = await self._run(call_of(rung, self._gone_s)[1:])
        carried = stream.dup()
        carried.setblocking(False)
        self._carrying = [
            asyncio.create_task(_carry_up(carried, link), name="to a Ray node"),
            asyncio.create_task(_carry_down(link, carried), name="from a Ray node"),
        ]
        self._carrying[1].add_done_callback(lambda _: carried.close())

    async def _deliver(self, stream: socket.socket) -> None:
        await send_server(stream)

    async def aclose(self) -> None:
        await super().aclose()
        carrying, self._carrying = self._carrying, []
        link, self._link = self._link, None
        if link is not None:
            await link.aclose()
        for task in carrying:
            task.cancel()
        await asyncio.gather(*carrying, return_exceptions=True)


async def _carry_up(stream: socket.socket, link: RayLink) -> None:
    """Pass on what the client writes until it ends, and then let the server end."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError, NodeLost):
        while piece := await loop.sock_recv(stream, _PIECE):
            await link.send(piece)
    await link.end()


async def _carry_down(link: RayLink, stream: socket.socket) -> None:
    """Pass on what the server writes until it ends."""
    loop = asyncio.get_running_loop()
    try:
        async for piece in link.receive_bytes():
            await loop.sock_sendall(stream, piece)
    except NodeLost as error:
        _log.debug("the stream from a Ray node ended: %s", error)
    except OSError:
        pass  # the client has ended
    finally:
        with contextlib.suppress(OSError):
            stream.shutdown(socket.SHUT_WR)


def from_config(config: JSON) -> RayBackend:
    """Return the backend for the settings of a run: `backend_options` may hold `address` and `slots_per_node`. Raises
    `ConfigError` for other options."""
    options: Mapping[str, JSON] = config.backend_options
    if unknown := sorted(options.keys() - {"address", "slots_per_node"}):
        raise ConfigError(f"the backend ray has no option {unknown[0]}: its options are address and slots_per_node")
    slots = options.get("slots_per_node", 64)
    if not isinstance(slots, int) or isinstance(slots, bool) or slots < 1:
        raise ConfigError(f"backend_options.slots_per_node must be a number above 0, not {slots!r:.100}")
    rung, require = levels(config.isolation, config.require_sandbox)
    return RayBackend(str(options.get("address", "")), slots_per_node=slots, rung=rung, require=require)
