"""Where groups go: near what they need, to the emptiest node, in turn, and not to a node that is gone."""

from __future__ import annotations

import asyncio
import random

import pytest

from cluster.on_loop import on_loop
from palaestra_cloud.cluster.placement import PATIENCE_S, Placement, Room


def placement(*slots: int) -> Placement:
    made = Placement()
    for number, count in enumerate(slots):
        made.add(Room(f"node-{number}", count))
    return made


@on_loop
async def test_groups_spread_over_the_nodes_with_the_most_room() -> None:
    two = placement(8, 16)
    assert [(await two.place(4, "")).name for _ in range(4)] == ["node-1", "node-1", "node-1", "node-0"]


@on_loop
async def test_a_group_goes_where_its_workspace_is_until_that_node_is_full() -> None:
    two = placement(8, 8)
    first = await two.place(4, "image")
    other = await two.place(1, "another")
    assert other is not first
    assert await two.place(4, "image") is first
    spilled = await two.place(4, "image")
    assert spilled is other
    assert (two.placed_again, two.placed_near) == (2, 1)


@on_loop
async def test_a_group_that_finds_no_room_waits_its_turn() -> None:
    one = placement(8)
    rooms = [await one.place(4, "") for _ in range(2)]
    large = asyncio.create_task(one.place(8, ""))
    small = asyncio.create_task(one.place(1, ""))
    await asyncio.sleep(0)
    one.free(rooms[0], 4, ended=True)
    await asyncio.sleep(0)
    assert not large.done()
    assert not small.done(), "a small group must not overtake a large one for ever"
    one.free(rooms[1], 4, ended=True)
    assert await large
    one.free(await large, 8, ended=True)
    assert (await small).taken == 1


@on_loop
async def test_a_group_larger_than_every_node_gets_an_empty_one() -> None:
    one = placement(2)
    assert (await one.place(16, "")).taken == 16


@on_loop
async def test_a_removed_node_gets_nothing_and_a_new_one_serves_those_who_wait() -> None:
    one = placement(4)
    one.remove("node-0")
    waiting = asyncio.create_task(one.place(4, ""))
    await asyncio.sleep(0)
    assert not waiting.done()
    one.add(Room("new", 4))
    assert (await waiting).name == "new"


@on_loop
async def test_a_cancelled_wait_takes_no_room() -> None:
    one = placement(4)
    held = await one.place(4, "")
    waiting = asyncio.create_task(one.place(4, ""))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    one.free(held, 4, ended=True)
    assert (one.rooms["node-0"].taken, one.rooms["node-0"].groups) == (0, 0)


@on_loop
async def test_whatever_is_placed_and_freed_no_node_is_overfull_and_none_starves() -> None:
    rng, many = random.Random(1), placement(*[8] * 10)
    held: list[tuple[Room, int]] = []
    placed = 0
    waiting: set[asyncio.Task[Room]] = set()
    for step in range(2000):
        size = rng.choice((1, 2, 4))
        task = asyncio.create_task(many.place(size, f"image-{rng.randrange(20)}"))
        task.set_name(str(size))
        waiting.add(task)
        await asyncio.sleep(0)
        for done in [each for each in waiting if each.done()]:
            waiting.remove(done)
            held.append((done.result(), int(done.get_name())))
            placed += 1
        assert all(room.taken <= room.most for room in many.rooms.values())
        while held and (rng.random() < 0.5 or len(waiting) > 20):
            room, taken = held.pop(rng.randrange(len(held)))
            many.free(room, taken, ended=True)
            await asyncio.sleep(0)
            for done in [each for each in waiting if each.done()]:
                waiting.remove(done)
                held.append((done.result(), int(done.get_name())))
                placed += 1
        assert step - placed <= 21
    for each in waiting:
        each.cancel()


@on_loop
async def test_a_group_overtakes_on_the_node_that_has_its_image_until_another_has_waited_long() -> None:
    now = [0.0]
    made = Placement(lambda: now[0])
    made.add(Room("node", 8))
    held = await made.place(8, "image")
    far, near, later = (asyncio.create_task(made.place(8, needs)) for needs in ("other", "image", "image"))
    await asyncio.sleep(0)
    made.free(held, 8, ended=True)
    assert await near is held
    assert not far.done()
    now[0] = PATIENCE_S
    made.free(held, 8, ended=True)
    assert await far is held
    assert not later.done()
    later.cancel()


@on_loop
async def test_room_for_groups_ahead_is_kept_for_those_with_a_prepared_node() -> None:
    two = placement(16, 16)
    first = await two.place(15, "image")
    await two.place(17, "another")
    far = asyncio.create_task(two.place(3, "another"))
    await asyncio.sleep(0)
    assert first.free == 3
    assert not far.done(), "the node lacks it, and its slots are busy"
    assert (await two.place(3, "image")) is first
    far.cancel()


@on_loop
async def test_a_long_queue_does_not_send_groups_away_from_their_images() -> None:
    now = [0.0]
    made = Placement(lambda: now[0])
    for name in ("a", "b"):
        made.add(Room(name, 8))
    rooms = {needs: await made.place(9, needs) for needs in ("x", "y")}
    waiting = [(needs, asyncio.create_task(made.place(9, needs))) for needs in "xxyy" * 5]
    for needs in "yx" * 10:
        now[0] += PATIENCE_S / 2
        await asyncio.sleep(0)
        made.free(rooms[needs], 9, ended=True)
    assert [(await task).name for _, task in waiting] == [rooms[needs].name for needs, _ in waiting]
