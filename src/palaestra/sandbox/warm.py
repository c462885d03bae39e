"""Slots that are made before anybody asks: a few clean ones of each spec in use.

Never leased before, so nothing has to be cleaned. A spec is in use from its first lease until `SPECS` others were used
after it; then its slots go. Only slots without a snapshot are made ahead: a snapshot's forks come in groups of a known
size, and one more would keep its files.

A slot that died while it waited is not handed out; the next one is, or a new one is made.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import Coroutine

from palaestra.core.errors import SandboxError
from palaestra.sandbox.slot import Backend, Slot, SlotSpec

SPECS = 4


class WarmSlots:
    """Keeps `size` slots ready per spec in use. Ends with `aclose`, before its backend does."""

    def __init__(self, backend: Backend, size: int) -> None:
        self._backend, self._size = backend, size
        self._ready: OrderedDict[SlotSpec, deque[Slot]] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._refilling: dict[SlotSpec, asyncio.Task[None]] = {}
        self.hits = self.misses = 0

    @property
    def count(self) -> int:
        """How many are ready."""
        return sum(len(ready) for ready in self._ready.values())

    def take(self, spec: SlotSpec, trajectory_id: str) -> Slot | None:
        """A ready slot, leased to a trajectory; None where one has to be made. What was taken is made anew."""
        if self._size == 0:
            return None
        ready = self._ready.setdefault(spec, deque())
        self._ready.move_to_end(spec)
        leased = None
        while ready and leased is None:
            leased = self._backend.adopt(ready.popleft(), trajectory_id)
        self.hits, self.misses = self.hits + (leased is not None), self.misses + (leased is None)
        if spec not in self._refilling:
            self._refilling[spec] = self._start(self._refill(spec))
        if len(self._ready) > SPECS:
            _, unused = self._ready.popitem(last=False)
            self._start(self._destroy(unused))
        return leased

    async def settled(self) -> None:
        """Wait until everything is ready that is to be."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def aclose(self) -> None:
        """Stop making slots. Those that are ready end with the backend."""
        self._size = 0
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._ready.clear()

    async def _refill(self, spec: SlotSpec) -> None:
        try:
            while spec in self._ready and len(self._ready[spec]) < self._size:
                slot = await self._backend.create(spec, "warm")
                if spec in self._ready:
                    self._ready[spec].append(slot)
                else:  # it came out of use meanwhile
                    await self._backend.destroy(slot)
        except (SandboxError, OSError):
            pass  # whoever needs such a slot makes it, and gets the error
        finally:
            del self._refilling[spec]

    async def _destroy(self, slots: deque[Slot]) -> None:
        for slot in slots:
            with contextlib.suppress(SandboxError):
                await self._backend.destroy(slot)

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
