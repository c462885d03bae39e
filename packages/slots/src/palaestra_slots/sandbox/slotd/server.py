"""The slot server: serves one client's requests, and owns that client's slots and layers. In addition to the requests
of `server_slot.OPERATIONS`, it serves:

    op                  fields                                      RESULT
    create              image, layers, network, allow, limits,      slot, epoch, exposed: why it shares the
                        mounts, env, continued: the topmost layer   host's network, deferred: whether `start`
                        is copied into the slot's own changes,      makes it
                        on_demand: paths; it may be deferred;
                        workspace: its second path
    start               the lease of a deferred slot                slot, epoch, exposed
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
    compose             limits, files: paths and sizes, and the     layers: a new one with these files below the
                        bytes                                       workspace of slots without an image
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
from collections.abc import Callable
from typing import Any

from . import server_slot
from .event_loop import EpollLoop, Job
from .exec import freezer
from .exec.pipes import Shelf
from .exec.supervisor import FIRST_CHILD
from .file_requests import FileRequests
from .frozen_slots import FrozenSlots
from .layer_requests import LayerRequests
from .namespaced import cgroups
from .network.bridge_exchange import BridgeExchange
from .network.egress import EgressGates
from .network.group_network import GroupNetworks
from .protocol import frames
from .protocol.frames import Fields, Frame, FrameConnection, FrameKind
from .protocol.init_messages import EnvBlock, env_block
from .rung import HOST, AnyDriver, CannotMake, NetworkScope
from .server_slot import Deferred, LifeStage, Replies, RequestError, ServerSlot, SlotTable

_log = logging.getLogger("slotd")

_KEPT_DESCRIPTORS = 4  # one descriptor in this many is reserved for the commands of the slots that exist
_GROUP_RETRY_S = 0.02


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
        self._connection = FrameConnection(self.loop, stream, self._on_frame, self._end_loop)
        self._open_driver = open_driver
        self._driver: AnyDriver
        self._replies = Replies(self._connection)
        self._slots = SlotTable()
        self._frozen = FrozenSlots(self._slots, self._replies, self._on_frame)
        self._files: FileRequests
        self._layers: LayerRequests
        self._children = itertools.count(FIRST_CHILD)
        self._epochs = itertools.count(1)
        self._gates = EgressGates(self.loop)
        self._groups = GroupNetworks(BridgeExchange(self.loop))
        self._operations: dict[str, Callable[[Frame], Job | None]] = {
            "create": self._create, "start": self._start_deferred, "renew": self._renew, "destroy": self._destroy,
            "ask": self._ask, "freeze": self._frozen.freeze_slot, "checkpoint": self._checkpoint, "seal": self._seal,
            "stats": self._stats, **dict.fromkeys(server_slot.ANSWERS, self._answer_query),
            **dict.fromkeys(server_slot.OPERATIONS, self._in_slot),
        }  # fmt: skip

    def _end_loop(self) -> None:
        """End the loop, because the client is gone. Every slot ends with this process."""
        self.loop.running = False

    # Frames

    def _on_frame(self, frame: Frame) -> None:
        """Handle a frame; an error in one request must not end the others."""
        try:
            if frame.kind is FrameKind.HELLO:
                self._hello(frame)
            elif frame.kind is not FrameKind.REQUEST:
                if frame.request in self._replies.open_requests:
                    self._replies.open_requests[frame.request].on_frame(frame)
            elif not self._frozen.holds_back(frame):
                job = self._operations[frame.fields["op"]](frame)
                if job is not None:
                    self.loop.start(self._guarded(frame, job))
        except Exception as error:
            self._replies.fail(frame, error)

    def _guarded(self, frame: Frame, job: Job) -> Job:
        try:
            yield from job
        except Exception as error:
            self._replies.fail(frame, error)

    def _hello(self, frame: Frame) -> None:
        if frame.fields["version"] != frames.VERSION:
            raise RequestError("isolation", f"the slot server uses version {frames.VERSION} of its protocol")
        try:
            self._driver = self._open_driver(frame.fields)
            self._gates.ports = frame.fields.get("host_ports", [])
            if (folder := frame.fields.get("groups")) is not None:
                self._groups.exchange = BridgeExchange(self.loop, f"{HOST}{folder}")
        except OSError as error:
            raise RequestError("isolation", str(error)) from error
        self._files = FileRequests(self._slots, self._driver, self._replies)
        self._layers = LayerRequests(self._driver, self._replies)
        self._operations |= self._files.operations | self._layers.operations
        self._epochs = itertools.count(frame.fields["first_epoch"])
        self._connection.send(
            FrameKind.HELLO, frame.request, {"version": frames.VERSION, "pid": os.getpid(), "uid": os.geteuid()}
        )

    # Slots

    def _create(self, frame: Frame) -> Job | None:
        _require_descriptors()
        names = frame.fields["layers"]
        layers = (
            () if not names else (self._layers.get(names[0]), *self._layers.get(names[0]).below)
        )  # some may be forgotten
        try:
            variables = env_block(frame.fields["env"])
        except ValueError as error:
            raise OSError(errno.EINVAL, f"invalid environment of a slot: {error}") from None
        change = layers[0] if frame.fields.get("continued") else None
        epoch = next(self._epochs)
        if change is None and frame.fields.get("on_demand") and self._defer(frame, layers, epoch):
            return None
        return self._make_slot(frame, layers, change, variables, epoch)

    def _defer(self, frame: Frame, layers: tuple[Any, ...], epoch: int) -> bool:
        """Give the client the files that the slot would show, and make the slot when `start` asks for it. Returns False
        if that is not possible."""
        fields = frame.fields
        if self._handover is None or fields["network"] or fields.get("allow") is not None or "group" in fields:
            return False
        try:
            shown = self._driver.show(fields, layers)
        except OSError:
            return False
        try:
            socket.send_fds(self._handover, [frames.HANDOVER.pack(epoch, shown.owner)], [shown.root])
        except OSError:
            return False
        finally:
            os.close(shown.root)
        # Until `start`, nothing else holds the layers, and their client may forget them.
        for layer in layers:
            layer.keep()
        name = f"slot-{epoch}"
        self._slots.deferred[epoch] = Deferred(fields, layers)
        self._replies.send(frame, {"slot": name, "epoch": epoch, "exposed": "", "deferred": True})
        return True

    def _start_deferred(self, frame: Frame) -> Job | None:
        """Make a deferred slot."""
        epoch = frame.fields["epoch"]
        deferred = self._slots.deferred.pop(epoch, None)
        if deferred is None:
            raise RequestError("stale", f"the lease of {frame.fields['slot']} (epoch {epoch}) has ended")
        try:
            create = frames.new(Frame, (frame.kind, frame.request, deferred.fields, b""))
            return self._make_slot(create, deferred.layers, None, env_block(deferred.fields["env"]), epoch)
        finally:
            # A slot that was made keeps the layers itself by now.
            deferred.release()

    def _make_slot(
        self, frame: Frame, layers: tuple[Any, ...], change: Any, variables: EnvBlock, epoch: int
    ) -> Job | None:
        new = self._driver.make(f"{epoch}", frame.fields, layers if change is None else layers[1:])
        slot = ServerSlot(
            f"slot-{epoch}", epoch, new, self.loop,
            on_ready=lambda slot: self._on_created(frame, slot, new.exposed),
            on_end=lambda slot: self._on_lost(frame, slot),
        )  # fmt: skip
        self._slots.by_name[slot.name] = slot
        if (group := frame.fields.get("group")) is not None:
            self._groups.enter(slot.name, group[0])
        if change is None:
            self._start_slot(slot, variables)
            return None
        return self._continue(slot, change, variables)

    def _continue(self, slot: ServerSlot, change: Any, variables: EnvBlock) -> Job:
        """Start a slot whose own changes begin as a copy of a layer."""
        change.keep()
        try:
            yield from self._layers.checkpoints("continue").restore(slot.files, change)
        except OSError as error:
            self._clean(slot)
            raise CannotMake(f"cannot make a slot: the changes cannot be copied into it: {error}") from None
        except BaseException:
            self._clean(slot)
            raise
        finally:
            change.release()
        self._start_slot(slot, variables)

    def _start_slot(self, slot: ServerSlot, variables: EnvBlock) -> None:
        shelf = Shelf(lambda path: self._files.locate(slot, path, writing=True))
        try:
            slot.start(variables, shelf, self._connection.send, self._replies.open_requests, self._children)
        except OSError as error:
            self._clean(slot)
            raise CannotMake(f"cannot make a slot: its first process cannot be started: {error}") from None

    def _on_created(self, frame: Frame, slot: ServerSlot, exposed: str) -> None:
        try:
            self._connect_network(slot, frame.fields)
        except OSError as error:
            self._replies.fail(frame, CannotMake(f"cannot make a slot: its network cannot be set up: {error}"))
            slot.kill(then=lambda: self._clean(slot))
            return
        if self._handover is not None:
            self._hand_over(slot, self._handover)
        self._replies.send(frame, {"slot": slot.name, "epoch": slot.epoch, "exposed": exposed})

    def _connect_network(self, slot: ServerSlot, fields: Fields) -> None:
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
        place, line = self._files.locate(slot, "/"), slot.open_line()
        with contextlib.suppress(OSError), line or contextlib.nullcontext():
            fds = [place.root] if line is None else [place.root, line.fileno(), slot.process]
            socket.send_fds(client, [frames.HANDOVER.pack(slot.epoch, place.owner)], fds)

    def _on_lost(self, frame: Frame, slot: ServerSlot) -> None:
        """Handle the death of a slot that was not ended by a request. The slot may have died while it was being made,
        or later."""
        if slot.was_made:
            self._connection.send(FrameKind.LOST, 0, {"slot": slot.name, "epoch": slot.epoch})
        else:
            self._replies.fail(frame, CannotMake(f"cannot make a slot: {slot.failure}"))
            self._clean(slot)

    def _renew(self, frame: Frame) -> None:
        """Give a lease a new epoch, so that requests of the former holder are refused."""
        slot = self._slots.leased(frame)
        slot.epoch = next(self._epochs)
        self._replies.send(frame, {"epoch": slot.epoch})

    def _destroy(self, frame: Frame) -> None:
        if (deferred := self._slots.deferred.pop(frame.fields["epoch"], None)) is not None:
            deferred.release()
            self._replies.send(frame)
            return
        slot = self._slots.leased(frame, alive=False)

        def ended() -> None:
            self._clean(slot)
            self._replies.send(frame)

        slot.kill(then=ended)

    def _clean(self, slot: ServerSlot) -> None:
        self._retire(slot)
        slot.files.release()

    def _retire(self, slot: ServerSlot) -> None:
        """Forget a dead slot and remove its control groups, which the kernel may keep for a moment longer."""
        self._slots.by_name.pop(slot.name, None)
        self._gates.close(slot.name)
        self._groups.leave(slot.name)
        self._frozen.forget(slot)
        if self._driver.checkpoints is not None:
            self._driver.checkpoints.slot_ended(slot.files)
        if slot.groups and not cgroups.remove(list(slot.groups)):
            self.loop.later(_GROUP_RETRY_S, lambda: self._retire(slot))

    # Processes

    def _in_slot(self, frame: Frame) -> None:
        server_slot.OPERATIONS[frame.fields["op"]](self._slots.leased(frame), frame)

    def _answer_query(self, frame: Frame) -> None:
        self._replies.send(frame, server_slot.ANSWERS[frame.fields["op"]](self._slots.leased(frame), frame.fields))

    def _ask(self, frame: Frame) -> None:
        def answered(data: bytes, error: OSError | None) -> None:
            if error is None:
                self._replies.send(frame, {}, data)
            else:
                self._replies.fail(frame, OSError(error.errno, error.strerror, ""))

        server_slot.ServiceQuery(self.loop, self._slots.leased(frame), frame.fields, bytes(frame.data), answered)

    # Frozen slots and checkpoints

    def _checkpoint(self, frame: Frame) -> Job:
        if self._frozen.holds_back(frame):
            return
        slot, checkpoints = self._slots.leased(frame), self._layers.checkpoints("checkpoint")
        with self._frozen.exclusively(slot):
            # Before the freeze, so that the next checkpoint does not trust a file that was written during it.
            begun, begun_ns = time.monotonic(), time.time_ns()
            stopped = yield from freezer.freeze_processes(slot.pid)
            try:
                mapped = freezer.maps_files_shared(slot.pid)
                layer, copied = yield from checkpoints.checkpoint(slot.files, mapped, begun_ns)
            finally:
                freezer.thaw(stopped)
        stopped_s = round(time.monotonic() - begun, 6)
        self._replies.send(
            frame, {"layers": self._layers.register_layer(layer), "copied_bytes": copied, "stopped_s": stopped_s}
        )

    # Layers

    def _seal(self, frame: Frame) -> None:
        slot = self._slots.leased(frame, alive=False)
        # What a fault of the machine has cut short is not the agent's work. A slot that its own commands ended is
        # sealed.
        if slot.state is not LifeStage.LIVE and slot.loss == "lost":
            self._clean(slot)
            raise RequestError("lost", f"{slot.name} died before it was sealed")

        def ended() -> None:
            self._retire(slot)
            try:
                self._layers.finish(frame, self._driver.seal(slot.files))
            except Exception as error:
                self._replies.fail(frame, error)

        slot.kill(then=ended)

    def _stats(self, frame: Frame) -> None:
        live = sum(slot.state is LifeStage.LIVE for slot in self._slots.by_name.values())
        slots = len(self._slots.by_name) + len(self._slots.deferred)
        self._replies.send(frame, {"slots": slots, "live": live, "layers": len(self._layers)})


def _require_descriptors() -> None:
    """Raise `CannotMake` if another slot would take descriptors that running commands need."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)  # all lower numbers are in use
    os.close(lowest)
    if lowest > most - most // _KEPT_DESCRIPTORS:
        what = f"the slot server has {lowest} files open, out of at most {most}"
        raise CannotMake(f"cannot make a slot: {what}; raise the limit (ulimit -Hn) before the run, or use fewer slots")
