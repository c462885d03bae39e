"""Agents that speak the Agent Client Protocol from a slot: their work, their model calls, and the ways in which they
fail."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from bug_fixing import Fixer, Repairer, fix_calc, repaired_by_tool

import palaestra
from palaestra import ConfigError, Outcome, Task, environment
from palaestra.agent.known_programs import program_named
from palaestra_integrations import acp_programs
from palaestra_slots import Blame

pytestmark = [pytest.mark.slots, pytest.mark.timeout(120)]

AGENT = """
import itertools, json, os, subprocess, sys, time, urllib.request
numbers = itertools.count(1)
def send(**message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)
def receive():
    line = sys.stdin.readline()
    return json.loads(line) if line else sys.exit(0)
def ask(method, **params):
    number = next(numbers)
    send(id=number, method=method, params={"sessionId": "s1", **params})
    while (message := receive()).get("id") != number or "method" in message:
        pass
    return message
def tell(**update):
    send(method="session/update", params={"sessionId": "s1", "update": update})
def model(messages):
    parameters = {"type": "object", "properties": {"command": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "bash", "parameters": parameters}}]
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    body = json.dumps({"model": "m", "messages": messages, "tools": tools}).encode()
    return json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))["choices"][0]["message"]
def opened(http=True):
    about = receive()
    assert about["method"] == "initialize" and about["params"]["protocolVersion"] == 1, about
    send(id=about["id"], result={"protocolVersion": 1, "agentCapabilities": {"mcpCapabilities": {"http": http}}})
    new = receive()
    assert new["method"] == "session/new" and new["params"]["cwd"] == "/workspace", new
    send(id=new["id"], result={"sessionId": "s1"})
    prompt = receive()
    assert prompt["method"] == "session/prompt" and prompt["params"]["sessionId"] == "s1", prompt
    return new["params"]["mcpServers"], prompt["id"], prompt["params"]["prompt"][0]["text"]
def allowed(command):
    options = [{"optionId": "n", "name": "No", "kind": "reject_once"}, {"optionId": "a", "name": "A", "kind":
        "allow_always"}, {"optionId": "o", "name": "Once", "kind": "allow_once"}]
    call = {"toolCallId": "c1", "title": command[:20]}
    return ask("session/request_permission", toolCall=call, options=options)["result"]["outcome"]
def work(text):
    messages = [{"role": "user", "content": text}]
    while True:
        said = model(messages)
        messages.append(said)
        if not said.get("tool_calls"):
            return tell(sessionUpdate="agent_message_chunk", content={"type": "text", "text": said["content"]})
        for call in said["tool_calls"]:
            command = json.loads(call["function"]["arguments"])["command"]
            tell(sessionUpdate="tool_call", toolCallId="c1", title=command, kind="execute", status="pending")
            assert allowed(command) == {"outcome": "selected", "optionId": "o"}
            done = subprocess.run(command, shell=True, capture_output=True, text=True)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr})
def end(number):
    send(id=number, result={"stopReason": "end_turn"})
"""


def agent(code: str) -> str:
    assert "'" not in AGENT + code
    return f"acp:python3 -c '{AGENT}{code}'"


def played(
    folder: Path, code: str, engine: Fixer | None = None, env: object = fix_calc, **settings: Any
) -> tuple[Any, str]:
    """The only rollout of a run, and its log."""
    settings = {"group_size": 1, "infra_retries": 0, **settings}
    run = asyncio.run(palaestra.run(env, server=engine or Fixer(), agent=agent(code), folder=folder, **settings))
    (rollout,) = run.trajectories
    return rollout, next((run.path / "agents").glob("*.log")).read_text()


def test_an_agent_works_over_the_protocol_and_every_token_is_verified(tmp_path: Path) -> None:
    engine = Fixer()
    files = """
servers, number, text = opened()
assert servers == [], servers
work(text)
assert "a + b" in ask("fs/read_text_file", path="/workspace/calc.py")["result"]["content"]
part = ask("fs/read_text_file", path="/workspace/calc.py", line=2, limit=1)["result"]["content"]
assert part.strip() == "return a + b", part
assert "error" in ask("fs/read_text_file", path="/workspace/missing.py")
assert ask("terminal/create", command="ls")["error"]["code"] == -32601
assert ask("fs/write_text_file", path="/workspace/note.txt", content="done")["result"] == {}
assert open("/workspace/note.txt").read() == "done"
print("on standard error", file=sys.stderr)
end(number)
"""
    rollout, log = played(tmp_path, files, engine)
    assert (rollout.reward, rollout.outcome, rollout.error) == (1.0, Outcome.NATURAL, ""), log
    for line in ("[says] The bug is fixed.", "[tool] c1 sed", "allow_once", "[writes] /workspace/note.txt", "end_turn"):
        assert line in log
    assert "on standard error" in log
    assert sum(mask != -100 for row in rollout.rows for mask in row.masks) == engine.sampled > 0
    verify = [sys.executable, "-m", "palaestra", "verify", str(next(tmp_path.rglob("agents")).parent)]
    verified = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert verified.returncode == 0, verified.stdout + verified.stderr


def test_tools_of_the_environment_are_a_server_of_the_session(tmp_path: Path) -> None:
    call = """
(server,), number, text = opened()
def rpc(method, **params):
    head = {each["name"]: each["value"] for each in server["headers"]}
    head |= {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode()
    return urllib.request.urlopen(urllib.request.Request(server["url"], body, head)).read().decode()
info = {"name": "a", "version": "1"}
rpc("initialize", protocolVersion="2025-06-18", capabilities={}, clientInfo=info)
model([{"role": "user", "content": text}])
assert "calc.py is repaired." in rpc("tools/call", name="repair", arguments={"file": "calc.py"})
end(number)
"""
    rollout, log = played(tmp_path, call, Repairer(), repaired_by_tool)
    assert (rollout.reward, rollout.error) == (1.0, ""), log
    with pytest.raises(ConfigError, match=r"mcpCapabilities\.http"):
        played(tmp_path / "b", "opened(http=False)", Repairer(), repaired_by_tool)


def test_a_limit_cancels_the_turn_and_the_work_is_graded(tmp_path: Path) -> None:
    endless = """
_, number, text = opened()
work(text)
try:
    while True:
        work(text)
except OSError:
    pass
message = receive()
open("/workspace/cancelled", "w").write(message["method"])
send(id=number, result={"stopReason": "cancelled"})
time.sleep(60)
"""
    began = time.monotonic()
    rollout, log = played(tmp_path, endless, env=cancelled_fix, max_agent_turns=3)
    assert (rollout.reward, rollout.outcome, len(rollout.turns)) == (1.0, Outcome.MAX_TURNS, 3), log
    assert time.monotonic() - began < 25


def test_an_agent_that_ignores_the_cancellation_is_killed(tmp_path: Path) -> None:
    began = time.monotonic()
    stubborn = "_, number, text = opened()\nwork(text)\ntime.sleep(100)"
    rollout, log = played(tmp_path, stubborn, worker_timeout=4)
    assert (rollout.reward, rollout.outcome) == (1.0, Outcome.BUDGET), log
    assert time.monotonic() - began < 25


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("print('my last words', file=sys.stderr); sys.exit(7)", "ended with exit status 7"),
        ("print('hello, I am no message')", "hello, I am no message"),
        ("print([1])", "no message of the protocol"),
        ("send(id=number, error={'code': -32603, 'message': 'I am broken'}); receive()", "I am broken"),
        ("send(id=number, result=[]); receive()", "is not an object"),
    ],
)
def test_a_failure_after_the_first_reply_is_graded(code: str, told: str, tmp_path: Path) -> None:
    rollout, log = played(tmp_path, "_, number, text = opened()\nwork(text)\n" + code.replace("'", '"'))
    assert (rollout.reward, rollout.outcome) == (1.0, Outcome.NATURAL), log
    assert "exit status 1" in rollout.error
    assert told in log
    assert "my last words" in log or "last words" not in code


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("time.sleep(60)", "did not answer `initialize` within 1 s"),
        ("sys.exit(4)", "exit status 4"),
        ("send(id=receive()['id'], result={'protocolVersion': 9})", "speaks version 9"),
        ("print('Usage: agent [OPTIONS]')", "Usage: agent"),
    ],
)
def test_an_agent_that_never_asked_the_model_is_not_scored(
    code: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acp_programs, "START_S", 1.0)
    rollout, _ = played(tmp_path, code.replace("'", '"'))
    assert (rollout.reward, rollout.blame) == (None, Blame.TOOL)
    assert told in rollout.error


def test_an_agent_that_floods_its_client_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acp_programs, "MESSAGE_BYTES", 1 << 20)
    rollout, log = played(tmp_path / "a", "_, number, text = opened()\nwork(text)\nprint(9 * 10**6 * chr(34))")
    assert (rollout.reward, rollout.outcome) == (1.0, Outcome.NATURAL), log
    assert "1 MiB" in log
    flood = """
_, number, text = opened()
work(text)
for at in itertools.count(100):
    send(id=at, method="fs/read_text_file", params=dict(sessionId="s1", path="/workspace/calc.py"))
"""
    began = time.monotonic()
    rollout, _ = played(tmp_path / "b", flood, worker_timeout=4)
    assert (rollout.reward, rollout.outcome) == (1.0, Outcome.BUDGET)
    assert time.monotonic() - began < 25


def test_a_path_outside_the_workspace_is_one_of_the_slot(tmp_path: Path) -> None:
    mark, secret = f"written-by-an-agent-{os.getpid()}", tmp_path / "secret"
    secret.write_text("of this machine")
    outside = f"""
_, number, text = opened()
work(text)
said = ask("fs/write_text_file", path="/etc/passwd", content="{mark}")
there = open("/etc/passwd").read() == "{mark}"
assert there == ("result" in said), said
climbed = ask("fs/write_text_file", path="../../../../tmp/{mark}", content="x")
assert "error" in ask("fs/read_text_file", path="{secret}")
assert "error" in ask("fs/read_text_file", path="a\\u0000b")
assert "error" in ask("fs/read_text_file", path=["a"])
tell(sessionUpdate="agent_message_chunk", content=dict(type="text", text="there: " + str(there)))
end(number)
"""
    rollout, log = played(tmp_path / "run", outside)
    assert (rollout.reward, rollout.error) == (1.0, ""), log
    assert "there: True" in log
    assert mark not in Path("/etc/passwd").read_text()
    assert not Path("/tmp", mark).exists()


@pytest.mark.parametrize(
    ("command", "problem"),
    [("", "needs the command"), ("'", "not a valid command line"), ("acp:true", "acp:true is no program")],
)
def test_what_is_not_a_command_is_refused_by_name(command: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        program_named(f"acp:{command}")


def test_a_known_program_keeps_its_name() -> None:
    assert program_named("acp:opencode acp").name == "acp:opencode"


@environment
def cancelled_fix():
    yield Task(
        id="calc",
        prompt="calc.py has a bug: add(2, 3) gives -1. Fix it.",
        files={"calc.py": "def add(a, b):\n    return a - b\n"},
    )


@cancelled_fix.score
async def told_so(task, sandbox):
    return float(await sandbox.read_text("cancelled") == "session/cancel")
