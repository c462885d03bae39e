"""Results of the Tinker server: bounded, kept until they were fetched, and ended with their session."""

from __future__ import annotations

import json
from functools import partial

import pytest

from manual_clock import ManualClock
from palaestra_train.tinker import futures as module
from palaestra_train.tinker.futures import KEPT_S, UNFETCHED_S, Busy, FutureAnswer, Futures, PendingRequest


def test_an_answer_stays_until_some_time_after_it_was_fetched() -> None:
    clock = ManualClock()
    futures = Futures(clock)
    fetched, unfetched = futures.add("a", "s"), futures.add("b", "s")
    for pending in (fetched, unfetched):
        futures.finish(pending, FutureAnswer.of({"ok": True}))
    futures.finish(fetched, FutureAnswer.of({"ok": False}))  # the first answer counts
    assert json.loads(fetched.answer.body) == {"ok": True}  # type: ignore[union-attr]
    futures.fetched(fetched)
    futures.sweep()
    assert futures.find("a") is fetched
    clock.now += KEPT_S + 1
    futures.sweep()
    assert futures.find("a") is None
    assert futures.find("b") is unfetched
    clock.now += UNFETCHED_S
    futures.sweep()
    assert futures.find("b") is None


def test_a_full_server_is_busy_until_results_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 2)
    monkeypatch.setattr(module, "MOST_BYTES", 100)
    futures = Futures(ManualClock())
    first, _ = futures.add("a", "s"), futures.add("b", "s")
    with pytest.raises(Busy, match="2 requests"):
        futures.add("c", "s")
    futures.finish(first, FutureAnswer(b"x" * 100))
    with pytest.raises(Busy, match="not been fetched"):
        futures.add("c", "s")
    futures.fetched(first)
    assert futures.add("c", "s").answer is None


async def test_requests_that_wait_are_bounded_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 100)
    futures = Futures(ManualClock())
    bodies: list[int] = []

    async def body(size: int) -> bytes:
        bodies.append(size)
        return b"x" * size

    async def submit(name: str, size: int, announced: int | None = None) -> PendingRequest:
        def add(raw: bytes) -> PendingRequest:
            return futures.find(name) or futures.add(name, "s")

        return await futures.read(partial(body, size), announced or size, add)

    first = await submit("a", 60, announced=100)
    assert await submit("a", 60 - 20) is first  # repeated: held once
    await submit("b", 40)
    with pytest.raises(Busy, match="waiting"):
        await submit("c", 1)
    assert bodies == [60, 40, 40]  # the last one was not read
    futures.finish(first, FutureAnswer(b""))
    await submit("c", 60)
    with pytest.raises(Busy):
        await submit("d", 1)
    futures.end_session("s")
    await submit("e", 1000)  # one alone is always taken


def test_the_end_of_a_session_cancels_what_waits() -> None:
    futures, cancelled = Futures(ManualClock()), []
    waiting, other = futures.add("a", "s"), futures.add("b", "t")
    waiting.cancel = lambda: cancelled.append("a")
    futures.end_session("s")
    assert cancelled == ["a"]
    assert waiting.done.is_set()
    assert futures.find("a") is None
    assert futures.find("b") is other
