"""The interface through which the server uses an isolation level: slots, their files and their layers.

`namespaced/` makes slots from namespaces and overlays; `unprivileged/` makes them from users and plain directories.
"""

from __future__ import annotations

import socket
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from .protocol.frames import Fields

HOST = "/host"  # where the server finds the host's root, if it has a root of its own (`namespaced/host.py`)


class CannotMake(Exception):
    """A slot or snapshot cannot be made as requested; the message names the reason and a remedy."""


class Counted:
    """Files with a count of their users. The last `release` drops the files."""

    _users = 1

    def keep(self) -> Self:
        """Add a user."""
        self._users += 1
        return self

    def release(self) -> None:
        """Remove a user."""
        self._users -= 1
        if self._users == 0:
            self.drop_files()

    def drop_files(self) -> None:
        """Remove the files after the last use."""
        raise NotImplementedError


class SealedLayer(Counted):
    """The files of a sealed slot, which never change. Their users are slots and the layers above them."""

    below: tuple[SealedLayer, ...]  # the layers below it, topmost first; this layer is a user of each

    def __init__(self, name: str, below: Sequence[SealedLayer]) -> None:
        self.name, self.below = name, tuple(below)
        for layer in below:
            layer.keep()

    def drop_files(self) -> None:
        for layer in self.below:
            layer.release()


class NetworkScope(Enum):
    """The network of a slot: its own namespace, the server's, or none."""

    OWN = "own"
    SHARED = "shared"
    NONE = "none"


class SlotInit(Protocol):
    """Starts the first process of one slot, and ends the processes it leaves behind."""

    @property
    def network(self) -> NetworkScope: ...

    @property
    def takes_lines(self) -> bool:
        """Whether the init accepts a second socket for orders."""

    @property
    def exposed(self) -> bool:
        """Whether the slot's commands may kill and stop the init."""

    @property
    def shares_memory(self) -> bool:
        """Whether the kernel may kill the init when the slot's commands use up their control group's memory."""

    def fork(self, control: socket.socket) -> int:
        """Start the init, which serves the other end of `control`; returns its pid. Never returns in the init."""

    def end_soon(self, pid: int) -> None:
        """Keep what can be had only while the init `pid` of a finished slot lives. Called before it is killed."""

    def gone(self) -> bool:
        """Return whether no process of the slot is left, and kill any that are. Called once the init is dead."""


@dataclass(frozen=True, slots=True)
class NewSlot:
    """A slot before its start. `groups` are its control groups. If the slot shares the host's network, `exposed` is the
    reason why it has no network of its own."""

    files: Any  # the driver's files; `release` removes them, unless they have become a layer
    groups: tuple[str, ...]
    init: SlotInit
    exposed: str = ""


class SlotPath(NamedTuple):
    """Where the server finds a path of a slot: at `path` below the open directory `root`. The slot knows that directory
    as `prefix`.

    New files belong to `owner`.
    """

    root: int
    path: str
    owner: int
    prefix: str = ""

    def seen(self, entry: Fields) -> Fields:
        """Return a directory entry with its path as the slot sees it."""
        return {**entry, "path": f"{self.prefix}{entry['path']}"} if self.prefix else entry

    def error(self, error: OSError) -> OSError:
        """Return an error with its path as the slot sees it."""
        return OSError(error.errno, error.strerror, f"{self.prefix}{error.filename or self.path}")


F = TypeVar("F", contravariant=True)
L = TypeVar("L", bound=SealedLayer)


class Checkpoints(Protocol[F, L]):
    """Makes layers without ending a slot: checkpoints of running slots, layers of given files, and snapshots on the
    host's disk."""

    def checkpoint(self, files: F, mapped: bool, begun_ns: int) -> Generator[None, None, tuple[L, int]]:
        """Copy a stopped slot's changes, as a job; returns the layer and the number of bytes copied. Raises OSError.

        `mapped` is true if a process of the slot can write to its files through memory.
        """

    def restore(self, files: F, layer: L) -> Iterator[None]:
        """Run a job that copies a layer into a slot's own changes before the slot starts. Raises OSError."""

    def slot_ended(self, files: F) -> None:
        """Drop the data for the slot's next checkpoint."""

    def compose(self, limits: Fields, files: Sequence[tuple[str, bytes]]) -> L:
        """Return a layer as a slot without an image, mounts and layers leaves it that has these limits, and in which
        only these files were written, each at a path below the workspace. Raises OSError, and then leaves nothing
        behind."""

    def save(self, layer: L, folder: str) -> Generator[None, None, int]:
        """Run a job that copies a layer and all layers below it to the host's empty `folder`. Returns the number of
        bytes copied."""

    def load(self, folder: str, image: str | None) -> tuple[L, ...]:
        """Return the layers that were saved in a folder, topmost first. Raises OSError if they are gone."""


class RungDriver(Protocol[F, L]):
    """Makes and changes the slots and layers of one server at one isolation level."""

    @property
    def checkpoints(self) -> Checkpoints[F, L] | None:
        """The checkpoints of this isolation level; None if running slots cannot be checkpointed at it."""

    def make(self, name: str, fields: Fields, layers: tuple[L, ...]) -> NewSlot:
        """Lay out a slot for a `create` request. Raises `CannotMake` or OSError, and then leaves nothing behind."""

    def show(self, fields: Fields, layers: tuple[L, ...]) -> SlotPath:
        """Mount, read-only and nowhere, the files that a slot for this `create` request would have at its start, as far
        as they are below the paths of `on_demand`. The caller closes the root of the result. Raises OSError if that is
        not possible."""

    def seal(self, files: F) -> L:
        """Turn a dead slot's files into a layer."""

    def duplicate(self, layer: L) -> Generator[None, None, L]:
        """Run a job that returns a second layer of the same files, which can be cut while slots use the first layer.
        The files of a layer on disk are copied. Raises `CannotMake` or OSError, and then leaves nothing behind."""

    def cut(self, layer: L, view: Fields) -> None:
        """Reduce a layer that is not in use yet to a view of itself."""

    def slot_changes(self, files: F) -> Iterator[Fields | None]:
        """Yield the changes of a slot so far; None stands for a pause."""

    def layer_changes(self, layer: L) -> Iterator[Fields | None]:
        """Yield the changes in a layer; None stands for a pause."""

    def locate(self, files: F, root: int, path: str, writing: bool = False) -> SlotPath:
        """Return where the server finds the slot's absolute path `path`. Raises OSError if the slot may not read that
        path or, if `writing` is true, may not write to it."""


AnyDriver = RungDriver[Any, Any]
