"""The terminal with a screen, in a real slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from palaestra.tools.registry.build import build_tool_registry
from palaestra.tools.runtime.runtime import ToolRuntime

if TYPE_CHECKING:
    from palaestra_slots.core.types import JSON
    from tools.desk import AtDesk, Desk

pytestmark = pytest.mark.slots


async def tmux(desk: Desk, action: str, **arguments: JSON) -> JSON:
    """One call, in a rollout that has asked for this tool."""
    if desk.tools.registry.get("tmux") is None:
        desk.tools = ToolRuntime(build_tool_registry(["tmux"]), desk.tools.slot, "task-1", timeout_s=30.0)
    return await desk.call("tmux", action=action, **arguments)


async def run(desk: Desk, command: str, **arguments: JSON) -> JSON:
    return await tmux(desk, "send_keys", keys=[command, "Enter"], block=True, max_wait_s=20, **arguments)


def test_a_shell_is_typed_into_and_looked_at(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        started = await tmux(desk, "start", pane_width=100, pane_height=30)
        assert (started["error"], started["running"]) == (None, True)
        await run(desk, "PS1='> '; clear")
        shown = await run(desk, "until [ -e go ]; do [ -e waits ] || touch waits; touch go; done; stty size")
        assert "; stty size\n30 100" in shown["output"]
        assert (shown["command_exit_code"], "still_running" in shown) == (0, False)
        assert (await run(desk, "(exit 7)"))["command_exit_code"] == 7
        assert "30 100\n" in (await tmux(desk, "capture", capture_entire=True))["output"]
        ended = await tmux(desk, "send_keys", keys="exit 3\n", block=True)
        assert (ended["running"], ended["shell_exit_code"]) == (False, 3)
        assert "has ended" in (await tmux(desk, "send_keys", keys="x"))["error"]

    at_desk(scenario)


def test_a_command_that_goes_on_is_told_and_interrupted(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        await tmux(desk, "start")
        shown = await tmux(desk, "send_keys", keys=["sleep 1000", "Enter"], block=True, max_wait_s=0.5)
        assert "not ended within 0.5s." in shown["still_running"]
        shown = await tmux(desk, "send_keys", keys=["C-c"], block=True)
        assert "still_running" not in shown
        assert (await tmux(desk, "stop"))["error"] is None
        assert (await desk.slot.execute("pgrep -c sleep")).output == "0\n"

    at_desk(scenario)


def test_what_does_not_read_its_keys_holds_nothing_up(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        await tmux(desk, "start")
        await tmux(desk, "send_keys", keys=["stty raw; touch raw; sleep 1000", "Enter"], max_wait_s=0.5)
        while await desk.slot.stat("raw") is None:
            await tmux(desk, "capture")
        refused = await tmux(desk, "send_keys", keys="x" * 100_000, max_wait_s=0.5)
        assert "all keys within 1s" in refused["error"]
        assert (await tmux(desk, "capture"))["running"]
        assert (await tmux(desk, "stop"))["error"] is None

    at_desk(scenario)


def test_a_stream_gives_everything_once(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        await tmux(desk, "start")
        await run(desk, "echo one")
        first = await tmux(desk, "stream")
        assert "one\n" in first["output"]
        assert first["more_bytes"] == 0
        await run(desk, "echo two")
        second = await tmux(desk, "stream")
        assert "two\n" in second["output"]
        assert "one" not in second["output"]
        assert (await tmux(desk, "stream"))["output"] == ""
        again = await tmux(desk, "stream", reset=True)
        assert again["output"] == first["output"] + second["output"]

    at_desk(scenario)


def test_calls_out_of_turn_are_told(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        assert "open one with start" in (await tmux(desk, "capture"))["error"]
        await tmux(desk, "start")
        assert "already open" in (await tmux(desk, "start"))["error"]
        assert "keys is needed" in (await tmux(desk, "send_keys"))["error"]
        await run(desk, "A=old")
        await tmux(desk, "start", reset=True)
        assert "<>" in (await run(desk, 'echo "<$A>"'))["output"].splitlines()
        assert len(await desk.slot.processes()) == 1

    at_desk(scenario)
