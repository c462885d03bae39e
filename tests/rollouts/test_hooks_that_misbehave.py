"""What an author's hook may do that no hook should: the rollout says so, and the run and its record go on."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from toy import Sums, services

from palaestra.core.types import JSON, Blame, Outcome, Score, Task
from palaestra.rollouts.export.atropos import encode_line, group_line
from palaestra.rollouts.grading import Grading
from palaestra.rollouts.journal import Messages, plain, read_groups
from palaestra.rollouts.rollout import Rollout
from palaestra.rollouts.runner import Runner
from palaestra.rollouts.stages import IDLE_LIMITS
from palaestra.rollouts.trajectory import Group


def run(env: Sums, folder: Path, **limits: float) -> list[Group]:
    """Run to the end; the groups come back from the journal."""

    async def main() -> None:
        shared = replace(services(folder), idle_limits=limits or IDLE_LIMITS)
        try:
            await Runner(env, shared).run()
        finally:
            shared.journal.close()

    asyncio.run(main())
    return read_groups(folder / "journal.jsonl")


async def awaits_what_is_cancelled(rollout: Rollout) -> float:
    work = asyncio.create_task(asyncio.sleep(60))
    work.cancel()
    await work
    return 1.0


async def exits(rollout: Rollout) -> float:
    sys.exit(0)


async def says_half_a_letter(rollout: Rollout) -> float:
    raise ValueError("bad \ud800 text")


async def pays_too_much(rollout: Rollout) -> float:
    return -1e300


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (awaits_what_is_cancelled, "something that it waited for was cancelled"),
        (exits, "SystemExit: 0"),
        (says_half_a_letter, "ValueError: bad ? text"),
        (pays_too_much, "gave -1e+300, which is no reward"),
    ],
)
def test_a_score_that_misbehaves_is_the_graders_failure(tmp_path: Path, hook: JSON, said: str) -> None:
    groups = run(Sums(2, score=hook), tmp_path)
    ended = [each for group in groups for each in group.trajectories]
    assert len(ended) == 4
    assert {(each.reward, each.outcome, each.blame) for each in ended} == {(None, Outcome.INFRA_ERROR, Blame.GRADER)}
    assert all(said in each.error for each in ended)


@pytest.mark.parametrize("hook", [awaits_what_is_cancelled, exits])
def test_a_preparation_that_misbehaves_ends_its_group_alone(tmp_path: Path, hook: JSON) -> None:
    class Prepared(Sums):
        async def resolve(self, task: Task) -> Task:
            if task.id == "sum-0":
                await hook(None)
            return task

    first, second, third = run(Prepared(3), tmp_path)
    assert (first.blame, first.trajectories) == (Blame.TASK, [])
    assert [len(group.scored) for group in (second, third)] == [2, 2]


class Telling(Sums):
    """Its score is 1, with these metrics and this detail."""

    def __init__(self, metrics: Mapping[str, float], detail: Mapping[str, JSON]) -> None:
        super().__init__(1)
        self.told = Score(1.0, metrics, detail)

    async def score(self, rollout: Rollout, grading: Grading) -> Score:
        return self.told


def test_a_metric_that_is_no_number_is_left_out_and_the_score_counts(tmp_path: Path) -> None:
    (group,) = run(Telling({"ratio": float("nan"), "rate": float("inf"), "tests": 3.0}, {}), tmp_path)
    assert [(each.reward, each.metrics) for each in group.trajectories] == [(1.0, {"tests": 3.0})] * 2
    assert group.trajectories[0].detail == {"metrics_left_out": {"ratio": "nan", "rate": "inf"}}


def deep(levels: int) -> JSON:
    value: JSON = "end"
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("detail", "kept"),
    [
        ({"x": object()}, {"x": "<object>"}),
        ({"x": ["\ud800", 1, None, True]}, {"x": ["?", 1, None, True]}),
        ({"\udcff": {(1, 2): b"\0"}}, {"?": {"(1, 2)": "AA=="}}),
        ({"x": {object}}, {"x": ["<type>"]}),
    ],
)
def test_what_json_cannot_hold_is_recorded_as_something_plain(
    tmp_path: Path, detail: Mapping[str, JSON], kept: JSON
) -> None:
    (group,) = run(Telling({"\ud800": 1.0}, detail), tmp_path)
    assert [(each.reward, each.detail, each.metrics) for each in group.trajectories] == [(1.0, kept, {"?": 1.0})] * 2
    line = group_line(group, env="sums", model="m")
    assert line is not None
    assert json.loads(encode_line(line))["scores"] == [1.0, 1.0]


def test_what_is_nested_without_end_ends(tmp_path: Path) -> None:
    (group,) = run(Telling({}, {"x": deep(5000)}), tmp_path)
    assert [each.reward for each in group.trajectories] == [1.0, 1.0]
    event = Messages(rollout_id="r", turn=0, messages=[{"role": "user", "content": deep(5000)}])
    assert "…" in str(plain(event).messages)


def test_who_does_not_end_when_told_is_ended_all_the_same(tmp_path: Path) -> None:
    async def stubborn(rollout: Rollout) -> float:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return 1.0
        raise AssertionError("unreachable")

    (group,) = run(Sums(1, score=stubborn), tmp_path, grade=0.05)
    assert [(each.reward, each.blame) for each in group.trajectories] == [(None, Blame.GRADER)] * 2
    assert "gave no sign of life for 0.05 s at stage grade" in group.trajectories[0].error


def test_a_rollout_that_is_itself_cancelled_is_not_the_graders(tmp_path: Path) -> None:
    async def main() -> None:
        entered = asyncio.Event()

        async def waits(rollout: Rollout) -> float:
            entered.set()
            await asyncio.sleep(60)
            return 1.0

        shared = services(tmp_path)
        running = asyncio.create_task(Runner(Sums(1, score=waits), shared).run())
        await entered.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        shared.journal.close()

    asyncio.run(main())
    assert b'"blame":"run"' in (tmp_path / "journal.jsonl").read_bytes()
