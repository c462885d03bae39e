"""What tools the agents of a run have: drawn, named, brought along, missing; always the same within a group."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from golden_messages import raises
from palaestra import Task, environment, tool
from palaestra.cli.main import main
from palaestra_contract import HermesAgentEnvConfig
from palaestra_contract.agent_env import AgentEnvConfig
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON

QUIZ = '''
from palaestra import Score, Task, ToolStep, environment

class Asked:
    def __init__(self):
        self.count = 0

@environment(toolsets=["todo"])
def quiz(n: int = 2):
    for i in range(n):
        yield Task(id=f"q{i}", prompt="What is the secret?", data={"secret": f"s{i}"},
                   solution=[ToolStep("ask", {"question": "secret"}), ToolStep("ask", {"question": "again"})])

@quiz.tool
async def ask(question: str, task, run) -> dict:
    """Ask the oracle.

    Args:
        question: What to ask.
    """
    run.state(Asked).count += 1
    return {"answer": task.data["secret"], "asked": run.state(Asked).count}

@quiz.score
async def told(task, rollout):
    replies = [m["content"] for m in rollout.result.messages if m["role"] == "tool"]
    return Score(float(all(task.data["secret"] in reply for reply in replies)), {"replies": len(replies)})
'''

TRYING = """
from palaestra import Score, Task, ToolStep, environment

@environment(toolsets=["terminal"])
def trying():
    yield Task(id="t", prompt="Write 3 to n.", files={"n": "0"}, solution=[
        ToolStep("try_it", {}), ToolStep("terminal", {"command": "echo 3 > n"}), ToolStep("try_it", {})])

@trying.tool
async def try_it(sandbox) -> dict:
    \"\"\"Whether the work is right so far.\"\"\"
    async with sandbox.fork() as copy:
        done = await copy.execute("rm -f left; read -r n < n; echo $n > left; [ $n = 3 ]")
    return {"right": done.success}

@trying.score
async def told(rollout, sandbox):
    replies = [m["content"] for m in rollout.result.messages if m["role"] == "tool"]
    clean = await sandbox.stat("left") is None
    return float(clean and replies[0] == '{"right": false}' and replies[2] == '{"right": true}')
"""

DRAWN = """
from palaestra import Task, environment

@environment
def drawn():
    for i in range(8):
        yield Task(id=f"t{i}", prompt="?", solution=[])

@drawn.score
async def fine():
    return 1.0
"""


CHECKS = """
from palaestra import HermesAgentBaseEnv, HermesAgentEnvConfig, APIServerConfig, tool

@tool
def shout(text: str) -> str:
    \"\"\"Say it louder.\"\"\"
    return text.upper()

class Checks(HermesAgentBaseEnv):
    name = "checks"

    @classmethod
    def config_init(cls):
        return HermesAgentEnvConfig(group_size=1, total_steps=1), [APIServerConfig()]

    def own_tools(self):
        return [shout]

    async def setup(self): pass
    async def evaluate(self): pass
    def format_prompt(self, item): return "?"

    async def get_next_item(self):
        return {"id": "one", "solution": []}

    async def compute_reward(self, item, result, ctx):
        ctx.write_file("seen.txt", "a")
        assert ctx.call_tool("shout", {"text": "a"}) == "A"
        return float('"total_lines": 1' in ctx.call_tool("read_file", {"path": "seen.txt"}))
"""


def run(folder: Path, text: str, *flags: str, code: int = 0) -> list[JSON]:
    """Run an environment in `folder`; its groups."""
    path = folder / "my_env.py"
    path.write_text(text)
    out = folder / f"{len(list(folder.iterdir()))}.jsonl"
    argv = ["run", str(path), "process", "--policy", "oracle", "--env.data_path_to_save_groups", str(out), *flags]
    assert main(argv) == code
    groups = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    return sorted(groups, key=lambda group: group["task_id"])


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slots
def test_an_environments_own_tool_is_called_with_its_task_and_keeps_state_per_rollout(here: Path) -> None:
    groups = run(here, QUIZ, "--group", "2")
    assert [group["scores"] for group in groups] == [[1.0, 1.0]] * 2
    for number, group in enumerate(groups):
        for messages in group["messages"]:
            replies = [json.loads(message["content"]) for message in messages if message["role"] == "tool"]
            assert replies == [{"answer": f"s{number}", "asked": 1}, {"answer": f"s{number}", "asked": 2}]


@pytest.mark.slots
def test_a_tool_can_try_something_in_a_fork_at_any_step(here: Path) -> None:
    (group,) = run(here, TRYING, "--group", "2")
    assert group["scores"] == [1.0, 1.0]


@pytest.mark.slots
def test_a_distribution_is_drawn_once_per_group_from_the_seed_and_recorded(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run(here, DRAWN, "--env.distribution", "development", "--group", "2")
    told = capsys.readouterr().err
    again = run(here, DRAWN, "--env.distribution", "development", "--env.max_num_workers", "1")
    other = run(here, DRAWN, "--env.distribution", "development", "--env.seed", "7")
    draws = [group["toolsets"] for group in first]
    assert draws == [group["toolsets"] for group in again]
    assert draws != [group["toolsets"] for group in other]
    assert len({tuple(draw) for draw in draws}) > 1
    assert all(set(draw) <= {"terminal", "file", "moa", "web", "vision"} for draw in draws)
    assert len({group["tools_hash"] for group in first}) > 1
    assert told.count("mixture_of_agents (no models to ask are configured") == 1
    (journal,) = [path for path in here.glob("runs/*/*/journal.jsonl") if '"seed":7' in path.read_text()]
    started = [json.loads(line) for line in journal.read_text().splitlines() if '"tools_missing"' in line]
    assert any("mixture_of_agents" in event["group"]["tools_missing"] for event in started)


@pytest.mark.slots
def test_what_was_drawn_binds_the_agent_and_not_the_check(here: Path) -> None:
    (group,) = run(here, CHECKS, "--env.distribution", "reasoning")
    assert "file" not in group["toolsets"]
    assert group["scores"] == [1.0]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--env.distribution", "developmnt"], "Did you mean development?"),
        (["--env.distribution", "safe", "--env.enabled_toolsets", "file"], "not both"),
    ],
)
def test_a_distribution_that_cannot_be_is_one_clear_message(
    here: Path, capsys: pytest.CaptureFixture[str], flags: list[str], says: str
) -> None:
    run(here, DRAWN, *flags, code=2)
    assert says in capsys.readouterr().err


@pytest.mark.slots
def test_strict_refuses_to_run_without_a_tool_that_was_asked_for(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strict = ("--env.strict_tools", "true", "--env.enabled_toolsets")
    run(here, DRAWN, *strict, "file", "vision", code=2)
    assert "missing: vision_analyze: no vision model" in capsys.readouterr().err
    assert len(run(here, DRAWN, *strict, "file")) == 8


def test_a_distribution_takes_the_place_of_a_default_but_not_of_a_choice() -> None:
    assert AgentEnvConfig(distribution="terminal_only").distribution == "terminal_only"
    with pytest.raises(ConfigError, match="not both"):
        AgentEnvConfig(distribution="terminal_only", enabled_toolsets=["file"])
    with pytest.raises(ConfigError, match="Did you mean browser_only"):
        HermesAgentEnvConfig(distribution="browser_onyl")


def test_a_tool_without_a_description_is_refused_when_it_is_declared() -> None:
    @environment
    def toy() -> Iterator[Task]:
        yield Task(id="one", prompt="?")

    with raises(ConfigError, "ask"):

        @toy.tool
        def ask(question: str) -> str:
            return question

    @toy.tool(name="query", parallel_safe=True)
    def look(question: str) -> str:
        """Ask."""
        return question

    assert [(each.name, each.toolset, each.parallel_safe) for each in toy.tools] == [("query", "toy", True)]
    assert tool(look.function).name == "look"
