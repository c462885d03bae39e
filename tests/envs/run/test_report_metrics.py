"""What trackers hear: the latest groups while a run goes on, the whole at its end; nobody's trouble stops it."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from toy import Sums, tell

from manual_clock import ManualClock
from palaestra.envs.config.command_line import CommandLine, Parsed
from palaestra.envs.config.fields import BaseEnvConfig
from palaestra.envs.run.report_metrics import Reporting, asked_for
from palaestra.envs.run.run import RunReport, run
from palaestra.rollouts.events import GroupFinished
from palaestra.rollouts.observe.trackers.tracker import Shown
from palaestra.rollouts.records import Group, Trajectory
from palaestra_contract.base_env import BaseEnv
from palaestra_slots.core.types import Outcome
from palaestra_tokens.config import APIServerConfig


class Heard:
    """A tracker that keeps what it hears."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, Mapping[str, float]]] = []
        self.shown: list[tuple[int, str, Shown]] = []
        self.closed = False

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.logged.append((step, numbers))

    def show(self, step: int, name: str, rollouts: Shown) -> None:
        self.shown.append((step, name, rollouts))

    async def aclose(self) -> None:
        self.closed = True


class Figured(Sums):
    """Has figures of its own; they fail when told to."""

    broken = False

    async def figures(self) -> Mapping[str, float]:
        if self.broken:
            raise ZeroDivisionError("no figures")
        return {"train/own": 5.0}

    def shown(self) -> Shown:
        return [("hello", 1.0)]


def group(number: int, reward: float) -> Group:
    name = f"{number:06d}-t"
    rollout = Trajectory(
        rollout_id=f"{name}/0",
        group_id=name,
        task_id="t",
        index=0,
        messages=[],
        outcome=Outcome.NATURAL,
        reward=reward,
    )
    return Group(group_id=name, number=number, task_id="t", trajectories=[rollout])


async def told(environment: Figured, rewards: list[float], **options: object) -> Heard:
    heard = Heard()
    reporting = Reporting([heard], clock=ManualClock(), **options)  # type: ignore[arg-type]
    with reporting.running(environment):
        for number, reward in enumerate(rewards):
            tell(reporting, GroupFinished(group(number, reward)))
            for _ in range(5):
                await asyncio.sleep(0)
    await reporting.finish(environment, {"reward/mean": 0.5})
    return heard


async def test_trackers_hear_of_the_latest_groups_and_then_of_the_whole() -> None:
    heard = await told(Figured(), [0.0, 1.0, 1.0, 1.0, 0.0], every=2)
    means = [(step, numbers.get("train/reward/mean"), numbers.get("train/own")) for step, numbers in heard.logged]
    assert means == [(2, 0.5, 5.0), (4, 1.0, 5.0), (5, None, None)]
    assert heard.logged[0][1]["train/tool_errors_count"] == 0
    assert heard.logged[-1][1] == {"reward/mean": 0.5}
    assert heard.shown == [(5, "train/rollouts", [("hello", 1.0)])]
    assert heard.closed


async def test_a_resumed_run_does_not_tell_again() -> None:
    heard = await told(Figured(), [0.0, 0.0, 1.0], known={0, 1})
    assert [(step, numbers.get("train/reward/mean")) for step, numbers in heard.logged] == [(3, 1.0), (3, None)]


async def test_figures_of_the_environments_own_that_fail_are_left_out_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    environment = Figured()
    environment.broken = True
    heard = await told(environment, [1.0, 1.0])
    assert [step for step, _ in heard.logged] == [1, 2, 2]
    (record,) = caplog.records
    assert "sums failed with ZeroDivisionError" in record.message


def test_a_default_asks_for_nothing() -> None:
    assert asked_for(BaseEnvConfig(), {}) == []
    assert asked_for(BaseEnvConfig(), {"env.use_wandb": "default"}) == []
    assert asked_for(BaseEnvConfig(), {"env.use_wandb": "config_init"}) == ["wandb"]
    assert asked_for(BaseEnvConfig(use_wandb=False), {"env.use_wandb": "command line"}) == []
    assert asked_for(BaseEnvConfig(use_trackio=True), {}) == ["trackio"]


TINY = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def tiny():
    yield Task(id="one", prompt="?", solution="true")

@tiny.score
async def fine(task):
    return 1.0
"""


@pytest.mark.slots
@pytest.mark.skipif(importlib.util.find_spec("trackio") is not None, reason="trackio is installed")
async def test_a_tracker_that_is_absent_is_one_warning_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from palaestra.envs.discovery import load_environment

    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny_env.py").write_text(TINY)
    form = load_environment("tiny_env.py", tmp_path)
    line = CommandLine(prog="t", env_type=form.config_type(), server_type=APIServerConfig)
    parsed = line.parse(["process", "--policy", "oracle", "--env.use_trackio", "true"], {})
    assert isinstance(parsed, Parsed)
    stream = io.StringIO()
    report: RunReport = await run(form, parsed, stream=stream)
    assert report.exit_code == 0
    assert stream.getvalue().count("trackio was requested but is not installed") == 1
    lines = [json.loads(line) for line in (report.folder / "metrics.jsonl").read_text().splitlines()]
    assert (lines[-1]["step"], lines[-1]["reward/mean"]) == (1, 1.0)


def test_only_texts_with_scores_are_shown() -> None:
    class Odd(BaseEnv):
        async def setup(self) -> None: ...

        async def get_next_item(self) -> None: ...

        async def evaluate(self, *args: object, **kwargs: object) -> None: ...

    inner = Odd(BaseEnvConfig(), [])
    inner.rollouts_for_wandb = [[("a", 1), ("b", None), {"text": "c"}, ("d", 0.5, "why")], [("e", True)]]  # type: ignore[list-item]
    assert inner.as_environment().shown() == [("a", 1.0), ("d", 0.5), ("e", 1.0)]
