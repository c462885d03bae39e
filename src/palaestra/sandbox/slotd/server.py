"""The slot server: serves one client's requests, and owns that client's slots and layers. In addition to the requests
of `server_slot.OPERATIONS`, it serves:

    op                  fields                                      RESULT
    create              image, layers, network, allow, limits,      slot, epoch, exposed: why it shares the
                        mounts, env, continued: the topmost layer   host's network
                        is copied into the slot's own changes
    renew, destroy      the lease                                   epoch; nothing
    oom, hung           the lease                                   oom; nothing. For a client that starts commands
    read                path, offset, max_bytes, holes              the file's bytes
    write               path, mode, follows, and the bytes
    stat, list          path                                        entry; a list of entries
    mkdir, link, remove path; target of a link
    arguments           pid                                         arguments: of a live process, else null
    ask                 port, timeout_s, max_bytes, and the bytes   what 127.0.0.1 answered until it hung up
    changes             the lease                                   a list of changes
    freeze              the lease                                   processes: how many were stopped. The next request
                                                                    about the slot lets them continue
    checkpoint          the lease                                   layers, copied_bytes, stopped_s
    seal                the lease, view                             layers
    view, layer_changes layers, view                                layers; a list of changes
    save, load          layers, folder; folder, image               bytes; layers. The folder is the host's
    forget, stats       layers; nothing                             nothing; counts

Quick requests run in the order of their frames, and long requests (a command, a listing) run concurrently. A request
that fails is answered with an ERROR and does not affect other requests. During a checkpoint, requests wait if they
start or freeze processes of the slot, or end the slot. If a request writes a file during a checkpoint, the checkpoint
may or may not contain that file.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import resource
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from . import files, server_slot
from .event_loop import EpollLoop, Job
from .exec import freezer
from .exec.pipes import Shelf
from .exec.supervisor import FIRST_CHILD
from .namespaced import cgroups
from .network.egress import EgressGates
from .network.group_network import GroupNetworks
from .protocol import frames
from .protocol.frames import CHUNK, Fields, Frame, FrameConnection, FrameKind, OpenRequest
from .protocol.init_messages import EnvBlock, env_block
from .rung import AnyDriver, CannotMake, Checkpoints, NetworkScope, SealedLayer, SlotPath
from .server_slot import LifeStage, ServerSlot
from .streams import Download, Listing, Upload

_log = logging.getLogger("slotd")

_KEPT_DESCRIPTORS = 4  # one descriptor in this many is reserved for the commands of the slots that exist
_GROUP_RETRY_S = 0.02

_WAIT_FOR_CHECKPOINT = ("exec", "spawn", "run", "shell", "checkpoint", "freeze", "seal", "destroy")


class RequestError(Exception):
    """A request cannot be served; `fields` are the fields of the ERROR frame."""

    def __init__(self, error: str, message: str) -> None:
        super().__init__(message)
        self.fields: Fields = {"error": error, "message": message}


class SlotServer:
    """The server of one client. `open_driver` starts the isolation level with the settings in the client's HELLO.

    Over `handover`, a SOCK_SEQPACKET socket, a client that is also root gets descriptors of its slots.
    """

    def __init__(
        self, stream: socket.socket, open_driver: Callable[[Fields], AnyDriver], handover: socket.socket | None = None
    ) -> None:
        self.loop = EpollLoop()
        self._handover = handover
        if handover is not None:
            handover.setblocking(False)
        self._connection = FrameConnection(self.loop, stream, self._on_frame, self._stop)
        self._open_driver = open_driver
        self._driver: AnyDriver
        self._slots: dict[str, ServerSlot] = {}
        self._layers: dict[str, Any] = {}  # the `SealedLayer`s of the driver
        self._open_requests: dict[int, OpenRequest] = {}
        self._children = itertools.count(FIRST_CHILD)
        self._epochs = itertools.count(1)
        self._gates = EgressGates(self.loop)
        self._groups = GroupNetworks()
        self._held: dict[str, list[Frame]] = {}  # requests that wait for the checkpoint of their slot
        self._frozen: dict[str, list[int]] = {}
        self._operations: dict[str, Callable[[Frame], Job | None]] = {
            "create": self._create, "renew": self._renew, "destroy": self._destroy, "oom": self._oom,
            "hung": self._hung, "read": self._read, "write": self._write, "stat": self._stat,
            "list": self._list_directory, "mkdir": self._mkdir, "link": self._make_link, "remove": self._remove,
            "arguments": self._arguments, "ask": self._ask, "changes": self._changes, "freeze": self._freeze,
            "checkpoint": self._checkpoint, "seal": self._seal, "view": self._view,
            "layer_changes": self._layer_changes, "save": self._save, "load": self._load, "forget": self._forget,
            "stats": self._stats, **dict.fromkeys(server_slot.OPERATIONS, self._in_slot),
        }  # fmt: skip

    def _stop(self) -> None:
        """End the loop, because the client is gone. Every slot ends with this process."""
        self.loop.running = False

    # Frames

    def _on_frame(self, frame: Frame) -> None:
        """Handle a frame; an error in one request must not end the others."""
        try:
            if frame.kind is FrameKind.HELLO:
                self._hello(frame)
            elif frame.kind is not FrameKind.REQUEST:
                if frame.request in self._open_requests:
                    self._open_requests[frame.request].on_frame(frame)
            elif not self._hold(frame):
                job = self._operations[frame.fields["op"]](frame)
                if job is not None:
                    self.loop.start(self._guarded(frame, job))
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
        self._connection.send(FrameKind.ERROR, frame.request, fields)

    def _reply(self, frame: Frame, fields: Fields | None = None, data: bytes = b"") -> None:
        self._connection.send(FrameKind.RESULT, frame.request, fields, data)

    def _hello(self, frame: Frame) -> None:
        if frame.fields["version"] != frames.VERSION:
            raise RequestError("isolation", f"the slot server uses version {frames.VERSION} of its protocol")
        try:
            self._driver = self._open_driver(frame.fields)
            self._gates.ports = frame.fields.get("host_ports", [])
        except OSError as error:
            raise RequestError("isolation", str(error)) from error
        self._epochs = itertools.count(frame.fields["first_epoch"])
        self._connection.send(
            FrameKind.HELLO, frame.request, {"version": frames.VERSION, "pid": os.getpid(), "uid": os.geteuid()}
        )

    # Slots

    def _create(self, frame: Frame) -> Job | None:
        _require_descriptors()
        names = frame.fields["layers"]
        layers = () if not names else (self._layer(names[0]), *self._layer(names[0]).below)  # some may be forgotten
        try:
            variables = env_block(frame.fields["env"])
        except ValueError as error:
            raise OSError(errno.EINVAL, f"invalid environment of a slot: {error}") from None
        change = layers[0] if frame.fields.get("continued") else None
        epoch = next(self._epochs)
        new = self._driver.make(f"{epoch}", frame.fields, layers if change is None else layers[1:])
        slot = ServerSlot(
            f"slot-{epoch}", epoch, new, self.loop,
            on_ready=lambda slot: self._on_created(frame, slot, new.exposed),
            on_end=lambda slot: self._on_lost(frame, slot),
        )  # fmt: skip
        self._slots[slot.name] = slot
        if change is None:
            self._start(slot, variables)
            return None
        return self._continue(slot, change, variables)

    def _continue(self, slot: ServerSlot, change: Any, variables: EnvBlock) -> Job:
        """Start a slot whose own changes begin as a copy of a layer."""
        change.keep()
        try:
            yield from self._checkpoints("continue").restore(slot.files, change)
        except OSError as error:
            self._clean(slot)
            raise CannotMake(f"cannot make a slot: the changes cannot be copied into it: {error}") from None
        except BaseException:
            self._clean(slot)
            raise
        finally:
            change.release()
        self._start(slot, variables)

    def _start(self, slot: ServerSlot, variables: EnvBlock) -> None:
        shelf = Shelf(lambda path: self._locate(slot, path, writing=True))
        try:
            slot.start(variables, shelf, self._connection.send, self._open_requests, self._children)
        except OSError as error:
            self._clean(slot)
            raise CannotMake(f"cannot make a slot: its first process cannot be started: {error}") from None

    def _on_created(self, frame: Frame, slot: ServerSlot, exposed: str) -> None:
        try:
            self._connect(slot, frame.fields)
        except OSError as error:
            self._fail(frame, CannotMake(f"cannot make a slot: its network cannot be set up: {error}"))
            slot.kill(then=lambda: self._clean(slot))
            return
        if self._handover is not None:
            self._hand_over(slot, self._handover)
        self._reply(frame, {"slot": slot.name, "epoch": slot.epoch, "exposed": exposed})

    def _connect(self, slot: ServerSlot, fields: Fields) -> None:
        """Connect a new slot's own network: to hosts outside, and to the other slots of its group. Raises OSError."""
        allow, group = fields.get("allow"), fields.get("group")
        if allow is not None or (fields["network"] and slot.network is NetworkScope.OWN):
            self._gates.open(slot, allow)
        if group is not None and slot.network is not NetworkScope.OWN:
            raise OSError(errno.EOPNOTSUPP, "it has no network namespace of its own, which a group's network needs")
        if group is not None:
            self._groups.join(slot, *group)

    def _hand_over(self, slot: ServerSlot, client: socket.socket) -> None:
        """Send the client descriptors of the slot's root and, if the init accepts a second socket for orders, of that
        socket and of the init. Sends nothing if too many messages wait for the client."""
        place, line = self._locate(slot, "/"), slot.open_line()
        with contextlib.suppress(OSError), line or contextlib.nullcontext():
            fds = [place.root] if line is None else [place.root, line.fileno(), slot.process]
            socket.send_fds(client, [frames.HANDOVER.pack(slot.epoch, place.owner)], fds)

    def _on_lost(self, frame: Frame, slot: ServerSlot) -> None:
        """Handle the death of a slot that was not ended by a request. The slot may have died while it was being made,
        or later."""
        if slot.was_made:
            self._connection.send(FrameKind.LOST, 0, {"slot": slot.name, "epoch": slot.epoch})
        else:
            self._fail(frame, CannotMake(f"cannot make a slot: {slot.failure}"))
            self._clean(slot)

    def _renew(self, frame: Frame) -> None:
        """Give a lease a new epoch, so that requests of the former holder are refused."""
        slot = self._leased(frame)
        slot.epoch = next(self._epochs)
        self._reply(frame, {"epoch": slot.epoch})

    def _destroy(self, frame: Frame) -> None:
        slot = self._leased(frame, alive=False)

        def ended() -> None:
            self._clean(slot)
            self._reply(frame)

        slot.kill(then=ended)

    def _clean(self, slot: ServerSlot) -> None:
        self._retire(slot)
        slot.files.release()

    def _retire(self, slot: ServerSlot) -> None:
        """Forget a dead slot and remove its control groups, which the kernel may keep for a moment longer."""
        self._slots.pop(slot.name, None)
        self._gates.close(slot.name)
        self._groups.leave(slot.name)
        self._frozen.pop(slot.name, None)
        if self._driver.checkpoints is not None:
            self._driver.checkpoints.slot_ended(slot.files)
        if slot.groups and not cgroups.remove(list(slot.groups)):
            self.loop.later(_GROUP_RETRY_S, lambda: self._retire(slot))

    # Processes

    def _in_slot(self, frame: Frame) -> None:
        server_slot.OPERATIONS[frame.fields["op"]](self._leased(frame), frame)

    def _oom(self, frame: Frame) -> None:
        self._reply(frame, {"oom": self._leased(frame).ran_out_of_memory()})

    def _hung(self, frame: Frame) -> None:
        self._leased(frame).end_hung()
        self._reply(frame)

    def _arguments(self, frame: Frame) -> None:
        found = server_slot.arguments(self._leased(frame).root, int(frame.fields["pid"]))
        self._reply(frame, {"arguments": found})

    def _ask(self, frame: Frame) -> None:
        def answered(data: bytes, error: OSError | None) -> None:
            if error is None:
                self._reply(frame, {}, data)
            else:
                self._fail(frame, OSError(error.errno, error.strerror, ""))

        server_slot.ServiceQuery(self.loop, self._leased(frame), frame.fields, bytes(frame.data), answered)

    # Files

    def _read(self, frame: Frame) -> None:
        slot, fields = self._leased(frame), frame.fields
        place = self._locate(slot, fields["path"])
        try:
            fd, size = files.open_for_reading(place.root, place.path, fields["offset"], fields["max_bytes"])
        except OSError as error:
            raise place.error(error) from None
        if size > CHUNK:
            Download(frame.request, fd, size, self._connection, self._open_requests, "holes" in fields).pump()
            return
        try:
            data = os.read(fd, size)
        finally:
            os.close(fd)
        self._connection.send(FrameKind.RESULT, frame.request, None, data)

    def _write(self, frame: Frame) -> None:
        slot, fields = self._leased(frame), frame.fields
        place = self._locate(slot, fields["path"], writing=True)
        try:
            writing = files.Writing(place.root, place.path, fields.get("mode"), place.owner)
        except OSError as error:
            raise place.error(error) from None
        if "follows" in fields:
            Upload(frame.request, writing, self._connection, self._open_requests, slot.uploads)
            return
        try:
            writing.add(frame.data)
        except OSError:
            writing.discard()
            raise
        writing.finish()
        self._connection.send(FrameKind.RESULT, frame.request)
        writing.close()

    def _stat(self, frame: Frame) -> None:
        with self._at(self._leased(frame), frame.fields["path"]) as place:
            entry = files.describe(place.root, place.path, place.owner)
        self._reply(frame, {"entry": None if entry is None else place.seen(entry)})

    def _list_directory(self, frame: Frame) -> Job:
        with self._at(self._leased(frame), frame.fields["path"]) as place:
            entries = yield from files.list_directory(place.root, place.path, place.owner)
        yield from self._send_list(frame, map(place.seen, entries))

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
                if slot.state is not LifeStage.LIVE:  # its files may belong to a snapshot now
                    raise RequestError(slot.loss, f"{slot.name} ended while its files were being removed")
        self._reply(frame)

    @contextlib.contextmanager
    def _at(self, slot: ServerSlot, path: str, writing: bool = False) -> Iterator[SlotPath]:
        """Yield where the server finds a path of a slot. Errors in the block name the path as the slot sees it."""
        place = self._locate(slot, path, writing)
        try:
            yield place
        except OSError as error:
            raise place.error(error) from None

    def _locate(self, slot: ServerSlot, path: str, writing: bool = False) -> SlotPath:
        return self._driver.locate(slot.files, slot.root, files.absolute(path), writing)

    # Frozen slots and checkpoints

    def _hold(self, frame: Frame) -> bool:
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

    def _freeze(self, frame: Frame) -> Job:
        if self._hold(frame):  # another freeze or checkpoint has begun since this request arrived
            return
        slot = self._leased(frame)
        with self._exclusively(slot):
            self._frozen[slot.name] = yield from freezer.freeze(slot.pid)
        self._reply(frame, {"processes": len(self._frozen.get(slot.name, []))})

    def _checkpoint(self, frame: Frame) -> Job:
        if self._hold(frame):
            return
        slot, checkpoints = self._leased(frame), self._checkpoints("checkpoint")
        with self._exclusively(slot):
            begun, begun_ns = time.monotonic(), time.time_ns()
            stopped = yield from freezer.freeze(slot.pid)
            try:
                mapped = freezer.maps_files_shared(slot.pid)
                layer, copied = yield from checkpoints.checkpoint(slot.files, mapped, begun_ns)
            finally:
                freezer.thaw(stopped)
        stopped_s = round(time.monotonic() - begun, 6)
        self._reply(frame, {"layers": self._register(layer), "copied_bytes": copied, "stopped_s": stopped_s})

    @contextlib.contextmanager
    def _exclusively(self, slot: ServerSlot) -> Iterator[None]:
        """Make the requests in `_WAIT_FOR_CHECKPOINT` wait until the end of the block."""
        held = self._held[slot.name] = []
        try:
            yield
        finally:
            del self._held[slot.name]
            for frame in held:
                self._on_frame(frame)

    def _save(self, frame: Frame) -> Job:
        checkpoints, layer = self._checkpoints("save"), self._layer(frame.fields["layers"][0])
        layer.keep()
        try:
            size = yield from checkpoints.save(layer, frame.fields["folder"])
        finally:
            layer.release()
        self._reply(frame, {"bytes": size})

    def _load(self, frame: Frame) -> Job:
        layers = self._checkpoints("load").load(frame.fields["folder"], frame.fields["image"])
        self._layers |= {layer.name: layer for layer in layers}
        self._reply(frame, {"layers": [layer.name for layer in layers]})
        yield

    def _checkpoints(self, op: str) -> Checkpoints[Any, Any]:
        if self._driver.checkpoints is None:
            raise CannotMake(f"{op} needs layers, which this level does not have; seal the slot, or use userns or full")
        return self._driver.checkpoints

    # Layers

    def _changes(self, frame: Frame) -> Job:
        yield from self._send_list(frame, self._driver.slot_changes(self._leased(frame).files))

    def _layer_changes(self, frame: Frame) -> Job:
        yield from self._send_list(frame, self._driver.layer_changes(self._layer(frame.fields["layers"][0])))

    def _send_list(self, frame: Frame, entries: Iterable[Fields | None]) -> Job:
        """Answer with a list of any length; None among the entries stands for a pause."""
        listing = Listing()
        try:
            yield from listing.fill(entries)
            listing.send(frame.request, self._connection, self._open_requests)
        finally:
            listing.close()

    def _seal(self, frame: Frame) -> None:
        slot = self._leased(frame, alive=False)
        if slot.state is not LifeStage.LIVE and slot.loss == "lost":
            self._clean(slot)
            raise RequestError("lost", f"{slot.name} died before it was sealed")

        def ended() -> None:
            self._retire(slot)
            try:
                self._finish_layer(frame, self._driver.seal(slot.files))
            except Exception as error:
                self._fail(frame, error)

        slot.kill(then=ended)

    def _view(self, frame: Frame) -> Job:
        layer = self._layer(frame.fields["layers"][0])
        layer.keep()
        try:
            second = yield from self._driver.duplicate(layer)
        finally:
            layer.release()
        self._finish_layer(frame, second)

    def _finish_layer(self, frame: Frame, layer: SealedLayer) -> None:
        try:
            if frame.fields["view"] is not None:
                self._driver.cut(layer, frame.fields["view"])
        except BaseException:
            layer.release()
            raise
        self._reply(frame, {"layers": self._register(layer)})

    def _register(self, layer: SealedLayer) -> list[str]:
        """Register a layer under its name; returns that name and the names of the layers below."""
        self._layers[layer.name] = layer
        return [layer.name, *(below.name for below in layer.below)]

    def _forget(self, frame: Frame) -> None:
        for name in frame.fields["layers"]:
            layer = self._layers.pop(name, None)
            if layer is not None:
                layer.release()
        self._reply(frame)

    def _stats(self, frame: Frame) -> None:
        live = sum(slot.state is LifeStage.LIVE for slot in self._slots.values())
        self._reply(frame, {"slots": len(self._slots), "live": live, "layers": len(self._layers)})

    # Look-ups

    def _leased(self, frame: Frame, alive: bool = True) -> ServerSlot:
        """Return the slot that a request names. Raises `RequestError` if the request's lease is not the current one, or
        the slot is dead."""
        name, epoch = frame.fields["slot"], frame.fields["epoch"]
        slot = self._slots.get(name)
        if slot is None or slot.epoch != epoch or slot.ending is not None:
            raise RequestError("stale", f"the lease of {name} (epoch {epoch}) has ended")
        if alive and slot.state is not LifeStage.LIVE:
            raise RequestError(slot.loss, f"{name} is dead")
        return slot

    def _layer(self, name: str) -> Any:
        if name not in self._layers:
            raise RequestError("sandbox", f"the snapshot's layer {name} no longer exists")
        return self._layers[name]


def _require_descriptors() -> None:
    """Raise `CannotMake` if another slot would take descriptors that running commands need."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)  # all lower numbers are in use
    os.close(lowest)
    if lowest > most - most // _KEPT_DESCRIPTORS:
        what = f"the slot server has {lowest} files open, out of at most {most}"
        raise CannotMake(f"cannot make a slot: {what}; raise the limit (ulimit -Hn) before the run, or use fewer slots")
