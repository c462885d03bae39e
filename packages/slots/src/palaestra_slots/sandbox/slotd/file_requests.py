"""Serves the requests about files of a slot: read, write, stat, list, mkdir, link, remove, changes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from . import files
from .event_loop import Job
from .protocol.frames import CHUNK, Frame
from .rung import AnyDriver, SlotPath
from .server_slot import LifeStage, Replies, RequestError, ServerSlot, SlotTable
from .streams import Download, Upload


class FileRequests:
    """The files of all slots. `operations` serves each request by its name."""

    def __init__(self, slots: SlotTable, driver: AnyDriver, replies: Replies) -> None:
        self._slots, self._driver, self._replies = slots, driver, replies
        self.operations: dict[str, Callable[[Frame], Job | None]] = {
            "read": self._read, "write": self._write, "stat": self._stat, "list": self._list_directory,
            "mkdir": self._mkdir, "link": self._make_link, "remove": self._remove, "changes": self._changes,
        }  # fmt: skip

    def _read(self, frame: Frame) -> None:
        slot, fields, replies = self._slots.leased(frame), frame.fields, self._replies
        place = self.locate(slot, fields["path"])
        try:
            fd, size = files.open_for_reading(place.root, place.path, fields["offset"], fields["max_bytes"])
        except OSError as error:
            raise place.error(error) from None
        if size > CHUNK:
            Download(frame.request, fd, size, replies.connection, replies.open_requests, "holes" in fields).pump()
            return
        try:
            data = os.read(fd, size)
        finally:
            os.close(fd)
        replies.send(frame, None, data)

    def _write(self, frame: Frame) -> None:
        slot, fields, replies = self._slots.leased(frame), frame.fields, self._replies
        place = self.locate(slot, fields["path"], writing=True)
        try:
            writing = files.Writing(place.root, place.path, fields.get("mode"), place.owner)
        except OSError as error:
            raise place.error(error) from None
        if "follows" in fields:
            Upload(frame.request, writing, replies.connection, replies.open_requests, slot.uploads)
            return
        writing.put(frame.data)
        replies.send(frame)
        writing.close()

    def _changes(self, frame: Frame) -> Job:
        yield from self._replies.send_list(frame, self._driver.slot_changes(self._slots.leased(frame).files))

    def _stat(self, frame: Frame) -> None:
        with self._at(self._slots.leased(frame), frame.fields["path"]) as place:
            entry = files.describe(place.root, place.path, place.owner)
        self._replies.send(frame, {"entry": None if entry is None else place.seen(entry)})

    def _list_directory(self, frame: Frame) -> Job:
        with self._at(self._slots.leased(frame), frame.fields["path"]) as place:
            entries = yield from files.list_directory(place.root, place.path, place.owner)
        yield from self._replies.send_list(frame, map(place.seen, entries))

    def _mkdir(self, frame: Frame) -> None:
        with self._at(self._slots.leased(frame), frame.fields["path"], writing=True) as place:
            files.make_directory(place.root, place.path, place.owner)
        self._replies.send(frame)

    def _make_link(self, frame: Frame) -> None:
        with self._at(self._slots.leased(frame), frame.fields["path"], writing=True) as place:
            files.make_link(place.root, place.path, frame.fields["target"], place.owner)
        self._replies.send(frame)

    def _remove(self, frame: Frame) -> Job:
        slot = self._slots.leased(frame)
        with self._at(slot, frame.fields["path"], writing=True) as place:
            for _ in files.remove(place.root, place.path):
                yield
                if slot.state is not LifeStage.LIVE:  # its files may belong to a snapshot now
                    raise RequestError(slot.loss, f"{slot.name} ended while its files were being removed")
        self._replies.send(frame)

    @contextlib.contextmanager
    def _at(self, slot: ServerSlot, path: str, writing: bool = False) -> Iterator[SlotPath]:
        """Yield where the server finds a path of a slot. Errors in the block name the path as the slot sees it."""
        place = self.locate(slot, path, writing)
        try:
            yield place
        except OSError as error:
            raise place.error(error) from None

    def locate(self, slot: ServerSlot, path: str, writing: bool = False) -> SlotPath:
        """Return where the server finds a path of a slot. Raises OSError."""
        return self._driver.locate(slot.files, slot.root, files.absolute(path), writing)
