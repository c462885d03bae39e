"""The environment of docs/migration.md scores as the page promises."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import palaestra

PAGE = Path(__file__).parents[2] / "docs/migration.md"
FILES = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE))


@pytest.mark.slots
@pytest.mark.parametrize("name", FILES)
def test_the_environment_scores_1_for_the_solution_and_0_for_nothing(name: str, tmp_path: Path) -> None:
    assert FILES
    path = tmp_path / name
    path.write_text(FILES[name])
    for policy, reward in (("oracle", 1.0), ("noop", 0.0)):
        run = palaestra.run_sync(str(path), policy=policy, folder=tmp_path / policy)
        rewards = {trajectory.reward for group in run.groups for trajectory in group.trajectories}
        assert rewards == {reward}
