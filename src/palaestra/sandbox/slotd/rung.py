"""What an isolation level has to provide to the server: slots, their files, their layers.

The server knows leases, commands and transfers, and nothing of how a slot is isolated. `namespaced/` makes slots of
namespaces and overlays, `unprivileged/` of users and plain directories.
"""

from __future__ import annotations

import socket
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeVar

from .protocol.frames import Fields


class CannotMake(Exception):
    """A slot or snapshot that cannot be made as asked; the message says why and what would help."""


class SealedLayer:
    """The files of a sealed slot, which never change. Layers count their users: slots, and the layers above them."""

    below: tuple[SealedLayer, ...]  # the layers it lies on, topmost first; it is a user of each

    def __init__(self, name: str, below: Sequence[SealedLayer]) -> None:
        self.name, self.below = name, tuple(below)
        self._users = 1
        for layer in below:
            layer.keep()

    def keep(self) -> None:
        """Add a user."""
        self._users += 1

    def release(self) -> None:
        """Remove a user; the files go with the last one."""
        self._users -= 1
        if self._users == 0:
            self.drop_files()
            for layer in self.below:
                layer.release()

    def drop_files(self) -> None:
        """Remove the files: nobody uses them any more."""
        raise NotImplementedError


class SlotFiles(Protocol):
    """The files of one slot."""

    def release(self) -> None:
        """Remove them, unless they have become a layer, and release the layers below."""


class NetworkScope(Enum):
    """Where sockets of a slot's processes are: in a namespace of its own, where the server's are, or nowhere."""

    OWN = "own"
    SHARED = "shared"
    NONE = "none"


class SlotInit(Protocol):
    """Starts the first process of one slot, and ends what it leaves behind."""

    @property
    def network(self) -> NetworkScope: ...

    @property
    def takes_lines(self) -> bool:
        """Whether the init takes a second socket for orders."""

    def fork(self, control: socket.socket) -> int:
        """Start the init, which serves the other end of `control`; its pid. Never returns in the init."""

    def gone(self) -> bool:
        """Whether no process of the slot is left once the init is dead. Kills those that are."""


@dataclass(frozen=True, slots=True)
class NewSlot:
    """A slot that is laid out but not started. `groups` are its control groups.

    `exposed` says why it can reach metadata addresses; empty if it cannot.
    """

    files: SlotFiles
    groups: tuple[str, ...]
    init: SlotInit
    exposed: str = ""


class Place(NamedTuple):
    """Where the server finds a path of a slot: `path` below `root`, an open directory that the slot knows as `prefix`.

    Files written there belong to `owner`.
    """

    root: int
    path: str
    owner: int
    prefix: str = ""

    def seen(self, entry: Fields) -> Fields:
        """A directory entry with its path as the slot sees it."""
        return {**entry, "path": f"{self.prefix}{entry['path']}"} if self.prefix else entry

    def error(self, error: OSError) -> OSError:
        """An error with its path as the slot sees it."""
        return OSError(error.errno, error.strerror, f"{self.prefix}{error.filename or self.path}")


F = TypeVar("F", bound=SlotFiles, contravariant=True)
L = TypeVar("L", bound=SealedLayer)


class Checkpoints(Protocol[F, L]):
    """Layers that outlive their source: checkpoints of running slots, snapshots on the host's disk."""

    def checkpoint(self, files: F, mapped: bool, begun_ns: int) -> Generator[None, None, tuple[L, int]]:
        """Copy a stopped slot's change, as a job: the layer, and how many bytes were copied. Raises OSError.

        `mapped`: whether a process of the slot can write through memory.
        """

    def slot_ended(self, files: F) -> None:
        """Drop what only the slot's next checkpoint would have needed."""

    def save(self, layer: L, folder: str) -> Generator[None, None, int]:
        """Copy a layer and all below it to the host's empty `folder`, as a job: the bytes of the files."""

    def load(self, folder: str, image: str | None) -> tuple[L, ...]:
        """The layers that were saved in a folder, topmost first. Raises OSError if they are gone."""


class RungDriver(Protocol[F, L]):
    """One isolation level at work in one server."""

    @property
    def checkpoints(self) -> Checkpoints[F, L] | None:
        """None if this isolation level has no layers to stack."""

    def make(self, name: str, fields: Fields, layers: tuple[L, ...]) -> NewSlot:
        """Lay out a slot as a CREATE request describes it. Raises `CannotMake` or OSError, and leaves nothing then."""

    def seal(self, files: F) -> L:
        """Turn a dead slot's files into a layer."""

    def duplicate(self, layer: L) -> L:
        """A second layer of the same files, to be cut; slots may use the first one."""

    def cut(self, layer: L, view: Fields) -> None:
        """Reduce a layer that nobody uses yet to a view of itself."""

    def slot_changes(self, files: F) -> Iterator[Fields | None]:
        """What a slot has changed so far; None now and then, as a pause."""

    def layer_changes(self, layer: L) -> Iterator[Fields | None]:
        """What a layer changes; None now and then, as a pause."""

    def locate(self, files: F, root: int, path: str, writing: bool = False) -> Place:
        """Where the server finds an absolute path of a slot whose init has reported `root`.

        Raises OSError for a path that the slot may not read (or write).
        """


AnyDriver = RungDriver[Any, Any]
AnyCheckpoints = Checkpoints[Any, Any]
