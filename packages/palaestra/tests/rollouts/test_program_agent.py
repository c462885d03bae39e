"""Agents that are programs in the slot: what they do is recorded, limited, graded and blamed as with the agent loop."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bug_fixing import TOKENIZER, Fixer, fix_calc, repaired_by_tool

import palaestra
from palaestra.rollouts.records import Trajectory
from palaestra_slots.core.errors import ConfigError, EngineUnavailable
from palaestra_slots.core.types import JSON, Blame, Outcome
from tools.mcp.serving import command

pytestmark = pytest.mark.slots

AGENT = """
import json, os, subprocess, sys, urllib.request
def ask(messages, tools=True):
    body = {"model": "m", "messages": messages}
    if tools:
        parameters = {"type": "object", "properties": {"command": {"type": "string"}}}
        body["tools"] = [{"type": "function", "function": {"name": "bash", "parameters": parameters}}]
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
def work():
    task = sys.stdin.read()
    ask([{"role": "system", "content": "Write a title."}, {"role": "user", "content": task}], tools=False)
    messages = [{"role": "system", "content": "You fix bugs."}, {"role": "user", "content": task}]
    while True:
        said = ask(messages)
        messages.append(said)
        if not said.get("tool_calls"):
            print("agent:", said["content"])
            return
        for call in said["tool_calls"]:
            command = json.loads(call["function"]["arguments"])["command"]
            done = subprocess.run(command, shell=True, capture_output=True, text=True)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr})
"""


def played(
    tmp_path: Path, command: str, engine: Fixer | None = None, *, env: object = fix_calc, **settings: JSON
) -> tuple[Trajectory, palaestra.Run]:
    """The only rollout of a run with this agent."""
    run = asyncio.run(
        palaestra.run(
            env,
            server=engine or Fixer(),
            agent=command,
            folder=tmp_path,
            group_size=1,
            infra_retries=0,
            **settings,
        )
    )
    (group,) = run.groups
    (trajectory,) = group.trajectories
    return trajectory, run


def python(code: str) -> str:
    assert "'" not in code
    return f"python3 -c '{code}'"


def test_a_command_solves_the_task_and_every_token_is_recorded(tmp_path: Path) -> None:
    engine = Fixer()
    trajectory, run = played(tmp_path, python(AGENT + "work()"), engine)
    assert (trajectory.outcome, trajectory.reward, trajectory.error) == (Outcome.NATURAL, 1.0, "")
    assert [message["role"] for message in trajectory.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert trajectory.ledger is not None
    assert [len(trajectory.ledger.segments), len(trajectory.ledger.turns)] == [1, 2]
    auxiliary = json.loads(next((run.path / "agents").glob("*.auxiliary.json")).read_bytes())
    assert {each.stat().st_mode & 0o777 for each in (run.path / "agents").iterdir()} == {0o600}
    trained = sum(mask != -100 for mask in trajectory.rows[0].masks)
    left_out = sum(turn["sampled_tokens"] for turn in auxiliary["ledger"]["turns"])
    assert trained + left_out == engine.sampled
    assert auxiliary["conversations"][0]["messages"][0]["content"] == "Write a title."
    assert "agent: The bug is fixed." in next((run.path / "agents").glob("*.log")).read_text()
    verified = subprocess.run(
        [sys.executable, "-m", "palaestra", "verify", str(run.path)], capture_output=True, text=True, check=False
    )
    assert verified.returncode == 0, verified.stdout + verified.stderr


@pytest.mark.slow
def test_isolation_without_root(tmp_path: Path) -> None:
    trajectory, _ = played(tmp_path, python(AGENT + "work()"), isolation="userns")
    assert trajectory.reward == 1.0, trajectory.error


def test_isolation_without_a_loopback_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="confined"):
        played(tmp_path, "true", isolation="confined")


@pytest.mark.slow
def test_an_agent_without_work_is_scored(tmp_path: Path) -> None:
    say = AGENT + 'ask([{"role": "user", "content": "hi"}]); sys.exit(3)'
    trajectory, _ = played(tmp_path, python(say))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.NATURAL, 0.0)
    assert "3" in trajectory.error


@pytest.mark.slow
def test_an_agent_that_never_asks_is_not_scored(tmp_path: Path) -> None:
    trajectory, _ = played(tmp_path, "no-such-program")
    assert (trajectory.outcome, trajectory.reward, trajectory.blame) == (Outcome.INFRA_ERROR, None, Blame.TOOL)
    assert "no-such-program" in trajectory.error


@pytest.mark.slow
def test_an_agent_that_never_ends_is_ended_and_scored(tmp_path: Path) -> None:
    trajectory, _ = played(tmp_path, python(AGENT + "work()\nimport time; time.sleep(99)"), worker_timeout=6.0)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.BUDGET, 1.0)


@pytest.mark.slow
def test_children_that_outlive_the_agent_cannot_call(tmp_path: Path) -> None:
    orphans = AGENT + (
        "import time\nagent = os.getpid()\n"
        "for _ in range(4):\n"
        "    if not os.fork():\n"
        "        os.setsid()\n"
        "        while os.getppid() == agent: time.sleep(0.001)\n"
        "        while True:\n"
        '            try: ask([{"role": "user", "content": "too late"}])\n'
        "            except OSError: pass\n"
        'ask([{"role": "user", "content": "in time"}])'
    )
    trajectory, _ = played(tmp_path, python(orphans))
    assert (trajectory.outcome, len(trajectory.turns)) == (Outcome.NATURAL, 1)
    assert [message["content"] for message in trajectory.messages if message["role"] == "user"] == ["in time"]


@pytest.mark.slow
def test_a_child_that_writes_without_end_does_not_keep_the_run_waiting(tmp_path: Path) -> None:
    flood = AGENT + (
        "agent = os.getpid()\n"
        "if not os.fork():\n"
        "    os.setsid()\n"
        '    while True: os.write(1, b"x" * 65536)\n'
        'ask([{"role": "user", "content": "hi"}])'
    )
    trajectory, _ = played(tmp_path, python(flood), worker_timeout=100.0)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.NATURAL, 0.0)


@pytest.mark.slow
def test_the_turn_limit_ends_the_agent(tmp_path: Path) -> None:
    loop = AGENT + 'while True: ask([{"role": "user", "content": "hi"}])'
    trajectory, _ = played(tmp_path, python(loop), max_agent_turns=3)
    assert (trajectory.outcome, trajectory.reward, len(trajectory.turns)) == (Outcome.MAX_TURNS, 0.0, 3)


@pytest.mark.slow
def test_refused_requests_count_as_turns(tmp_path: Path) -> None:
    refused = AGENT + (
        'ask([{"role": "user", "content": "hi"}])\n'
        "while True:\n"
        '    try: ask([{"role": "nobody", "content": "hi"}])\n'
        "    except OSError: pass"
    )
    trajectory, _ = played(tmp_path, python(refused), max_agent_turns=4)
    assert (trajectory.outcome, trajectory.reward, len(trajectory.turns)) == (Outcome.MAX_TURNS, 0.0, 1)


@pytest.mark.slow
def test_an_agent_whose_requests_are_all_refused_is_not_scored(tmp_path: Path) -> None:
    refused = AGENT + 'ask([{"role": "nobody", "content": "hi"}])'
    trajectory, _ = played(tmp_path, python(refused), max_agent_turns=1)
    assert (trajectory.outcome, trajectory.reward, trajectory.blame) == (Outcome.INFRA_ERROR, None, Blame.TOOL)
    assert "nobody" in trajectory.error


@pytest.mark.slow
def test_concurrent_calls_and_several_replies_stay_within_the_turn_limit(tmp_path: Path) -> None:
    greedy = (
        AGENT
        + """
import threading
def more(n):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    body = {"model": "m", "n": n, "messages": [{"role": "user", "content": "hi"}]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    try:
        urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
    except OSError:
        pass
more(1)
more(16)
threads = [threading.Thread(target=more, args=(2,)) for _ in range(20)]
[each.start() for each in threads]; [each.join() for each in threads]
"""
    )
    trajectory, _ = played(tmp_path, python(greedy), max_agent_turns=4)
    assert trajectory.reward == 0.0
    assert 1 <= len(trajectory.turns) <= 4


@pytest.mark.slow
def test_a_failing_engine_is_not_the_agents_fault(tmp_path: Path) -> None:
    class Gone(Fixer):
        async def generate(self, input_ids: JSON, sampling: JSON) -> JSON:
            raise EngineUnavailable("the server is gone")

    trajectory, _ = played(tmp_path, python(AGENT + "work()"), Gone())
    assert (trajectory.outcome, trajectory.reward, trajectory.blame) == (Outcome.API_ERROR, None, Blame.ENGINE)


@pytest.mark.slow
def test_a_request_that_breaks_the_engine_is_the_agents_fault(tmp_path: Path) -> None:
    class Fragile(Fixer):
        async def generate(self, input_ids: JSON, sampling: JSON) -> JSON:
            if "poison" in TOKENIZER.decode(list(input_ids)):
                failure = EngineUnavailable("the server answered HTTP 500")
                failure.by_request = True
                raise failure
            return await super().generate(input_ids, sampling)

    poison = AGENT + 'ask([{"role": "user", "content": "hi"}])\nask([{"role": "user", "content": "poison"}])'
    trajectory, _ = played(tmp_path, python(poison), Fragile())
    assert (trajectory.outcome, trajectory.reward, trajectory.blame) == (Outcome.NATURAL, 0.0, None)


@pytest.mark.slow
def test_a_hostile_agent_cannot_make_its_zero_unscored(tmp_path: Path) -> None:
    kill = AGENT + 'ask([{"role": "user", "content": "hi"}])\nos.system("kill -9 -1")'
    trajectory, _ = played(tmp_path, python(kill), worker_timeout=20.0)
    assert (trajectory.outcome.scored, trajectory.reward) == (True, 0.0)


@pytest.mark.slow
def test_the_slot_reaches_the_endpoint_and_nothing_else(tmp_path: Path) -> None:
    probe = AGENT + (
        "import socket\n"
        'reached = []\nfor host, port in (("127.0.0.1", 22), ("10.0.0.1", 80), ("1.1.1.1", 53)):\n'
        "    try: socket.create_connection((host, port), 1); reached.append(host)\n"
        "    except OSError: pass\n"
        'ask([{"role": "user", "content": "reached " + repr(reached)}])'
    )
    trajectory, _ = played(tmp_path, python(probe))
    assert trajectory.messages[0]["content"] == "reached []"


TOOLS = (
    AGENT
    + """
def use(name, **arguments):
    with open(os.environ["PALAESTRA_MCP_CONFIG"]) as file:
        server = json.load(file)["mcpServers"]["environment"]
    params = {"name": name, "arguments": arguments}
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}).encode()
    request = urllib.request.Request(server["url"], body, server["headers"])
    return json.load(urllib.request.urlopen(request))
ask([{"role": "user", "content": "What now?"}])
"""
)


def test_tools_of_the_environment_run_in_the_rollout_and_are_recorded(tmp_path: Path) -> None:
    calls = 'use("repair", file="calc.py"); use("repair", file=3); use("repair"); use("terminal", command="ls")'
    trajectory, _ = played(tmp_path, python(TOOLS + calls), env=repaired_by_tool, max_agent_turns=1)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.NATURAL, 1.0), trajectory.error
    assert [(call.tool, call.arguments, call.turn) for call in trajectory.inner_calls] == [
        ("repair", json.dumps({"file": "calc.py"}), 1),
        ("repair", json.dumps(json.dumps({"file": 3})), 1),
        ("repair", json.dumps("{}"), 1),
    ]
    assert "calc.py is repaired." in trajectory.inner_calls[0].reply
    assert [(error.turn, error.tool) for error in trajectory.tool_errors] == [(1, "repair"), (1, "repair")]


@pytest.mark.slow
def test_tools_of_the_runs_mcp_servers_are_offered_too(tmp_path: Path) -> None:
    calls = 'print(use("mcp_sums_add", a=20, b=22))'
    trajectory, run = played(tmp_path, python(TOOLS + calls), mcp_servers={"sums": command()})
    assert (trajectory.outcome, trajectory.error) == (Outcome.NATURAL, "")
    assert [(call.tool, call.turn) for call in trajectory.inner_calls] == [("mcp_sums_add", 1)]
    assert "42" in trajectory.inner_calls[0].reply
    assert "42" in next((run.path / "agents").glob("*.log")).read_text()


@pytest.mark.slow
def test_a_tools_infrastructure_failure_is_not_the_agents_fault(tmp_path: Path) -> None:
    lost = TOOLS + 'use("repair", file="lost.py")\nimport time; time.sleep(99)'
    trajectory, _ = played(tmp_path, python(lost), env=repaired_by_tool)
    assert (trajectory.outcome, trajectory.reward, trajectory.blame) == (Outcome.INFRA_ERROR, None, Blame.SANDBOX)
    assert "burnt down" in trajectory.error


@pytest.mark.slow
def test_calls_of_tools_are_bounded(tmp_path: Path) -> None:
    greedy = TOOLS + 'for _ in range(70): said = use("repair", file="calc.py")\nprint(said)'
    trajectory, run = played(tmp_path, python(greedy), env=repaired_by_tool)
    assert (trajectory.reward, len(trajectory.inner_calls)) == (1.0, 64)
    assert "At most 64 calls" in next((run.path / "agents").glob("*.log")).read_text()
    endless = TOOLS + 'while True: use("repair", file="calc.py"); ask([{"role": "user", "content": "More?"}])'
    trajectory, _ = played(tmp_path, python(endless), env=repaired_by_tool, max_rollout_output_bytes=100)
    assert trajectory.outcome is Outcome.BUDGET


@pytest.mark.slow
def test_streams_and_bodies_held_open_do_not_keep_the_run_waiting(tmp_path: Path) -> None:
    class Slow(Fixer):
        async def generate(self, input_ids: JSON, sampling: JSON) -> JSON:
            if "wait" in TOKENIZER.decode(list(input_ids)):
                await asyncio.Event().wait()
            return await super().generate(input_ids, sampling)

    holding = AGENT + (
        "import socket\n"
        'host, _, rest = os.environ["OPENAI_BASE_URL"].removeprefix("http://").partition("/")\n'
        'name, port = host.split(":")\n'
        "held = []\n"
        "for number in range(30):\n"
        "    held.append(socket.create_connection((name, int(port))))\n"
        '    body = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "wait"}]})\n'
        '    head = "POST /" + rest + "/chat/completions HTTP/1.1\\r\\nHost: x\\r\\nAuthorization: Bearer "\n'
        '    head += os.environ["OPENAI_API_KEY"] + "\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body)\n'
        "    held[-1].sendall((head + body[: len(body) if number % 3 else 5]).encode()[: None if number % 5 else 40])\n"
        'ask([{"role": "user", "content": "hi"}])\n'
        "if not os.fork():\n"
        "    os.setsid()\n"
        "    import time; time.sleep(300)\n"
    )
    started = time.perf_counter()
    trajectory, _ = played(tmp_path, python(holding), Slow(), worker_timeout=100.0)
    assert time.perf_counter() - started < 60
    assert (trajectory.outcome, trajectory.reward, len(trajectory.turns)) == (Outcome.NATURAL, 0.0, 1)
