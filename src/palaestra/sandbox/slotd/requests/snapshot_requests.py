"""Requests that keep something: a checkpoint of a running slot, a snapshot on disk, a slot that stands still.

    op          fields                RESULT
    checkpoint  the lease             layers, copied_bytes, stopped_s
    freeze      the lease             processes: how many were stopped. Any later request to the slot lets them go on
    save        layers, folder        bytes. The folder is the host's and empty
    load        folder, image         layers

While a checkpoint is made, what would start a process in its slot waits, and so does what would stop its processes
too, or end it. Files can still be written from outside, and are in the checkpoint or not.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from ..event_loop import Job
from ..layers.checkpoint import Keeper
from ..layers.store import Layer
from ..namespaced import freezer
from ..namespaced.create import Ground
from ..protocol.connection import Link
from ..protocol.frames import Fields, Frame, Kind
from ..rung import CannotMake
from ..server_slot import Slot

_HELD_UP = ("exec", "spawn", "run", "shell", "checkpoint", "freeze", "seal", "destroy")


@dataclass(frozen=True, slots=True)
class Books:
    """What is asked of the server."""

    keeper: Callable[[], Keeper | None]
    """What keeps layers on this rung; None where nothing can."""
    leased: Callable[[Frame], Slot]
    layer: Callable[[str], object]
    register: Callable[[Sequence[Layer]], None]
    handle: Callable[[Frame], None]


class KeepRequests:
    """Serves the requests above."""

    def __init__(self, link: Link, books: Books) -> None:
        self._link, self._books = link, books
        self._waiting: dict[str, list[Frame]] = {}
        self._frozen: dict[str, list[int]] = {}
        self.operations: dict[str, Callable[[Frame], Job]] = {
            "checkpoint": self._checkpoint, "freeze": self._freeze, "save": self._save, "load": self._load,
        }  # fmt: skip

    def hold(self, frame: Frame) -> bool:
        """Whether a request has to wait for a checkpoint of its slot; it is handled again then. Thaws a frozen slot."""
        if not self._waiting and not self._frozen:
            return False
        name, op = frame.fields.get("slot", ""), frame.fields["op"]
        if name in self._waiting and op in _HELD_UP:
            self._waiting[name].append(frame)
            return True
        freezer.thaw(self._frozen.pop(name, []))
        return False

    def slot_ended(self, slot: Slot) -> None:
        """Forget what was kept for a slot's next checkpoint."""
        keeper = self._books.keeper()
        if keeper is not None and isinstance(slot.ground, Ground):
            keeper.slot_ended(slot.ground)
        self._frozen.pop(slot.lease.name, None)

    def _freeze(self, frame: Frame) -> Job:
        if self.hold(frame):  # what came in the same moment has begun first
            return
        slot = self._books.leased(frame)
        with self._alone(slot):
            self._frozen[slot.lease.name] = yield from _freeze(slot)
        self._reply(frame, {"processes": len(self._frozen.get(slot.lease.name, []))})

    def _checkpoint(self, frame: Frame) -> Job:
        if self.hold(frame):
            return
        slot, keeper = self._books.leased(frame), self._keeper("checkpoint")
        assert isinstance(slot.ground, Ground)
        with self._alone(slot):
            begun, begun_ns = time.monotonic(), time.time_ns()
            stopped = yield from _freeze(slot)
            try:
                mapped = freezer.maps_files_shared(slot.pid)
                layer, copied = yield from keeper.checkpoint(slot.ground, mapped, begun_ns)
            finally:
                freezer.thaw(stopped)
        self._books.register([layer])
        names = [layer.name, *(below.name for below in layer.below)]
        stopped_s = round(time.monotonic() - begun, 6)
        self._reply(frame, {"layers": names, "copied_bytes": copied, "stopped_s": stopped_s})

    @contextlib.contextmanager
    def _alone(self, slot: Slot) -> Iterator[None]:
        """What the requests of `_HELD_UP` do comes after the block."""
        waiting = self._waiting[slot.lease.name] = []
        try:
            yield
        finally:
            del self._waiting[slot.lease.name]
            for held in waiting:
                self._books.handle(held)

    def _save(self, frame: Frame) -> Job:
        keeper, layer = self._keeper("save"), self._books.layer(frame.fields["layers"][0])
        assert isinstance(layer, Layer)
        layer.keep()
        try:
            size = yield from keeper.save(layer, frame.fields["folder"])
        finally:
            layer.release()
        self._reply(frame, {"bytes": size})

    def _load(self, frame: Frame) -> Job:
        layers = self._keeper("load").load(frame.fields["folder"], frame.fields["image"])
        self._books.register(layers)
        self._reply(frame, {"layers": [layer.name for layer in layers]})
        yield

    def _keeper(self, op: str) -> Keeper:
        keeper = self._books.keeper()
        if keeper is None:
            raise CannotMake(f"this rung has no layers to {op}; seal the slot instead, or use userns or full")
        return keeper

    def _reply(self, frame: Frame, fields: Fields) -> None:
        self._link.send(Kind.RESULT, frame.request, fields)


def _freeze(slot: Slot) -> Generator[None, None, list[int]]:
    try:
        return (yield from freezer.freeze(slot.pid))
    except freezer.WillNotStop as error:
        raise CannotMake(f"cannot stop {slot.lease.name}: {error}") from None
