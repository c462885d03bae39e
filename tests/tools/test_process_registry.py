"""Background processes for synchronous code: from threads, without a loop, and in reward functions that are bridged."""

from __future__ import annotations

import asyncio

import pytest

from palaestra import process_registry
from palaestra.core.bridge import bridged
from palaestra.core.errors import IsolationUnavailable
from palaestra.core.types import JSON
from palaestra.processes.registry import ProcessRegistry
from palaestra.tools.process_registry import SharedProcesses
from palaestra.tools.session import cleanup_vm, handle_function_call

from .conftest import AtDesk, Desk

pytestmark = pytest.mark.slots


def test_code_without_a_loop_has_the_whole_life_of_a_process() -> None:
    try:
        session = process_registry.spawn_local(
            "read word; echo got $word $NAME in $PWD", cwd="/tmp", task_id="sync-1", env_vars={"NAME": "x"}
        )
    except IsolationUnavailable as error:
        pytest.skip(str(error))
    try:
        assert isinstance(process_registry, SharedProcesses)
        assert process_registry.get(session.id) is session
        assert process_registry.poll(session.id)["status"] == "running"
        assert process_registry.has_active_processes("sync-1")
        assert process_registry.has_active_for_session("sync-1")
        assert not process_registry.has_active_processes("sync-2")
        assert process_registry.submit_stdin(session.id, "it") == {
            "session_id": session.id, "status": "ok", "bytes_written": 3
        }  # fmt: skip
        waited = process_registry.wait(session.id, timeout=60)
        assert (waited["status"], waited["exit_code"], waited["output"]) == ("exited", 0, "got it x in /tmp\n")
        assert process_registry.read_log(session.id)["total_lines"] == 1
        assert process_registry.kill_process(session.id)["status"] == "already_exited"

        called: JSON = handle_function_call("terminal", {"command": "sleep 600", "background": True}, "sync-1")
        assert "session_id" in called
        assert [each["status"] for each in process_registry.list_sessions("sync-1")] == ["exited", "running"]
        assert process_registry.kill_all("sync-1") == 1
        assert process_registry.kill_all("sync-1") == 0
    finally:
        cleanup_vm("sync-1")
    assert process_registry.list_sessions("sync-1") == []
    assert process_registry.poll(session.id)["status"] in ("lost", "not_found")
    assert process_registry.poll("proc_000000000000") == {
        "session_id": "proc_000000000000",
        "status": "not_found",
        "error": "No process with ID proc_000000000000",
    }


def test_a_reward_function_asks_the_registry_of_its_own_loop(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        async def reward() -> JSON:  # as the contract has it: async, with synchronous calls in it
            polled = process_registry.poll(session_id)
            killed = process_registry.kill_all(desk.tools.task_id)
            return polled["status"], killed, process_registry.poll(session_id)["exit_code"]

        session_id = (await desk.call("terminal", command="sleep 600", background=True))["session_id"]
        assert await bridged(reward()) == ("running", 1, 143)
        assert await asyncio.to_thread(process_registry.wait, session_id) == process_registry_reply(session_id)
        with pytest.raises(RuntimeError, match=r"await ProcessRegistry\.poll there instead"):
            process_registry.poll(session_id)

    at_desk(scenario)


def process_registry_reply(session_id: str) -> JSON:
    reply = {"session_id": session_id, "status": "exited", "exit_code": 143}
    return {**reply, "output": "", "cursor": 0, "output_total_bytes": 0}


def test_a_registry_of_another_loop_is_asked_there(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        session_id = (await desk.call("terminal", command="sleep 600", background=True))["session_id"]

        async def elsewhere() -> JSON:
            return process_registry.poll(session_id)["status"]

        assert await asyncio.to_thread(lambda: asyncio.run(bridged(elsewhere()))) == "running"

    at_desk(scenario)


def test_a_registry_that_nobody_has_any_more_is_forgotten(at_desk: AtDesk) -> None:
    known: list[str] = []

    async def scenario(desk: Desk) -> None:
        registry = ProcessRegistry()
        known.append((await registry.spawn(desk.slot, "true", task_id="gone")).id)
        assert process_registry.get(known[0]) is not None

    at_desk(scenario)
    assert process_registry.get(known[0]) is None
