"""What starts the workers of a run: `ray_launcher.py` on the nodes of a Ray cluster, and `ProcessLauncher` as processes
on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from palaestra_cloud.cluster.messages import StreamEnded, read_frame
from palaestra_slots.core.errors import PalaestraError

_END_S = 20.0
"""How long a worker may take to end its slots; then it is killed, and its slot server ends them."""

COMMAND = ("-P", "-m", "palaestra_cloud.cluster.worker")
"""The arguments with which Python is a worker."""


class NodeLost(PalaestraError):
    """A node, or the worker on it, has gone."""


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """A node on which a worker can be started. `id` is unique and never used again; `host` is shown to people."""

    id: str
    host: str


class Link(Protocol):
    """The two streams of a worker."""

    async def send(self, frames: bytes) -> None:
        """Send frames, in the order of the calls. Raises `NodeLost`."""
        ...

    def receive(self) -> AsyncIterator[bytes]:
        """Yield the messages of the worker, still encoded, until it ends. Raises `NodeLost`. No more messages than fit
        some buffers are on the way while the caller is busy."""
        ...

    async def aclose(self) -> None:
        """Let the worker end, and wait until it has ended or its node has gone."""
        ...


class Launcher(Protocol):
    """Starts workers. `name` says where, for the table of nodes."""

    name: str

    async def nodes(self) -> list[NodeAddress]:
        """Return the nodes that are there now."""
        ...

    async def start(self, node: NodeAddress) -> Link:
        """Start a worker on a node. Raises `NodeLost` with the reason."""
        ...

    async def aclose(self) -> None: ...


async def start_worker(
    environ: Mapping[str, str] | None = None, command: Sequence[str] = COMMAND
) -> asyncio.subprocess.Process:
    """Start a worker as a child of this process; its stderr is that of this process. The worker ends when its stdin
    does, so it cannot outlive this process."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, *command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=dict(os.environ if environ is None else environ),
    )


class ProcessLink:
    """The streams of a worker that is a child of this process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def send(self, frames: bytes) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(frames)
            await self.process.stdin.drain()
        except (ConnectionError, RuntimeError) as error:
            raise NodeLost("the worker has ended") from error

    async def receive(self) -> AsyncIterator[bytes]:
        assert self.process.stdout is not None
        while True:
            try:
                yield await read_frame(self.process.stdout)
            except StreamEnded as error:
                raise NodeLost(str(error)) from error

    async def aclose(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(ConnectionError, RuntimeError):
            self.process.stdin.close()
        try:
            async with asyncio.timeout(_END_S):
                await self.process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()


class ProcessLauncher:
    """Starts `count` workers on this machine, each as if it were a node. `command` has the arguments with which Python
    is a worker."""

    def __init__(self, count: int, command: Sequence[str] = COMMAND) -> None:
        self.name = f"{count} processes"
        self.links: dict[str, ProcessLink] = {}
        self._count = count
        self._command = command

    async def nodes(self) -> list[NodeAddress]:
        return [NodeAddress(f"process-{number}", f"process-{number}") for number in range(self._count)]

    async def start(self, node: NodeAddress) -> ProcessLink:
        link = self.links[node.id] = ProcessLink(await start_worker(command=self._command))
        return link

    async def aclose(self) -> None:
        """Do nothing: the links end their workers."""
