"""A run whose agents have the tools of an MCP server, and the same run played again without the server."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from golden_messages import check_message
from palaestra.cli.main import main

pytest.importorskip("mcp", reason="needs the extra 'mcp'")
SERVER = Path(__file__).parents[1] / "tools/mcp/mcp_server.py"

SUMS = '''
import json
from palaestra import Task, ToolStep, environment

@environment(toolsets=[])
def sums(n: int = 2):
    """Add with the server's tool."""
    for i in range(n):
        steps = [ToolStep("mcp_adder_add", {"a": i, "b": 1}), ToolStep("mcp_adder_variable", {"name": "KEY"})]
        yield Task(id=f"sum-{i}", prompt="Add", solution=steps, answer=str(i + 1))

@sums.score
async def added(task, rollout):
    replies = [json.loads(each["content"])["output"] for each in rollout.result.messages if each["role"] == "tool"]
    return replies == [task.answer, "hidden-value"]
'''


def run(*argv: str) -> int:
    return main(list(argv))


@pytest.mark.slots
@pytest.mark.slow
def test_every_agent_has_the_servers_tools_and_no_record_has_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = {"adder": {"command": sys.executable, "args": [str(SERVER), "stdio"], "env": {"KEY": "${ADDER_KEY}"}}}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    (tmp_path / "sums_env.py").write_text(SUMS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ADDER_KEY", "hidden-value")
    chosen = ["--env.mcp_servers.adder.tools", '{"include": ["add", "variable"]}']
    flags = ["run", "sums_env.py", "process", "--policy", "oracle", "--mcp", "mcp.json", *chosen]
    assert run(*flags, "--env.data_path_to_save_groups", "out.jsonl", "--group", "2") == 0
    groups = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [group["scores"] for group in groups] == [[1.0, 1.0]] * 2
    (journal,) = (tmp_path / "runs").rglob("journal.jsonl")
    settings = journal.read_text().splitlines()[0]
    assert "${ADDER_KEY}" in settings
    assert "hidden-value" not in settings

    monkeypatch.delenv("ADDER_KEY")
    (tmp_path / "mcp.json").unlink()
    capsys.readouterr()
    assert run("replay", str(journal.parent), "--environment", "sums_env.py", "--json") == 0
    played = json.loads(capsys.readouterr().out)
    assert (played["observations"], played["rewards_equal"], played["differences"]) == (8, 4, [])
    assert run(*flags) == 2
    check_message(capsys.readouterr().err, "MCP")
