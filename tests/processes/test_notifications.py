"""What is told of a watched session without anybody asking."""

from __future__ import annotations

import asyncio

import pytest

from palaestra.core.clock import SystemClock
from palaestra.processes.notifications import MATCH_EVERY_S, MAX_MATCHES, EventKind, ProcessEvent
from palaestra.processes.registry import MAX_EVENTS, ProcessRegistry
from palaestra.processes.session import Watch
from palaestra.sandbox.slot import Slot
from processes.scenes import WithRegistry

pytestmark = pytest.mark.slots


class Stepping(SystemClock):
    """Every look at it is a minute later."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 60.0
        return self.now


async def told(registry: ProcessRegistry) -> ProcessEvent:
    return await asyncio.wait_for(registry.completion_queue.get(), 20)


def test_lines_that_match_and_the_end(with_registry: WithRegistry) -> None:
    async def scene(registry: ProcessRegistry, slot: Slot) -> None:
        watch = Watch(patterns=("READY", "FAIL"), on_exit=True, address={"chat_id": "7"})
        command = "echo starting; printf REA; read x; printf 'DY now\\r\\nFAIL a\\nFAIL b\\nother\\n'; exit 9"
        session = await registry.spawn(slot, command, task_id="t", session_key="k", watch=watch)
        await registry.submit_stdin(session.id, "")
        match, more, end = [await told(registry) for _ in range(3)]
        assert match == ProcessEvent(EventKind.MATCH, session.id, "t", "k", "READY now", None, {"chat_id": "7"})
        assert more.text == "2 more lines matched"
        assert (end.kind, end.exit_code, end.address) == (EventKind.EXITED, 9, {"chat_id": "7"})
        assert end.text.endswith("FAIL b\nother\n")
        notices = (await registry.poll(session.id))["notices"]
        assert notices[:2] == ["match: READY now", "match: 2 more lines matched"]
        assert notices[2].startswith("exited with exit code 9: starting")
        assert "notices" not in await registry.poll(session.id)

    with_registry(scene)


def test_matches_are_told_only_so_often(with_registry: WithRegistry) -> None:
    async def scene(_: ProcessRegistry, slot: Slot) -> None:
        assert MATCH_EVERY_S < 60
        async with ProcessRegistry(clock=Stepping()) as registry:
            watch = Watch(patterns=("x",), on_exit=True)
            session = await registry.spawn(slot, "for i in $(seq 20); do echo x$i; done", task_id="t", watch=watch)
            events = [await told(registry) for _ in range(MAX_MATCHES + 1)]
            assert [event.text.split()[0] for event in events[:-1]] == [f"x{n}" for n in range(1, MAX_MATCHES + 1)]
            assert events[-2].text.endswith("(the patterns are no longer looked for)")
            assert (events[-1].kind, events[-1].session_id) == (EventKind.EXITED, session.id)

    with_registry(scene)


def test_new_output_is_told_at_intervals(with_registry: WithRegistry) -> None:
    async def scene(registry: ProcessRegistry, slot: Slot) -> None:
        watch = Watch(interval_s=0.05)
        command = "echo one; read x; echo two; read x"
        session = await registry.spawn(slot, command, task_id="t", watch=watch)
        first = await told(registry)
        assert (first.kind, first.text) == (EventKind.PROGRESS, "one\n")
        await registry.submit_stdin(session.id, "")
        assert (await told(registry)).text == "two\n"
        await registry.submit_stdin(session.id, "")
        assert (await told(registry)).kind is EventKind.EXITED

    with_registry(scene)


def test_a_life_has_its_limit(with_registry: WithRegistry) -> None:
    async def scene(registry: ProcessRegistry, slot: Slot) -> None:
        watch = Watch(on_exit=True, lifetime_s=0.05)
        session = await registry.spawn(slot, "setsid sleep 1000 & exec sleep 1000", task_id="t", watch=watch)
        assert (await told(registry)).exit_code == 143
        assert (await slot.execute("pgrep -c sleep")).output == "0\n"
        assert (await registry.poll(session.id))["notices"][0] == "killed after its time limit of 0.05s"

    with_registry(scene)


def test_where_nobody_listens_the_oldest_gives_way(with_registry: WithRegistry) -> None:
    async def scene(registry: ProcessRegistry, slot: Slot) -> None:
        event = ProcessEvent(EventKind.EXITED, "proc_0", "t", "k", "")
        for _ in range(MAX_EVENTS):
            registry.completion_queue.put_nowait(event)
        session = await registry.spawn(slot, "true", task_id="t", watch=Watch(on_exit=True))
        while "notices" not in await registry.poll(session.id):
            pass
        assert [(await told(registry)).session_id for _ in range(MAX_EVENTS)].index(session.id) == MAX_EVENTS - 1

    with_registry(scene)
