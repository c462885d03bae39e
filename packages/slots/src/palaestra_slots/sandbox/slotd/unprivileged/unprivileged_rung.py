"""The isolation levels `confined` and `none`. A slot consists of a user and plain directories. A slot that starts from
a layer gets a copy of the layer's directories.

If the server is root and gives each slot a user, `confined` serves many slots. Otherwise, it serves one slot at a time,
because a second slot would have the same user and could reach the files of the first.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import socket
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

from .. import packages
from ..layers.cut_view import Selection
from ..layers.overlay import OverlayMarks, Stack, StackedRoot
from ..protocol.frames import Fields
from ..rung import CannotMake, NetworkScope, NewSlot, SealedLayer, SlotPath
from . import copy_workspace, server_directory, unprivileged_init, users

# The directories that a layer keeps.
_TREES = {path: name for path, name in unprivileged_init.DIRECTORIES.items() if name != "tmp"}
_READ, _PASS = 0o004, 0o001


class CopiedLayer(SealedLayer):
    """A layer of whole trees, which are never written to."""

    below: tuple[CopiedLayer, ...]

    def __init__(self, name: str, path: str, below: tuple[CopiedLayer, ...], drop: Callable[[str], None]) -> None:
        super().__init__(name, below)
        self.path, self._drop = path, drop

    def drop_files(self) -> None:
        self._drop(self.path)
        super().drop_files()


@dataclass
class CopiedFiles:
    """The directory of one slot, and the layers from which it started. `user` 0 means the server's own user."""

    path: str
    user: int
    layers: tuple[CopiedLayer, ...]
    driver: UnprivilegedDriver
    shown: tuple[tuple[str, bool], ...]
    _open: dict[str, int] = field(default_factory=dict, init=False)

    def directory(self, name: str) -> int:
        """Return a descriptor of one of the slot's directories, which no command can replace."""
        if name not in self._open:
            flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            self._open[name] = os.open(f"{self.path}/{name}", flags)
        return self._open[name]

    def release(self) -> None:
        """Remove the files, unless they have become a layer, and release the user and the layers."""
        while self._open:
            os.close(self._open.popitem()[1])
        self.driver.drop(self.path)
        self.driver.end(self)


@dataclass
class UnprivilegedInit:
    """Implements `SlotInit`. The slot's processes are those of its user; if it has no user of its own, they are all
    orphans of its init."""

    plan: unprivileged_init.UnprivilegedPlan
    children: set[int]  # the server's own children, which are not orphans of a slot
    pid: int = 0

    @property
    def network(self) -> NetworkScope:
        """NONE for confined processes without a network, which cannot use any port; otherwise SHARED."""
        return NetworkScope.SHARED if self.plan.network or not self.plan.confined else NetworkScope.NONE

    @property
    def takes_lines(self) -> bool:
        return False

    @property
    def exposed(self) -> bool:
        """True if the commands have no user of their own. They are then processes of the init's user."""
        return not self.plan.user

    @property
    def shares_memory(self) -> bool:
        return False

    def fork(self, control: socket.socket) -> int:
        self.pid = os.fork()
        if self.pid == 0:
            unprivileged_init.run(self.plan, control)
        self.children.add(self.pid)
        return self.pid

    def end_soon(self, pid: int) -> None:
        """Do nothing, since nothing of the init is needed later."""

    def gone(self) -> bool:
        self.children.discard(self.pid)
        if not self.plan.user:
            return users.kill_orphans(self.children) == 0
        users.kill(self.plan.user)
        return users.living(self.plan.user) == 0


class UnprivilegedDriver:
    """Implements `RungDriver`."""

    checkpoints = None

    def __init__(self, place: server_directory.ServerDirectory, confined: bool, settings: Fields) -> None:
        self._base, self._confined = place, confined
        self._users = users.Users(place.first_user) if confined and place.first_user else None
        self._prefix = tuple(filter(None, [settings.get("prefix")]))
        self._system: dict[str, tuple[tuple[str, bool], ...]] = {}
        self._machine = bool(settings.get("machine"))
        self._numbers = itertools.count(1)
        self._token = os.urandom(4).hex()
        self._children: set[int] = set()
        self._removers: set[int] = set()
        self._slots = 0
        for name in ("layers", "trash", "empty", *(f"empty/{name}" for name in _TREES.values())):
            os.mkdir(f"{place.path}/{name}", 0o700)

    def make(self, name: str, fields: Fields, layers: tuple[CopiedLayer, ...]) -> NewSlot:
        """Lay out a slot; its init fills it."""
        self._refuse(fields)
        user = self._users.take() if self._users else 0
        path = f"{self._base.path}/slot-{next(self._numbers)}"
        try:
            os.mkdir(path, 0o710)  # the slot's user can pass through, but cannot create anything in it
        except OSError:
            if self._users:
                self._users.give_back(user)
            raise
        self._slots += 1
        for layer in layers:
            layer.keep()
        plan = unprivileged_init.UnprivilegedPlan(
            home=path,
            user=user,
            confined=self._confined,
            network=fields["network"],
            shown=self._readable_paths(fields) if self._confined else (),
            template=layers[0].path if layers else None,
            limits=_resource_limits(fields["limits"], user) if self._confined else (),
        )
        exposed = "only slots at the levels full and userns have their own network" if fields["network"] else ""
        return NewSlot(
            CopiedFiles(path, user, layers, self, plan.shown),
            (),
            UnprivilegedInit(plan, self._children),
            exposed,
        )

    def _readable_paths(self, fields: Fields) -> tuple[tuple[str, bool], ...]:
        """Return what a slot may read of the machine: paths, each with whether its files are shown or only names."""
        hiding = [source for source, _, *whole in fields["mounts"] if not whole and packages.is_interpreter(source)]
        found: list[tuple[str, bool]] = [(mount[0], True) for mount in fields["mounts"] if mount[0] not in hiding]
        found += ((path, True) for path in unprivileged_init.settings(fields["network"]))
        for path in (*unprivileged_init.READ_ONLY, *self._prefix, *hiding):
            if path not in self._system:
                whole = path in unprivileged_init.READ_ONLY and not self._machine
                # the top-level links lead below /usr
                self._system[path] = () if os.path.islink(path) else tuple(packages.visible(path, whole=whole))
            found += self._system[path]
        return tuple(found)

    def _refuse(self, fields: Fields) -> None:
        rung = "confined" if self._confined else "none"
        if fields["image"] is not None:
            raise CannotMake(f"slots at the level {rung} have no root of their own for an image; use userns or full")
        if fields.get("allow") is not None:
            raise CannotMake(f"the level {rung} cannot restrict a slot to a list of hosts; use userns or full")
        if any(source != target for source, target, *_ in fields["mounts"]):
            raise CannotMake(f"the level {rung} cannot mount; give a directory at its own path, or use userns or full")
        # All slots would have the same user, who may trace and kill the processes of all of them.
        if self._confined and self._users is None and self._slots:
            raise CannotMake("without root, the level confined allows one slot at a time; end the other slot first")

    def end(self, files: CopiedFiles) -> None:
        """Release a dead slot's user and layers. The slot's files are already deleted, or have become a layer."""
        self._slots -= 1
        if self._users is not None:
            server_directory.clear_shared_memory(files.user)
            self._users.give_back(files.user)
        for layer in files.layers:
            layer.release()

    def seal(self, files: CopiedFiles) -> CopiedLayer:
        """Turn a dead slot's files into a layer by renaming them."""
        layer = self._new_layer(files.layers)
        try:
            os.mkdir(layer.path, 0o700)
            for name in _TREES.values():
                # The move to another parent needs the right to write to the directory, which an agent may have removed.
                os.chmod(f"{files.path}/{name}", 0o700)
                copy_workspace.open_up(f"{files.path}/{name}")
                os.rename(f"{files.path}/{name}", f"{layer.path}/{name}")
        finally:
            files.release()
        return layer

    def duplicate(self, layer: CopiedLayer) -> Generator[None, None, CopiedLayer]:
        yield None
        copy = self._new_layer(layer.below)
        copy_workspace.duplicate(layer.path, copy.path)
        return copy

    def cut(self, layer: CopiedLayer, view: Fields) -> None:
        below = self._below(layer.below)
        stacks = [(path, Stack([f"{below}/{name}"], OverlayMarks(user_xattrs=True))) for path, name in _TREES.items()]
        chosen = Selection.resolved(view["only"], view["without"], StackedRoot(stacks))
        for path, name in _TREES.items():
            trash = f"{self._base.path}/trash/{layer.name}-{name}"
            os.mkdir(trash)
            part = chosen.within(path.strip("/"))
            cut = copy_workspace.CopyCut(f"{layer.path}/{name}", f"{below}/{name}", trash)
            cut.keep_only(part.only)
            for left_out in part.without:
                cut.leave_out(left_out)
            self.drop(trash)

    def slot_changes(self, files: CopiedFiles) -> Iterator[Fields | None]:
        return self._changes(files.path, files.layers)

    def show(self, fields: Fields, layers: tuple[CopiedLayer, ...]) -> SlotPath:
        raise OSError(errno.EOPNOTSUPP, "without mounts, only a slot shows its files")

    def layer_changes(self, layer: CopiedLayer) -> Iterator[Fields | None]:
        return self._changes(layer.path, layer.below)

    def _changes(self, directory: str, layers: tuple[CopiedLayer, ...]) -> Iterator[Fields | None]:
        for path, name in _TREES.items():
            for change in copy_workspace.differences(f"{directory}/{name}", f"{self._below(layers)}/{name}"):
                yield change and {**change, "path": f"{path}/{change['path']}"}

    def locate(self, files: CopiedFiles, root: int, path: str, writing: bool = False) -> SlotPath:
        """Find the slot's own directories at the usual paths, and system files that every user may read."""
        owner = files.user or os.geteuid()
        real = unprivileged_init.real_path(files.path, path)
        # Commands see their directories under the real paths, for example in TMPDIR, and may print those.
        if real != path or path.startswith(f"{files.path}/"):
            name, _, rest = real[len(files.path) + 1 :].partition("/")
            known = next(prefix for prefix, folder in unprivileged_init.DIRECTORIES.items() if folder == name)
            return SlotPath(files.directory(name), f"/{rest}", owner, known)
        if self._confined:
            self._require_public(path, writing, files.shown)
        return SlotPath(root, path, owner)

    def _require_public(self, path: str, writing: bool, shown: tuple[tuple[str, bool], ...]) -> None:
        """Raise PermissionError if the slot's commands may not read the path, or if `writing` is set."""
        denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        # The server writes with its own user, who may write where the commands of the slot must not.
        if writing:
            raise denied
        try:
            real = os.path.realpath(path, strict=True)
        except OSError:
            return  # the path does not exist, which will be reported
        parents = [real[:index] or "/" for index, letter in enumerate(real) if letter == "/"]
        names = os.path.isdir(real)  # and such an entry shows the names in a directory
        visible = real == "/" or any(
            (whole or names) and (real == top or real.startswith(f"{top}/")) for top, whole in shown
        )
        open_to_all = all(os.stat(parent).st_mode & _PASS for parent in parents) and os.stat(real).st_mode & _READ
        if not visible or (self._users and not open_to_all):
            raise denied

    def drop(self, path: str) -> None:
        """Remove a directory in a separate process, since the directory's owner decides how long that takes."""
        with contextlib.suppress(FileNotFoundError):
            trash = f"{self._base.path}/trash/{next(self._numbers)}"
            os.rename(path, trash)
            remover = os.fork()
            if remover == 0:
                try:
                    server_directory.remove(trash)
                finally:
                    os._exit(0)
            self._removers.add(remover)
            self._children.add(remover)
        # Nothing reports the end of a remover, so those that have ended are reaped with the next one.
        for pid in list(self._removers):
            if os.waitpid(pid, os.WNOHANG)[0]:
                self._removers.discard(pid)
                self._children.discard(pid)

    def _new_layer(self, below: tuple[CopiedLayer, ...]) -> CopiedLayer:
        name = f"layer-{self._token}-{next(self._numbers)}"
        return CopiedLayer(name, f"{self._base.path}/layers/{name}", below, self.drop)

    def _below(self, layers: tuple[CopiedLayer, ...]) -> str:
        return layers[0].path if layers else f"{self._base.path}/empty"


def _resource_limits(limits: Fields, user: int) -> tuple[tuple[int, int | None], ...]:
    return (
        (resource.RLIMIT_CORE, 1),  # so that the kernel does not start the host's program for core dumps (core(5))
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_NPROC, limits["pids"] if user else None),
        (resource.RLIMIT_DATA, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["disk_bytes"]),
    )
