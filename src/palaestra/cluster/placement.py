"""Chooses the node of a group. The runner decides which group begins when; this module only decides where.

A group stays on one node. It goes to a node that has already prepared what it needs if that node has room for all its
rollouts, otherwise to the node with the most room. A group that finds no room waits, first come, first served. Each
node also gets a few groups ahead, which are prepared while it is full.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

_REMEMBERED = 4096
"""How many prepared workspaces are remembered per node."""


@dataclass(slots=True)
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

    def fits(self, rollouts: int) -> bool:
        """Return whether a group has room. A group that is larger than a node gets an empty node."""
        return self.free >= rollouts or not self.groups


class Placement:
    """The nodes of a run, and the groups that wait for room."""

    def __init__(self) -> None:
        self.rooms: dict[str, Room] = {}
        self.placed = self.placed_near = self.placed_again = 0
        """The number of groups placed, of those placed where their workspace or image was prepared, and of those that
        need one which some node had prepared."""
        self._waiting: deque[tuple[int, str, asyncio.Future[Room]]] = deque()

    def add(self, room: Room) -> None:
        """Add a node."""
        self.rooms[room.name] = room
        self._serve()

    def remove(self, name: str) -> None:
        """Remove a node. Its groups wait for another one with `place`."""
        self.rooms.pop(name, None)

    async def place(self, rollouts: int, needs: str) -> Room:
        """Wait until a node has room for a group, take the room and return it. `needs` is a key of what the group needs
        prepared; empty if it needs nothing."""
        place: asyncio.Future[Room] = asyncio.get_running_loop().create_future()
        entry = (rollouts, needs, place)
        self._waiting.append(entry)
        self._serve()
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.free(place.result(), rollouts, ended=True)
            elif entry in self._waiting:
                self._waiting.remove(entry)
            raise

    def free(self, room: Room, rollouts: int, *, ended: bool) -> None:
        """Free the room of rollouts that have ended; `ended` if the whole group has."""
        room.taken -= rollouts
        room.groups -= ended
        self._serve()

    def fail(self, error: Exception) -> None:
        """Let everything that waits fail with this error."""
        while self._waiting:
            _, _, place = self._waiting.popleft()
            if not place.done():
                place.set_exception(error)

    def _serve(self) -> None:
        while self._waiting:
            rollouts, needs, place = self._waiting[0]
            if not place.done():
                room = self._choose(rollouts, needs)
                if room is None:
                    return
                room.taken += rollouts
                room.groups += 1
                self._count(room, needs)
                place.set_result(room)
            self._waiting.popleft()

    def _choose(self, rollouts: int, needs: str) -> Room | None:
        fitting = [room for room in self.rooms.values() if room.fits(rollouts)]
        near = [room for room in fitting if needs and needs in room.prepared]
        return max(near or fitting, key=lambda room: room.free, default=None)

    def _count(self, room: Room, needs: str) -> None:
        self.placed += 1
        if not needs:
            return
        if any(needs in each.prepared for each in self.rooms.values()):
            self.placed_again += 1
            self.placed_near += needs in room.prepared
        room.prepared.pop(needs, None)
        room.prepared[needs] = None
        if len(room.prepared) > _REMEMBERED:
            del room.prepared[next(iter(room.prepared))]
