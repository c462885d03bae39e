"""The slot server: takes requests from one client and owns all slots and layers of a run.

Requests run in the order of their frames where they are quick; what takes time (a command, a long listing) goes on
beside the others. A request that fails is answered with an ERROR and harms nobody else.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import socket
from collections.abc import Callable

from . import cgroups, files, frames, init, roots, views
from .executions import Request
from .frames import Fields, Frame, Kind
from .link import Link
from .loop import Job, Loop
from .slots import Ground, Lease, Slot, State
from .stack import Root, Stack, differences
from .stores import Layer, Store, copy_attributes
from .transfers import Download, Upload
from .world import World, prepare

_log = logging.getLogger("slotd")

_STAGE = "/stage"
_DEFAULT_DISK_BYTES = 8 << 30
_GROUP_RETRY_S = 0.02


class RequestError(Exception):
    """A request that cannot be served; the fields are those of the ERROR frame."""

    def __init__(self, error: str, message: str) -> None:
        super().__init__(message)
        self.fields: Fields = {"error": error, "message": message}


class Server:
    """One per run. `full` is the rung; `group` the control groups, where there are any."""

    def __init__(self, stream: socket.socket, full: bool, group: cgroups.ServerGroup | None) -> None:
        self.loop = Loop()
        self._link = Link(self.loop, stream, self._on_frame, self._stop)
        self._full, self._group = full, group
        self._world: World | None = None
        self._slots: dict[str, Slot] = {}
        self._layers: dict[str, Layer] = {}
        self._commands: dict[int, Slot] = {}
        self._transfers: dict[int, Download | Upload] = {}
        self._token = os.urandom(4).hex()
        self._epochs = itertools.count(1)
        self._layer_numbers = itertools.count(1)
        self._stores = itertools.count(1)
        self._operations: dict[str, Callable[[Frame], Job | None]] = {
            "create": self._create, "exec": self._exec, "read": self._read, "write": self._write, "stat": self._stat,
            "list": self._list, "remove": self._remove, "changes": self._changes, "seal": self._seal,
            "view": self._view, "layer_changes": self._layer_changes, "destroy": self._destroy,
            "forget": self._forget, "stats": self._stats,
        }  # fmt: skip

    def _stop(self) -> None:
        """The client is gone. Everything of ours ends with this process, which is pid 1 of all that it started."""
        self.loop.running = False

    # Frames

    def _on_frame(self, frame: Frame) -> None:
        try:
            if frame.kind is Kind.HELLO:
                self._hello(frame)
            elif frame.kind is Kind.REQUEST:
                job = self._operations[frame.fields["op"]](frame)
                if job is not None:
                    self.loop.start(self._guarded(frame, job))
            elif frame.kind is Kind.CANCEL and frame.request in self._commands:
                self._commands[frame.request].cancel(frame.request)
            elif frame.request in self._transfers:
                self._transfers[frame.request].on_frame(frame)
            elif frame.kind is Kind.CREDIT and frame.request in self._commands:
                self._commands[frame.request].give_credit(frame.request, frame.fields["bytes"])
        except Exception as error:  # one bad request must not end the others
            self._fail(frame, error)

    def _guarded(self, frame: Frame, job: Job) -> Job:
        try:
            yield from job
        except Exception as error:
            self._fail(frame, error)

    def _fail(self, frame: Frame, error: Exception) -> None:
        if isinstance(error, RequestError):
            fields = error.fields
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
            self._world = prepare(self._full, frame.fields)
        except OSError as error:
            raise RequestError("isolation", str(error)) from error
        self._link.send(Kind.HELLO, frame.request, {"version": frames.VERSION, "pid": os.getpid()})

    # Slots

    def _create(self, frame: Frame) -> None:
        assert self._world is not None
        fields = frame.fields
        layers = tuple(self._layer(name) for name in fields["layers"])
        image, limits = fields["image"], fields["limits"]
        if layers and layers[0].image != image:
            raise RequestError("sandbox", "a snapshot starts only slots of the image it was made from")
        try:
            trees = self._world.trees(image, fields["network"])
            binds = self._world.binds(fields["mounts"], image)
        except OSError as error:
            raise RequestError("sandbox", _lower_advice(error)) from None
        epoch = next(self._epochs)
        disk = limits["disk_bytes"] or _DEFAULT_DISK_BYTES
        store = Store(f"/slots/{next(self._stores)}", disk, self._world.owner)
        try:
            trees = self._lay_out(store, trees, layers, binds)
            groups = self._join_groups(f"{epoch}", limits)
        except BaseException:
            store.release()
            raise
        for layer in layers:
            layer.keep()
        ground = Ground(store, layers, trees, image)
        lease = Lease(f"slot-{epoch}", epoch, fields["trajectory"])
        slot = Slot(
            lease, ground, groups, self.loop, self._link, self._world.owner,
            on_ready=lambda slot: self._on_created(frame, slot),
            on_end=lambda slot: self._on_lost(frame, slot),
        )  # fmt: skip
        self._slots[lease.name] = slot
        slot.start(self._plan(slot, frame.fields, binds, disk))

    def _lay_out(
        self, store: Store, trees: tuple[roots.Tree, ...], layers: tuple[Layer, ...], binds: tuple[roots.Bind, ...]
    ) -> tuple[roots.Tree, ...]:
        """Make the directories of a new slot's store; its trees with everything that lies below them."""
        assert self._world is not None
        for name in ("u", "w", "m"):
            os.mkdir(f"{store.path}/{name}")
        stacked = []
        for tree in trees:
            targets = [bind.target for bind in binds if _tree_of(bind.target, trees) == tree]
            places = [target[len(tree.target) :].strip("/") for target in targets]
            lowers = tuple(layer.trees[tree.name] for layer in layers if tree.name in layer.trees) + tree.lowers
            missing = [place for place in places if not _is_in(place, tree.lowers)]
            if missing:
                lowers += (self._make_places(store, tree, missing),)
            stacked.append(roots.Tree(tree.name, tree.target, lowers))
            upper = f"{store.path}/u/{tree.name}"
            os.mkdir(upper)
            copy_attributes(os.stat(lowers[0]), upper)
            os.mkdir(f"{store.path}/w/{tree.name}")
        return tuple(stacked)

    def _make_places(self, store: Store, tree: roots.Tree, places: list[str]) -> str:
        """A lowest layer with nothing but the mount points that are missing, so that no change shows them."""
        assert self._world is not None
        directory = f"{store.path}/m/{tree.name}"
        os.mkdir(directory)
        for place in places:
            path = directory
            for name in place.split("/"):
                path = f"{path}/{name}"
                if not os.path.isdir(path):
                    os.mkdir(path)
                    os.chown(path, self._world.owner, self._world.owner)
        return directory

    def _join_groups(self, name: str, limits: Fields) -> tuple[str, ...]:
        if self._group is None:
            return ()
        wanted = cgroups.Limits(limits["memory_bytes"], limits["cpus"], limits["pids"])
        return tuple(self._group.add(name, wanted, roots.HOST))

    def _plan(self, slot: Slot, fields: Fields, binds: tuple[roots.Bind, ...], disk: int) -> init.Plan:
        assert self._world is not None
        overlays = tuple(
            roots.Overlay(tree.target, tree.lowers, slot.ground.upper(tree), f"{slot.ground.store.path}/w/{tree.name}")
            for tree in slot.ground.trees
        )
        limits = fields["limits"]
        counted = bool(slot.groups)
        root = roots.RootPlan(overlays, binds, _STAGE, disk, self._world.owner, self._world.user_xattrs)
        return init.Plan(
            root=root,
            hostname="slot",
            network=fields["network"],
            groups=slot.groups,
            user_namespace=self._world.user_namespace,
            open_files=limits["open_files"],
            processes=None if counted or self._world.user_namespace is not None else limits["pids"],
            data_bytes=None if counted else limits["memory_bytes"],
        )

    def _on_created(self, frame: Frame, slot: Slot) -> None:
        self._reply(frame, {"slot": slot.lease.name, "epoch": slot.lease.epoch})

    def _on_lost(self, frame: Frame, slot: Slot) -> None:
        """A slot died without being asked to: while it was made, or later."""
        if slot.root < 0:
            why = slot.failure.get("failed", "its first process died")
            self._link.send(Kind.ERROR, frame.request, {"error": "sandbox", "message": f"cannot make a slot: {why}"})
            self._clean(slot)
        else:
            self._link.send(Kind.LOST, 0, {"slot": slot.lease.name, "epoch": slot.lease.epoch})

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
        if slot.groups and not cgroups.remove(list(slot.groups)):
            self.loop.later(_GROUP_RETRY_S, lambda: self._retire(slot))

    # Commands and files

    def _exec(self, frame: Frame) -> None:
        slot, fields = self._leased(frame), frame.fields
        argv, shell = fields.get("argv"), None
        if argv is None:
            shell = slot.shell()
            argv = [f"/bin/{shell}", "-c", fields["command"]]
        request = Request(
            argv=argv, shell=shell, cwd=files.absolute(fields["cwd"]), env=fields["env"], stdin=frame.data,
            timeout_s=fields["timeout_s"], max_output_bytes=fields["max_output_bytes"],
            stream=fields["stream"], verdict=fields["verdict"],
        )  # fmt: skip
        self._commands = {number: held for number, held in self._commands.items() if held.runs(number)}
        self._commands[frame.request] = slot
        slot.execute(frame.request, request)

    def _read(self, frame: Frame) -> None:
        slot, fields = self._leased(frame), frame.fields
        fd, size = files.open_for_reading(slot.root, fields["path"], fields["offset"], fields["max_bytes"])
        transfer = Download(frame.request, fd, size, self._link, self._transfers)
        transfer.pump()

    def _write(self, frame: Frame) -> None:
        assert self._world is not None
        slot, fields = self._leased(frame), frame.fields
        writing = files.Writing(slot.root, fields["path"], fields["mode"], self._world.owner)
        Upload(frame.request, writing, self._link, self._transfers)

    def _stat(self, frame: Frame) -> None:
        self._reply(frame, {"entry": files.describe(self._leased(frame).root, frame.fields["path"])})

    def _list(self, frame: Frame) -> None:
        self._reply(frame, {"entries": files.list_directory(self._leased(frame).root, frame.fields["path"])})

    def _remove(self, frame: Frame) -> Job:
        yield from files.remove(self._leased(frame).root, frame.fields["path"])
        self._reply(frame)

    # Layers

    def _changes(self, frame: Frame) -> Job:
        slot = self._leased(frame, alive=False)
        uppers = [(tree, slot.ground.upper(tree)) for tree in slot.ground.trees]
        yield from self._list_changes(frame, uppers)

    def _layer_changes(self, frame: Frame) -> Job:
        layer = self._layer(frame.fields["layers"][0])
        yield from self._list_changes(frame, [(tree, layer.trees[tree.name]) for tree in self._trees_below(layer)])

    def _list_changes(self, frame: Frame, uppers: list[tuple[roots.Tree, str]]) -> Job:
        assert self._world is not None
        found: list[Fields] = []
        for tree, upper in uppers:
            for difference in differences(upper, Stack(tree.lowers, self._world.marks), self._world.marks):
                if difference is None:
                    yield
                else:
                    path = f"{tree.target.rstrip('/')}/{difference.path}"
                    found.append({"path": path, "kind": difference.kind, "opaque": difference.opaque})
        self._reply(frame, {"changes": sorted(found, key=lambda change: str(change["path"]))})

    def _seal(self, frame: Frame) -> None:
        slot = self._leased(frame, alive=True)

        def ended() -> None:
            self._retire(slot)
            layer = self._layer_of(slot)
            self._finish_layer(frame, layer)

        slot.kill(then=ended)

    def _layer_of(self, slot: Slot) -> Layer:
        """The dead slot's change as a layer. It takes over the slot's store; the slot's hold on its layers goes."""
        ground = slot.ground
        trees = {tree.name: ground.upper(tree) for tree in ground.trees}
        layer = Layer(self._new_layer_name(), ground.store, trees, ground.layers, ground.image)
        for lower in ground.layers:
            lower.release()
        return layer

    def _new_layer_name(self) -> str:
        """Never the same in two servers: a snapshot of one that is gone must not mean another's files."""
        return f"layer-{self._token}-{next(self._layer_numbers)}"

    def _view(self, frame: Frame) -> None:
        """A second layer of the same files, cut; the first stays as it is, since slots may stand on it."""
        whole = self._layer(frame.fields["layers"][0])
        whole.store.unlimit()
        name = self._new_layer_name()
        directory = f"{whole.store.path}/{name}"
        os.mkdir(directory)
        for tree, path in whole.trees.items():
            views.duplicate(path, f"{directory}/{tree}")
        trees = {tree: f"{directory}/{tree}" for tree in whole.trees}
        self._finish_layer(frame, Layer(name, whole.store.keep(), trees, whole.below, whole.image))

    def _finish_layer(self, frame: Frame, layer: Layer) -> None:
        try:
            if frame.fields.get("view") is not None:
                self._cut(layer, frame.fields["view"])
        except BaseException:
            layer.release()
            raise
        self._layers[layer.name] = layer
        self._reply(frame, {"layers": [layer.name, *(below.name for below in layer.below)]})

    def _cut(self, layer: Layer, view: Fields) -> None:
        assert self._world is not None
        marks = self._world.marks
        layer.store.unlimit()
        stacks = {tree: Stack(tree.lowers, marks) for tree in self._trees_below(layer)}
        below = Root([(tree.target, stack) for tree, stack in stacks.items()])
        chosen = views.Selection.resolved(view["only"], view["without"], below)
        for tree, stack in stacks.items():
            trash = f"{layer.store.path}/trash-{layer.name}-{tree.name}"
            os.mkdir(trash)
            part = chosen.within(tree.target.strip("/"))
            cut = views.Cut(layer.trees[tree.name], stack, marks, trash)
            cut.keep_only(part.only)
            for path in part.without:
                cut.leave_out(path)

    def _trees_below(self, layer: Layer) -> list[roots.Tree]:
        """The trees that a layer changes, with what it lies on."""
        assert self._world is not None
        trees = []
        for tree in self._world.trees(layer.image, network=False):
            lowers = tuple(below.trees[tree.name] for below in layer.below if tree.name in below.trees) + tree.lowers
            trees.append(roots.Tree(tree.name, tree.target, lowers))
        return trees

    def _forget(self, frame: Frame) -> None:
        layer = self._layers.pop(frame.fields["layers"][0], None)
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

    def _layer(self, name: str) -> Layer:
        if name not in self._layers:
            raise RequestError("sandbox", f"the snapshot's layer {name} is no longer there")
        return self._layers[name]


def _tree_of(path: str, trees: tuple[roots.Tree, ...]) -> roots.Tree:
    """The tree that a path of the slot lies in."""
    inside = [tree for tree in trees if tree.target == "/" or path == tree.target or path.startswith(f"{tree.target}/")]
    return max(inside, key=lambda tree: len(tree.target))


def _is_in(path: str, lowers: tuple[str, ...]) -> bool:
    return any(os.path.lexists(f"{lower}/{path}") for lower in lowers)


def _lower_advice(error: OSError) -> str:
    if error.errno in (errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP):
        return f"{error}: owners cannot be mapped there; use a directory on a local file system, or the rung userns"
    return str(error)
