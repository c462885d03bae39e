"""The settings of a run hold for the tasks that a class runs itself, outside rollouts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pages.site import Site, searxng
from palaestra.cli.main import main
from palaestra_slots.core.types import JSON
from tools.mcp.serving import command

pytestmark = pytest.mark.slots

SCRIPT = '''
import asyncio, json, uuid
from pathlib import Path
from palaestra import APIServerConfig, HermesAgentBaseEnv, HermesAgentEnvConfig, ToolContext, tool
from palaestra import handle_function_call, handle_function_call_async

@tool
def shout(text: str) -> dict[str, str]:
    """Return the text in capitals."""
    return {"output": text.upper()}

class OwnEnv(HermesAgentBaseEnv):
    name = "own"

    @classmethod
    def config_init(cls):
        config = HermesAgentEnvConfig(enabled_toolsets=["terminal"], group_size=1, total_steps=1)
        return config, [APIServerConfig(model_name="m")]

    async def setup(self):
        self.left = ["one"]

    async def get_next_item(self):
        return self.left.pop() if self.left else None

    def own_tools(self):
        return [shout]

    def format_prompt(self, item):
        return item

    async def compute_reward(self, item, result, ctx):
        return 0.0

    async def evaluate(self, *args, **kwargs):
        return {}

    async def collect_trajectory(self, item):
        task = str(uuid.uuid4())
        name, arguments = json.loads(Path("call.json").read_text())
        facts = [json.loads(await handle_function_call_async(name, arguments, task))]
        context = ToolContext(task)
        facts.append(json.loads(context.call_tool(name, arguments)))
        facts.append(json.loads(await asyncio.to_thread(handle_function_call, name, arguments, task)))
        other = str(uuid.uuid4())
        try:
            facts.append(json.loads(await handle_function_call_async(name, arguments, other)))
        except Exception as error:
            facts.append({"error": str(error)})
        Path("facts.json").write_text(json.dumps(facts))
        return {"tokens": [1], "masks": [-100], "scores": 1.0}, []

if __name__ == "__main__":
    OwnEnv.cli()
'''

INTERFACES = ("terminal", {"command": "grep -c : /proc/net/dev"})
SLOW = ("terminal", {"command": "sleep 4; echo not killed"})
INIT = ("terminal", {"command": "head -1 /proc/1/status"})
SEARCH = ("web_search", {"query": "birds"})


def output(reply: JSON) -> str:
    return str(reply.get("output", "")).strip()


CASES: dict[str, tuple[tuple[str, ...], tuple[str, JSON], Callable[[JSON], bool]]] = {
    "no network": (("--env.allow_network", "false"), INTERFACES, lambda reply: output(reply) == "1"),
    "a time limit": (("--env.terminal_timeout", "1"), SLOW, lambda reply: reply["exit_code"] == 124),
    "an isolation level": (("--env.isolation", "none"), INIT, lambda reply: "slot-init" not in output(reply)),
    "the level by default": ((), INIT, lambda reply: "slot-init" in output(reply)),
    "a web setting": (
        ("--env.web_urls", "searxng=URL"),
        SEARCH,
        lambda reply: bool(reply["data"]["web"]),
    ),
    "the environment's own tools": ((), ("shout", {"text": "hi"}), lambda reply: reply["output"] == "HI"),
    "a missing recording": (
        ("--env.world", "replay", "--env.world_file", "world.jsonl"),
        SEARCH,
        lambda reply: "record" in reply["error"],
    ),
    "an MCP server": (
        ("--mcp", "mcp.json"),
        ("mcp_small_add", {"a": 1, "b": 2}),
        lambda reply: reply == {"output": "3"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_setting_holds_for_the_tasks_of_a_class(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags, call, holds = CASES[name]
    Path("own_env.py").write_text(SCRIPT)
    Path("call.json").write_text(json.dumps(call))
    Path("world.jsonl").touch()
    Path("mcp.json").write_text(json.dumps({"mcpServers": {"small": command()}}))
    with Site(searxng()) as web:
        assert main(["run", "own_env.py", "--policy", "noop", *(flag.replace("URL", web.url) for flag in flags)]) == 0
    facts = json.loads(Path("facts.json").read_text())
    assert [holds(reply) for reply in facts] == [True] * 4, facts


def test_the_slots_of_a_class_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own_env.py").write_text(SCRIPT)
    Path("call.json").write_text(json.dumps(INTERFACES))
    flags = ("--env.tool_pool_size", "1", "--env.acquire_timeout_s", "0.2")
    assert main(["run", "own_env.py", "--policy", "noop", *flags]) == 0
    *own, other = json.loads(Path("facts.json").read_text())
    assert all(output(reply) for reply in own)
    assert "slot" in other["error"]
