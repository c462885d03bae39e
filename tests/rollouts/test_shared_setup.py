"""Shared preparation is done once, whoever asks, and admission never asks the pool for more than it has."""

from __future__ import annotations

import asyncio

import pytest
from toy import NoSlots

from palaestra.core.errors import PrepareError, SandboxError
from palaestra.rollouts.admission import AdmittedSlots
from palaestra.rollouts.shared_setup import Foundations
from palaestra.sandbox.slot import Change, Slot, SlotSpec, Snapshot, View


def snapshot(name: str) -> Snapshot:
    return Snapshot(name, (name,), SlotSpec())


class Forgetful(NoSlots):
    """Remembers what it was told to forget."""

    def __init__(self) -> None:
        super().__init__()
        self.forgotten: list[str] = []

    async def forget(self, snapshot: Snapshot) -> None:
        self.forgotten.append(snapshot.snapshot_id)


def test_many_ask_and_one_lays() -> None:
    async def main() -> tuple[int, list[str]]:
        source, laid = Forgetful(), 0
        foundations = Foundations(AdmittedSlots(source, 1))

        async def lay() -> Snapshot:
            nonlocal laid
            laid += 1
            await asyncio.sleep(0)
            return snapshot("base")

        await asyncio.gather(*(foundations.get("key", lay) for _ in range(10)))
        await foundations.aclose()
        return laid, source.forgotten

    assert asyncio.run(main()) == (1, ["base"])


def test_one_that_its_backend_lost_is_laid_anew() -> None:
    class Losing(Forgetful):
        lost: tuple[str, ...] = ()

        async def changes(self, snapshot: Snapshot) -> list[Change]:
            if snapshot.snapshot_id in self.lost:
                raise SandboxError("the layer is no longer there")
            return []

    async def main() -> list[str]:
        source = Losing()
        foundations, names = Foundations(AdmittedSlots(source, 1)), iter("abc")

        async def lay() -> Snapshot:
            return snapshot(next(names))

        seen = [(await foundations.get("key", lay)).snapshot_id]
        await foundations.drop_lost("key")
        seen.append((await foundations.get("key", lay)).snapshot_id)
        source.lost = ("a",)
        await foundations.drop_lost("key")
        await foundations.drop_lost("another")
        return [*seen, (await foundations.get("key", lay)).snapshot_id]

    assert asyncio.run(main()) == ["a", "a", "b"]


def test_a_failure_is_everybodys_and_is_not_tried_again() -> None:
    async def main() -> tuple[int, int]:
        foundations, laid = Foundations(AdmittedSlots(NoSlots(), 1)), 0

        async def lay() -> Snapshot:
            nonlocal laid
            laid += 1
            await asyncio.sleep(0)
            raise PrepareError("no such package")

        answers = await asyncio.gather(*(foundations.get("key", lay) for _ in range(4)), return_exceptions=True)
        with pytest.raises(PrepareError):
            await foundations.get("key", lay)
        await foundations.aclose()
        return laid, sum(isinstance(answer, PrepareError) for answer in answers)

    assert asyncio.run(main()) == (1, 4)


def test_when_the_layer_is_cancelled_a_waiter_takes_over() -> None:
    async def main() -> str:
        foundations, started = Foundations(AdmittedSlots(NoSlots(), 1)), asyncio.Event()

        async def hang() -> Snapshot:
            started.set()
            await asyncio.Event().wait()
            raise AssertionError

        async def lay() -> Snapshot:
            return snapshot("second")

        first = asyncio.create_task(foundations.get("key", hang))
        await started.wait()
        second = asyncio.create_task(foundations.get("key", lay))
        await asyncio.sleep(0)
        first.cancel()
        return (await second).snapshot_id

    assert asyncio.run(main()) == "second"


def test_a_sandbox_that_fails_under_the_layer_is_no_verdict() -> None:
    async def main() -> tuple[list[object], int]:
        foundations, tries = Foundations(AdmittedSlots(NoSlots(), 1)), 0

        async def lay() -> Snapshot:
            nonlocal tries
            tries += 1
            await asyncio.sleep(0)
            if tries == 1:
                raise SandboxError("its server died")
            return snapshot("base")

        asked = (foundations.get("key", lay) for _ in range(3))
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [str(each) if isinstance(each, SandboxError) else each for each in answers], tries

    assert asyncio.run(main()) == (["its server died", snapshot("base"), snapshot("base")], 2)


def test_when_all_are_cancelled_nobody_takes_over() -> None:
    async def main() -> tuple[list[bool], int]:
        foundations, tries = Foundations(AdmittedSlots(NoSlots(), 1)), 0

        async def lay() -> Snapshot:
            nonlocal tries
            tries += 1
            await asyncio.Event().wait()
            raise AssertionError

        async with asyncio.timeout(5):
            tasks = [asyncio.create_task(foundations.get("key", lay)) for _ in range(4)]
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        return [task.cancelled() for task in tasks], tries

    assert asyncio.run(main()) == ([True] * 4, 1)


class Counting(NoSlots):
    """Hands out stand-ins and counts how many are out; only identity matters here."""

    def __init__(self) -> None:
        super().__init__()
        self.out = 0
        self.most = 0

    async def acquire(
        self,
        trajectory_id: str,
        *,
        spec: SlotSpec | None = None,
        snapshot: Snapshot | None = None,
        timeout_s: float | None = None,
    ) -> Slot:
        self.out += 1
        self.most = max(self.most, self.out)
        await asyncio.sleep(0)
        return object()  # type: ignore[return-value]

    async def release(self, slot: Slot) -> None:
        self.out -= 1

    async def seal(self, slot: Slot, view: View | None = None) -> Snapshot:
        self.out -= 1
        return snapshot("sealed")


def test_never_more_slots_out_than_places() -> None:
    async def main() -> tuple[int, int]:
        source = Counting()
        slots = AdmittedSlots(source, 3)

        async def rollout(number: int) -> None:
            await slots.admit()
            slot = await slots.lease(f"r{number}", spec=SlotSpec(), snapshot=None)
            await asyncio.sleep(0)
            await (slots.release(slot) if number % 2 else slots.seal(slot))

        await asyncio.gather(*(rollout(number) for number in range(40)))
        return source.most, source.out

    assert asyncio.run(main()) == (3, 0)


def test_a_failed_lease_gives_its_place_back() -> None:
    async def main() -> int:
        source = NoSlots()
        slots = AdmittedSlots(source, 1)
        for number in range(5):
            await slots.admit()
            with pytest.raises(Exception, match="no slot"):
                await slots.lease(f"r{number}", spec=SlotSpec(), snapshot=None)
        return source.asked

    assert asyncio.run(main()) == 5
