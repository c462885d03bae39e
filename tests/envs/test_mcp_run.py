"""A run whose agents have the tools of an MCP server."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from palaestra.core.types import Task, ToolStep
from palaestra.envs.function import environment
from palaestra.envs.running import main

pytest.importorskip("mcp", reason="needs the extra 'mcp'")
SERVER = Path(__file__).parents[1] / "tools/mcp/mcp_server.py"


@environment(toolsets=[])
def sums(n: int = 2):  # type: ignore[no-untyped-def]
    """Add with the server's tool."""
    for i in range(n):
        steps = [ToolStep("mcp_adder_add", {"a": i, "b": 1}), ToolStep("mcp_adder_variable", {"name": "KEY"})]
        yield Task(id=f"sum-{i}", prompt="Add", solution=steps, answer=str(i + 1))


@sums.score
async def added(task: Task, rollout) -> bool:  # type: ignore[no-untyped-def]
    replies = [json.loads(each["content"])["output"] for each in rollout.result.messages if each["role"] == "tool"]
    return bool(replies == [task.answer, "hidden-value"])


@pytest.mark.slots
@pytest.mark.long
def test_every_agent_has_the_servers_tools_and_no_record_has_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = {"adder": {"command": sys.executable, "args": [str(SERVER), "stdio"], "env": {"KEY": "${ADDER_KEY}"}}}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ADDER_KEY", "hidden-value")
    chosen = ["--env.mcp_servers.adder.tools", '{"include": ["add", "variable"]}']
    flags = ["--policy", "oracle", "--mcp", "mcp.json", *chosen]
    assert main(sums, ["process", "--env.data_path_to_save_groups", "out.jsonl", "--group", "2", *flags]) == 0
    groups = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [group["scores"] for group in groups] == [[1.0, 1.0]] * 2
    (journal,) = (tmp_path / "runs").rglob("journal.jsonl")
    settings = journal.read_text().splitlines()[0]
    assert "${ADDER_KEY}" in settings
    assert "hidden-value" not in settings
    assert '"mcp_adder_variable"' in journal.read_text()
    assert main(sums, ["process", "--policy", "oracle", "--mcp", "none.json"]) == 2
    monkeypatch.delenv("ADDER_KEY")
    assert main(sums, ["process", *flags]) == 2
