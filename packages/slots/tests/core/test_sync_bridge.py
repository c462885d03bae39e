"""Synchronous calls inside async functions: they wait on the loop, and nothing else does."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from palaestra_slots.core import sync_bridge
from palaestra_slots.core.sync_bridge import bridged, called_with_sync, wait_for_sync
from palaestra_slots.core.types import JSON

Sync = Callable[[int], int]


def doubling() -> Sync:
    """A synchronous function that awaits on the running loop."""
    loop = asyncio.get_running_loop()

    async def double(value: int) -> int:
        await asyncio.sleep(0)
        return value * 2

    return lambda value: wait_for_sync(double(value), loop=loop, twin="double_async")


async def test_sync_calls_and_awaits_mix_in_one_coroutine() -> None:
    double = doubling()

    async def reward() -> int:
        first = double(1)
        await asyncio.sleep(0)
        return double(first) + await bridged(nested())

    async def nested() -> int:
        return double(10)

    assert await bridged(reward()) == 24


async def test_the_loop_runs_on_while_a_sync_call_waits() -> None:
    seen: list[str] = []
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def wait() -> None:
        await gate.wait()
        seen.append("released")

    async def reward() -> None:
        wait_for_sync(wait(), loop=loop, twin="wait_async")

    async def other() -> None:
        seen.append("other")
        gate.set()

    await asyncio.gather(bridged(reward()), other())
    assert seen == ["other", "released"]


async def test_an_exception_arrives_at_the_sync_call() -> None:
    loop = asyncio.get_running_loop()

    async def fail() -> None:
        raise LookupError("gone")

    async def reward() -> str:
        try:
            wait_for_sync(fail(), loop=loop, twin="fail_async")
        except LookupError as error:
            return str(error)
        return "no error"

    assert await bridged(reward()) == "gone"


async def test_cancellation_reaches_the_sync_call_and_gets_out() -> None:
    seen: list[str] = []
    loop = asyncio.get_running_loop()
    waiting = asyncio.Event()

    async def hang() -> None:
        waiting.set()
        await asyncio.Event().wait()

    async def reward() -> None:
        try:
            wait_for_sync(hang(), loop=loop, twin="hang_async")
        finally:
            seen.append("cleaned up")

    task = asyncio.create_task(bridged(reward()))
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["cleaned up"]


async def test_context_variables_are_shared_with_the_caller() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)
    double = doubling()
    variable.set(1)

    async def reward() -> int:
        inherited = variable.get()
        variable.set(2)
        double(1)
        return inherited

    assert (await bridged(reward()), variable.get()) == (1, 2)


async def test_a_worker_thread_posts_to_the_loop() -> None:
    double = doubling()
    assert await asyncio.to_thread(double, 21) == 42


@pytest.mark.parametrize("wrap", [asyncio.ensure_future, bridged], ids=["own task in reward", "no bridge at all"])
async def test_a_foreign_task_is_told_which_method_to_await(wrap: Callable[..., Awaitable[int]]) -> None:
    async def main() -> None:
        double = doubling()

        async def foreign() -> int:
            return double(1)

        if wrap is bridged:
            double(1)
        else:
            await bridged(_awaiting(foreign()))

    async def _awaiting(coroutine: Awaitable[int]) -> int:
        return await asyncio.ensure_future(coroutine)

    with pytest.raises(RuntimeError, match="await double_async"):
        await main()


def in_two_threads(double: Sync) -> list[int]:
    """Call a function in threads of its own, and wait for them without awaiting."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(double, [1, 2]))


def test_a_plain_hook_may_wait_for_its_own_threads() -> None:
    async def main() -> None:
        double = doubling()
        assert await called_with_sync(in_two_threads, double) == [2, 4]
        assert await called_with_sync(lambda: double(double(1))) == 4
        assert await called_with_sync(lambda: asyncio.run(inner(double))) == 6

    async def inner(double: Sync) -> int:
        return double(3)

    asyncio.run(main())


def in_a_bare_thread(double: Sync) -> list[int]:
    """Call a function in a thread whose errors nobody sees."""
    values: list[int] = []
    thread = threading.Thread(target=lambda: values.append(double(5)))
    thread.start()
    thread.join()
    return values


def behind_an_event(double: Sync) -> list[int]:
    values, done = list[int](), threading.Event()

    def work() -> None:
        try:
            values.append(double(5))
        finally:
            done.set()

    threading.Thread(target=work).start()
    done.wait()
    return values


def a_future(double: Sync) -> list[int]:
    pool = ThreadPoolExecutor(1)
    return [pool.submit(double, 5).result()]


def a_queue(double: Sync) -> list[int]:
    values: queue.Queue[int] = queue.Queue()
    threading.Thread(target=lambda: values.put(double(5)), daemon=True).start()
    try:
        return [values.get(timeout=3)]
    except queue.Empty:
        return []


def caught(double: Sync) -> list[int]:
    """A hook that swallows the refusal, and would score the work with it."""
    try:
        return in_two_threads(double)
    except RuntimeError:
        return []


WAYS = [in_two_threads, in_a_bare_thread, behind_an_event, a_future, a_queue, caught]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("way", WAYS)
async def test_an_async_hook_may_wait_for_its_own_threads(
    way: Callable[[Sync], list[int]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_bridge, "BLOCKED_S", 0.5)
    monkeypatch.setattr(sync_bridge, "_blocking", set())
    begun = 0

    async def hook(double: Sync) -> list[int]:
        nonlocal begun
        begun += 1
        await asyncio.sleep(0)
        return [*way(double), double(1)]

    async def main() -> None:
        double = doubling()
        right = [*((2, 4) if way in (in_two_threads, caught) else (10,)), 2]
        assert await called_with_sync(hook, double) == right
        assert await called_with_sync(hook, double) == right

    await main()
    assert begun == 3  # the second call knows the hook
    assert caplog.text.count("hook blocks the event loop") == 1


@pytest.mark.slow
async def test_only_the_hook_that_blocks_is_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_bridge, "BLOCKED_S", 0.5)
    begun: list[str] = []
    double = doubling()

    async def blocking() -> list[int]:
        begun.append("blocking")
        return in_two_threads(double)

    async def beside() -> int:
        begun.append("beside")
        await asyncio.sleep(0.1)
        return double(7)

    assert await asyncio.gather(called_with_sync(beside), called_with_sync(blocking)) == [14, [2, 4]]
    assert sorted(begun) == ["beside", "blocking", "blocking"]


@pytest.mark.slow
async def test_a_hook_around_the_hook_that_blocks_is_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_bridge, "BLOCKED_S", 0.5)
    begun: list[str] = []

    async def inner(double: Sync) -> list[int]:
        begun.append("inner")
        return in_two_threads(double)

    async def outer(double: Sync) -> JSON:
        begun.append("outer")
        return await called_with_sync(inner, double)

    assert await called_with_sync(outer, doubling()) == [2, 4]
    assert begun == ["outer", "inner", "inner"]


@pytest.mark.slow
async def test_a_loop_that_is_blocked_outside_a_hook_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_bridge, "BLOCKED_S", 0.5)
    with pytest.raises(RuntimeError, match=r"event loop.*double_async"):
        in_two_threads(doubling())
