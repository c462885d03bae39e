"""Synchronous calls inside async functions: they wait on the loop, and nothing else does."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from palaestra_slots.core.sync_bridge import bridged, called_with_sync, wait_for_sync

Sync = Callable[[int], int]


def doubling() -> Sync:
    """A synchronous function that awaits on the running loop."""
    loop = asyncio.get_running_loop()

    async def double(value: int) -> int:
        await asyncio.sleep(0)
        return value * 2

    return lambda value: wait_for_sync(double(value), loop=loop, twin="double_async")


def test_sync_calls_and_awaits_mix_in_one_coroutine() -> None:
    async def main() -> int:
        double = doubling()

        async def reward() -> int:
            first = double(1)
            await asyncio.sleep(0)
            return double(first) + await bridged(nested())

        async def nested() -> int:
            return double(10)

        return await bridged(reward())

    assert asyncio.run(main()) == 24


def test_the_loop_runs_on_while_a_sync_call_waits() -> None:
    async def main() -> list[str]:
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
        return seen

    assert asyncio.run(main()) == ["other", "released"]


def test_an_exception_arrives_at_the_sync_call() -> None:
    async def main() -> str:
        loop = asyncio.get_running_loop()

        async def fail() -> None:
            raise LookupError("gone")

        async def reward() -> str:
            try:
                wait_for_sync(fail(), loop=loop, twin="fail_async")
            except LookupError as error:
                return str(error)
            return "no error"

        return await bridged(reward())

    assert asyncio.run(main()) == "gone"


def test_cancellation_reaches_the_sync_call_and_gets_out() -> None:
    async def main() -> list[str]:
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
        return seen

    assert asyncio.run(main()) == ["cleaned up"]


def test_context_variables_are_shared_with_the_caller() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)

    async def main() -> tuple[int, int]:
        double = doubling()
        variable.set(1)

        async def reward() -> int:
            inherited = variable.get()
            variable.set(2)
            double(1)
            return inherited

        return await bridged(reward()), variable.get()

    assert asyncio.run(main()) == (1, 2)


def test_a_worker_thread_posts_to_the_loop() -> None:
    async def main() -> int:
        double = doubling()
        return await asyncio.to_thread(double, 21)

    assert asyncio.run(main()) == 42


@pytest.mark.parametrize("wrap", [asyncio.ensure_future, bridged], ids=["own task in reward", "no bridge at all"])
def test_a_foreign_task_is_told_which_method_to_await(wrap: Callable[..., Awaitable[int]]) -> None:
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
        asyncio.run(main())


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


@pytest.mark.slow
def test_an_async_hook_that_waits_for_its_own_threads_fails() -> None:
    async def hook(double: Sync) -> list[int]:
        return in_two_threads(double)

    async def main() -> None:
        with pytest.raises(RuntimeError, match=r"has blocked the event loop.*double_async"):
            await called_with_sync(hook, doubling())

    asyncio.run(main())
