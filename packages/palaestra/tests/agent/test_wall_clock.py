"""A conversation's wall clock: what it counts, what it does not, and when it ends what goes on too long."""

from __future__ import annotations

import asyncio
import threading

import pytest

from manual_clock import ManualClock
from palaestra.agent.budget import WallClock
from palaestra_slots.core.clock import SystemClock, take_turn, uncharged


def test_no_time_passes_while_it_stands() -> None:
    clock = ManualClock()
    wall = WallClock(clock)
    wall.start()
    clock.now += 2
    with wall.standing():
        clock.now += 100
        assert wall.elapsed_s == 2
    clock.now += 3
    assert wall.elapsed_s == 5
    wall.charge(40)
    clock.now += 1
    assert wall.elapsed_s == 41
    wall.start()
    assert wall.elapsed_s == 0


async def test_its_limit_ends_what_goes_on_and_not_what_waits() -> None:
    wall = WallClock(SystemClock())
    wall.start()
    async with wall.limited(0.2):
        with wall.standing():
            await asyncio.sleep(0.5)

    async def goes_on() -> None:
        async with wall.limited(0.05):
            with wall.standing():
                await asyncio.sleep(0.1)
            await asyncio.sleep(60)

    with pytest.raises(TimeoutError):
        await goes_on()
    with wall.standing():  # after the end, as grading does
        pass


async def test_what_waits_at_once_is_not_counted_twice_and_every_clock_around_it_stands() -> None:
    clock = ManualClock()
    whole, part, other = WallClock(clock), WallClock(clock), WallClock(clock)
    for wall in (whole, part, other):
        wall.start()
    places = asyncio.Semaphore(1)

    async def waits() -> None:
        await take_turn(places)
        places.release()

    async with other.limited(60):
        async with whole.limited(60), part.limited(60), asyncio.TaskGroup() as group:
            await take_turn(places)
            clock.now += 1  # there is one place: nobody waits
            group.create_task(waits())
            await asyncio.sleep(0)
            clock.now += 10
            group.create_task(waits())
            await asyncio.sleep(0)
            clock.now += 10
            places.release()
        clock.now += 2
        with uncharged():
            clock.now += 5
    assert (whole.elapsed_s, part.elapsed_s, other.elapsed_s) == (8, 8, 3)


def test_what_waits_on_another_loop_stops_it_and_the_limit_holds() -> None:
    async def elsewhere() -> None:
        with uncharged():
            await asyncio.sleep(0.3)
        await asyncio.sleep(60)

    async def main() -> None:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        wall = WallClock(SystemClock())
        wall.start()
        with pytest.raises(TimeoutError):
            async with wall.limited(0.1):
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(elsewhere(), loop))
        assert 0.1 <= wall.elapsed_s < 30  # without the wait, and not as long as the tool
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    asyncio.run(main())
