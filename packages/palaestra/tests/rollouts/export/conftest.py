"""Groups and trajectories to export, with only what a test cares about spelled out."""

from __future__ import annotations

import pytest

from palaestra.rollouts.records import Group, Trajectory
from palaestra_slots.core.types import JSON, Outcome


@pytest.fixture(scope="session")
def trajectory():
    """`trajectory(index, reward, **fields)`; a reward of None means the slot was lost."""

    def make(index: int = 0, reward: float | None = 1.0, **fields: JSON) -> Trajectory:
        given = {
            "rollout_id": f"r{index}",
            "group_id": "g0",
            "task_id": "task-0",
            "index": index,
            "messages": [{"role": "user", "content": "do it"}, {"role": "assistant", "content": "done"}],
            "outcome": Outcome.NATURAL if reward is not None else Outcome.INFRA_ERROR,
            "reward": reward,
        }
        return Trajectory(**(given | fields))

    return make


@pytest.fixture(scope="session")
def group():
    """`group(*trajectories, number=…, **fields)`"""

    def make(*trajectories: Trajectory, number: int = 0, **fields: JSON) -> Group:
        given = {"group_id": f"g{number}", "number": number, "task_id": f"task-{number}"}
        return Group(**(given | fields), trajectories=list(trajectories))

    return make
