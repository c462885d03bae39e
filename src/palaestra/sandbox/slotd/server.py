"""The slot server: takes requests from one client and owns all slots and layers of a run.

Requests run in the order of their frames where they are quick; what takes time (a command, a long listing) goes on
beside the others. A request that fails is answered with an ERROR and harms nobody else.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import resource
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence

from . import files
from .event_loop import Job, Loop
from .exec.output import Shelf
from .layers.checkpoint import Keeper
from .namespaced import cgroups
from .network.egress import Gates
from .protocol import frames
from .protocol.connection import Link
from .protocol.frames import CHUNK, Fields, Frame, Kind
from .protocol.init_messages import environment
from .requests import command_requests, handover, streams
from .requests.background_requests import BackgroundRequests
from .requests.command_requests import FIRST_CHILD, CommandRequests
from .requests.inspect import Looking
from .requests.snapshot_requests import Books, KeepRequests
from .requests.streams import Conversation, Download, Upload
from .rung import CannotMake, Layer, Place, Workshop
from .server_slot import Lease, Slot, State

_log = logging.getLogger("slotd")

_KEPT_DESCRIPTORS = 4
"""One in so many descriptors is kept for the commands of the slots that there are."""

_GROUP_RETRY_S = 0.02


def _require_descriptors() -> None:
    """Raise `CannotMake` where another slot would take what running commands need."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)  # all below are taken
    os.close(lowest)
    if lowest > most - most // _KEPT_DESCRIPTORS:
        what = f"the slot server has {lowest} files open and may have {most}"
        raise CannotMake(f"cannot make a slot: {what}; raise the limit (ulimit -Hn) before the run, or use fewer slots")


class RequestError(Exception):
    """A request that cannot be served; the fields are those of the ERROR frame."""

    def __init__(self, error: str, message: str) -> None:
        super().__init__(message)
        self.fields: Fields = {"error": error, "message": message}


class Server:
    """One per run. `open_workshop` makes the rung's ways ready, from the settings of the client's HELLO.

    `hands` is where a client that may have them gets the roots of its slots (`handover.py`).
    """

    def __init__(
        self, stream: socket.socket, open_workshop: Callable[[Fields], Workshop], hands: socket.socket | None = None
    ) -> None:
        self.loop = Loop()
        self._hands = hands
        if hands is not None:
            hands.setblocking(False)
        self._link = Link(self.loop, stream, self._on_frame, self._stop)
        self._open_workshop = open_workshop
        self._workshop: Workshop
        self._slots: dict[str, Slot] = {}
        self._layers: dict[str, Layer] = {}
        self._talks: dict[int, Conversation] = {}
        self._children = itertools.count(FIRST_CHILD)
        self._background = BackgroundRequests(self._link, self._leased, self._children)
        self._keep = KeepRequests(
            self._link, Books(self._keeper, self._leased, self._layer, self._register, self._on_frame)
        )
        self._gates = Gates(self.loop)
        self._looking = Looking(self.loop, self._link, self._leased)
        self._epochs = itertools.count(1)
        self._operations: dict[str, Callable[[Frame], Job | None]] = {
            "create": self._create, "read": self._read, "write": self._write, "stat": self._stat,
            "list": self._list_directory, "mkdir": self._mkdir, "link": self._make_link,
            "remove": self._remove, "changes": self._changes, "seal": self._seal,
            "view": self._view, "layer_changes": self._layer_changes, "destroy": self._destroy,
            "forget": self._forget, "stats": self._stats, **self._background.operations,
            **dict.fromkeys(command_requests.OPERATIONS, self._command), **self._keep.operations,
            **self._looking.operations, "renew": self._renew,
            "oom": self._oom, "hung": self._hung,
        }  # fmt: skip

    def _stop(self) -> None:
        """The client is gone. Everything of ours ends with this process, which is pid 1 of all that it started."""
        self.loop.running = False

    # Frames

    def _on_frame(self, frame: Frame) -> None:
        """One bad request must not end the others."""
        try:
            if frame.kind is not Kind.REQUEST:
                self._on_other(frame)
            elif not self._keep.hold(frame):
                job = self._operations[frame.fields["op"]](frame)
                if job is not None:
                    self.loop.start(self._guarded(frame, job))
        except Exception as error:
            self._fail(frame, error)

    def _on_other(self, frame: Frame) -> None:
        if frame.kind is Kind.HELLO:
            self._hello(frame)
        elif frame.request in self._talks:
            self._talks[frame.request].on_frame(frame)

    def _guard(self, frame: Frame, action: Callable[[], object]) -> None:
        """The same for what comes after the request."""
        try:
            action()
        except Exception as error:
            self._fail(frame, error)

    def _guarded(self, frame: Frame, job: Job) -> Job:
        try:
            yield from job
        except Exception as error:
            self._fail(frame, error)

    def _fail(self, frame: Frame, error: Exception) -> None:
        if isinstance(error, RequestError):
            fields = error.fields
        elif isinstance(error, CannotMake):
            fields = {"error": "sandbox", "message": str(error)}
        elif isinstance(error, OSError):
            fields = {"error": "os", "errno": error.errno, "message": error.strerror, "path": error.filename}
        else:
            _log.exception("request %s failed", frame.fields.get("op", frame.kind))
            fields = {"error": "sandbox", "message": f"{type(error).__name__}: {error}"}
        self._link.send(Kind.ERROR, frame.request, fields)

    def _reply(self, frame: Frame, fields: Fields | None = None, data: bytes = b"") -> None:
        self._link.send(Kind.RESULT, frame.request, fields, data)

    def _hello(self, frame: Frame) -> None:
        if frame.fields["version"] != frames.VERSION:
            raise RequestError("isolation", f"the slot server speaks version {frames.VERSION} of its protocol")
        try:
            self._workshop = self._open_workshop(frame.fields)
        except OSError as error:
            raise RequestError("isolation", str(error)) from error
        self._epochs = itertools.count(frame.fields["first_epoch"])
        self._link.send(Kind.HELLO, frame.request, {"version": frames.VERSION, "pid": os.getpid()})

    # Slots

    def _create(self, frame: Frame) -> None:
        _require_descriptors()
        layers = self._stack(frame.fields["layers"])
        try:
            variables = environment(frame.fields["env"])
        except ValueError as error:
            raise OSError(errno.EINVAL, f"a slot's environment: {error}") from None
        epoch = next(self._epochs)
        made = self._workshop.make(f"{epoch}", frame.fields, layers)
        slot = Slot(
            Lease(f"slot-{epoch}", epoch),
            made.ground,
            made.groups,
            self.loop,
            self._link,
            on_ready=lambda slot: self._on_created(frame, slot, made.exposed),
            on_end=lambda slot: self._on_lost(frame, slot),
            talks=self._talks,
            environment=variables,
        )
        self._slots[slot.lease.name] = slot
        try:
            slot.start(made.body)
        except OSError as error:
            self._clean(slot)
            raise CannotMake(f"cannot make a slot: its first process cannot be started: {error}") from None
        shelf = Shelf(lambda path: self._locate(slot, path, writing=True))
        slot.requests = CommandRequests(slot.commands, shelf, self._children)

    def _on_created(self, frame: Frame, slot: Slot, exposed: str) -> None:
        if frame.fields.get("allow") is not None:
            try:
                self._gates.open(slot, frame.fields["allow"])
            except OSError as error:
                why = f"cannot make a slot: its list of hosts: {error}"
                self._link.send(Kind.ERROR, frame.request, {"error": "sandbox", "message": why})
                slot.kill(then=lambda: self._clean(slot))
                return
        line = None
        if self._hands is not None:
            place, line = self._locate(slot, "/"), slot.open_line()
            handover.give(self._hands, slot.lease.epoch, place.owner, place.root, line)
        self._reply(frame, {"slot": slot.lease.name, "epoch": slot.lease.epoch, "exposed": exposed})

    def _on_lost(self, frame: Frame, slot: Slot) -> None:
        """A slot died without being asked to: while it was made, or later."""
        if slot.root < 0:
            why = slot.failure.get("failed", "its first process died")
            self._link.send(Kind.ERROR, frame.request, {"error": "sandbox", "message": f"cannot make a slot: {why}"})
            self._clean(slot)
        else:
            self._link.send(Kind.LOST, 0, {"slot": slot.lease.name, "epoch": slot.lease.epoch})

    def _renew(self, frame: Frame) -> None:
        """Give a lease to somebody else: its former holder is refused from now on."""
        slot = self._leased(frame)
        slot.lease = Lease(slot.lease.name, next(self._epochs))
        self._reply(frame, {"epoch": slot.lease.epoch})

    def _destroy(self, frame: Frame) -> None:
        slot = self._leased(frame, alive=False)

        def ended() -> None:
            self._clean(slot)
            self._reply(frame)

        slot.kill(then=ended)

    def _clean(self, slot: Slot) -> None:
        self._retire(slot)
        slot.release_files()

    def _retire(self, slot: Slot) -> None:
        """Forget a dead slot and remove its control groups, which the kernel may hold for a moment longer."""
        self._slots.pop(slot.lease.name, None)
        self._gates.close(slot.lease.name)
        self._keep.slot_ended(slot)
        if slot.groups and not cgroups.remove(list(slot.groups)):
            self.loop.later(_GROUP_RETRY_S, lambda: self._retire(slot))

    # Commands and files

    def _command(self, frame: Frame) -> None:
        self._leased(frame).requests.serve(frame)

    def _oom(self, frame: Frame) -> None:
        """A command that the client has started was killed."""
        self._reply(frame, {"oom": self._leased(frame).ran_out_of_memory()})

    def _hung(self, frame: Frame) -> None:
        """One cannot be killed."""
        self._leased(frame).end_hung()
        self._reply(frame)

    def _read(self, frame: Frame) -> None:
        slot, fields = self._leased(frame), frame.fields
        place = self._locate(slot, fields["path"])
        try:
            fd, size = files.open_for_reading(place.root, place.path, fields["offset"], fields["max_bytes"])
        except OSError as error:
            raise place.error(error) from None
        if size > CHUNK:
            Download(frame.request, fd, size, self._link, self._talks, "holes" in fields).pump()
            return
        try:
            data = os.read(fd, size)
        finally:
            os.close(fd)
        self._link.send(Kind.RESULT, frame.request, None, data)

    def _write(self, frame: Frame) -> None:
        slot, fields = self._leased(frame), frame.fields
        place = self._locate(slot, fields["path"], writing=True)
        try:
            writing = files.Writing(place.root, place.path, fields.get("mode"), place.owner)
        except OSError as error:
            raise place.error(error) from None
        if "follows" in fields:
            Upload(frame.request, writing, self._link, self._talks, slot.uploads)
            return
        try:
            writing.add(frame.data)
        except OSError:
            writing.discard()
            raise
        writing.finish()
        self._link.send(Kind.RESULT, frame.request)
        writing.close()

    def _stat(self, frame: Frame) -> None:
        with self._at(self._leased(frame), frame.fields["path"]) as place:
            entry = files.describe(place.root, place.path)
        self._reply(frame, {"entry": None if entry is None else place.seen(entry)})

    def _list_directory(self, frame: Frame) -> Job:
        with self._at(self._leased(frame), frame.fields["path"]) as place:
            entries = yield from files.list_directory(place.root, place.path)
        yield from self._give(frame, map(place.seen, entries))

    def _mkdir(self, frame: Frame) -> None:
        with self._at(self._leased(frame), frame.fields["path"], writing=True) as place:
            files.make_directory(place.root, place.path, place.owner)
        self._reply(frame)

    def _make_link(self, frame: Frame) -> None:
        with self._at(self._leased(frame), frame.fields["path"], writing=True) as place:
            files.make_link(place.root, place.path, frame.fields["target"], place.owner)
        self._reply(frame)

    def _remove(self, frame: Frame) -> Job:
        slot = self._leased(frame)
        with self._at(slot, frame.fields["path"], writing=True) as place:
            for _ in files.remove(place.root, place.path):
                yield
                if slot.state is not State.LIVE:  # its files may be a snapshot's now
                    raise RequestError("lost", f"{slot.name} ended while files of it were removed")
        self._reply(frame)

    @contextlib.contextmanager
    def _at(self, slot: Slot, path: str, writing: bool = False) -> Iterator[Place]:
        """Where a path of a slot is found; errors name it as the slot sees it."""
        place = self._locate(slot, path, writing)
        try:
            yield place
        except OSError as error:
            raise place.error(error) from None

    def _locate(self, slot: Slot, path: str, writing: bool = False) -> Place:
        return self._workshop.locate(slot.ground, slot.root, files.absolute(path), writing)

    # Layers

    def _changes(self, frame: Frame) -> Job:
        yield from self._give(frame, self._workshop.slot_changes(self._leased(frame).ground))

    def _layer_changes(self, frame: Frame) -> Job:
        yield from self._give(frame, self._workshop.layer_changes(self._layer(frame.fields["layers"][0])))

    def _give(self, frame: Frame, entries: Iterable[Fields | None]) -> Job:
        """Answer with a list of any length; None among the entries is a pause."""
        listing = streams.Listing()
        try:
            yield from listing.fill(entries)
            listing.send(frame.request, self._link, self._talks)
        finally:
            listing.close()

    def _seal(self, frame: Frame) -> None:
        slot = self._leased(frame, alive=False)
        if slot.state is not State.LIVE:
            self._clean(slot)
            raise RequestError("lost", f"{slot.lease.name} died before it was sealed")

        def ended() -> None:
            self._retire(slot)
            self._guard(frame, lambda: self._finish_layer(frame, self._workshop.seal(slot.ground)))

        slot.kill(then=ended)

    def _view(self, frame: Frame) -> None:
        self._finish_layer(frame, self._workshop.duplicate(self._layer(frame.fields["layers"][0])))

    def _finish_layer(self, frame: Frame, layer: Layer) -> None:
        try:
            if frame.fields["view"] is not None:
                self._workshop.cut(layer, frame.fields["view"])
        except BaseException:
            layer.release()
            raise
        self._layers[layer.name] = layer
        self._reply(frame, {"layers": [layer.name, *(below.name for below in layer.below)]})

    def _forget(self, frame: Frame) -> None:
        for name in frame.fields["layers"]:
            layer = self._layers.pop(name, None)
            if layer is not None:
                layer.release()
        self._reply(frame)

    def _stats(self, frame: Frame) -> None:
        live = sum(slot.state is State.LIVE for slot in self._slots.values())
        self._reply(frame, {"slots": len(self._slots), "live": live, "layers": len(self._layers)})

    # Look-ups

    def _leased(self, frame: Frame, alive: bool = True) -> Slot:
        """The slot a request names, if its lease is the current one."""
        name, epoch = frame.fields["slot"], frame.fields["epoch"]
        slot = self._slots.get(name)
        if slot is None or slot.lease.epoch != epoch or slot.ending is not None:
            raise RequestError("stale", f"the lease of {name} (epoch {epoch}) has ended")
        if alive and slot.state is not State.LIVE:
            raise RequestError("lost", f"{name} is dead")
        return slot

    def _keeper(self) -> Keeper | None:
        return getattr(self._workshop, "keeper", None)

    def _register(self, layers: Sequence[Layer]) -> None:
        self._layers |= {layer.name: layer for layer in layers}

    def _stack(self, names: Sequence[str]) -> tuple[Layer, ...]:
        """A layer with those below it, which are there for as long as it is, also when they were forgotten by name."""
        if not names:
            return ()
        top = self._layer(names[0])
        return (top, *top.below)

    def _layer(self, name: str) -> Layer:
        if name not in self._layers:
            raise RequestError("sandbox", f"the snapshot's layer {name} is no longer there")
        return self._layers[name]
