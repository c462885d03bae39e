"""Faults of the world at a known rate: each is blamed rightly, none becomes a reward, and groups stay whole."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path

import pytest

from faults.injected import FAULTS, IDLE_LIMITS, OWN_LIMITS, BrokenWorld
from palaestra.rollouts.events import AttemptDiscarded, RolloutEnded, RunStarted
from palaestra.rollouts.journal.journal import EventStream, Journal, read_journal
from palaestra.rollouts.journal.reader import Recording
from palaestra.rollouts.records import Group, Trajectory
from palaestra.rollouts.runner import Runner
from palaestra.rollouts.spec import RunContext, RunSettings
from palaestra.rollouts.workspaces import Workspaces
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.pool import SlotPool, SlotPoolConfig
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.server_group import ServerGroup

pytestmark = pytest.mark.slots


def roll_out(folder: Path, env: BrokenWorld, group_size: int, *, whole: bool) -> tuple[list[Group], Path]:
    async def main() -> Path:
        async with SlotPool(SlotPoolConfig(), LocalBackend.from_isolation("best")) as pool:
            shared = RunContext(
                engine=ServerGroup([APIServerConfig(server_type="scripted", model_name="oracle")]),
                workspaces=Workspaces(pool),
                events=EventStream(Journal(folder / "journal.jsonl")),
                settings=RunSettings(group_size=group_size, idle_limits=IDLE_LIMITS, whole_groups=whole),
            )
            shared.events.emit(RunStarted(run_id="r", env="e", model="m", seed=0))
            await env.open()
            try:
                await Runner(env, shared, concurrency=4).run()
            finally:
                await env.aclose()
                shared.events.journal.close()
            return shared.events.journal.path

    path = asyncio.run(main())
    return list(Recording(path)), path


def attempts(path: Path) -> dict[str, list[Trajectory]]:
    found: defaultdict[str, list[Trajectory]] = defaultdict(list)
    for event in read_journal(path):
        if isinstance(event, RolloutEnded | AttemptDiscarded):
            found[event.trajectory.rollout_id].append(event.trajectory)
    return found


def wrongly_blamed(env: BrokenWorld, path: Path) -> list[str]:
    """Attempts whose record does not say what happened to them."""
    wrong = []
    recorded = attempts(path)
    assert {name: len(each) for name, each in recorded.items()} == {n: len(each) for n, each in env.injected.items()}
    for name, faults in env.injected.items():
        for fault, trajectory in zip(faults, recorded[name], strict=True):
            blame = FAULTS[fault] if fault else None
            right = (blame, None) if blame else (None, 1.0)
            if (trajectory.blame, trajectory.reward) != right:
                said = f"{trajectory.blame}, {trajectory.reward}: {trajectory.error}"
                wrong.append(f"{name}, {fault or 'no fault'}: {said}")
    return wrong


@pytest.mark.slow
def test_every_fault_is_blamed_and_groups_stay_whole_at_a_tenth(tmp_path: Path) -> None:
    faults = list(FAULTS)
    rollouts = [f"{number:06d}-t{number}/{index}" for number in range(50) for index in range(4)]
    plan = {each: [faults[place % len(faults)]] for place, each in enumerate(rollouts[::10])}
    assert {fault for each in plan.values() for fault in each} == set(FAULTS)
    env = BrokenWorld(50, plan)
    groups, path = roll_out(tmp_path, env, 4, whole=True)
    assert wrongly_blamed(env, path) == []
    bugs = [name for name, (fault,) in plan.items() if fault == "the grader raises"]
    again = sum(FAULTS[fault] is not None for (fault,) in plan.values()) - len(bugs)
    assert sum(len(each) for each in attempts(path).values()) == len(rollouts) + again
    short = {name.partition("/")[0] for name in bugs}  # a bug of the score would fail whatever is played
    assert {group.group_id: len(group.scored) for group in groups} == {
        group.group_id: 3 if group.group_id in short else 4 for group in groups
    }


def test_whose_fault_it_was_is_seen_without_replacement(tmp_path: Path) -> None:
    """The quick ones of the faults, one of each blame, beside what is no fault of the world."""
    faults = ["503", "the grader ran no test", "the agent's slot dies", "abort", *OWN_LIMITS]
    env = BrokenWorld(1, {f"000000-t0/{index}": [fault] for index, fault in enumerate(faults)})
    (group,), path = roll_out(tmp_path, env, 7, whole=False)
    assert wrongly_blamed(env, path) == []
    assert [trajectory.reward for trajectory in group.trajectories] == [None] * 4 + [1.0] * 3


def test_a_group_has_so_many_replacements_and_no_more(tmp_path: Path) -> None:
    plan = {f"000000-t0/{index}": ["the grader ran no test"] * 5 for index in range(2)}
    env = BrokenWorld(1, plan)
    (group,), path = roll_out(tmp_path, env, 2, whole=True)
    assert sum(len(each) for each in attempts(path).values()) == 4
    assert (len(group.trajectories), group.scored) == (2, [])
    assert wrongly_blamed(env, path) == []
