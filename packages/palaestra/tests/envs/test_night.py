"""A run left alone: what stops it, that it can be gone on with, and what others can see of it meanwhile."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from envs.scripts import groups_file
from palaestra.rollouts.events import RolloutEnded, RunEnded
from palaestra.rollouts.journal.journal import read_journal
from palaestra.rollouts.observe.status import RunReader
from palaestra_slots.core.types import Outcome

pytestmark = pytest.mark.slots

RUN = [sys.executable, "-m", "palaestra", "run", "my_env.py", "--policy", "oracle", "--concurrency", "1"]
PRICES = ["--env.prompt_price", "1000000", "--env.completion_price", "0"]
TIMEOUT_S = 60

WAITING = """
import asyncio, pathlib
from palaestra import Task, environment

HERE = pathlib.Path(__file__).parent

@environment(toolsets=["terminal"])
def waiting(n: int = 3):
    for i in range(n):
        yield Task(id=f"task-{i}", prompt="?", solution="touch done")

@waiting.score
async def there(task, sandbox):
    while task.id == "task-1" and not (HERE / "go").exists():
        (HERE / "waits").touch()
        await asyncio.sleep(0.02)
    return await sandbox.stat("done") is not None
"""

BROKEN_GRADER = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def broken():
    for i in range(40):
        yield Task(id=f"task-{i}", prompt="?", solution="touch done")

@broken.score
async def raises(task):
    raise OSError("no space left")
"""


def start(folder: Path, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*RUN, *flags], cwd=folder, stderr=subprocess.PIPE, text=True)


def until(process: subprocess.Popen[str], path: Path) -> None:
    """Wait for a file that the run makes; fails when the run ends first."""
    while not path.exists():
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        time.sleep(0.02)


def end(process: subprocess.Popen[str]) -> str:
    _, said = process.communicate(timeout=TIMEOUT_S)
    return said


def run_of(folder: Path) -> Path:
    (run,) = folder.glob("runs/*/*")
    return run


def endings(run: Path) -> tuple[list[tuple[str, Outcome]], list[str]]:
    events = list(read_journal(run / "journal.jsonl"))
    rollouts = [(e.trajectory.task_id, e.trajectory.outcome) for e in events if isinstance(e, RolloutEnded)]
    return rollouts, [event.reason for event in events if isinstance(event, RunEnded)]


def test_sigterm_lets_what_is_in_flight_finish(tmp_path: Path) -> None:
    (tmp_path / "my_env.py").write_text(WAITING)
    with start(tmp_path) as going:
        until(going, tmp_path / "waits")
        going.send_signal(signal.SIGTERM)
        assert going.stderr is not None
        while "Nothing new starts" not in going.stderr.readline():
            assert going.poll() is None
        (tmp_path / "go").touch()
        said = end(going)
    assert going.returncode == 130, said
    run = run_of(tmp_path)
    assert endings(run) == ([("task-0", Outcome.NATURAL), ("task-1", Outcome.NATURAL)], ["interrupted"])
    assert f"continue with palaestra resume {run.relative_to(tmp_path)}" in said
    with start(tmp_path, "--resume", str(run)) as again:
        said = end(again)
    assert again.returncode == 0, said
    lines = groups_file(tmp_path).read_text().splitlines()
    assert [json.loads(line)["task_id"] for line in lines] == ["task-0", "task-1", "task-2"]


@pytest.mark.parametrize("drain", [["--env.drain_s", "0"], []])
def test_a_drain_without_patience_keeps_what_was_finished(tmp_path: Path, drain: list[str]) -> None:
    """After the time that was given, or at the second signal."""
    (tmp_path / "my_env.py").write_text(WAITING)
    with start(tmp_path, *drain) as going:
        until(going, tmp_path / "waits")
        going.send_signal(signal.SIGTERM)
        if not drain:
            assert going.stderr is not None
            while "Nothing new starts" not in going.stderr.readline():
                assert going.poll() is None
            going.send_signal(signal.SIGTERM)
        said = end(going)
    assert going.returncode == 130, said
    assert "Traceback" not in said
    run = run_of(tmp_path)
    assert endings(run) == ([("task-0", Outcome.NATURAL), ("task-1", Outcome.CANCELLED)], ["interrupted"])


def test_a_world_that_breaks_too_much_pauses_the_run(tmp_path: Path) -> None:
    (tmp_path / "my_env.py").write_text(BROKEN_GRADER)
    with start(tmp_path, "--max-infra-rate", "0.04", "--env.infra_retries", "0") as going:
        said = end(going)
    assert going.returncode == 3, said
    assert "ended 5 of the last 5 rollouts (grader 5), more than 4% of 100" in said
    rollouts, reasons = endings(run_of(tmp_path))
    assert (len(rollouts), reasons) == (5, ["paused"])


def test_a_cost_that_is_reached_pauses_the_run_and_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "my_env.py").write_text(WAITING)
    (tmp_path / "go").touch()
    with start(tmp_path, "--max-cost", "5", *PRICES) as going:
        said = end(going)
    assert going.returncode == 3, said
    assert "(max_cost)" in said
    ends = [
        event.trajectory
        for event in read_journal(run_of(tmp_path) / "journal.jsonl")
        if isinstance(event, RolloutEnded)
    ]
    assert len(ends) == 1
    assert ends[0].cost == ends[0].prompt_tokens > 0
    with start(tmp_path, "--max-cost", "5", *PRICES, "--resume", str(run_of(tmp_path))) as again:
        said = end(again)
    assert again.returncode == 3, "what was spent before counts"
    assert len(endings(run_of(tmp_path))[0]) == 1


def test_what_a_part_without_prices_used_counts_by_those_of_the_next(tmp_path: Path) -> None:
    (tmp_path / "my_env.py").write_text(WAITING)
    (tmp_path / "go").touch()
    with start(tmp_path, "--tasks", "1") as going:
        said = end(going)
    assert going.returncode == 0, said
    run = run_of(tmp_path)
    with start(tmp_path, "--max-cost", "5", *PRICES, "--resume", str(run)) as again:
        said = end(again)
    assert again.returncode == 3, said
    assert len(endings(run)[0]) == 1
    with start(tmp_path, *PRICES, "--resume", str(run)) as again:
        said = end(again)
    assert again.returncode == 0, said
    status = RunReader(run / "journal.jsonl").read()
    costs = [each.trajectory.cost for each in read_journal(run / "journal.jsonl") if isinstance(each, RolloutEnded)]
    assert costs[0] is None
    assert status.cost == sum(cost for cost in costs if cost is not None)
    assert 0 < status.unpriced_tokens < status.prompt_tokens + status.completion_tokens
    told = subprocess.run(
        [sys.executable, "-m", "palaestra", "status", str(run)], capture_output=True, text=True, check=True
    )
    assert f"plus the cost of {status.unpriced_tokens:,} tokens without a price" in told.stdout


def test_others_see_a_live_run(tmp_path: Path) -> None:
    (tmp_path / "my_env.py").write_text(WAITING)
    with start(tmp_path, "--metrics-port", "0", *PRICES) as going:
        assert going.stderr is not None
        until(going, tmp_path / "waits")
        found = None
        while found is None:
            found = re.search(r"metrics at (http://127\.0\.0\.1:\d+/metrics)", going.stderr.readline())
        with urllib.request.urlopen(found.group(1), timeout=TIMEOUT_S) as answer:
            text = answer.read().decode()
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        status = [sys.executable, "-m", "palaestra", "status", str(run_of(tmp_path)), "--json"]
        seen = json.loads(subprocess.run(status, capture_output=True, check=True, timeout=TIMEOUT_S).stdout)
        (tmp_path / "go").touch()
        said = end(going)
    assert going.returncode == 0, said
    assert 'palaestra_in_flight{stage="grade"} 1\n' in text
    assert 'palaestra_rollouts_total{outcome="natural"} 1\n' in text
    assert re.search(r"^palaestra_cost_total \d+$", text, re.MULTILINE)
    assert (seen["state"], seen["rollouts"]) == ("running", 1)


def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    (tmp_path / "my_env.py").write_text(WAITING)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with start(tmp_path, "--metrics-port", str(taken.getsockname()[1])) as going:
            said = end(going)
    assert going.returncode == 2
    assert "cannot listen on 127.0.0.1:" in said
