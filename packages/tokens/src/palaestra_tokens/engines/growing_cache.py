"""The keys and values of the rows of a batch, in tensors with room for more tokens.

The caches of `transformers` copy all keys and values for each token. With many rows on a CPU this takes longer than the
model itself. Here a token is written behind those before it, and a row that leaves is replaced by the last one.

Importing this module loads torch and transformers (the extra `train`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

LEAST_ROOM = 64
"""The fewest tokens for which room is made. A longer cache gets room for a quarter of its length."""


class GrowingLayer(DynamicLayer):  # type: ignore[misc]  # torch is not installed where types are checked
    """One layer: `keys` and `values` are views `[B, H, T, D]` of larger tensors. Works in inference mode only."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._rooms: list[torch.Tensor] = []
        self._first = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.hold([(key_states, value_states)])
            return self.keys, self.values
        rows, _, length, _ = self.keys.shape
        coming = key_states.shape[2]
        if self._first + length + coming > self._rooms[0].shape[2]:
            self.hold([(self.keys, self.values)], coming)
        stop = self._first + length
        for room, new in zip(self._rooms, (key_states, value_states), strict=True):
            room[:rows, :, stop : stop + coming] = new
        self._show(rows, length + coming)
        return self.keys, self.values

    def hold(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor]], coming: int = 0) -> None:
        """Hold the rows of all parts, pairs of keys and values, with room for `coming` tokens or more. Shorter parts
        are padded on the left."""
        length = max(keys.shape[2] for keys, _ in parts)
        room = max(coming, length_with_room(length) - length)
        self._rooms = [_padded_batch([part[which] for part in parts], length, room) for which in (0, 1)]
        self._first = 0
        self._show(sum(len(keys) for keys, _ in parts), length)

    def release(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values, and hold none any more."""
        held = self.keys, self.values
        self.keys = self.values = held[0].new_empty(0)  # a view would keep all in memory
        self._rooms = []
        return held

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add rows: in the places of rows that have left, if there is room for these."""
        rows, _, length, _ = self.keys.shape
        all_rows, start = rows + len(keys), length - keys.shape[2]
        if start < 0 or all_rows > len(self._rooms[0]):
            self.hold([(self.keys, self.values), (keys, values)])
            return
        self._show(all_rows, length)
        for view, part in ((self.keys, keys), (self.values, values)):
            view[rows:, :, :start] = 0  # as in `_padded_batch`
            view[rows:, :, start:] = part

    def shrink(self, moved: Mapping[int, int], rows: int, padding: int) -> None:
        """Write each row of `moved` over another one, keep the first `rows`, and drop their first `padding` tokens."""
        for room in self._rooms:
            for source, target in moved.items():
                room[target] = room[source]
        length = self.keys.shape[2] - padding
        self._first += padding
        self._show(rows, length)

    def _show(self, rows: int, length: int) -> None:
        self.keys, self.values = (room[:rows, :, self._first : self._first + length] for room in self._rooms)


def _padded_batch(parts: Sequence[torch.Tensor], length: int, room: int) -> torch.Tensor:
    first, rows = parts[0], sum(map(len, parts))
    made = first.new_empty((rows, first.shape[1], length + room, first.shape[3]))
    start = 0
    for part in parts:
        own, padding = made[start : start + len(part)], length - part.shape[2]
        # Padding is masked, but a number that is not finite would spoil the sum over all tokens.
        own[:, :, :padding] = 0
        own[:, :, padding:length] = part
        start += len(part)
    return made


def length_with_room(length: int) -> int:
    """Return how many tokens a row takes the memory of, if the longest row has `length`."""
    return length + max(LEAST_ROOM, length // 4)


def new_cache() -> Cache:
    return Cache(layer_class_to_replicate=GrowingLayer)


def copied_row(cache: Cache, row: int, start: int, count: int) -> Cache:
    """Return a cache of one row: `count` tokens of a row from `start` on."""
    made = new_cache()
    with torch.inference_mode():
        for number, layer in enumerate(cache.layers):
            keys, values = (each[row : row + 1, :, start : start + count] for each in (layer.keys, layer.values))
            made.update(keys, values, number)
    return made


def close_gaps(cache: Cache, attended: torch.Tensor) -> None:
    """Move the tokens of each row to its end. `attended[B, N]` is 0 at gaps."""
    order = attended.argsort(dim=1, stable=True)[:, None, :, None]
    with torch.inference_mode():
        for layer in cache.layers:
            parts = ((each, order.expand(*each.shape)) for each in (layer.keys, layer.values))
            keys, values = (each.gather(2, places) for each, places in parts)
            layer.hold([(keys, values)])


def take_rows(cache: Cache, rows: Sequence[int]) -> None:
    """Make the rows of a cache those at `rows`, of which some may stand there several times."""
    chosen = list(rows)
    with torch.inference_mode():
        for layer in cache.layers:
            layer.hold([(layer.keys[chosen], layer.values[chosen])])


def append_rows(cache: Cache, fresh: Cache, rows: Sequence[int]) -> None:
    """Add the rows of `fresh` at `rows`, of which some may stand there several times. `fresh` is empty afterwards: no
    more than one layer of the new rows is in memory twice."""
    chosen = list(rows)
    with torch.inference_mode():
        for old, new in zip(cache.layers, fresh.layers, strict=True):
            keys, values = new.release()
            old.append(keys[chosen], values[chosen])


def drop_rows(cache: Cache, moved: Mapping[int, int], rows: int, padding: int) -> None:
    """Keep the first `rows` rows of a cache; see `GrowingLayer.shrink`."""
    with torch.inference_mode():
        for layer in cache.layers:
            layer.shrink(moved, rows, padding)
