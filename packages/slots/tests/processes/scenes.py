"""The shape of tests with a registry."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from palaestra_slots.processes.registry import ProcessRegistry
from palaestra_slots.processes.session import ProcessSession
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Slot

Scene = Callable[[ProcessRegistry, Slot], Awaitable[None]]
WithRegistry = Callable[[Scene], None]
OnBackend = Callable[[Callable[[LocalBackend], Awaitable[None]]], None]


async def wrote(session: ProcessSession, wanted: str) -> None:
    """Wait until the process has written this."""
    seen = b""
    async for piece in session.reach().output():
        seen += piece.data
        if wanted.encode() in seen:
            return
    raise AssertionError(f"ended without {wanted!r}: {seen[-200:]!r}")
