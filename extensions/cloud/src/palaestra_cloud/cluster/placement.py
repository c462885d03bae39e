"""Chooses the node of a group. The runner decides which groups may begin; this module decides where each one begins,
and lets a group overtake others on a node that has prepared what it needs.

A group stays on one node. It goes to a node that has already prepared its image or workspace if that node has room for
all its rollouts. Otherwise it goes to the node with the most room, after the groups that wait longer. When a node gets
room, the group that waits longest for something that this node has prepared comes first, but only until another group
has been passed over for `PATIENCE_S`: since as many groups were placed as waited before it (delay scheduling after
Zaharia et al., EuroSys 2010). Each node also gets a few groups ahead, which are prepared while it is full. Half of that
room is kept for groups whose image or workspace is prepared there: more of them find it, and no slot waits.

Placing a group costs the same with ten nodes and with a thousand.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

PATIENCE_S = 120.0
"""How long a group may be passed over for groups with a prepared node, in seconds from its turn."""

_REMEMBERED = 4096
"""How many prepared workspaces are remembered per node."""


@dataclass(slots=True, eq=False)
class Room:
    """The room on one node, in rollouts: its slots, those of the groups that it has, and what it has prepared."""

    name: str
    slots: int
    taken: int = 0
    groups: int = 0
    prepared: dict[str, None] = field(default_factory=dict)

    @property
    def most(self) -> int:
        """The rollouts that the node may have, including those that are prepared ahead."""
        return self.slots + -(-self.slots // 8)

    @property
    def free(self) -> int:
        return self.most - self.taken

    def fits(self, rollouts: int, *, near: bool = True) -> bool:
        """Return whether a group has room; `near` if the node has prepared what it needs, or no node has. A group that
        is larger than a node gets an empty node."""
        kept = 0 if near else (self.most - self.slots) // 2
        return self.free - kept >= rollouts or not self.groups


@dataclass(slots=True, eq=False)
class _Waiting:
    """A group that waits for room, since `since`. In the order of arrival, its turn comes when `turn` groups have been
    placed, which was at `due`."""

    rollouts: int
    needs: str
    since: float
    place: asyncio.Future[Room]
    turn: int
    due: float | None = None


class _Queue:
    """The groups that wait, in their order, and those that need the same."""

    def __init__(self) -> None:
        self._all: dict[_Waiting, None] = {}
        self._by_needs: dict[str, dict[_Waiting, None]] = {}
        self._later: deque[_Waiting] = deque()

    def __len__(self) -> int:
        return len(self._all)

    def add(self, waiting: _Waiting) -> None:
        self._all[waiting] = None
        self._by_needs.setdefault(waiting.needs, {})[waiting] = None
        self._later.append(waiting)

    def advance(self, placed: int, now: float) -> None:
        """Note whose turn has come, now that so many groups have been placed."""
        while self._later and self._later[0].turn <= placed:
            self._later.popleft().due = now

    def is_late(self, now: float) -> bool:
        """Return whether the first group has been passed over for too long."""
        due = self.first().due if self._all else None
        return due is not None and now - due >= PATIENCE_S

    def remove(self, waiting: _Waiting) -> None:
        if waiting in self._all:
            del self._all[waiting]
            same = self._by_needs[waiting.needs]
            del same[waiting]
            if not same:
                del self._by_needs[waiting.needs]

    def first(self) -> _Waiting:
        return next(iter(self._all))

    def first_near(self, room: Room) -> _Waiting | None:
        """Return the group that fits and has waited longest for something that the node has prepared."""
        few, many = sorted((room.prepared.keys(), self._by_needs.keys()), key=len)
        near = [next(iter(self._by_needs[needs])) for needs in few if needs and needs in many]
        return min((each for each in near if room.fits(each.rollouts)), key=lambda each: each.since, default=None)


class _Rooms:
    """The nodes by their free room, and by what they have prepared."""

    def __init__(self) -> None:
        self.by_name: dict[str, Room] = {}
        self._by_free: dict[int, dict[Room, None]] = {}
        self._by_prepared: dict[str, dict[Room, None]] = {}

    def add(self, room: Room) -> None:
        self.by_name[room.name] = room
        self._by_free.setdefault(room.free, {})[room] = None
        for needs in room.prepared:
            self._by_prepared.setdefault(needs, {})[room] = None

    def remove(self, name: str) -> None:
        room = self.by_name.pop(name, None)
        if room is not None:
            _discard(self._by_free, room.free, room)
            for needs in room.prepared:
                _discard(self._by_prepared, needs, room)

    def take(self, room: Room, rollouts: int, groups: int) -> None:
        """Take room for so many rollouts of so many groups, or free it if these are negative."""
        used = self.by_name.get(room.name) is room
        if used:
            _discard(self._by_free, room.free, room)
        room.taken += rollouts
        room.groups += groups
        if used:
            self._by_free.setdefault(room.free, {})[room] = None

    def near(self, rollouts: int, needs: str) -> Room | None:
        """Return the node with the most room among those that have prepared this and have room for the group."""
        prepared = self._by_prepared.get(needs, ()) if needs else ()
        return max((each for each in prepared if each.fits(rollouts)), key=lambda each: each.free, default=None)

    def emptiest(self, rollouts: int) -> Room | None:
        """Return the node with the most room, if the group fits there."""
        if not self._by_free:
            return None
        most = max(self._by_free)
        if most >= rollouts:
            return next(iter(self._by_free[most]))
        empty = (each for each in self.by_name.values() if not each.groups)
        return max(empty, key=lambda each: each.free, default=None)

    def is_prepared(self, needs: str) -> bool:
        return needs in self._by_prepared

    def prepare(self, room: Room, needs: str) -> None:
        """Note that a node prepares this now, or uses it again."""
        room.prepared.pop(needs, None)
        room.prepared[needs] = None
        self._by_prepared.setdefault(needs, {})[room] = None
        if len(room.prepared) > _REMEMBERED:
            oldest = next(iter(room.prepared))
            del room.prepared[oldest]
            _discard(self._by_prepared, oldest, room)


class Placement:
    """The nodes of a run, and the groups that wait for room. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.placed = self.placed_near = self.placed_again = 0
        """The number of groups placed, of those placed where their workspace or image was prepared, and of those that
        need one which some node had prepared."""
        self.longest_wait_s = 0.0
        """The longest time that a group has waited for room."""
        self._clock = clock
        self._rooms = _Rooms()
        self._queue = _Queue()

    @property
    def rooms(self) -> dict[str, Room]:
        """The nodes by name."""
        return self._rooms.by_name

    def add(self, room: Room) -> None:
        """Add a node."""
        self._rooms.add(room)
        self._fill_room(room)

    def remove(self, name: str) -> None:
        """Remove a node. Its groups wait for another one with `place`."""
        self._rooms.remove(name)

    async def place(self, rollouts: int, needs: str) -> Room:
        """Wait until a node has room for a group, take the room and return it. `needs` is a key of what the group needs
        prepared; empty if it needs nothing."""
        if (room := self._at_once(rollouts, needs)) is not None:
            self._take_places(room, rollouts, needs)
            return room
        place: asyncio.Future[Room] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(rollouts, needs, self._clock(), place, turn=self.placed + len(self._queue) + 1)
        self._queue.add(waiting)
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.free(place.result(), rollouts, ended=True)
            else:
                self._queue.remove(waiting)
            raise

    def free(self, room: Room, rollouts: int, *, ended: bool) -> None:
        """Free the room of rollouts that have ended; `ended` if the whole group has."""
        self._rooms.take(room, -rollouts, -ended)
        if self.rooms.get(room.name) is room:
            self._fill_room(room)

    def fail(self, error: Exception) -> None:
        """Let everything that waits fail with this error."""
        while self._queue:
            waiting = self._queue.first()
            self._queue.remove(waiting)
            if not waiting.place.done():
                waiting.place.set_exception(error)

    def _at_once(self, rollouts: int, needs: str) -> Room | None:
        if self._queue.is_late(self._clock()):
            return None
        if (room := self._rooms.near(rollouts, needs)) is not None or self._queue:
            return room
        room = self._rooms.emptiest(rollouts)
        return room if room is not None and room.fits(rollouts, near=self._is_new(needs)) else None

    def _is_new(self, needs: str) -> bool:
        """Whether no node has prepared this, or nothing needs to be."""
        return not needs or not self._rooms.is_prepared(needs)

    def _fill_room(self, room: Room) -> None:
        """Give the room on a node to groups that wait."""
        while self._queue and room.free > 0:
            first, now = self._queue.first(), self._clock()
            late = self._queue.is_late(now)
            waiting = None if late else self._queue.first_near(room)
            if waiting is None:
                waiting = first
                if not room.fits(first.rollouts, near=late or self._is_new(first.needs)):
                    return
            self._queue.remove(waiting)
            if not waiting.place.done():
                self.longest_wait_s = max(self.longest_wait_s, now - waiting.since)
                self._take_places(room, waiting.rollouts, waiting.needs)
                waiting.place.set_result(room)

    def _take_places(self, room: Room, rollouts: int, needs: str) -> None:
        self._rooms.take(room, rollouts, 1)
        self.placed += 1
        self._queue.advance(self.placed, self._clock())
        if needs:
            self.placed_again += self._rooms.is_prepared(needs)
            self.placed_near += needs in room.prepared
            self._rooms.prepare(room, needs)


def _discard(index: dict[int, dict[Room, None]] | dict[str, dict[Room, None]], key: int | str, room: Room) -> None:
    """Remove a node from an index, and the key with its last node."""
    rooms: dict[Room, None] = index[key]  # type: ignore[index]
    del rooms[room]
    if not rooms:
        del index[key]  # type: ignore[arg-type]
