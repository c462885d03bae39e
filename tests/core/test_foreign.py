"""Code that is not ours, awaited: cancelling who awaits it ends it, whatever the code makes of that."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from palaestra.core.foreign import foreign


async def swallows() -> str:
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(60)
    return "done all the same"


def test_who_is_cancelled_ends_though_the_code_goes_on() -> None:
    async def main() -> bool:
        task = asyncio.create_task(foreign(swallows()))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert asyncio.run(main())


def test_a_limit_above_it_holds() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(foreign(swallows()), 0.01)

    asyncio.run(main())


def test_a_limit_of_its_own_is_its_own_affair() -> None:
    async def limited() -> str:
        try:
            async with asyncio.timeout(0.01):
                await asyncio.sleep(60)
        except TimeoutError:
            return "too slow"
        raise AssertionError

    assert asyncio.run(foreign(limited())) == "too slow"
