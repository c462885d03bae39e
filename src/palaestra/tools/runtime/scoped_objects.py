"""Objects that outlive a call: `States` holds one object per type, for a rollout (`ToolRun.state`) or a run (`shared`).

Invariant: objects are created on first use and closed in reverse order, each once, even if a close raises.
"""

from __future__ import annotations

import inspect
import logging
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class States:
    """One object per type. Whoever creates it calls `aclose`, which closes the objects that have an `aclose`."""

    def __init__(self) -> None:
        self._held: dict[type, object] = {}
        self._lent: set[type] = set()

    def get(self, kind: type[T]) -> T:
        """The one object of this type, created without arguments on first use."""
        found = self._held.get(kind)
        if not isinstance(found, kind):
            found = self._held[kind] = kind()
        return found

    def put(self, thing: object) -> None:
        """Make this the one object of its type. Its owner closes it."""
        self._held[type(thing)] = thing
        self._lent.add(type(thing))

    async def aclose(self) -> None:
        """Close everything, the newest first, and log what a close raises. Idempotent."""
        while self._held:
            kind, thing = self._held.popitem()
            close = getattr(thing, "aclose", None)
            if kind in self._lent or not inspect.iscoroutinefunction(close):
                continue
            try:
                await close()
            except Exception:
                logger.warning("%s could not be closed", type(thing).__name__, exc_info=True)
