"""What is told of a watched session without anybody asking."""

from __future__ import annotations

import asyncio

import pytest

from golden_messages import check_message
from palaestra_slots.core.clock import SystemClock
from palaestra_slots.core.types import JSON
from palaestra_slots.processes.notifications import MATCH_EVERY_S, MAX_MATCHES, MAX_NOTIFICATIONS
from palaestra_slots.processes.registry import ProcessRegistry
from palaestra_slots.processes.session import Watch
from palaestra_slots.sandbox.slot import Slot
from processes.scenes import WithRegistry

pytestmark = pytest.mark.slots


class Stepping(SystemClock):
    """Every look at it is a minute later."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 60.0
        return self.now


async def reported(registry: ProcessRegistry) -> dict[str, JSON]:
    return await asyncio.to_thread(registry.notifications.completion_queue.get, True, 20)


def test_lines_that_match_and_the_end(with_registry: WithRegistry) -> None:
    async def scene(registry: ProcessRegistry, slot: Slot) -> None:
        watch = Watch(patterns=("READY", "FAIL"), on_exit=True, address={"chat_id": "7"})
        command = "echo starting; printf REA; read x; printf 'DY now\\r\\nFAIL a\\nFAIL b\\nother\\n'; exit 9"
        session = await registry.spawn(slot, command, task_id="t", session_key="k", watch=watch)
        await registry.submit_stdin(session.id, "")
        match, more, end = [await reported(registry) for _ in range(3)]
        about = {"session_id": session.id, "task_id": "t", "session_key": "k", "command": command, "chat_id": "7"}
        assert match == {"type": "watch_match", "output": "READY now", "exit_code": None, **about}
        check_message(more["output"])
        assert (end["type"], end["exit_code"], end["chat_id"]) == ("completion", 9, "7")
        assert end["output"].endswith("FAIL b\nother\n")
        notices = (await registry.poll(session.id))["notices"]
        assert notices[:2] == ["match: READY now", "match: 2 more lines matched"]
        check_message(notices[2], "starting")
        assert "notices" not in await registry.poll(session.id)

    with_registry(scene)


def test_matches_are_told_only_so_often(with_registry: WithRegistry) -> None:
    async def scene(_: ProcessRegistry, slot: Slot) -> None:
        assert MATCH_EVERY_S < 60
        async with ProcessRegistry(clock=Stepping()) as registry:
            watch = Watch(patterns=("x",), on_exit=True)
            session = await registry.spawn(slot, "for i in $(seq 20); do echo x$i; done", task_id="t", watch=watch)
            events = [await reported(registry) for _ in range(MAX_MATCHES + 1)]
            assert [event["output"].split()[0] for event in events[:-1]] == [f"x{n}" for n in range(1, MAX_MATCHES + 1)]
            check_message(events[-2]["output"], "patterns")
            assert (events[-1]["type"], events[-1]["session_id"]) == ("completion", session.id)

    with_registry(scene)


def test_new_output_is_told_at_intervals(with_registry: WithRegistry) -> None:
    async def scene(registry: ProcessRegistry, slot: Slot) -> None:
        watch = Watch(interval_s=0.05)
        command = "echo one; read x; echo two; read x"
        session = await registry.spawn(slot, command, task_id="t", watch=watch)
        first = await reported(registry)
        assert (first["type"], first["output"]) == ("progress", "one\n")
        await registry.submit_stdin(session.id, "")
        assert (await reported(registry))["output"] == "two\n"
        await registry.submit_stdin(session.id, "")
        assert (await reported(registry))["type"] == "completion"

    with_registry(scene)


def test_a_life_has_its_limit(with_registry: WithRegistry) -> None:
    async def scene(registry: ProcessRegistry, slot: Slot) -> None:
        watch = Watch(on_exit=True, lifetime_s=0.05)
        session = await registry.spawn(slot, "setsid sleep 1000 & exec sleep 1000", task_id="t", watch=watch)
        assert (await reported(registry))["exit_code"] == 143
        assert (await slot.execute("pgrep -c sleep")).output == "0\n"
        check_message((await registry.poll(session.id))["notices"][0], "0.05s")

    with_registry(scene)


def test_the_oldest_report_is_dropped_if_nobody_reads(with_registry: WithRegistry) -> None:
    async def scene(registry: ProcessRegistry, slot: Slot) -> None:
        for _ in range(MAX_NOTIFICATIONS):
            registry.notifications.completion_queue.put_nowait({"session_id": "proc_0"})
        session = await registry.spawn(slot, "true", task_id="t", watch=Watch(on_exit=True))
        while "notices" not in await registry.poll(session.id):
            pass
        found = [(await reported(registry))["session_id"] for _ in range(MAX_NOTIFICATIONS)]
        assert found.index(session.id) == MAX_NOTIFICATIONS - 1

    with_registry(scene)
