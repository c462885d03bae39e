"""Tools by function call: a slot per task, made when needed, ended when told to or when the process ends."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from golden_messages import raises
from palaestra.agent.result import AgentResult
from palaestra_contract import HermesAgentLoop, get_tool_definitions
from palaestra_contract.tools.function_calls import ToolSession, use_session
from palaestra_contract.tools.session_tasks import ToolSessionConfig
from palaestra_slots.core.errors import ConfigError, IsolationUnavailable, SandboxError, StaleLease, TaskError
from palaestra_slots.core.types import JSON
from programs import nap

pytestmark = pytest.mark.slots


@pytest.fixture
def session() -> Iterator[ToolSession]:
    with ToolSession() as opened:
        try:
            opened.handle("read_file", {"path": "/etc/hostname"}, "probe")
        except IsolationUnavailable as error:
            pytest.skip(str(error))
        opened.release("probe")
        yield opened


def call(session: ToolSession, name: str, task_id: str | None = None, **arguments: JSON) -> JSON:
    return json.loads(session.handle(name, arguments, task_id))


def test_a_task_keeps_its_slot_and_shares_it_with_no_other(session: ToolSession) -> None:
    assert call(session, "terminal", "a", command="echo one > f; pwd")["output"] == "/workspace\n"
    assert call(session, "bash", "a", command="cat f")["output"] == "one\n"
    assert "error" in call(session, "read_file", "b", path="f")
    assert call(session, "todo", "a", todos=[{"id": "1", "content": "x", "status": "pending"}])["summary"]["total"] == 1
    assert call(session, "todo_list", "a")["summary"]["total"] == 1
    assert call(session, "todo", "b")["summary"]["total"] == 0
    assert sorted(session.tasks()) == ["a", "b"]
    session.release("a")
    assert session.tasks() == ["b"]
    assert call(session, "terminal", "a", command="cat f")["exit_code"] == 1


def test_a_slot_that_nobody_uses_is_ended_and_one_in_use_is_not(session: ToolSession) -> None:
    with ToolSession(config=ToolSessionConfig(idle_s=0.4)) as tidy, ThreadPoolExecutor(1) as beside:
        working = beside.submit(call, tidy, "terminal", "working", command="sleep 2; echo done")
        call(tidy, "terminal", "serving", command=nap(), background=True)
        call(tidy, "terminal", "idle", command="touch mine")
        while "idle" in tidy.tasks():
            time.sleep(0.02)
        assert working.result()["output"] == "done\n"
        assert "serving" in tidy.tasks()
        with pytest.raises(StaleLease, match=r"0\.4 s"):
            tidy.handle("terminal", {"command": "ls"}, "idle")
        tidy.release("idle")
        assert call(tidy, "terminal", "idle", command="ls")["output"] == ""


def test_mistakes_are_replies(session: ToolSession) -> None:
    assert call(session, "nothing")["error"].startswith("Unknown tool 'nothing'. Available tools: ['terminal'")
    refused = call(session, "image_generate", prompt="a")["error"]
    assert refused.startswith("image_generate cannot be used here: no image model")
    assert "missing required argument 'command'" in call(session, "terminal")["error"]
    assert "Invalid JSON" in json.loads(session.handle("terminal", '{"command": "ls'))["error"]
    assert json.loads(session.handle("todo", ""))["todos"] == []


def test_overrides_count_for_the_next_slot_of_their_task(session: ToolSession, tmp_path: Path) -> None:
    session.override("a", {"cwd": "/tmp"})
    assert call(session, "terminal", "a", command="pwd")["output"] == "/tmp\n"
    assert json.loads(session.handle("terminal", '{"command": "pwd"}', "a"))["output"] == "/tmp\n"
    assert "Invalid JSON" in json.loads(session.handle("terminal", '{"command": "pwd"', "a"))["error"]
    assert call(session, "terminal", "a", command="pwd", workdir="/workspace")["output"] == "/workspace\n"
    session.clear_override("a")
    assert call(session, "terminal", "a", command="pwd")["output"] == "/workspace\n"
    session.override("b", {"docker_image": str(tmp_path / "nowhere")})
    with raises(TaskError, "task b", tmp_path / "nowhere"):
        call(session, "terminal", "b", command="pwd")
    session.override("b", {"modal_image": "python:3.11"})
    with raises(TaskError, "'python:3.11'"):
        call(session, "read_file", "b", path="f")
    with raises(ConfigError, "'docker_imag'", "docker_image"):
        session.override("c", {"docker_imag": "x"})


async def test_a_call_waits_for_no_other_task_and_can_be_cancelled(session: ToolSession) -> None:
    naptime = nap()
    left = asyncio.create_task(session.handle_async("terminal", {"command": naptime}, "a"))
    right = await session.handle_async("terminal", {"command": "echo done"}, "b")
    assert json.loads(right)["output"] == "done\n"
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    seen = await session.handle_async("terminal", {"command": f"pgrep -cxf '{naptime}' || true"}, "a")
    assert json.loads(seen)["output"].strip() == "0"


def test_a_closed_session_takes_no_calls() -> None:
    session = ToolSession()
    session.close()
    session.close()
    with pytest.raises(SandboxError, match="closed"):
        session.handle("todo", {})


class OneCall:
    """A model that makes one call and then stops."""

    def __init__(self) -> None:
        self.turn = 0

    async def chat_completion(self, **request: JSON) -> JSON:
        self.turn += 1
        arguments = json.dumps({"command": "echo $((6 * 7))"})
        calls = [{"id": "c1", "function": {"name": "terminal", "arguments": arguments}}] if self.turn == 1 else None
        return {"choices": [{"message": {"content": "ok", "tool_calls": calls}, "finish_reason": "stop"}]}


async def test_a_loop_without_a_handler_runs_the_tools_in_a_slot_of_its_task(
    session: ToolSession,
) -> None:
    use_session(session)

    async def run() -> AgentResult:
        tools = get_tool_definitions(["terminal"], quiet_mode=True)
        loop = HermesAgentLoop(OneCall(), tools, {"terminal"}, task_id="loop-1")
        return await loop.run([{"role": "user", "content": "what is 6 * 7?"}])

    try:
        result = await run()
        assert session.tasks() == ["loop-1"]
    finally:
        use_session(ToolSession())
    assert json.loads(result.messages[2]["content"])["output"] == "42\n"


SCRIPT = """
from palaestra import cleanup_vm, get_active_environments_info, handle_function_call, register_task_env_overrides
register_task_env_overrides("t1", {"cwd": "/tmp"})
print(handle_function_call("terminal", {"command": "pwd"}, task_id="t1"))
print(handle_function_call("terminal", {"command": "setsid NAP > /dev/null 2>&1 & echo"}))
print(get_active_environments_info())
cleanup_vm("t1")
print(get_active_environments_info())
"""


def test_the_functions_share_one_session_that_ends_with_the_process(session: ToolSession) -> None:
    naptime = nap()
    script = SCRIPT.replace("NAP", naptime)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    replies = done.stdout.splitlines()
    assert json.loads(replies[0]) == {"output": "/tmp\n", "exit_code": 0, "error": None}
    assert replies[2:] == ["{'count': 2, 'task_ids': ['t1', 'default']}", "{'count': 1, 'task_ids': ['default']}"]
    until = time.monotonic() + 30
    while subprocess.run(["pgrep", "-xf", naptime], capture_output=True, check=False).returncode == 0:
        assert time.monotonic() < until, "a process of a slot outlived its process"
