"""Keeps the layers of the slot server, and serves the requests about them: compose, view, layer_changes, save, load,
forget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .event_loop import Job
from .protocol.frames import Frame
from .rung import AnyDriver, CannotMake, Checkpoints, SealedLayer
from .server_slot import Replies, RequestError


class LayerRequests:
    """The layers, by name. `operations` serves each request by its name."""

    def __init__(self, driver: AnyDriver, replies: Replies) -> None:
        self._driver, self._replies = driver, replies
        self._all: dict[str, Any] = {}  # the `SealedLayer`s of the driver
        self.operations: dict[str, Callable[[Frame], Job | None]] = {
            "view": self._view, "layer_changes": self._layer_changes, "save": self._save, "load": self._load,
            "forget": self._forget, "compose": self._compose,
        }  # fmt: skip

    def __len__(self) -> int:
        return len(self._all)

    def _save(self, frame: Frame) -> Job:
        checkpoints, layer = self.checkpoints("save"), self.get(frame.fields["layers"][0])
        # The client may forget the layer while it is being copied.
        layer.keep()
        try:
            size = yield from checkpoints.save(layer, frame.fields["folder"])
        finally:
            layer.release()
        self._replies.send(frame, {"bytes": size})

    def _load(self, frame: Frame) -> Job:
        layers = self.checkpoints("load").load(frame.fields["folder"], frame.fields["image"])
        self._all |= {layer.name: layer for layer in layers}
        self._replies.send(frame, {"layers": [layer.name for layer in layers]})
        yield

    def _compose(self, frame: Frame) -> None:
        checkpoints = self.checkpoints("compose")
        files, data, start = [], frame.data, 0
        for path, size in frame.fields["files"]:
            files.append((path, data[start : start + size]))
            start += size
        self._replies.send(frame, {"layers": self.register_layer(checkpoints.compose(frame.fields["limits"], files))})

    def checkpoints(self, op: str) -> Checkpoints[Any, Any]:
        """Return what copies changes at this level. Raises `CannotMake` if the level has no layers."""
        if self._driver.checkpoints is None:
            raise CannotMake(f"{op} needs layers, which this level does not have; seal the slot, or use userns or full")
        return self._driver.checkpoints

    def _layer_changes(self, frame: Frame) -> Job:
        yield from self._replies.send_list(frame, self._driver.layer_changes(self.get(frame.fields["layers"][0])))

    def _view(self, frame: Frame) -> Job:
        layer = self.get(frame.fields["layers"][0])
        layer.keep()
        try:
            second = yield from self._driver.duplicate(layer)
        finally:
            layer.release()
        self.finish(frame, second)

    def finish(self, frame: Frame, layer: SealedLayer) -> None:
        """Limit a new layer to the view that the request names, register it, and answer."""
        try:
            if frame.fields["view"] is not None:
                self._driver.cut(layer, frame.fields["view"])
        except BaseException:
            layer.release()
            raise
        self._replies.send(frame, {"layers": self.register_layer(layer)})

    def register_layer(self, layer: SealedLayer) -> list[str]:
        """Register a layer under its name; returns that name and the names of the layers below."""
        self._all[layer.name] = layer
        return [layer.name, *(below.name for below in layer.below)]

    def _forget(self, frame: Frame) -> None:
        for name in frame.fields["layers"]:
            layer = self._all.pop(name, None)
            if layer is not None:
                layer.release()
        self._replies.send(frame)

    def get(self, name: str) -> Any:
        """Return a `SealedLayer` of the driver. Raises `RequestError` if it no longer exists."""
        if name not in self._all:
            raise RequestError("sandbox", f"the snapshot's layer {name} no longer exists")
        return self._all[name]
