"""Agents of Harbor in our slots, with every model call recorded: one that works from this process, installed ones, and
the failures of each."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("harbor.agents.base", reason="the package harbor is not installed (make faces)")

import openai
from bug_fixing import FIX, Fixer, Repairer, fix_calc, repaired_by_tool
from harbor.agents.base import BaseAgent
from harbor.agents.capabilities import AgentCapabilities
from harbor.agents.installed.base import BaseInstalledAgent

import palaestra
from palaestra import ConfigError, Outcome
from palaestra.agent.known_programs import program_named

pytestmark = [pytest.mark.slots, pytest.mark.timeout(300)]

ASK = """
import json, os, urllib.request
tool = {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}
messages = [{"role": "user", "content": open("/installed-agent/prompt").read()}]
for _ in range(2):
    body = {"model": "policy", "messages": messages, "tools": [{"type": "function", "function": tool}]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
    message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages.append(message)
    for call in message.get("tool_calls") or ():
        os.system(json.loads(call["function"]["arguments"])["command"])
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "done"})
"""


class Terminus(Fixer):
    """Writes what terminus-2 reads: keystrokes in JSON."""

    def _reply(self, text: str) -> str:
        done = "fixed.py" in text
        keys = [] if done else [{"keystrokes": f"cd /workspace; {FIX}\n", "duration": 1.0}]
        return json.dumps({"analysis": "a", "plan": "p", "commands": keys, "task_complete": done})


class Host(BaseAgent):
    """Asks the model from this process and runs its calls in the environment."""

    capabilities = AgentCapabilities(mcp_http_headers=True)
    steps = 2
    seen: dict[str, Any]

    @staticmethod
    def name() -> str:
        return "host"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: Any) -> None:
        await environment.exec("mkdir -p /opt/mine")

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        Host.seen = {"secret": self._get_env("PALAESTRA_TEST_SECRET"), "servers": self.mcp_servers}
        tool = {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}
        tools: Any = [{"type": "function", "function": tool}]
        messages: list[Any] = [{"role": "user", "content": instruction}]
        client = openai.AsyncOpenAI(base_url=self._get_env("OPENAI_BASE_URL"), api_key=self._get_env("OPENAI_API_KEY"))
        async with client:
            for _ in range(self.steps):
                asked = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
                message = asked.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                for call in message.tool_calls or ():
                    done = await environment.exec(json.loads(call.function.arguments)["command"])
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": done.stdout})


class Endless(Host):
    steps = 1000

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        await super().run(instruction, environment, context)
        raise AssertionError("a limit must end it")


class Stubborn(Endless):
    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        try:
            await super().run(instruction, environment, context)
        except (asyncio.CancelledError, openai.APIError):
            await asyncio.sleep(30)


class Failing(Host):
    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        await super().run(instruction, environment, context)
        raise ValueError("my own mistake")


class Silent(Host):
    steps = 0


class Installed(BaseInstalledAgent):
    """Installs a script in the slot, which asks the model from there."""

    @staticmethod
    def name() -> str:
        return "installed"

    async def install(self, environment: Any) -> None:
        await self.exec_as_root(environment, f"printf %s {shlex.quote(ASK)} > /installed-agent/ask.py")

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        await environment.exec(f"printf %s {shlex.quote(instruction)} > /installed-agent/prompt")
        await self.exec_as_agent(environment, "python3 /installed-agent/ask.py", env=self.extra_env)


def named(kind: type[BaseAgent]) -> str:
    return f"harbor:{kind.__module__}:{kind.__qualname__}"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Host.__module__])


def played(agent: str, folder: Path, env: object = fix_calc, engine: Fixer | None = None, **settings: Any) -> Any:
    """The run of one rollout and its log."""
    run = asyncio.run(
        palaestra.run(
            env, server=engine or Fixer(), agent=agent, folder=folder, group_size=1, infra_retries=0, **settings
        )
    )
    return run, next((run.path / "agents").glob("*.log")).read_text()


@pytest.mark.parametrize(
    ("agent", "engine"),
    [(named(Host), Fixer), (named(Installed), Fixer), ("harbor:terminus-2?record_terminal_session=false", Terminus)],
    ids=["host", "installed", "terminus-2"],
)
def test_an_agent_fixes_a_bug_and_every_token_is_verified(agent: str, engine: type[Fixer], tmp_path: Path) -> None:
    model = engine()
    run, log = played(agent, tmp_path, engine=model)
    (rollout,) = run.trajectories
    assert (rollout.reward, rollout.outcome) == (1.0, Outcome.NATURAL), f"{rollout.error}\n{log[-3000:]}"
    assert "$ " in log
    assert sum(mask != -100 for row in rollout.rows for mask in row.masks) == model.sampled > 0
    verify = [sys.executable, "-m", "palaestra", "verify", str(run.path)]
    verified = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert verified.returncode == 0, verified.stdout + verified.stderr


def test_variables_of_this_process_are_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALAESTRA_TEST_SECRET", "x")
    played(named(Host), tmp_path)
    assert os.environ["PALAESTRA_TEST_SECRET"] == "x"
    assert Host.seen["secret"] is None


@pytest.mark.parametrize("kind", [Endless, Stubborn])
def test_a_limit_ends_the_agent_and_its_work_is_graded(kind: type[BaseAgent], tmp_path: Path) -> None:
    began = time.monotonic()
    run, _ = played(named(kind), tmp_path, max_agent_turns=3)
    (rollout,) = run.trajectories
    assert (rollout.reward, rollout.outcome, len(rollout.turns)) == (1.0, Outcome.MAX_TURNS, 3)
    assert time.monotonic() - began < 25


def test_an_error_of_the_agent_is_its_own(tmp_path: Path) -> None:
    run, log = played(named(Failing), tmp_path)
    (rollout,) = run.trajectories
    assert (rollout.reward, rollout.outcome) == (1.0, Outcome.NATURAL)
    assert "ValueError: my own mistake" in log
    assert "exit status 1" in rollout.error


def test_an_agent_that_never_asks_is_not_scored(tmp_path: Path) -> None:
    run, _ = played(named(Silent), tmp_path)
    (rollout,) = run.trajectories
    assert rollout.reward is None
    assert "without an answer from the model" in rollout.error


def test_tools_of_the_environment_are_a_server_of_the_agent(tmp_path: Path) -> None:
    played(named(Host), tmp_path, repaired_by_tool, Repairer())
    (server,) = Host.seen["servers"]
    assert (server.name, server.headers) == ("environment", {"Authorization": "Bearer ${PALAESTRA_KEY}"})
    with pytest.raises(ConfigError, match="harbor:terminus-2 sends no headers"):
        played("harbor:terminus-2", tmp_path / "b", repaired_by_tool, Terminus())


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("oracle", "use --policy oracle"),
        ("nop", "use --policy noop"),
        ("no-such-agent", "Harbor has no agent 'no-such-agent'"),
        ("json:JSONDecoder", "is not an agent of Harbor"),
        ("terminus-2?colour=red", "Unknown option 'colour'"),
        ("terminus-2?max_turns=many", "max_turns"),
    ],
)
def test_what_is_not_an_agent_is_refused_by_name(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        program_named(f"harbor:{name}")
