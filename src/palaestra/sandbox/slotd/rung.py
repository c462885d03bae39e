"""What a server's rung has to provide: slots to begin and to end, their files, their layers. No kernel concern itself.

The server knows slots, leases, commands and transfers, and none of how a slot is isolated. `layered.py` makes slots of
namespaces and overlays, `confined/` makes them of users and plain directories.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from .protocol.frames import Fields


class CannotMake(Exception):
    """A slot that cannot be made as asked; the message says why and what would help."""


class Layer(Protocol):
    """A sealed slot's files, which never change any more."""

    @property
    def name(self) -> str: ...

    @property
    def below(self) -> Sequence[Layer]:
        """What it lies on, topmost first."""
        ...

    def release(self) -> None:
        """One user less; the last one takes the files along."""
        ...


class Ground(Protocol):
    """The files of one slot."""

    def release(self) -> None:
        """Let go of them and of the layers below."""
        ...


class Network(Enum):
    """Where sockets of a slot's processes are: in a namespace of its own, where the server's are, or nowhere."""

    OWN = "own"
    SHARED = "shared"
    NONE = "none"


class Body(Protocol):
    """The processes of one slot."""

    @property
    def network(self) -> Network: ...

    @property
    def takes_lines(self) -> bool:
        """Whether its init takes a second socket for orders."""
        ...

    def fork(self, control: socket.socket) -> int:
        """Fork the slot's init, which serves the other end of `control`; its pid. Never returns in the init."""
        ...

    def gone(self) -> bool:
        """Called when the init is dead: whether nothing else of the slot lives. Kills what does."""
        ...


@dataclass(frozen=True, slots=True)
class Made:
    """Everything for one slot but its processes, and how to begin them. `groups` are its control groups.

    `exposed` says why it reaches metadata addresses; empty where it does not.
    """

    ground: Ground
    groups: tuple[str, ...]
    body: Body
    exposed: str = ""


class Place(NamedTuple):
    """Where the server finds a path of a slot: `path` below `root`, an open directory that the slot knows as `prefix`.

    What is written there belongs to `owner`.
    """

    root: int
    path: str
    owner: int
    prefix: str = ""

    def seen(self, entry: Fields) -> Fields:
        """A directory entry as the slot sees it."""
        return {**entry, "path": f"{self.prefix}{entry['path']}"} if self.prefix else entry

    def error(self, error: OSError) -> OSError:
        """An error that names a path as the slot sees it."""
        return OSError(error.errno, error.strerror, f"{self.prefix}{error.filename or self.path}")


class Workshop(Protocol):
    """The rung of one server at work."""

    def make(self, name: str, fields: Fields, layers: tuple[Layer, ...]) -> Made:
        """Lay out a slot as a CREATE request describes it. Raises `CannotMake` or OSError and leaves nothing then."""
        ...

    def seal(self, ground: Ground) -> Layer:
        """A dead slot's files as a layer."""
        ...

    def duplicate(self, layer: Layer) -> Layer:
        """A second layer of the same files, to be cut."""
        ...

    def cut(self, layer: Layer, view: Fields) -> None:
        """Reduce a layer that nobody stands on yet to a view of itself."""
        ...

    def slot_changes(self, ground: Ground) -> Iterator[Fields | None]:
        """What a slot has changed so far; None now and then, as a pause."""
        ...

    def layer_changes(self, layer: Layer) -> Iterator[Fields | None]:
        """What a layer changes; None now and then, as a pause."""
        ...

    def locate(self, ground: Ground, root: int, path: str, writing: bool = False) -> Place:
        """Where the server finds an absolute path of a slot, whose init has given `root`.

        Raises OSError for a path that the slot may not read (or write).
        """
        ...
