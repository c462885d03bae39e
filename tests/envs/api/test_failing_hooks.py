"""A hook of the class contract that raises or has the wrong shape fails its rollout with one line, never the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from golden_messages import check_message
from palaestra.cli.main import main
from palaestra.rollouts.journal.reader import Recording
from palaestra.rollouts.records import Group
from palaestra_slots.core.types import JSON, Blame

pytestmark = pytest.mark.slots

SCRIPT = """
import palaestra
from palaestra import HermesAgentBaseEnv, HermesAgentEnvConfig

class FailingEnv(HermesAgentBaseEnv):
    name = "failing"

    @classmethod
    def config_init(cls):
        config = HermesAgentEnvConfig(enabled_toolsets=["terminal"], group_size=2, total_steps=2, max_num_workers=1)
        return config, [palaestra.APIServerConfig(model_name="m")]

    async def setup(self):
        self.left = ["bad", "good"]

    async def get_next_item(self):
        kind = self.left.pop(0) if self.left else None
        return kind and {"id": kind, "bad": kind == "bad", "solution": "echo x > x.txt"}

    def format_prompt(self, item):
        return "Write x.txt"

    async def compute_reward(self, item, result, ctx):
        return float(ctx.terminal("cat x.txt")["exit_code"] == 0)

    async def evaluate(self, *args, **kwargs):
        return {}

HOOK
"""

ROLLOUT_HOOKS = {
    "raising loop": """
    async def _run_agent_loop(self, task_id, tools, valid_names, messages, tool_handler=None):
        if "bad" in task_id:
            raise RuntimeError("the loop is broken")
        return await super()._run_agent_loop(task_id, tools, valid_names, messages, tool_handler)
""",
    "loop of another shape": """
    async def _run_agent_loop(self, task_id, tools, messages):
        return await super()._run_agent_loop(task_id, tools, set(), messages)
""",
    "loop without a result": """
    async def _run_agent_loop(self, rollout, messages):
        if "bad" in rollout.rollout_id:
            return None
        return await super()._run_agent_loop(rollout, messages)
""",
    "raising row": """
    def _build_scored_item(self, item, result, reward):
        if item["bad"]:
            raise KeyError("nothing")
        return super()._build_scored_item(item, result, reward)
""",
    "no row": """
    def _build_scored_item(self, item, result, reward):
        return (None, []) if item["bad"] else super()._build_scored_item(item, result, reward)
""",
    "row without a score": """
    def _build_scored_item(self, item, result, reward):
        row = super()._build_scored_item(item, result, reward)
        return {**row, "scores": "high"} if item["bad"] else row
""",
    "raising collection": """
    async def collect_trajectory(self, item):
        row, backlog = await super().collect_trajectory(item)
        if item["bad"]:
            raise RuntimeError("no row")
        return row, backlog
""",
    "collection that is no pair": """
    async def collect_trajectory(self, item):
        row, backlog = await super().collect_trajectory(item)
        return {**row} if item["bad"] else (row, backlog)
""",
    "second rollout in one": """
    async def collect_trajectory(self, item):
        if item["bad"]:
            await super().collect_trajectory(item)
        return await super().collect_trajectory(item)
""",
    "swallowed failure": """
    async def setup_trajectory_workspace(self, item, *, trajectory_id, exec_tool):
        if item["bad"]:
            raise RuntimeError("no workspace")
        return {}

    async def collect_trajectory(self, item):
        try:
            return await super().collect_trajectory(item)
        except Exception:
            return {"tokens": [1], "masks": [-100], "scores": 0.0}, []
""",
}

GROUP_HOOKS = {
    "raising tools": """
    def _resolve_tools_for_group(self):
        raise RuntimeError("no tools")
""",
    "tools that are no pair": """
    def _resolve_tools_for_group(self):
        return super()._resolve_tools_for_group()[0]
""",
    "tools that do not exist": """
    def _resolve_tools_for_group(self):
        return [{"type": "function", "function": {"name": "levitate", "parameters": {}}}], {"levitate"}
""",
    "raising groups": """
    async def collect_trajectories(self, item):
        group, backlog = await super().collect_trajectories(item)
        raise RuntimeError("no group")
""",
    "raising postprocessing": """
    async def postprocess_histories(self, trajectories):
        raise RuntimeError("no group")
""",
}

HARMLESS = {
    "raising metrics": """
    async def wandb_log(self, wandb_metrics=None):
        raise RuntimeError("no metrics")
""",
    "raising rollouts to show": """
    async def add_rollouts_for_wandb(self, scored_data, item=None):
        raise RuntimeError("nothing to show")
""",
    "raising display": """
    @staticmethod
    def _format_trajectory_for_display(messages):
        raise RuntimeError("nothing to show")
""",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(hook: str, *flags: str) -> tuple[int, list[Group]]:
    Path("failing_env.py").write_text(SCRIPT.replace("HOOK", hook))
    line = ["run", "failing_env.py", "--policy", "oracle", "--env.ensure_scores_are_not_same", "false", *flags]
    code = main(line)
    journals = list(Path().glob("runs/*/*/journal.jsonl"))
    return code, sorted(Recording(journals[0]), key=lambda group: group.number) if journals else []


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("hook", ROLLOUT_HOOKS)
def test_it_fails_its_rollouts(hook: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, (bad, good) = run(ROLLOUT_HOOKS[hook])
    assert code == 3
    assert "Traceback" not in capsys.readouterr().err
    for trajectory in bad.trajectories:
        assert (trajectory.reward, trajectory.blame) == (None, Blame.TASK)
        assert "\n" not in trajectory.error
    if hook != "loop of another shape":
        assert [each.reward for each in good.trajectories] == [1.0, 1.0]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("hook", GROUP_HOOKS)
def test_it_fails_its_groups(hook: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, groups = run(GROUP_HOOKS[hook])
    assert code == 3
    assert "Traceback" not in capsys.readouterr().err
    assert len(groups) == 2
    assert all(group.error and "\n" not in group.error for group in groups)
    played = [trajectory for group in groups for trajectory in group.trajectories]
    assert len(played) == (4 if "def collect" in GROUP_HOOKS[hook] or "def post" in GROUP_HOOKS[hook] else 0)
    assert all(trajectory.reward is None and trajectory.turns for trajectory in played)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("hook", HARMLESS)
def test_it_costs_what_it_was_for(hook: str, capsys: pytest.CaptureFixture[str], caplog: JSON) -> None:
    code, groups = run(HARMLESS[hook])
    assert code == 0
    assert [each.reward for group in groups for each in group.trajectories] == [1.0] * 4
    assert "Traceback" not in capsys.readouterr().err + caplog.text
    assert "RuntimeError: no" in caplog.text


@pytest.mark.usefixtures("here")
def test_rollouts_that_a_collected_group_leaves_out_are_recorded_without_a_reward() -> None:
    code, groups = run(
        """
    async def postprocess_histories(self, trajectories):
        return {key: value[:1] for key, value in trajectories.items() if value}
"""
    )
    assert code == 3
    assert [[each.reward for each in group.trajectories] for group in groups] == [[1.0, None]] * 2
    assert "left" in groups[0].trajectories[1].error


@pytest.mark.usefixtures("here")
def test_a_manager_that_does_not_run_the_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, groups = run("    async def process_manager(self):\n        pass\n")
    assert (code, groups) == (2, [])
    check_message(capsys.readouterr().err, "process_manager")


@pytest.mark.usefixtures("here")
def test_a_manager_may_start_what_the_setup_needs() -> None:
    code, groups = run(
        """
    async def process_manager(self):
        self.started = True
        await super().process_manager()
        raise RuntimeError("too late to matter")

    async def setup(self):
        assert self.started
        self.left = ["good"]
"""
    )
    assert code == 0
    assert [each.reward for each in groups[0].trajectories] == [1.0, 1.0]
