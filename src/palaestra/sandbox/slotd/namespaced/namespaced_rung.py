"""The rungs `full` and `userns` at work: slots of namespaces, over stacks of layers."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass

from .. import rung
from ..layers import store
from ..layers.checkpoint import Keeper
from ..layers.seal import Sealer
from ..protocol.frames import Fields
from ..rung import Made, Network, Place
from . import cgroups, create
from .host import prepare


@dataclass(frozen=True, slots=True)
class NamespaceBody:
    """A slot whose init is pid 1 of a process namespace: the kernel ends everything with it."""

    plan: create.Plan

    @property
    def network(self) -> Network:
        """With the network on, a slot has the host's."""
        return Network.SHARED if self.plan.network else Network.OWN

    @property
    def takes_lines(self) -> bool:
        """The native init does."""
        return True

    def fork(self, control: socket.socket) -> int:
        """Fork the init into a namespace of its own."""
        return create.fork(self.plan, control)

    def gone(self) -> bool:
        """Always: the init's death is reported after that of all others in its namespace."""
        return True


class Layered:
    """Implements `Workshop`."""

    def __init__(self, full: bool, group: cgroups.ServerGroup | None, settings: Fields) -> None:
        self._world = prepare(full, settings)
        self._maker, self._sealer = create.SlotMaker(self._world, group), Sealer(self._world)
        self.keeper = Keeper(self._world)

    def make(self, name: str, fields: Fields, layers: tuple[rung.Layer, ...]) -> Made:
        """Lay out a slot as a CREATE request describes it."""
        made = self._maker.make(name, fields, tuple(_layer(layer) for layer in layers))
        return Made(made.ground, made.groups, NamespaceBody(made.plan), made.exposed)

    def seal(self, ground: rung.Ground) -> store.Layer:
        """A dead slot's change as a layer."""
        return self._sealer.seal(_ground(ground))

    def duplicate(self, layer: rung.Layer) -> store.Layer:
        """A second layer of the same files."""
        return self._sealer.duplicate(_layer(layer))

    def cut(self, layer: rung.Layer, view: Fields) -> None:
        """Reduce a layer to a view of itself."""
        self._sealer.cut(_layer(layer), view)

    def slot_changes(self, ground: rung.Ground) -> Iterator[Fields | None]:
        """What a slot has changed so far."""
        return self._sealer.slot_changes(_ground(ground))

    def layer_changes(self, layer: rung.Layer) -> Iterator[Fields | None]:
        """What a layer changes."""
        return self._sealer.layer_changes(_layer(layer))

    def locate(self, ground: rung.Ground, root: int, path: str, writing: bool = False) -> Place:
        """Everything is below the slot's own root."""
        return Place(root, path, self._world.owner)


def _ground(ground: rung.Ground) -> create.Ground:
    assert isinstance(ground, create.Ground)
    return ground


def _layer(layer: rung.Layer) -> store.Layer:
    assert isinstance(layer, store.Layer)
    return layer
