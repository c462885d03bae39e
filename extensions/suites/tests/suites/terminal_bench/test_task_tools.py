"""The MCP servers and the skills of a task, as its agent uses them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from palaestra.envs.config.build import make_pool
from palaestra.envs.policy_runs import policy_runs
from palaestra.rollouts.records import Trajectory
from palaestra_slots.core.errors import TaskError
from palaestra_slots.core.types import ToolStep
from palaestra_slots.images.task_files import Unsupported
from palaestra_suites.terminal_bench import harbor_task
from palaestra_suites.terminal_bench.terminal_task import TaskServer
from palaestra_suites.terminal_bench.terminalbench_2 import TerminalBenchEnvironment
from palaestra_suites.terminal_bench.terminalbench_2_config import TerminalBench2EvalConfig
from palaestra_suites.toolchain.toolchain import DependencyCache
from palaestra_tokens.engines.scripted import OraclePolicy
from suites.terminal_bench.mini import written

TOML = """\
schema_version = "1.4"
[agent]
timeout_sec = 60
[verifier]
timeout_sec = 60
[environment]
workdir = "/app"
skills_dir = "/opt/skills"
[[environment.mcp_servers]]
name = "vault"
transport = "stdio"
command = "python3"
args = ["/opt/vault.py", "{secret}"]
[[environment.mcp_servers]]
name = "desk"
transport = "streamable-http"
url = "http://desk:8000/mcp"
headers = {X-Desk = "7"}
[[environment.mcp_servers]]
name = "old-desk"
url = "http://desk:8000/sse"
"""
COMPOSE = """\
services:
  main:
    depends_on:
      desk: {condition: service_healthy}
  desk:
    build: ./desk
    command: [python3, /desk.py]
    healthcheck: {interval: 200ms, timeout: 5s, retries: 50,
      test: [CMD, python3, -c, "import socket; socket.create_connection(('localhost', 8000))"]}
"""
ANSWER_PY = """\
import os
def answer(request, secret):
    method, params = request["method"], request.get("params") or {}
    if method == "initialize":
        result = {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}},
                  "serverInfo": {"name": "own", "version": "1"}}
    elif method == "tools/list":
        schema = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
        result = {"tools": [{"name": "open", "description": "Open it.", "inputSchema": schema}]}
    elif method == "tools/call":
        text = f"{secret} {params['arguments']['key']} uid {os.getuid()} " + "x" * params["arguments"].get("size", 0)
        result = {"content": [{"type": "text", "text": text}]}
    else:
        return {"jsonrpc": "2.0", "id": request["id"], "error": {"code": -32601, "message": f"no {method}"}}
    return {"jsonrpc": "2.0", "id": request["id"], "result": result}
"""
VAULT_PY = (
    ANSWER_PY
    + """
import json, sys
print("x" * 200_000, file=sys.stderr)
for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:
        print(json.dumps(answer(request, sys.argv[1])), flush=True)
"""
)
DESK_PY = (
    ANSWER_PY
    + """
import json, queue
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
events = queue.Queue()
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path != "/sse":
            return self.send_error(405)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b"event: endpoint\\ndata: /messages\\n\\n")
        while True:
            self.wfile.write(f"event: message\\ndata: {json.dumps(events.get())}\\n\\n".encode())
    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        secret = f"{self.headers['Host']} desk {self.headers.get('X-Desk')}"
        said = answer(request, secret) if "id" in request else None
        if self.path == "/messages" and said:
            events.put(said)
        body = json.dumps(said).encode() if said and self.path == "/mcp" else b""
        self.send_response(200 if body else 202)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
ThreadingHTTPServer(("0.0.0.0", 8000), Handler).serve_forever()
"""
)
SKILL = "---\nname: opening\ndescription: How to open a vault.\n---\nAsk the vault with the key.\n"


def make_task(folder: Path) -> Path:
    return written(
        folder / "vault",
        {
            "task.toml": TOML,
            "instruction.md": "Open the vault.",
            "environment/Dockerfile": "FROM debian\nCOPY vault.py /opt/\nCOPY skills /opt/skills\nWORKDIR /app\n",
            "environment/docker-compose.yaml": COMPOSE,
            "environment/vault.py": VAULT_PY,
            "environment/skills/opening/SKILL.md": SKILL,
            "environment/desk/Dockerfile": "FROM debian\nCOPY desk.py /\n",
            "environment/desk/desk.py": DESK_PY,
            "tests/test.sh": "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n",
        },
    )


@pytest.fixture
def answers(installed_pytest: DependencyCache, tmp_path: Path) -> Any:
    """What the tools of a rollout reply, call by call."""

    def play(steps: Sequence[ToolStep]) -> list[dict[str, Any]]:
        make_task(tmp_path / "tasks")
        config = TerminalBench2EvalConfig(
            dataset_name=str(tmp_path / "tasks"), base_image="host", cache_dir=str(tmp_path / "cache")
        )

        async def main() -> Trajectory:
            async with make_pool(config) as pool:
                environment = TerminalBenchEnvironment(config, installed_pytest)
                await environment.open()
                async with policy_runs(environment, pool) as runs:
                    task = replace(await anext(environment.tasks()), solutions=(steps,))
                    group = await runs.play(OraclePolicy(1), task)
                assert pool.backend.stats()["slots"] == 0
            assert not group.error
            return group.trajectories[0]

        done = asyncio.run(main())
        assert not done.error, done.error
        return [json.loads(message["content"]) for message in done.messages if message["role"] == "tool"]

    return play


@pytest.mark.slots
def test_an_agent_uses_the_servers_and_skills_of_its_task(answers: Any) -> None:
    opened = {"tool": "open", "arguments": {"key": "k1"}}
    large = {"tool": "open", "arguments": {"key": "k1", "size": 2_000_000}}
    kill = {"command": "pkill -f [v]ault.py; while pgrep -f [v]ault.py; do sleep 0.1; done"}
    listed, vault, desk, old, long, _, again, wrong, skills, skill, missing = answers(
        [
            ToolStep("mcp_list_tools", {}),
            *(ToolStep("mcp_call_tool", {"server": name, **opened}) for name in ("vault", "desk", "old-desk")),
            ToolStep("mcp_call_tool", {"server": "desk", **large}),
            ToolStep("terminal", kill),
            ToolStep("mcp_call_tool", {"server": "vault", **opened}),
            ToolStep("mcp_call_tool", {"server": "vault", "tool": "shut"}),
            ToolStep("skill", {}),
            ToolStep("skill", {"name": "opening"}),
            ToolStep("skill", {"name": "../../etc"}),
        ]
    )
    assert {name: [tool["name"] for tool in tools] for name, tools in listed["servers"].items()} == {
        "vault": ["open"], "desk": ["open"], "old-desk": ["open"],
    }  # fmt: skip
    assert vault["output"].startswith("{secret} k1 uid 0")
    assert desk["output"].startswith("desk:8000 desk 7 k1")
    assert old["output"].startswith("desk:8000 desk None k1")
    assert long["output_total_chars"] > 2_000_000
    assert again["output"] == vault["output"]
    assert "error" in wrong
    assert skills["skills"] == [{"name": "opening", "description": "How to open a vault."}]
    assert (skill["folder"], skill["content"]) == ("/opt/skills/opening", SKILL)
    assert "no slash" in missing["error"]


def test_what_a_task_declares_is_read(tmp_path: Path) -> None:
    agent = harbor_task.read_task(make_task(tmp_path)).agent
    assert agent.skills_dir == "/opt/skills"
    assert agent.servers == (
        TaskServer("vault", command=("python3", "/opt/vault.py", "{secret}")),
        TaskServer("desk", "http://desk:8000/mcp", headers={"X-Desk": "7"}),
        TaskServer("old-desk", "http://desk:8000/sse", sse=True),
    )


@pytest.mark.parametrize(
    ("before", "after", "kind", "named"),
    [
        ('"stdio"', '"pipe"', TaskError, "mcp_servers.*transport must be sse, streamable-http or stdio, not 'pipe'"),
        ('command = "python3"\n', "", TaskError, "command"),
        ('"http://desk:8000/mcp"', '"file:///etc/passwd"', TaskError, "must be an http or https URL"),
        ('name = "desk"', 'name = "vault"', TaskError, "'vault' is the name of another server too"),
        ('"7"', '"${HOME}"', Unsupported, "refers to the host's variable HOME, which slots cannot see"),
        ('"/opt/skills"', '"../skills"', TaskError, "skills_dir must be an absolute path"),
    ],
)
def test_wrong_declarations_are_refused_by_name(
    tmp_path: Path, before: str, after: str, kind: type[Exception], named: str
) -> None:
    task = make_task(tmp_path)
    assert before in TOML
    (task / "task.toml").write_text(TOML.replace(before, after, 1))
    with pytest.raises(kind, match=named):
        harbor_task.read_task(task)
