"""Starts workers on the nodes of a Ray cluster: one actor per node that has a CPU, which carries the worker's streams.

Ray places the actors, finds out that a node has died, and moves the bytes. It starts no task per group or rollout, and
retries nothing: the journal decides what is left to do. A head node that is started with `--num-cpus 0`, as KubeRay
recommends, gets no worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any, TextIO, cast

os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # under `uv run`, Ray would upload the working folder

import ray
from ray.exceptions import RayError

from palaestra_cloud.cluster.launcher import COMMAND, NodeAddress, NodeLost
from palaestra_cloud.cluster.ray_actor import NodeActor
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.printable import without_middle

logger = logging.getLogger(__name__)

_CONNECT_S = 5.0
_END_S = 30.0

_MESSAGES_AHEAD = 4
"""The messages that wait for the driver before the actor stops reading from its worker."""

_RemoteActor: Any = ray.remote(
    num_cpus=0,
    max_restarts=0,
    max_task_retries=0,
    # One `receive`, one `send`, one `end`, and room; Ray's own limit is 1,000. In a concurrency group of its own, `end`
    # would run in another event loop, from which it cannot wait for the worker's process.
    max_concurrency=4,
)(NodeActor)


class RayLauncher:
    """Starts workers on the nodes of the Ray cluster at `address`, HOST:PORT. Without an address, the cluster is that
    of `RAY_ADDRESS`, which a Ray job sets, or the one that runs on this machine. Raises `ConfigError` if there is no
    cluster."""

    def __init__(self, address: str = "", command: tuple[str, ...] = COMMAND) -> None:
        self._command = command
        self._connected = not ray.is_initialized()
        self._stdout = sys.stdout
        if self._connected:
            _join_cluster(address)
            sys.stdout = cast("TextIO", _WithoutRay(self._stdout))
        self.name = f"ray {ray.get_runtime_context().gcs_address}"

    async def nodes(self) -> list[NodeAddress]:
        found = await asyncio.to_thread(ray.nodes)
        return [
            NodeAddress(each["NodeID"], each["NodeManagerHostname"])
            for each in found
            if each["Alive"] and each["Resources"].get("CPU", 0) > 0
        ]

    async def start(self, node: NodeAddress) -> RayLink:
        """Start a worker on a node. Raises `NodeLost` with the reason."""
        try:
            actor = _RemoteActor.options(label_selector={"ray.io/node-id": node.id}).remote()
            await actor.start.remote(self._command)
        except RayError as error:
            raise NodeLost(_brief(error)) from error
        return RayLink(actor)

    async def aclose(self) -> None:
        """Leave the cluster, if this object has joined it."""
        if self._connected:
            self._connected = False
            await asyncio.to_thread(_shut_down)
            sys.stdout = self._stdout


def _shut_down() -> None:
    """Leave the cluster. Ray then prints what it has held back, so this happens in a thread of this name."""
    leaving = threading.Thread(target=ray.shutdown, name=_SHUT_DOWN)
    leaving.start()
    leaving.join()


_SHUT_DOWN = "ray_shutdown"
_RAYS_THREADS = ("ray_listen_error_messages", _SHUT_DOWN)


class _WithoutRay:
    """Standard output, except that what Ray prints there about nodes that die goes to the log: the answer of a command
    is on standard output. Ray has no setting for it (its `listen_error_messages`)."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if threading.current_thread().name in _RAYS_THREADS:
            logger.debug("ray: %s", text.strip())
            return len(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


class RayLink:
    """The streams of a worker on a Ray node."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def send(self, frames: bytes) -> None:
        try:
            await self._actor.send.remote(frames)
        except RayError as error:
            raise NodeLost(_brief(error)) from error

    async def receive(self) -> AsyncIterator[bytes]:
        try:
            stream = self._actor.receive.options(
                num_returns="streaming", _generator_backpressure_num_objects=_MESSAGES_AHEAD
            )
            async for message in stream.remote():
                yield await message
        except RayError as error:
            raise NodeLost(_brief(error)) from error

    async def aclose(self) -> None:
        with contextlib.suppress(RayError, TimeoutError):
            async with asyncio.timeout(_END_S):
                await self._actor.end.remote()
        with contextlib.suppress(RayError):
            await asyncio.to_thread(ray.kill, self._actor)


def _join_cluster(address: str) -> None:
    if address:
        _check_reachable(address)
    try:
        with _own_signals():
            ray.init(address=address or "auto", namespace="palaestra", log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = f"at {address}" if address else "here"
        raise ConfigError(
            f"--on ray: there is no usable Ray cluster {where}: {without_middle(str(error), 400)}. Start one with `ray "
            "start --head`, join other machines with `ray start --address HOST:6379`, or name one by its HOST:PORT "
            "(--on ray:HOST:PORT)"
        ) from error


def _check_reachable(address: str) -> None:
    """Raise `ConfigError` if nothing listens at the address: Ray itself would wait long, and may end this process."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"--on ray:{address}: write the head node's HOST:PORT (the port is usually 6379)")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--on ray:{address}: nothing answers there: {error}. `ray status` on the head node prints the address"
        ) from error


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keep this process's handling of signals, which Ray replaces."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            with contextlib.suppress(ValueError, TypeError):  # not the main thread, or not set from Python
                signal.signal(number, handler)


def _brief(error: RayError) -> str:
    """Return the first lines of an error of Ray, which appends long advice."""
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    return without_middle(text, 300)
