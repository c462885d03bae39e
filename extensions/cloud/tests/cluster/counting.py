"""An environment for runs on a cluster, and what of their journals must be the same however they ran."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from palaestra.rollouts.resume.state import read_finished

ENVIRONMENT = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def lines(n: int = 4, seconds: float = 0.0):
    for i in range(n):
        steps = ["wc -l < a.txt > answer.txt", f"sleep {seconds}", "cat answer.txt; echo $((6 * 7))"]
        yield Task(id=f"lines-{i}", prompt=f"Count the lines of a.txt ({i})", files={"a.txt": "x\\n" * i},
                   solution=steps, answer=str(i))

@lines.score
async def correct(task, sandbox, rng):
    right = (await sandbox.read_text("answer.txt", missing="")).strip() == task.answer
    return float(right), {"drawn": rng.random()}
"""


def written(folder: Path) -> Path:
    """The environment's file in this folder."""
    path = folder / "lines_env.py"
    path.write_text(ENVIRONMENT)
    return path


def palaestra(*words: str) -> list[str]:
    return [sys.executable, "-m", "palaestra", *words]


def run(folder: Path, *words: str, timeout_s: float = 110) -> subprocess.CompletedProcess[str]:
    """Run `palaestra` there to its end."""
    return subprocess.run(palaestra(*words), cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False)


def content(run_folder: Path) -> dict[str, Any]:
    """What the journal says of each rollout: messages with observations, turns, reward and drawn numbers; and that
    each group and rollout has ended once."""
    work = read_finished(run_folder / "journal.jsonl")
    found = {}
    for number, group in ((each, work.whole(each)) for each in sorted(work.ended)):
        assert group.number == number
        assert not group.error, group.error
        for each in group.trajectories:
            assert each.rollout_id not in found
            found[each.rollout_id] = (
                group.tools_hash, group.asked, each.task_id, each.index, each.messages, each.outcome, each.reward,
                each.blame, each.metrics, [(turn.number, turn.finish_reason, turn.tools) for turn in each.turns],
            )  # fmt: skip
    return found
