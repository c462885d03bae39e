"""A slot as code that is not ours uses it: a call whose answer was not awaited is an error of its author.

Such a call is never made, and stands as an object that is true and equal to nothing: a score that compares it gives
every rollout the same reward, and a preparation that writes a file with it leaves none. Nothing else would show it.
Not for what such code gets from the slot: its shells, processes and forks are handed on as they are.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, cast

from palaestra.sandbox.slot import Slot


class NotAwaited(RuntimeError):
    """Code called a slot and did not await what it called."""


class AwaitedSlot:
    """A slot inside a `with` block, at whose end every call of it must have been awaited. Raises `NotAwaited`."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._calls: list[tuple[str, Coroutine[object, object, object]]] = []

    def __getattr__(self, name: str) -> object:
        found = getattr(self._slot, name)
        if not inspect.iscoroutinefunction(found):
            return found

        @functools.wraps(found)
        def call(*args: Any, **named: Any) -> Coroutine[object, object, object]:
            work: Coroutine[object, object, object] = found(*args, **named)
            self._calls.append((name, work))
            return work

        return call

    def __repr__(self) -> str:
        return repr(self._slot)

    def __enter__(self) -> Slot:
        return cast("Slot", self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        forgotten = [(name, work) for name, work in self._calls if inspect.getcoroutinestate(work) == "CORO_CREATED"]
        for _, work in forgotten:
            work.close()
        if error is None and forgotten:
            named = ", ".join(dict.fromkeys(f"sandbox.{name}" for name, _ in forgotten))
            raise NotAwaited(f"{named} was called and not awaited: write await sandbox.{forgotten[0][0]}(…)")
