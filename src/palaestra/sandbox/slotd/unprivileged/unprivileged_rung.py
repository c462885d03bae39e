"""The rungs `confined` and `none` at work: slots of users and plain directories, forked by copying.

`confined` serves many slots at a time where it is root and can give each a user of its own; otherwise one, since a
second would be the same user and could reach the first one's files.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .. import rung
from ..layers.cut_view import Selection
from ..layers.overlay import Marks, Root, Stack
from ..layers.store import Counted
from ..protocol.frames import Fields
from ..rung import CannotMake, Made, Network, Place
from . import copy_workspace, server_directory, unprivileged_init, users

_TREES = {path: name for path, name in unprivileged_init.DIRECTORIES.items() if name != "tmp"}
"""What a layer keeps."""

_READ, _PASS = 0o004, 0o001


@dataclass
class Layer(Counted):
    """Whole trees that nobody writes to any more. `below` is what the sealed slot had started from, topmost first."""

    name: str
    path: str
    below: tuple[Layer, ...]
    drop: Callable[[str], None]

    def beneath(self) -> tuple[Layer, ...]:
        return self.below

    def drop_files(self) -> None:
        self.drop(self.path)


@dataclass
class Ground:
    """The directory of one slot, and what it started from. `user` 0 is the server's own."""

    path: str
    user: int
    layers: tuple[Layer, ...]
    workshop: Confined
    _open: dict[str, int] = field(default_factory=dict, init=False)

    def directory(self, name: str) -> int:
        """One of its directories, opened. No command can put anything else in its place."""
        if name not in self._open:
            flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            self._open[name] = os.open(f"{self.path}/{name}", flags)
        return self._open[name]

    def release(self) -> None:
        """Let go of the files, if they have not become a layer's, of the user and of the layers."""
        while self._open:
            os.close(self._open.popitem()[1])
        self.workshop.drop(self.path)
        self.workshop.end(self)


@dataclass
class UserBody:
    """A slot whose processes are those of its user; without one, all that the server inherits when the init dies."""

    plan: unprivileged_init.Plan
    children: set[int]
    """The server's own, which `gone` must not take for what a slot has left."""
    pid: int = 0

    @property
    def network(self) -> Network:
        """Of confined processes without one nobody listens on a port of the server's network."""
        return Network.SHARED if self.plan.network or not self.plan.confined else Network.NONE

    @property
    def takes_lines(self) -> bool:
        """The init of this rung does not."""
        return False

    def fork(self, control: socket.socket) -> int:
        """Fork the init."""
        self.pid = os.fork()
        if self.pid == 0:
            unprivileged_init.run(self.plan, control)
        self.children.add(self.pid)
        return self.pid

    def gone(self) -> bool:
        """Whether nothing but the init, which is dead, was there; what was is killed."""
        self.children.discard(self.pid)
        if not self.plan.user:
            return users.kill_orphans(self.children) == 0
        users.kill(self.plan.user)
        return users.living(self.plan.user) == 0


class Confined:
    """Implements `Workshop`."""

    def __init__(self, place: server_directory.Base, confined: bool, settings: Fields) -> None:
        self._base, self._confined = place, confined
        self._users = users.Users(place.first_user) if confined and place.first_user else None
        self._readable = tuple(filter(None, [settings.get("prefix")]))
        self._numbers = itertools.count(1)
        self._token = os.urandom(4).hex()
        self._children: set[int] = set()
        self._removers: set[int] = set()
        self._slots = 0
        for name in ("layers", "trash", "empty", *(f"empty/{name}" for name in _TREES.values())):
            os.mkdir(f"{place.path}/{name}", 0o700)

    def make(self, name: str, fields: Fields, layers: tuple[rung.Layer, ...]) -> Made:
        """Lay out a slot; its init fills it."""
        self._refuse(fields)
        below = tuple(_layer(layer) for layer in layers)
        user = self._users.take() if self._users else 0
        path = f"{self._base.path}/slot-{next(self._numbers)}"
        os.mkdir(path, 0o710)  # its user passes through, and cannot put anything in it
        self._slots += 1
        for layer in below:
            layer.keep()
        limits = fields["limits"]
        plan = unprivileged_init.Plan(
            home=path,
            user=user,
            confined=self._confined,
            network=fields["network"],
            readable=(*self._readable, *(source for source, _ in fields["mounts"])),
            template=below[0].path if below else None,
            limits=_limits(limits, user) if self._confined else (),
        )
        exposed = "only the rung full can refuse them" if fields["network"] else ""
        return Made(Ground(path, user, below, self), (), UserBody(plan, self._children), exposed)

    def _refuse(self, fields: Fields) -> None:
        rung = "confined" if self._confined else "none"
        if fields["image"] is not None:
            raise CannotMake(f"the rung {rung} has no root of its own, so no image; use userns or full")
        if fields.get("allow") is not None:
            raise CannotMake(f"the rung {rung} cannot hold a slot to a list of hosts; use userns or full")
        if any(source != target for source, target in fields["mounts"]):
            raise CannotMake(f"the rung {rung} cannot mount; give a directory at its own path, or use userns or full")
        if self._confined and self._users is None and self._slots:
            raise CannotMake("without root there is one slot at a time on the rung confined; end the other one first")

    def end(self, ground: Ground) -> None:
        """The slot is dead and its files are gone, or a layer's."""
        self._slots -= 1
        if self._users is not None:
            server_directory.clear_shared_memory_of(ground.user)
            self._users.give_back(ground.user)
        for layer in ground.layers:
            layer.release()

    def seal(self, ground: rung.Ground) -> Layer:
        """A dead slot's files as a layer: they only change their name."""
        ours = _ground(ground)
        layer = self._new_layer(ours.layers)
        try:
            os.mkdir(layer.path, 0o700)
            for name in _TREES.values():
                os.chmod(f"{ours.path}/{name}", 0o700)
                copy_workspace.open_up(f"{ours.path}/{name}")
                os.rename(f"{ours.path}/{name}", f"{layer.path}/{name}")
        finally:
            ours.release()
        return layer

    def duplicate(self, layer: rung.Layer) -> Layer:
        """A second layer of the same files, to be cut."""
        ours = _layer(layer)
        copy = self._new_layer(ours.below)
        copy_workspace.duplicate(ours.path, copy.path)
        return copy

    def cut(self, layer: rung.Layer, view: Fields) -> None:
        """Reduce a layer to a view of itself."""
        ours = _layer(layer)
        below = self._below(ours.below)
        stacks = [(path, Stack([f"{below}/{name}"], Marks(user_xattrs=True))) for path, name in _TREES.items()]
        chosen = Selection.resolved(view["only"], view["without"], Root(stacks))
        for path, name in _TREES.items():
            trash = f"{self._base.path}/trash/{ours.name}-{name}"
            os.mkdir(trash)
            part = chosen.within(path.strip("/"))
            cut = copy_workspace.Cut(f"{ours.path}/{name}", f"{below}/{name}", trash)
            cut.keep_only(part.only)
            for left_out in part.without:
                cut.leave_out(left_out)
            self.drop(trash)

    def slot_changes(self, ground: rung.Ground) -> Iterator[Fields | None]:
        """What a slot has changed so far."""
        ours = _ground(ground)
        return self._changes(ours.path, ours.layers)

    def layer_changes(self, layer: rung.Layer) -> Iterator[Fields | None]:
        """What a layer changes."""
        ours = _layer(layer)
        return self._changes(ours.path, ours.below)

    def _changes(self, directory: str, layers: tuple[Layer, ...]) -> Iterator[Fields | None]:
        for path, name in _TREES.items():
            for change in copy_workspace.differences(f"{directory}/{name}", f"{self._below(layers)}/{name}"):
                yield change and {**change, "path": f"{path}/{change['path']}"}

    def locate(self, ground: rung.Ground, root: int, path: str, writing: bool = False) -> Place:
        """The slot's own directories at the paths of every backend; of the system, what anybody may read."""
        ours = _ground(ground)
        owner = ours.user or os.geteuid()
        real = unprivileged_init.real_path(ours.path, path)
        if real != path or path.startswith(f"{ours.path}/"):
            name, _, rest = real[len(ours.path) + 1 :].partition("/")
            known = next(prefix for prefix, folder in unprivileged_init.DIRECTORIES.items() if folder == name)
            return Place(ours.directory(name), f"/{rest}", owner, known)
        if self._confined:
            self._require_public(path, writing)
        return Place(root, path, owner)

    def _require_public(self, path: str, writing: bool) -> None:
        """Refuse what a command of the slot could not read, or write."""
        denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        if writing:
            raise denied
        try:
            real = os.path.realpath(path, strict=True)
        except OSError:
            return  # it is not there, and will be reported so
        parents = [real[:index] or "/" for index, letter in enumerate(real) if letter == "/"]
        shown = real == "/" or any(real == top or real.startswith(f"{top}/") for top in self._shown())
        open_to_all = all(os.stat(parent).st_mode & _PASS for parent in parents) and os.stat(real).st_mode & _READ
        if not shown or (self._users and not open_to_all):
            raise denied

    def _shown(self) -> tuple[str, ...]:
        return (*unprivileged_init.READ_ONLY, *self._readable)

    def drop(self, path: str) -> None:
        """Remove a directory in a process of its own: how long that takes is its holder's doing."""
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
        for pid in list(self._removers):
            if os.waitpid(pid, os.WNOHANG)[0]:
                self._removers.discard(pid)
                self._children.discard(pid)

    def _new_layer(self, below: tuple[Layer, ...]) -> Layer:
        name = f"layer-{self._token}-{next(self._numbers)}"
        return Layer(name, f"{self._base.path}/layers/{name}", below, self.drop)

    def _below(self, layers: tuple[Layer, ...]) -> str:
        return layers[0].path if layers else f"{self._base.path}/empty"


def _ground(ground: rung.Ground) -> Ground:
    assert isinstance(ground, Ground)
    return ground


def _layer(layer: rung.Layer) -> Layer:
    assert isinstance(layer, Layer)
    return layer


def _limits(limits: Fields, user: int) -> tuple[tuple[int, int | None], ...]:
    return (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_NPROC, limits["pids"] if user else None),
        (resource.RLIMIT_DATA, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["disk_bytes"]),
    )
