"""Objects that outlive a call: `States`, one object per type, for a rollout (`ToolRun.state`) or for a run (`shared`).

Whoever makes a `States` closes it: a run for all its rollouts, an executor for its trajectories, a binding for its one.

Invariant: objects are made when first asked for and closed in the reverse order, each once, whatever a close raises.
Nothing here starts by itself.
"""

from __future__ import annotations

import inspect
import logging
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class States:
    """One object per type. `aclose` closes those that have an `aclose`."""

    def __init__(self) -> None:
        self._held: dict[type, object] = {}
        self._lent: tuple[type, ...] = ()

    def get(self, kind: type[T]) -> T:
        """The one object of this type, made without arguments when first asked for."""
        found = self._held.get(kind)
        if not isinstance(found, kind):
            found = self._held[kind] = kind()
        return found

    def put(self, thing: object) -> None:
        """Make this the one object of its type. It is its owner's to close, not this one's."""
        self._held[type(thing)] = thing
        self._lent = (*self._lent, type(thing))

    async def aclose(self) -> None:
        """Close everything, the newest first. What a close raises is logged. Idempotent."""
        while self._held:
            kind, thing = self._held.popitem()
            close = getattr(thing, "aclose", None)
            if kind in self._lent or not inspect.iscoroutinefunction(close):
                continue
            try:
                await close()
            except Exception:
                logger.warning("%s could not be closed", type(thing).__name__, exc_info=True)
