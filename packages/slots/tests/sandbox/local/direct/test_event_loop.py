"""What a client's commands can wait for: pipes and time limits that come late to the event loop, if at all."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest

from palaestra_slots.sandbox.local.direct.direct_slot import AsyncioLoop
from palaestra_slots.sandbox.slotd.exec import pipes

LONG_ENOUGH_S = 10.0


def with_loop(body: Callable[[AsyncioLoop], Awaitable[None]]) -> None:
    async def run() -> None:
        loop = AsyncioLoop()
        try:
            await body(loop)
        finally:
            loop.end()

    asyncio.run(run())


@contextmanager
def a_pipe() -> Iterator[tuple[int, int]]:
    reader, writer = pipes.pipe()
    try:
        yield reader, writer
    finally:
        pipes.close(reader, writer)


async def until(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG_ENOUGH_S
    while not done():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("way", ["watch", "watch_soon"])
def test_who_watches_hears_of_what_comes_until_it_stops(way: str) -> None:
    async def body(loop: AsyncioLoop) -> None:
        with a_pipe() as (reader, writer):
            heard: list[bytes] = []
            getattr(loop, way)(reader, lambda: heard.append(os.read(reader, 99)))
            os.write(writer, b"early")
            await until(lambda: heard == [b"early"])
            os.write(writer, b"late")
            await until(lambda: heard == [b"early", b"late"])
            loop.unwatch(reader)
            os.write(writer, b"never")
            await asyncio.sleep(0.05)
            assert heard == [b"early", b"late"]

    with_loop(body)


def test_the_last_to_watch_is_called() -> None:
    async def body(loop: AsyncioLoop) -> None:
        with a_pipe() as (reader, writer):
            heard: list[str] = []

            def take(name: str) -> Callable[[], None]:
                return lambda: heard.append(f"{name} {os.read(reader, 99).decode()}")

            loop.watch_soon(reader, take("nobody"))
            loop.watch_soon(reader, take("first"))
            os.write(writer, b"a")
            await until(lambda: heard == ["first a"])
            loop.watch_soon(reader, take("second"))
            os.write(writer, b"b")
            await until(lambda: heard == ["first a", "second b"])
            loop.watch(reader, take("third"))
            os.write(writer, b"c")
            await until(lambda: heard == ["first a", "second b", "third c"])
            loop.unwatch(reader)

    with_loop(body)


def test_a_number_that_is_used_again_is_another_pipe() -> None:
    """A command's pipe is closed in the moment in which it was to be watched, and the next one has its number."""

    async def body(loop: AsyncioLoop) -> None:
        heard: list[bytes] = []
        for text in (b"a", b"b", b"c"):
            with a_pipe() as (reader, writer):
                loop.watch_soon(reader, lambda: heard.append(b"closed"))
                loop.unwatch(reader)
            with a_pipe() as (again, writer):
                assert again == reader
                loop.watch_soon(again, lambda: heard.append(os.read(again, 99)))
                os.write(writer, text)
                await until(lambda: heard[-1:] == [text])  # noqa: B023
                loop.unwatch(again)
        assert heard == [b"a", b"b", b"c"]

    with_loop(body)


def test_timers_come_when_they_are_due_and_nothing_else_happens() -> None:
    async def body(loop: AsyncioLoop) -> None:
        called: list[tuple[float, float]] = []
        begun = time.monotonic()

        def at(seconds: float) -> None:
            loop.later(seconds, lambda: called.append((seconds, time.monotonic() - begun)))

        at(1)
        for seconds in (0, 0.1):
            loop.later(seconds, lambda: called.append((-1, 0))).cancel()
        await asyncio.sleep(0.05)  # the moments have ended; one alarm is left
        at(0.002)
        at(0.05)
        at(0)
        await until(lambda: len(called) == 4)
        assert [seconds for seconds, _ in called] == [0, 0.002, 0.05, 1]
        assert all(seconds <= after for seconds, after in called)

    with_loop(body)


def test_an_error_in_one_timer_is_not_the_end_of_the_others() -> None:
    async def body(loop: AsyncioLoop) -> None:
        told: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
        called: list[int] = []
        for seconds in (0.002, 0.1):
            loop.later(seconds, lambda: 1 // 0)
            loop.later(seconds, lambda: called.append(1))
        await until(lambda: len(called) == 2)
        assert [type(error) for error in told] == [ZeroDivisionError] * 2

    with_loop(body)


async def test_nothing_stays_open_and_nothing_is_called_after_the_end() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    loop = AsyncioLoop()
    heard: list[bytes] = []
    with a_pipe() as (reader, writer):
        loop.watch_soon(reader, lambda: heard.append(os.read(reader, 99)))
        os.write(writer, b"x")
        await until(lambda: heard == [b"x"])
        loop.later(0.05, lambda: heard.append(b"a timer"))
        await asyncio.sleep(0.02)
        os.write(writer, b"y")
        loop.end()
        loop.end()
        loop.unwatch(reader)
    assert sorted(os.listdir("/proc/self/fd")) == before
    await asyncio.sleep(0.1)
    assert heard == [b"x"]
