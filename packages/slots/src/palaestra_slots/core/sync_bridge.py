"""Synchronous calls inside an async function, on the one event loop, without blocking it.

`await bridged(coroutine)` runs the coroutine in a greenlet. Inside it, `wait_for_sync(awaitable)` switches to the
parent greenlet, which awaits on the loop, and returns with the value. Thus an `async def` reward function may call
`ctx.terminal(...)` without `await`. SQLAlchemy's asyncio extension uses the same mechanism.

Cancellation reaches the waiting call; context variables are shared.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import wait
from types import CodeType
from typing import Any, TypeVar

from greenlet import getcurrent, greenlet

from palaestra_slots.core.io.threads import in_own_thread, running_loop
from palaestra_slots.core.types import JSON
from palaestra_slots.core.user_code import called_off_loop

logger = logging.getLogger(__name__)

T = TypeVar("T")

BLOCKED_S = 5.0
"""Seconds after which a loop that runs no callback counts as blocked."""

_blocking: set[CodeType] = set()
"""The code that was on the stack of a blocked loop. A hook with such code runs on a loop of its own."""


class _Yield:
    """The bridged coroutine awaits a future, which is to be passed to the loop."""

    __slots__ = ("future",)

    def __init__(self, future: object) -> None:
        self.future = future


class _Wait:
    """A synchronous call inside the bridged coroutine waits for this awaitable."""

    __slots__ = ("awaitable",)

    def __init__(self, awaitable: Awaitable[object]) -> None:
        self.awaitable = awaitable


class _Driver(greenlet):  # type: ignore[misc]
    """Runs one coroutine in a greenlet of its own, sharing its parent's context variables."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        parent = getcurrent()
        super().__init__(self._drive, parent)
        self.coroutine = coroutine
        self.gr_context = parent.gr_context

    def _drive(self) -> object:
        value: object = None
        error: BaseException | None = None
        while True:
            try:
                future = self.coroutine.send(value) if error is None else self.coroutine.throw(error)
            except StopIteration as stop:
                return stop.value
            value, error = None, None
            try:
                value = self.hand_over(_Yield(future))
            except BaseException as thrown:
                error = thrown

    def hand_over(self, request: object) -> object:
        """Switch to the parent greenlet, and return its answer to `request`."""
        assert self.parent is not None
        return self.parent.switch(request)


class _Bridged(Awaitable[T]):
    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._driver = _Driver(coroutine)

    def __await__(self) -> Generator[Any, Any, T]:
        driver = self._driver
        request = driver.switch()
        while not driver.dead:
            try:
                if isinstance(request, _Wait):
                    answer = yield from request.awaitable.__await__()
                else:
                    answer = yield request.future
            except BaseException as error:
                request = driver.throw(error)
            else:
                request = driver.switch(answer)
        result: T = request
        return result


async def bridged(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await the coroutine so that `wait_for_sync` works in it and in everything that it calls synchronously. Returns
    its result."""
    return await _Bridged(coroutine)


async def called_with_sync(hook: Callable[..., object], *args: object, **named: object) -> JSON:
    """Call a hook that may make synchronous tool calls, as `called_off_loop` does, and return its answer.

    An async hook that has blocked the loop, because it waited there for threads that make tool calls, is called once
    more, and from then on, in a thread with a loop of its own.
    """
    code = getattr(hook, "__code__", None)
    if code not in _blocking:
        try:
            answer = await bridged(called_off_loop(hook, *args, **named))
        except Exception:
            if code not in _blocking:
                raise
        else:
            if code not in _blocking:
                return answer
        logger.warning("%s blocks the event loop; it runs in a thread of its own instead", hook.__qualname__)
    return await in_own_thread(lambda: asyncio.run(bridged(called_off_loop(hook, *args, **named))))


def is_bridged() -> bool:
    """Return whether this code runs inside `bridged`."""
    return isinstance(getcurrent(), _Driver)


def wait_for_sync(coroutine: Coroutine[Any, Any, T], *, loop: asyncio.AbstractEventLoop, twin: str) -> T:
    """Wait for `coroutine` from synchronous code and return its result, without blocking `loop`. This works inside
    `bridged`, or from another thread.

    Where waiting would deadlock, the call raises `RuntimeError`, which names the async method to await instead
    (`twin`): on the loop's own thread outside the bridge, and in a thread for which the loop's thread waits.
    """
    current = getcurrent()
    if isinstance(current, _Driver):
        answer: T = current.hand_over(_Wait(coroutine))  # type: ignore[assignment]
        return answer
    if running_loop() is loop:
        # Otherwise, Python would warn that the coroutine was never awaited.
        coroutine.close()
        raise RuntimeError(
            f"a synchronous tool call was made in an event loop's task that Palaestra does not drive; "
            f"await {twin} there instead"
        )
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    while not wait([future], timeout=BLOCKED_S).done:
        if not _runs_callbacks(loop) and (stack := _joins(loop)):
            future.cancel()
            _blocking.update(stack)
            raise RuntimeError(
                f"a hook has blocked the event loop, for which the synchronous tool call of this thread waits. Make "
                f"the hook a plain function (def), which runs in a thread of its own, or await {twin} in it"
            )
    return future.result()


def _runs_callbacks(loop: asyncio.AbstractEventLoop) -> bool:
    """Return whether a loop of another thread runs its callbacks."""
    turned = threading.Event()
    loop.call_soon_threadsafe(turned.set)
    return turned.wait(BLOCKED_S)


def _joins(loop: asyncio.AbstractEventLoop) -> list[CodeType]:
    """Return the code on the stack of a loop's thread if it waits for another thread; empty if it computes, which ends
    by itself."""
    frame = sys._current_frames().get(getattr(loop, "_thread_id", 0))
    if frame is None or frame.f_code.co_filename != threading.__file__:
        return []
    stack = []
    while frame is not None:
        stack.append(frame.f_code)
        frame = frame.f_back
    return stack


def wait_on(loop: asyncio.AbstractEventLoop, work: Callable[[], Coroutine[Any, Any, T]], twin: str) -> T:
    """Call `wait_for_sync` for work that belongs to `loop`, even from a bridged function that runs on another loop."""
    here = running_loop()

    async def done() -> T:
        if here in (None, loop):
            return await work()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), loop))

    return wait_for_sync(done(), loop=here or loop, twin=twin)
