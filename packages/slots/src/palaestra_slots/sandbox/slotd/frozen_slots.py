"""Freezes slots on request, and lets requests wait while a slot is being frozen or copied."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from .event_loop import Job
from .exec import freezer
from .protocol.frames import Frame
from .server_slot import Replies, ServerSlot, SlotTable

_WAIT_FOR_CHECKPOINT = ("exec", "spawn", "run", "shell", "checkpoint", "freeze", "seal", "destroy")


class FrozenSlots:
    """The frozen slots, and the requests that wait for the freeze or checkpoint of their slot; `serve` handles each
    afterwards."""

    def __init__(self, slots: SlotTable, replies: Replies, serve: Callable[[Frame], None]) -> None:
        self._slots, self._replies, self._serve = slots, replies, serve
        self._held: dict[str, list[Frame]] = {}
        self._frozen: dict[str, list[int]] = {}

    def forget(self, slot: ServerSlot) -> None:
        """Forget the stopped processes of a dead slot."""
        self._frozen.pop(slot.name, None)

    def holds_back(self, frame: Frame) -> bool:
        """Return whether a request has to wait for a freeze or checkpoint of its slot, and queue it in that case. If
        the request need not wait, thaw the slot if it is frozen."""
        if not self._held and not self._frozen:
            return False
        name, op = frame.fields.get("slot", ""), frame.fields["op"]
        if name in self._held and op in _WAIT_FOR_CHECKPOINT:
            self._held[name].append(frame)
            return True
        freezer.thaw(self._frozen.pop(name, []))
        return False

    def freeze_slot(self, frame: Frame) -> Job:
        if self.holds_back(frame):  # another freeze or checkpoint has begun since this request arrived
            return
        slot = self._slots.leased(frame)
        with self.exclusively(slot):
            self._frozen[slot.name] = yield from freezer.freeze_processes(slot.pid)
        # A request that waited for the freeze has been served by now, and has let the slot continue.
        self._replies.send(frame, {"processes": len(self._frozen.get(slot.name, []))})

    @contextlib.contextmanager
    def exclusively(self, slot: ServerSlot) -> Iterator[None]:
        """Make the requests in `_WAIT_FOR_CHECKPOINT` wait until the end of the block."""
        held = self._held[slot.name] = []
        try:
            yield
        finally:
            del self._held[slot.name]
            for frame in held:
                self._serve(frame)
