"""A registry with a real local slot."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from palaestra_slots.core.errors import IsolationUnavailable
from palaestra_slots.processes.registry import ProcessRegistry
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import SlotSpec
from processes.scenes import OnBackend, Scene, WithRegistry


def _run(scene: Callable[[LocalBackend], Awaitable[None]]) -> None:
    async def main() -> None:
        async with LocalBackend() as backend:
            await scene(backend)

    try:
        asyncio.run(main())
    except IsolationUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def on_backend() -> OnBackend:
    """Run a scene with a started backend."""
    return _run


@pytest.fixture
def with_registry() -> WithRegistry:
    """Run a scene with a registry and a fresh slot."""

    def run(scene: Scene) -> None:
        async def main(backend: LocalBackend) -> None:
            async with ProcessRegistry() as registry:
                await scene(registry, await backend.create(SlotSpec(), "test"))

        _run(main)

    return run
