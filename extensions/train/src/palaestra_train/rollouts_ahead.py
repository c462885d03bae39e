"""`RolloutsAhead` rolls out the groups of later steps while the trainer takes a step.

Groups are drawn only when an earlier group is taken or a step ends, never because time has passed. The draws therefore
follow from the order in which groups are taken, which is recorded, so a resumed training run draws the same groups.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import TypeAlias

from palaestra.rollouts.records import Group
from palaestra_slots.core.types import Task

Drawn: TypeAlias = tuple[int, Task]
"""The number of a group, and its task."""


class RolloutsAhead:
    """Keeps `most` groups drawn and not yet trained. `roll_out` rolls out one group; `draw` draws the next one."""

    def __init__(self, roll_out: Callable[[int, Task], Awaitable[Group]], draw: Callable[[], Drawn], most: int) -> None:
        self._roll_out = roll_out
        self._draw = draw
        self._most = most
        self._running: dict[int, asyncio.Task[Group]] = {}
        self._tasks: dict[int, Task] = {}
        self._held = 0

    @property
    def pending(self) -> list[tuple[int, str]]:
        """The number and the task's id of each group that was drawn and not taken."""
        return [(number, self._tasks[number].id) for number in sorted(self._running)]

    @asynccontextmanager
    async def opened(self, drawn: Iterable[Drawn]) -> AsyncIterator[None]:
        """Roll out the groups `drawn` by an earlier process, and then new ones, until the block ends."""
        for number, task in drawn:
            self._start_rollout(number, task)
        self._fill()
        try:
            yield
        finally:
            for each in self._running.values():
                each.cancel()
            for each in self._running.values():
                with suppress(asyncio.CancelledError, Exception):
                    await each
            self._running.clear()

    async def take(self, number: int | None = None) -> Group:
        """Wait for the group with this number, or for the first one that is finished, and return it. It counts as
        drawn until `release`. Raises what `roll_out` raises for any group."""
        if number is not None and number not in self._running:
            raise LookupError(f"group {number} is not drawn")
        while True:
            ended = sorted(each for each, task in self._running.items() if task.done())
            for each in ended:
                self._running[each].result()  # a failure of any group ends the training
            if (number is None and ended) or number in ended:
                chosen = ended[0] if number is None else number
                self._held += 1
                del self._tasks[chosen]
                return self._running.pop(chosen).result()
            waiting = [task for task in self._running.values() if not task.done()]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)

    def release(self, count: int) -> None:
        """Draw as many new groups as these taken ones leave room for, because they taught nothing or were trained."""
        self._held -= count
        self._fill()

    def _fill(self) -> None:
        while len(self._running) + self._held < self._most:
            self._start_rollout(*self._draw())

    def _start_rollout(self, number: int, task: Task) -> None:
        self._tasks[number] = task
        self._running[number] = asyncio.ensure_future(self._roll_out(number, task))
