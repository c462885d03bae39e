"""Answers the requests of the slot server's client, and finds the slots that they name."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from .event_loop import Job
from .protocol.frames import Fields, Frame, FrameConnection, FrameKind, OpenRequest
from .rung import CannotMake
from .server_slot import LifeStage, ServerSlot
from .streams import Listing

_log = logging.getLogger("slotd")


class RequestError(Exception):
    """A request cannot be served; `fields` are the fields of the ERROR frame."""

    def __init__(self, error: str, message: str) -> None:
        super().__init__(message)
        self.fields: Fields = {"error": error, "message": message}


class Replies:
    """Sends the answers over the client's connection. `open_requests` has the requests that are not answered yet, by
    number."""

    def __init__(self, connection: FrameConnection) -> None:
        self.connection = connection
        self.open_requests: dict[int, OpenRequest] = {}

    def fail(self, frame: Frame, error: Exception) -> None:
        """Answer with the ERROR for an exception."""
        if isinstance(error, RequestError):
            fields = error.fields
        elif isinstance(error, CannotMake):
            fields = {"error": "sandbox", "message": str(error)}
        elif isinstance(error, OSError):
            fields = {"error": "os", "errno": error.errno, "message": error.strerror, "path": error.filename}
        else:
            _log.exception("request %s failed", frame.fields.get("op", frame.kind))
            fields = {"error": "sandbox", "message": f"{type(error).__name__}: {error}"}
        self.connection.send(FrameKind.ERROR, frame.request, fields)

    def send(self, frame: Frame, fields: Fields | None = None, data: bytes = b"") -> None:
        """Answer with a RESULT."""
        self.connection.send(FrameKind.RESULT, frame.request, fields, data)

    def send_list(self, frame: Frame, entries: Iterable[Fields | None]) -> Job:
        """Answer with a list of any length; None among the entries stands for a pause."""
        listing = Listing()
        try:
            yield from listing.fill(entries)
            listing.send(frame.request, self.connection, self.open_requests)
        finally:
            listing.close()


class SlotTable:
    """The slots of the server, by name."""

    def __init__(self) -> None:
        self.by_name: dict[str, ServerSlot] = {}

    def leased(self, frame: Frame, alive: bool = True) -> ServerSlot:
        """Return the slot that a request names. Raises `RequestError` if the request's lease is not the current one, or
        the slot is dead."""
        name, epoch = frame.fields["slot"], frame.fields["epoch"]
        slot = self.by_name.get(name)
        if slot is None or slot.epoch != epoch or slot.ending is not None:
            raise RequestError("stale", f"the lease of {name} (epoch {epoch}) has ended")
        if alive and slot.state is not LifeStage.LIVE:
            raise RequestError(slot.loss, f"{name} is dead")
        return slot
