"""The shape of tests with a slot."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Slot

Body = Callable[[LocalBackend, Slot], Awaitable[None]]
WithSlot = Callable[[Body], None]
