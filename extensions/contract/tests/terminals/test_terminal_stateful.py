"""The stateful terminal in a real slot."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from golden_messages import check_message
from palaestra.tools.builtin.terminal import MAX_OUTPUT_CHARS
from palaestra.tools.registry.build import build_tool_registry
from palaestra.tools.runtime.runtime import ToolRuntime
from palaestra_contract.exec_tool import ExecTool

if TYPE_CHECKING:
    from tools.desk import AtDesk, Desk

pytestmark = pytest.mark.slots


def stateful(desk: Desk) -> None:
    """This tool is there for who asks for it by name."""
    assert desk.tools.registry.get("terminal_stateful") is None
    desk.tools = ToolRuntime(build_tool_registry(["terminal_stateful"]), desk.tools.slot, "task-1", timeout_s=30.0)


def test_what_one_command_leaves_is_there_for_the_next(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        stateful(desk)
        first = await desk.call("terminal_stateful", command="mkdir d; cd d; export A=1; f() { echo f$A; }; false")
        assert first == {"output": "", "exit_code": 1, "error": None}
        assert (await desk.call("terminal_stateful", command="pwd; f"))["output"] == "/workspace/d\nf1\n"
        both = [desk.call("terminal_stateful", command=f"A={n}; sleep 0.05; f") for n in (2, 3)]
        assert [reply["output"] for reply in await asyncio.gather(*both)] == ["f2\n", "f3\n"]

    at_desk(scenario)


def test_a_shell_without_a_directory_to_start_in_says_how_to_go_on(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        stateful(desk)
        await desk.call("terminal_stateful", command="rm -rf /workspace; exit")
        told = await desk.call("terminal_stateful", command="pwd")
        check_message(told["error"], "/workspace")
        await (await desk.tools.slot()).write_text("again", "")
        assert (await desk.call("terminal_stateful", command="ls"))["output"] == "again\n"

    at_desk(scenario)


def test_ends_and_limits_are_told(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        stateful(desk)
        late = await desk.call("terminal_stateful", command="A=kept; echo begun; sleep 600", timeout=1)
        assert (late["output"], late["exit_code"]) == ("begun\n", 124)
        assert "timed out after 1s" in late["error"]
        assert (await desk.call("terminal_stateful", command="echo $A"))["output"] == "kept\n"
        gone = await desk.call("terminal_stateful", command="exit 3")
        assert (gone["exit_code"], gone["shell_restarted"]) == (3, True)
        assert (await desk.call("terminal_stateful", command="echo $A"))["output"] == "\n"
        long = await desk.call("terminal_stateful", command="seq 1 20000")
        assert len(long["output"]) <= MAX_OUTPUT_CHARS
        assert (await desk.slot.read_text(long["full_output_path"])).endswith("\n20000\n")

    at_desk(scenario)


def test_hooks_have_a_shell_that_goes_on_too(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        exec_tool = ExecTool(desk.tools.slot, lambda: desk.tools)
        assert (await exec_tool("bash_stateful", {"command": "cd /tmp; B=2"})).success
        result = await exec_tool("terminal_stateful", {"command": "pwd; echo $B; exit 4"}, timeout=20)
        assert (result.output, result.exit_code) == ("/tmp\n2\n", 4)
        assert (await exec_tool("bash", {"command": "pwd"})).output == "/workspace\n"
        told = await exec_tool("bash", {"command": "echo a; echo b >&2"})
        assert (told.output, told.metadata["stdout"], told.metadata["stderr"]) == ("a\n\n[stderr]\nb\n", "a\n", "b\n")

    at_desk(scenario)
