"""Code that is not ours, awaited: cancelling who awaits it ends it, whatever the code makes of that."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from palaestra_slots.core.user_code import ForeignError, foreign


async def swallows() -> str:
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(60)
    return "done all the same"


async def test_who_is_cancelled_ends_though_the_code_goes_on() -> None:
    task = asyncio.create_task(foreign(swallows()))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_a_limit_above_it_holds() -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(foreign(swallows()), 0.01)


async def test_a_limit_of_its_own_is_its_own_affair() -> None:
    async def limited() -> str:
        try:
            async with asyncio.timeout(0.01):
                await asyncio.sleep(60)
        except TimeoutError:
            return "too slow"
        raise AssertionError

    assert await foreign(limited()) == "too slow"


async def test_a_cancellation_that_becomes_another_error_is_one_still() -> None:
    async def fails_on_its_way_out() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise OSError("closing failed")

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(foreign(fails_on_its_way_out()), 0.01)


async def fails(error: BaseException) -> None:
    raise error


async def test_a_failed_task_group_is_no_cancellation() -> None:
    async def group(*, caught: bool) -> str:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(fails(ValueError("no such page")))
                tasks.create_task(fails(KeyError("b")))
        except* (ValueError, KeyError):
            if not caught:
                raise
        return "went on"

    assert await foreign(group(caught=True)) == "went on"
    with pytest.raises(ForeignError, match=r"^ValueError: no such page; KeyError: 'b'$"):
        await foreign(group(caught=False))
    with pytest.raises(TimeoutError):  # limits above it still work
        async with asyncio.timeout(0.01):
            await asyncio.sleep(60)


async def test_what_is_no_exception_is_a_failure_all_the_same() -> None:
    class Stop(BaseException):
        pass

    for error in (Stop("enough"), SystemExit(3)):
        with pytest.raises(ForeignError, match=type(error).__name__):
            await foreign(fails(error))


async def test_a_retry_that_catches_everything_ends_too() -> None:
    async def retries() -> None:
        while True:
            try:
                await asyncio.sleep(3600)
            except:  # noqa: E722
                await asyncio.sleep(3600)

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(foreign(retries(), patience_s=0.01), 0.01)
