"""Shared preparation is done once per run, and a lease times queueing and making the slot apart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from toy import NoSlots

from palaestra.rollouts.events import Alive
from palaestra.rollouts.limits import CutShort
from palaestra.rollouts.watchdog import Stages
from palaestra.rollouts.workspaces import Workspaces
from palaestra_slots.core.errors import PrepareError, SandboxError
from palaestra_slots.sandbox.slot import Slot, SlotSpec, Snapshot


def snapshot(name: str) -> Snapshot:
    return Snapshot(name, (name,), SlotSpec())


class Forgetful(NoSlots):
    """Remembers what it was told to forget."""

    def __init__(self) -> None:
        super().__init__()
        self.forgotten: list[str] = []

    async def forget(self, snapshot: Snapshot) -> None:
        self.forgotten.append(snapshot.snapshot_id)


async def test_shared_preparation_is_done_once() -> None:
    source, prepared = Forgetful(), 0
    workspaces = Workspaces(source)

    async def prepare() -> Snapshot:
        nonlocal prepared
        prepared += 1
        await asyncio.sleep(0)
        return snapshot("base")

    await asyncio.gather(*(workspaces.shared("key", prepare) for _ in range(10)))
    await workspaces.aclose()
    assert (prepared, source.forgotten) == (1, ["base"])


async def test_a_lost_snapshot_is_prepared_again() -> None:
    class Losing(Forgetful):
        lost: tuple[str, ...] = ()

        async def holds(self, snapshot: Snapshot) -> bool:
            return snapshot.snapshot_id not in self.lost

    source = Losing()
    workspaces, names = Workspaces(source), iter("abc")

    async def prepare() -> Snapshot:
        return snapshot(next(names))

    seen = [(await workspaces.shared("key", prepare)).snapshot_id]
    await workspaces.drop_lost("key")
    seen.append((await workspaces.shared("key", prepare)).snapshot_id)
    source.lost = ("a",)
    await workspaces.drop_lost("key")
    await workspaces.drop_lost("another")
    assert [*seen, (await workspaces.shared("key", prepare)).snapshot_id] == ["a", "a", "b"]


async def test_a_failure_fails_all_who_share_it_and_is_not_retried() -> None:
    workspaces, prepared = Workspaces(NoSlots()), 0

    async def prepare() -> Snapshot:
        nonlocal prepared
        prepared += 1
        await asyncio.sleep(0)
        raise PrepareError("no such package")

    answers = await asyncio.gather(*(workspaces.shared("key", prepare) for _ in range(4)), return_exceptions=True)
    with pytest.raises(PrepareError):
        await workspaces.shared("key", prepare)
    await workspaces.aclose()
    assert (prepared, sum(isinstance(answer, PrepareError) for answer in answers)) == (1, 4)


async def test_a_waiter_takes_over_when_the_preparing_group_is_cancelled() -> None:
    workspaces, started = Workspaces(NoSlots()), asyncio.Event()

    async def hang() -> Snapshot:
        started.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def prepare() -> Snapshot:
        return snapshot("second")

    first = asyncio.create_task(workspaces.shared("key", hang))
    await started.wait()
    second = asyncio.create_task(workspaces.shared("key", prepare))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).snapshot_id == "second"


async def test_a_sandbox_failure_is_retried_by_the_next_group() -> None:
    workspaces, tries = Workspaces(NoSlots()), 0

    async def prepare() -> Snapshot:
        nonlocal tries
        tries += 1
        await asyncio.sleep(0)
        if tries == 1:
            raise SandboxError("its server died")
        return snapshot("base")

    asked = (workspaces.shared("key", prepare) for _ in range(3))
    answers = await asyncio.gather(*asked, return_exceptions=True)
    result = [str(each) if isinstance(each, SandboxError) else each for each in answers], tries
    assert result == (["its server died", snapshot("base"), snapshot("base")], 2)


async def test_nobody_takes_over_when_all_are_cancelled() -> None:
    workspaces, tries = Workspaces(NoSlots()), 0

    async def prepare() -> Snapshot:
        nonlocal tries
        tries += 1
        await asyncio.Event().wait()
        raise AssertionError

    async with asyncio.timeout(5):
        tasks = [asyncio.create_task(workspaces.shared("key", prepare)) for _ in range(4)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    assert ([task.cancelled() for task in tasks], tries) == ([True] * 4, 1)


class OnePlace(NoSlots):
    """Has one slot, after a while; only who holds it matters here."""

    def __init__(self) -> None:
        super().__init__()
        self.place = asyncio.Semaphore(1)

    async def acquire(
        self,
        trajectory_id: str,
        *,
        spec: SlotSpec | None = None,
        snapshot: Snapshot | None = None,
        timeout_s: float | None = None,
        admitted: Callable[[], None] | None = None,
    ) -> Slot:
        await self.place.acquire()
        try:
            assert admitted is not None
            admitted()
            await asyncio.sleep(0.01)
        except BaseException:
            self.place.release()
            raise
        return object()  # type: ignore[return-value]


async def test_queueing_and_making_a_slot_are_timed_apart() -> None:
    pool, events = OnePlace(), []
    stages = Stages("r", events.append, {})
    await pool.place.acquire()
    leasing = asyncio.create_task(Workspaces(pool).lease("r", SlotSpec(), None, stages))
    await asyncio.sleep(0.01)
    pool.place.release()
    await leasing
    assert min(stages.seconds.values()) >= 0.009
    result = [event.entered for event in events if isinstance(event, Alive) and event.entered]
    assert result == ["admit", "acquire"]


async def test_what_the_check_raises_gives_the_place_back() -> None:
    def refuse() -> None:
        raise CutShort("the run ends")

    pool = OnePlace()
    with pytest.raises(CutShort):
        await Workspaces(pool).lease("r", SlotSpec(), None, Stages("r", lambda event: None, {}), refuse)
    assert pool.place.locked() is False
