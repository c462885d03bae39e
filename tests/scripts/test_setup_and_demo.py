"""What a newcomer runs first: `make setup` and the table of `make demo`."""

from __future__ import annotations

import io
import os
import runpy
import subprocess
from pathlib import Path

import pytest
from recorded import write_run
from rich.console import Console

from palaestra import open_run
from palaestra.rollouts.records import Beside, Group, Trajectory
from palaestra_slots.core.types import Outcome

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not (ROOT / ".venv/bin/palaestra").exists(), reason="needs the .venv of make setup")
def test_setup_ends_with_where_the_command_is() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(["make", "setup"], cwd=ROOT, capture_output=True, text=True, check=True, env=environ)
    path = done.stdout.splitlines()[-1].removeprefix("ready: ").partition(" ")[0]
    assert subprocess.run([path, "--version"], capture_output=True, check=True).stdout.startswith(b"palaestra")


def test_the_demo_shows_the_time_of_a_fork(tmp_path: Path) -> None:
    rollout = Trajectory(
        rollout_id="g/0", group_id="g", task_id="t", index=0, messages=[], outcome=Outcome.NATURAL, reward=1.0,
        detail={f"{kind}_{part}": 1 for kind in ("f2p", "p2p") for part in ("passed", "total")},
        beside=Beside(duration_s=1.0, stages={"acquire": 0.0025}),
    )  # fmt: skip
    folder = write_run(tmp_path, Group(group_id="g", number=0, task_id="t", trajectories=[rollout]))
    demo = runpy.run_path(str(ROOT / "scripts/demo.py"))
    played = [demo["Played"](name, 1.0, open_run(folder)) for name in ("oracle", "noop")]
    shown = io.StringIO()
    Console(width=130, file=shown).print(demo["table"](played))
    (row,) = (line for line in shown.getvalue().splitlines() if line.startswith("│ t "))
    assert [cell.strip() for cell in row.split("│")][-2] == "2.5"
