"""From a dead slot to a layer, from a layer to a view of it, and what a layer changes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator

from ..namespaced.create import Ground
from ..namespaced.host import World
from ..namespaced.rootfs import Tree
from ..protocol.frames import Fields
from .cut_view import Cut, Selection, duplicate
from .overlay import Root, Stack, differences
from .store import Layer


class Sealer:
    """Makes layers in one world. Their names are never those of another server's layers.

    A snapshot outlives the server that made it in the hands of its client; it must not mean somebody else's files.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._token = os.urandom(4).hex()
        self._numbers = itertools.count(1)

    def seal(self, ground: Ground) -> Layer:
        """A dead slot's change as a layer. It takes over the slot's store; the slot's hold on its layers goes."""
        trees = {tree.name: ground.upper(tree) for tree in ground.trees}
        layer = Layer(self._name(), ground.store, trees, ground.layers, ground.image)
        for lower in ground.layers:
            lower.release()
        return layer

    def duplicate(self, layer: Layer) -> Layer:
        """A second layer of the same files, to be cut; the first stays as it is, since slots may stand on it."""
        layer.store.unlimit()
        name = self._name()
        directory = f"{layer.store.path}/{name}"
        os.mkdir(directory)
        for tree, path in layer.trees.items():
            duplicate(path, f"{directory}/{tree}")
        trees = {tree: f"{directory}/{tree}" for tree in layer.trees}
        return Layer(name, layer.store.keep(), trees, layer.below, layer.image)

    def cut(self, layer: Layer, view: Fields) -> None:
        """Reduce a layer that nobody stands on yet to a view of itself."""
        marks = self._world.marks
        layer.store.unlimit()
        stacks = {tree: Stack(tree.lowers, marks) for tree in self._trees_below(layer)}
        below = Root([(tree.target, stack) for tree, stack in stacks.items()])
        chosen = Selection.resolved(view["only"], view["without"], below)
        for tree, stack in stacks.items():
            trash = f"{layer.store.path}/trash-{layer.name}-{tree.name}"
            os.mkdir(trash)
            part = chosen.within(tree.target.strip("/"))
            cut = Cut(layer.trees[tree.name], stack, marks, trash)
            cut.keep_only(part.only)
            for path in part.without:
                cut.leave_out(path)

    def slot_changes(self, ground: Ground) -> Iterator[Fields | None]:
        """What a slot has changed so far; None now and then, as a pause."""
        return self._changes((tree, ground.upper(tree)) for tree in ground.trees)

    def layer_changes(self, layer: Layer) -> Iterator[Fields | None]:
        """What a layer changes; None now and then, as a pause."""
        return self._changes((tree, layer.trees[tree.name]) for tree in self._trees_below(layer))

    def _changes(self, uppers: Iterable[tuple[Tree, str]]) -> Iterator[Fields | None]:
        marks = self._world.marks
        for tree, upper in uppers:
            for difference in differences(upper, Stack(tree.lowers, marks), marks):
                if difference is None:
                    yield None
                else:
                    path = f"{tree.target.rstrip('/')}/{difference.path}"
                    yield {"path": path, "kind": difference.kind, "opaque": difference.opaque}

    def _trees_below(self, layer: Layer) -> list[Tree]:
        """The trees that a layer changes, with what it lies on."""
        trees = []
        for tree in self._world.trees(layer.image, network=False):
            lowers = tuple(below.trees[tree.name] for below in layer.below if tree.name in below.trees) + tree.lowers
            trees.append(Tree(tree.name, tree.target, lowers))
        return trees

    def _name(self) -> str:
        return f"layer-{self._token}-{next(self._numbers)}"
