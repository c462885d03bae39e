"""Classes of all forms that collect through `super()`: records, blame and resumption are those of the rollouts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from palaestra.cli.main import main
from palaestra.rollouts.journal.reader import Recording
from palaestra.rollouts.records import Group
from palaestra_slots.core.types import Outcome

pytestmark = pytest.mark.slots

HERMES = """
import os
from palaestra import AgentEnv, AgentEnvConfig, APIServerConfig, HermesAgentBaseEnv, HermesAgentEnvConfig

class CollectingEnv(HermesAgentBaseEnv):
    name = "collecting"

    @classmethod
    def config_init(cls):
        config = HermesAgentEnvConfig(enabled_toolsets=["terminal"], group_size=2, total_steps=2, max_num_workers=1)
        return config, [APIServerConfig(model_name="m")]

    async def setup(self):
        self.left = ["a", "b"]

    async def get_next_item(self):
        word = self.left.pop(0) if self.left else None
        return word and {"id": word, "word": word, "solution": f"echo {word} > word.txt"}

    def format_prompt(self, item):
        return f"Write {item['word']} to word.txt{item.get('hint', '')}"

    async def compute_reward(self, item, result, ctx):
        return float(ctx.terminal("cat word.txt")["output"].strip() == item["word"])

    async def evaluate(self, *args, **kwargs):
        row, _ = await self.collect_trajectory({"id": "held", "word": "held", "solution": "echo held > word.txt"})
        group, _ = await self.collect_trajectories({"id": "h", "word": "h", "solution": "echo h > word.txt"})
        await self.evaluate_log({"one": row["scores"], "group": sum(group["scores"])})

COLLECT
"""

AGENT = """
from palaestra import AgentEnv, AgentEnvConfig, APIServerConfig, ToolCall

class CollectingEnv(AgentEnv):
    name = "collecting"

    @classmethod
    def config_init(cls):
        return AgentEnvConfig(group_size=2, total_steps=2, max_num_workers=1), [APIServerConfig(model_name="m")]

    async def setup_agent_env(self):
        self.left = ["a", "b"]

    async def get_next_item(self):
        word = self.left.pop(0) if self.left else None
        return word and {"id": word, "word": word, "solution": f"echo {word} > word.txt"}

    def build_task(self, item):
        return f"Write {item['word']} to word.txt{item.get('hint', '')}"

    async def score_trajectory(self, item, final_response):
        return 1.0

    async def verify_and_score_trajectory(self, item, final_response, *, trajectory_id, exec_tool, agent_result=None):
        seen = await exec_tool(ToolCall("bash", {"command": "cat word.txt"}))
        return float(seen.output.strip() == item["word"]), {}

    async def evaluate(self, *args, **kwargs):
        row, _ = await self.collect_trajectory({"id": "held", "word": "held", "solution": "echo held > word.txt"})
        group, _ = await self.collect_trajectories({"id": "h", "word": "h", "solution": "echo h > word.txt"})
        await self.evaluate_log({"one": row["scores"], "group": sum(group["scores"])})

COLLECT
"""

ROLLOUTS = """
    async def collect_trajectory(self, item):
        row, backlog = await super().collect_trajectory({**item, "hint": " now"})
        row["scores"] += 1
        row["overrides"] = {"hinted": True}
        return row, backlog
"""

GROUPS = """
    async def collect_trajectories(self, item):
        group, backlog = await super().collect_trajectories({**item, "hint": " now"})
        group["scores"] = [score + 1 for score in group["scores"]]
        return group, backlog
"""

BOTH = ROLLOUTS + GROUPS

OWN_AGENT = """
    async def collect_trajectory(self, item):
        trajectory_id = str(uuid.uuid4())
        task = self.build_task(item)

        async def _exec(call):
            return await self._tool_executor.execute(trajectory_id, call)

        agent = AtroposAgent(
            server=self.server,
            tokenizer=self.tokenizer,
            tools=self.tools,
            config=self.build_agent_config(item),
            execute_tool=_exec,
        )
        try:
            await self.setup_trajectory_workspace(item, trajectory_id=trajectory_id, exec_tool=_exec)
            result = await agent.run(task)
            if not result.success:
                return None, []
            score, _ = await self.verify_and_score_trajectory(
                item, result.final_response, trajectory_id=trajectory_id, exec_tool=_exec, agent_result=result
            )
            messages = [{"role": "system", "content": agent._build_system_prompt()}, {"role": "user", "content": task}]
            for step in result.steps:
                messages.append({"role": "assistant", "content": step.assistant_message})
                if step.tool_results:
                    text = "\\n".join(r.to_xml() for r in step.tool_results)
                    messages.append({"role": "user", "content": text})
            return {"tokens": [1, 2], "masks": [-100, 2], "scores": score, "messages": messages}, []
        finally:
            await self._tool_executor.release_trajectory(trajectory_id, reset_workspace=True)
"""

GATHERED = """
    async def collect_trajectories(self, item):
        results = await asyncio.gather(*[self.collect_trajectory(item) for _ in range(self.config.group_size)])
        if any(scored is None for scored, _ in results):
            return None, []
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], messages=[])
        for scored, _ in results:
            for name in group:
                group[name].append(scored[name])
        return group, []
"""

FORMS = {"hermes": HERMES, "agent": AGENT}
WAYS = {"rollouts": (ROLLOUTS, 2.0), "groups": (GROUPS, 2.0), "both": (BOTH, 3.0)}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def groups() -> list[Group]:
    (journal,) = Path().glob("runs/*/*/journal.jsonl")
    return sorted(Recording(journal), key=lambda group: group.number)


def line(*flags: str) -> list[str]:
    return ["run", "collecting_env.py", "--policy", "oracle", "--env.ensure_scores_are_not_same", "false", *flags]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_super_collects_as_the_base_class_does(form: str, way: str) -> None:
    collect, reward = WAYS[way]
    Path("collecting_env.py").write_text(FORMS[form].replace("COLLECT", collect))
    assert main(line()) == 0
    found = groups()
    assert [[each.reward for each in group.trajectories] for group in found] == [[reward, reward]] * 2
    for trajectory in (each for group in found for each in group.trajectories):
        assert (trajectory.outcome, len(trajectory.turns), trajectory.tool_calls_attempted) == (Outcome.NATURAL, 2, 1)
        assert any(str(message["content"]).endswith("word.txt now") for message in trajectory.messages)
        assert trajectory.beside.sandbox


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("collect", [OWN_AGENT, OWN_AGENT + GATHERED], ids=["rollouts", "groups"])
def test_the_oracle_plays_an_agent_that_the_class_runs_itself(collect: str) -> None:
    imports = "import asyncio, uuid\nfrom palaestra import AtroposAgent, ScoredDataGroup\n"
    Path("collecting_env.py").write_text(imports + AGENT.replace("COLLECT", collect))
    assert main(line()) == 0
    found = groups()
    assert [[each.reward for each in group.trajectories] for group in found] == [[1.0, 1.0]] * 2
    shown = [str(each.messages) for group in found for each in group.trajectories]
    assert all("tool_response" in text for text in shown), shown[0]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("form", FORMS)
def test_super_collects_from_evaluate(form: str) -> None:
    Path("collecting_env.py").write_text(FORMS[form].replace("COLLECT", ROLLOUTS))
    assert main(["eval", "collecting_env.py", "--policy", "oracle", "--samples", "2"]) == 0
    (metrics,) = Path().glob("runs/*/*/evaluation/metrics.json")
    assert '"one": 2.0' in metrics.read_text()
    assert '"group": 2.0' in metrics.read_text() or '"group": 4.0' in metrics.read_text()


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("way", ["rollouts", "groups"])
def test_the_failure_of_the_model_server_keeps_its_blame(way: str) -> None:
    collect, _ = WAYS[way]
    Path("collecting_env.py").write_text(HERMES.replace("COLLECT", collect))
    server = ["--base-url", "http://127.0.0.1:9/v1", "--model", "m", "--openai.health_check", "false"]
    code = main(["run", "collecting_env.py", "--tasks", "1", *server, "--openai.timeout", "1"])
    assert code in (3, 4)
    (group,) = groups()
    assert {str(each.blame) for each in group.trajectories} == {"engine"}


FAILS_ONCE = """
    async def compute_reward(self, item, result, ctx):
        if not os.path.exists("failed"):
            open("failed", "w").close()
            raise GraderError("the service of the check is busy")
        return 1.0
"""


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("way", WAYS)
def test_a_rollout_of_a_collected_group_is_played_again_after_a_failure_of_its_check(way: str) -> None:
    collect, reward = WAYS[way]
    imports = "from palaestra_slots.core.errors import GraderError\n"
    Path("collecting_env.py").write_text(imports + HERMES.replace("COLLECT", collect + FAILS_ONCE))
    assert main(line()) == 0
    assert [[each.reward for each in group.trajectories] for group in groups()] == [[reward, reward]] * 2


KILLED = """
    async def METHOD(self, item):
        got = await super().METHOD(item)
        with open("collected.txt", "a") as file:
            file.write(item["word"])
        if item["word"] == "b" and not os.path.exists("again"):
            open("again", "w").close()
            os._exit(9)
        return got
"""


@pytest.mark.parametrize(("method", "counts"), [("collect_trajectory", "aabbb"), ("collect_trajectories", "abb")])
def test_a_killed_run_repeats_no_finished_rollout_or_group(here: Path, method: str, counts: str) -> None:
    Path("collecting_env.py").write_text(HERMES.replace("COLLECT", KILLED.replace("METHOD", method)))
    argv = [sys.executable, "-m", "palaestra", *line()]
    killed = subprocess.run(argv, cwd=here, capture_output=True, text=True, timeout=60, env=dict(os.environ))
    assert killed.returncode == 9, killed.stderr
    (journal,) = Path().glob("runs/*/*/journal.jsonl")
    assert main(line("--resume", str(journal.parent))) == 0
    assert [[each.reward for each in group.trajectories] for group in groups()] == [[1.0, 1.0]] * 2
    assert len(Path("collected.txt").read_text()) in (len(counts), len(counts) + 1)
    assert Path("collected.txt").read_text().count("a") == counts.count("a")
