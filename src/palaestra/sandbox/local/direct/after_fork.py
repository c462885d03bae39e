"""What a forked child of this process (of a pool of processes, say) lets go of at once.

It can use no slot, and would keep alive what this process leaves: files of slots that have ended, and a slot server
whose client is dead.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Held(Protocol):
    """It has descriptors that only this process is to have."""

    def let_go(self) -> None:
        """Close them, and nothing else: what they lead to is still in use."""
        ...


_held: weakref.WeakSet[Held] = weakref.WeakSet()


def not_for_children(held: Held) -> None:
    """Have it let go in every child that is forked from now on."""
    _held.add(held)


def _let_go() -> None:
    for held in list(_held):
        held.let_go()


os.register_at_fork(after_in_child=_let_go)
