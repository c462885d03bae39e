"""A gateway that is killed again and again, in the middle of its work and with messages that wait."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

from gateway.conftest import until
from palaestra_gateway.outbox import SENT_AGAIN

LIVES, SENT_ALIVE, SENT_DEAD = 4, 15, 5


class Process(Protocol):
    """A gateway in another process."""

    def kill(self) -> None: ...

    async def wait(self) -> object: ...


class Forked:
    """A fork of this process that runs a coroutine, for platforms whose connections only a test can replace."""

    def __init__(self, play: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._process = multiprocessing.get_context("fork").Process(target=lambda: asyncio.run(play()), daemon=True)
        self._process.start()

    def kill(self) -> None:
        """End it by SIGKILL."""
        self._process.kill()

    async def wait(self) -> None:
        """Wait for its end."""
        await asyncio.to_thread(self._process.join)


async def killed_again_and_again(
    start: Callable[[], Awaitable[Process]], write: Callable[[str], Awaitable[object]], read: Callable[[], list[str]]
) -> None:
    """Check that every message of a person is answered once. An answer that may have been sent before says so. `write`
    sends a message, and `read` returns the answers."""
    number = 0

    async def write_some(count: int, wait_s: float = 0.0) -> None:
        nonlocal number
        for _ in range(count):
            number += 1
            await write(f"message {number}")
            await asyncio.sleep(wait_s)

    for life in range(LIVES):
        last = life == LIVES - 1
        process = await start()
        try:
            await write_some(SENT_ALIVE, 0.005)
            if last:
                with contextlib.suppress(TimeoutError):  # the check below says which answers are missing
                    await until(lambda: len({_number(text) for text in read()}) == number)
        finally:
            process.kill()
            await process.wait()
        if not last:
            await write_some(SENT_DEAD)
    certain = [_number(text) for text in read() if not text.startswith(SENT_AGAIN)]
    again = {_number(text) for text in read() if text.startswith(SENT_AGAIN)}
    assert len(certain) == len(set(certain))
    missing = set(range(1, number + 1)) - set(certain) - again
    assert not missing, missing
    assert len(again) < LIVES


def _number(text: str) -> int:
    return int(text.strip().rpartition(" ")[2])
