"""Where abuse happens: a hostile slot, a neighbour that must not notice, and the server that both stand on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from palaestra_slots.core.types import Limits, Network
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import ExecutionResult, Rung, Slot, SlotSpec

SMALL = Limits(memory_bytes=96 << 20, pids=48, disk_bytes=32 << 20, open_files=64)
"""What a hostile slot may use: enough for bash and Python, far too little for the machine to notice."""

Case = Callable[[Slot], Awaitable[None]]


class Ground:
    """A backend on one rung that lives through many cases, on a loop of its own."""

    def __init__(self, rung: Rung) -> None:
        self.rung = rung
        self.runner = asyncio.Runner()
        self.backend = LocalBackend(rung=rung)

    def close(self) -> None:
        """End everything."""
        self.runner.run(self.backend.aclose())
        self.runner.close()


@dataclass(frozen=True)
class Arena:
    """One case on one rung. `contained` says whether this rung promises to hold it."""

    ground: Ground
    contained: bool

    @property
    def backend(self) -> LocalBackend:
        """What the slots come from."""
        return self.ground.backend

    @asynccontextmanager
    async def another(self, *, network: Network = Network.OFF, limits: Limits | None = None) -> AsyncIterator[Slot]:
        """A further slot, until the block ends."""
        spec = SlotSpec(network=network) if limits is None else SlotSpec(network=network, limits=limits)
        slot = await self.backend.create(spec, "another")
        try:
            yield slot
        finally:
            await self.backend.destroy(slot)

    def face(self, case: Case, **limits: int | float | None) -> None:
        """Run a case in a hostile slot; then its neighbour and the server must be as they were."""
        self.ground.runner.run(self._face(case, replace(SMALL, **limits)))  # type: ignore[arg-type]

    async def _face(self, case: Case, limits: Limits) -> None:
        server = self.backend.server_pid
        neighbour = await self.backend.create(SlotSpec(), "neighbour")
        started = await neighbour.execute(
            "echo mine > kept; setsid sleep 1000 </dev/null >/dev/null 2>&1 & echo $! > pid; "
            "until grep -q sleep /proc/$!/comm; do :; done"
        )
        assert started.success
        hostile = await self.backend.create(SlotSpec(limits=limits), "hostile")
        try:
            await case(hostile)
            await self._assert_well(neighbour, server)
        finally:
            await self.backend.destroy(hostile)
            await self._assert_well(neighbour, server)
            await self.backend.destroy(neighbour)

    async def _assert_well(self, neighbour: Slot, server: int) -> None:
        """The neighbour has its files, its process and nobody else's; the server makes slots as before."""
        seen = await neighbour.execute("cat kept; ls; kill -0 $(cat pid) && echo runs; : > probe && rm probe")
        assert (seen.exit_code, seen.output) == (0, "mine\nkept\npid\nruns\n"), seen
        if self.ground.rung > Rung.CONFINED:
            seen = await neighbour.execute("pgrep -c sleep; ls -A /tmp /dev/shm")
            assert seen.output == "1\n/dev/shm:\n\n/tmp:\n", seen
        assert self.backend.server_pid == server
        another = await self.backend.create(SlotSpec(), "another")
        assert (await another.execute("echo made")).output == "made\n"
        await self.backend.destroy(another)


async def python(slot: Slot, program: str, *, timeout_s: float = 30.0) -> ExecutionResult:
    """Run a Python program in the slot."""
    return await slot.execute(["python3", "-c", program], timeout_s=timeout_s)


@asynccontextmanager
async def running(
    slot: Slot, program: str, *arguments: str, timeout_s: float = 60.0
) -> AsyncIterator[asyncio.Future[ExecutionResult]]:
    """A Python program in the slot, from its first output on. At the end of the block it is killed if it still runs."""
    began = asyncio.Event()
    argv = ["python3", "-c", program, *arguments]
    task = asyncio.ensure_future(slot.execute(argv, on_output=lambda data: began.set(), timeout_s=timeout_s))
    try:
        await asyncio.wait_for(began.wait(), 20)
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
