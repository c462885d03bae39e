"""Runs a stand-in of a server in its own thread, for programs without a running event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

T = TypeVar("T")

_LONGEST_START_S = 20.0


@contextlib.contextmanager
def served_in_thread(make: Callable[[], AbstractAsyncContextManager[T]], name: str) -> Iterator[T]:
    """Yield the server that `make` returns, which runs until the block ends. `name` is that of the thread."""
    ready, over = threading.Event(), threading.Event()
    made: list[T] = []

    async def serve() -> None:
        async with make() as server:
            made.append(server)
            ready.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name=name)
    thread.start()
    try:
        ready.wait(_LONGEST_START_S)
        yield made[0]
    finally:
        over.set()
        thread.join()
