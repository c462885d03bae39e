"""Plain functions in threads of their own: what they give and raise, and that nobody waits for them in vain."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from functools import partial

import pytest

from palaestra_slots.core.io.threads import MAX_THREADS, OneThread, in_own_thread


def test_what_it_returns_and_raises_comes_back() -> None:
    def empty() -> object:
        return next(iter(()))

    async def main() -> None:
        first = await in_own_thread(threading.current_thread)
        assert first is not threading.current_thread()
        with pytest.raises(SystemExit):
            await in_own_thread(sys.exit)
        with pytest.raises(RuntimeError, match="StopIteration"):
            await in_own_thread(empty)
        assert await in_own_thread(threading.current_thread) is first

    asyncio.run(main())


def test_functions_that_hang_leave_room_for_others() -> None:
    release = threading.Event()

    async def main() -> None:
        for _ in range(2 * MAX_THREADS):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(in_own_thread(release.wait), 0.001)
        assert await in_own_thread(lambda: "here") == "here"

    try:
        asyncio.run(main())
    finally:
        release.set()


HANGS = """
import asyncio, threading
from palaestra_slots.core.io.threads import in_own_thread

async def main():
    try:
        await asyncio.wait_for(in_own_thread(threading.Event().wait), 0.01)
    except TimeoutError:
        print("went on")

asyncio.run(main())
"""


def test_a_process_ends_though_a_function_does_not() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "went on\n"


def test_one_thread_does_all_its_calls_in_order_and_ends() -> None:
    done: list[int] = []

    async def main() -> threading.Thread:
        thread = OneThread("rows")
        first = await thread.call(threading.current_thread)
        with pytest.raises(SystemExit):
            await thread.call(sys.exit)
        await asyncio.gather(*(thread.call(partial(done.append, number)) for number in range(9)))
        assert await thread.call(threading.current_thread) is first
        thread.close()
        thread.close()
        return first

    first = asyncio.run(main())
    first.join(10)
    assert (first.name, first.daemon, first.is_alive()) == ("rows", True, False)
    assert done == list(range(9))
