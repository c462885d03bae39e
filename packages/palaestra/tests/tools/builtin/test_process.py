"""`terminal` with background=true and the `process` tool, as a model calls them, in a real slot."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from golden_messages import check_message
from palaestra.tools.registry.build import build_tool_registry
from palaestra.tools.runtime.runtime import ToolRuntime
from palaestra_slots.processes.registry import ProcessRegistry
from palaestra_slots.processes.session import MAX_PROCESSES

if TYPE_CHECKING:
    from tools.desk import AtDesk, Desk

pytestmark = pytest.mark.slots


def test_a_process_from_its_start_to_its_end(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        command = 'echo up; while read -r x; do echo "<$x>"; done; exit 7'
        started = await desk.call("terminal", command=command, background=True, workdir="/tmp")
        name, pid = started["session_id"], started["pid"]
        assert started == {
            "output": "Background process started", "exit_code": 0, "error": None, "session_id": name, "pid": pid
        }  # fmt: skip
        assert (await desk.call("process", action="submit", session_id=name, data="a"))["status"] == "ok"
        assert (await desk.call("process", action="write", session_id=name, data="b\n", eof=True))["bytes_written"] == 2
        ended = await desk.call("process", action="wait", session_id=name)
        assert (ended["status"], ended["exit_code"], ended["output"]) == ("exited", 7, "up\n<a>\n<b>\n")
        polled = await desk.call("process", action="poll", session_id=name)
        assert set(polled) == {
            "session_id", "command", "status", "pid", "uptime_seconds", "exit_code", "output_preview", "cursor",
            "output_total_bytes",
        }  # fmt: skip
        new = await desk.call("process", action="poll", session_id=name, since=3)
        assert (new["output"], new["cursor"]) == ("<a>\n<b>\n", 11)
        assert await desk.call("process", action="poll", session_id=name, since=3.0) == new
        log = await desk.call("process", action="log", session_id=name, offset=1, limit=1)
        assert (log["output"], log["total_lines"], log["showing"]) == ("<a>", 3, "lines 2-2 of 3")
        (listed,) = (await desk.call("process", action="list"))["processes"]
        assert (listed["session_id"], listed["command"], listed["cwd"]) == (name, command, "/tmp")
        assert (await desk.call("process", action="kill", session_id=name))["status"] == "already_exited"

    at_desk(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("line", ["x" * 999, "\\1" * 999, "y" * 120_000])
def test_a_log_is_bounded_as_it_is_sent(at_desk: AtDesk, line: str) -> None:
    async def scenario(desk: Desk) -> None:
        command = f"python3 -c \"[print('{line[:2]}' * {len(line) // 2}) for _ in range(200)]\""
        name = (await desk.call("terminal", command=command, background=True))["session_id"]
        await desk.call("process", action="wait", session_id=name)
        for offset in (0, 1):
            log = await desk.call("process", action="log", session_id=name, offset=offset, limit=400)
            assert 0 < len(json.dumps(log["output"], ensure_ascii=False)) <= 101_000
        last = await desk.call("process", action="log", session_id=name)
        total = last["total_lines"]
        assert f"-{total} of {total}" in last["showing"]

    at_desk(scenario)


def test_conversations_may_share_a_registry_and_still_see_their_own_alone(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        shared = ProcessRegistry()
        other = ToolRuntime(build_tool_registry(["terminal"]), desk.tools.slot, "task-2")
        for tools in (desk.tools, other):
            tools.share(shared)
        name = (await desk.call("terminal", command="exec sleep 1000", background=True))["session_id"]
        assert (await other.call("process", {"action": "list"})).reply == {"processes": []}
        assert "not_found" in (await other.handle("process", {"action": "kill", "session_id": name}))
        assert await shared.has_active_for_session("task-1")
        assert await shared.kill_all() == 1

    at_desk(scenario)


def test_killing_ends_the_whole_tree(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        command = "setsid sleep 1001 & sleep 1002 & echo up; wait"
        name = (await desk.call("terminal", command=command, background=True, watch_patterns=["up"]))["session_id"]
        await desk.call("terminal", command="until [ $(pgrep -fc 'sleep 100[12]') -ge 2 ]; do :; done")
        killed = await desk.call("process", action="kill", session_id=name)
        assert (killed["status"], killed["exit_code"]) == ("killed", 143)
        assert (await desk.call("terminal", command="pgrep -fc 'sleep [1]00'"))["output"] == "0\n"

    at_desk(scenario)


def test_a_terminal_in_the_background(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        name = (await desk.call("terminal", command="read x; test -t 0 && stty size", background=True, pty=True))[
            "session_id"
        ]
        await desk.call("process", action="submit", session_id=name)
        assert (await desk.call("process", action="wait", session_id=name))["output"] == "\n30 120\n"

    at_desk(scenario)


def test_what_cannot_be_done_is_told_and_nothing_is_started(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        reply = await desk.call("terminal", command="touch ran", background=True, workdir="nowhere")
        assert reply["exit_code"] == 1
        assert "nowhere is not" in reply["error"]
        for name in ("pty", "notify_on_complete"):
            reply = await desk.call("terminal", command="touch ran", **{name: True})
            assert reply["error"] == f"{name} needs background=true; nothing was run"
            assert (reply["output"], reply["exit_code"]) == ("", -1)
        reply = await desk.call("terminal", command="touch ran\0", background=True)
        assert ("NUL" in reply["error"], reply["output"], reply["exit_code"]) == (True, "", -1)
        for _ in range(MAX_PROCESSES):
            await desk.call("terminal", command="exec sleep 1000", background=True)
        reply = await desk.call("terminal", command="touch ran", background=True)
        assert reply["exit_code"] == -1
        assert "64 background processes are running" in reply["error"]
        assert await desk.slot.stat("ran") is None

    at_desk(scenario)


def test_a_call_without_what_it_needs_says_what(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        check_message((await desk.call("process", action="poll"))["error"], "session_id", "poll")
        assert "one of" in (await desk.call("process", action="restart"))["error"]
        check_message((await desk.call("process"))["error"], "action")
        reply = await desk.call("process", action="poll", session_id="proc_0")
        assert reply == {"session_id": "proc_0", "status": "not_found", "error": "No process with ID proc_0"}
        name = (await desk.call("terminal", command="exec sleep 1000", background=True))["session_id"]
        assert "data is needed" in (await desk.call("process", action="write", session_id=name))["error"]
        assert (await desk.call("process", action="write", session_id=name, eof=True))["bytes_written"] == 0

    at_desk(scenario)


def test_a_short_check_interval_is_raised(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        reply = await desk.call("terminal", command="true", background=True, check_interval=5)
        check_message(reply["check_interval_note"], "check_interval")
        assert "check_interval_note" not in await desk.call(
            "terminal", command="true", background=True, check_interval=30
        )

    at_desk(scenario)
