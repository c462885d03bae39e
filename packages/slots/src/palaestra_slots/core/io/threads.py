"""Calls user functions in threads, because they may take arbitrarily long or never return. Palaestra's own blocking
work uses `asyncio.to_thread`.

Such a call blocks neither the event loop nor the end of the process: a cancelled call no longer counts towards
`MAX_THREADS`, and no thread is joined.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

from palaestra_slots.core.clock import take_turn

T = TypeVar("T")

MAX_THREADS = 64
"""The maximum number of calls of one loop that are awaited concurrently."""

CANCEL_S = 60.0
"""The maximum time, in seconds, for cancelled work to clean up."""

_places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

_idle: list[OneThread] = []
os.register_at_fork(after_in_child=_idle.clear)  # a forked process has none of these threads


async def in_own_thread(function: Callable[[], T]) -> T:
    """Call the function in a thread with the caller's context, and return its result or raise its error. Cancelling
    abandons the thread."""
    # A semaphore can be awaited on one event loop only.
    places = _places.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_THREADS))
    await take_turn(places)
    thread = _idle.pop() if _idle else OneThread("function")
    ended = False

    def work() -> T:
        nonlocal ended
        try:
            return function()
        finally:
            ended = True

    try:
        return await thread.call(work)
    finally:
        places.release()
        # A cancelled call leaves its thread inside the function, so the thread cannot take another call.
        if ended:
            _idle.append(thread)
        else:
            thread.close()


class OneThread:
    """A thread for calls that must be made in the same thread, in order, such as the steps of a generator. It starts
    with the first call and ends after `close`; it is never joined."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def call(self, function: Callable[[], T]) -> T:
        """Call the function in this thread with the caller's context, and return its result or raise its error, as
        `in_own_thread` does."""
        loop, context = asyncio.get_running_loop(), copy_context()
        ended: asyncio.Future[None] = loop.create_future()
        returned: list[T] = []
        raised: list[BaseException] = []

        def tell() -> None:
            if not ended.done():
                ended.set_result(None)

        def work() -> None:
            try:
                returned.append(context.run(function))
            except BaseException as error:  # raised again for the caller
                raised.append(error)
            with contextlib.suppress(RuntimeError):  # the loop has ended in the meantime
                loop.call_soon_threadsafe(tell)

        if self._thread is None:
            self._thread = threading.Thread(target=self._run_calls, name=self._name, daemon=True)
            self._thread.start()
        self._calls.put(work)
        await ended
        if raised:
            raise raised[0]
        return returned[0]

    def close(self) -> None:
        """Let the thread end after the call in progress. Idempotent."""
        self._calls.put(None)

    def _run_calls(self) -> None:
        while (work := self._calls.get()) is not None:
            work()
            del work  # frees the call's arguments before the thread waits for the next call


def running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine to completion and return its result, even if an event loop already runs in this thread, as in a
    notebook."""
    if running_loop() is None:
        return asyncio.run(work)
    thread = LoopThread("palaestra")
    try:
        return thread.wait(work)
    finally:
        thread.close()


class LoopThread:
    """An event loop in a thread of its own, for callers that are not async or whose own loop is running."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine on the loop, and block until its result can be returned. Ctrl-C cancels the coroutine and
        gives it `CANCEL_S` seconds to clean up."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            with contextlib.suppress(BaseException):
                asyncio.run_coroutine_threadsafe(_others(), self._loop).result(CANCEL_S)
            raise

    def close(self) -> None:
        """End the loop and its thread. Idempotent."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _others() -> None:
    """Wait for all other tasks of the loop."""
    await asyncio.wait(asyncio.all_tasks() - {cast("asyncio.Task[Any]", asyncio.current_task())})
