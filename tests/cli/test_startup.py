"""A command that only checks flags or shows help loads neither the agent, nor the sandbox, nor an HTTP client."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from envs.scripts import CLASS_ENV

HEAVY = (
    "aiohttp",
    "palaestra.agent.loop",
    "palaestra.rollouts.rollout",
    "palaestra_slots.sandbox.backends.local",
    "jinja2",
)
OPTIONAL = (
    "aiohttp",
    "palaestra.envs.cache_key",
    "palaestra.envs.run.elsewhere",
    "palaestra.envs.run.pass_at_k",
    "palaestra.rollouts.counterfactual",
    "palaestra.rollouts.export.exporter",
    "palaestra.rollouts.grading.blame",
    "palaestra.rollouts.observe.tracing",
    "palaestra.rollouts.observe.trackers",
    "palaestra.rollouts.recorded_tools",
    "palaestra.rollouts.resume.observation_diff",
    "palaestra_slots.images",
    "palaestra_slots.processes",
    "palaestra_slots.sandbox.images",
    "palaestra_slots.sandbox.python_call",
    "palaestra_slots.sandbox.service",
    "palaestra_slots.sandbox.slot_tools",
    "palaestra_slots.sandbox.slotd.network",
    "palaestra_slots.sandbox.snapshots",
    "palaestra_tokens.ledger.verify",
    "palaestra_view.comparison",
    "palaestra_view.search_texts",
)
"""What a run loads only if a task, a setting, a failure or the model's answers need it."""

ENV = """
from palaestra import Task, environment

@environment
def words(n: int = 2):
    yield Task(id="w", prompt="p")

@words.score
def right(task): return 1
"""
SCRIPT = f"""
import sys
from palaestra.cli.main import main
code = main(sys.argv[1:])
print(code, [name for name in {HEAVY!r} if name in sys.modules])
"""


@pytest.mark.slots
def test_a_scripted_run_loads_nothing_optional(tmp_path: Path) -> None:
    (tmp_path / "my_env.py").write_text(ENV.replace("@environment", '@environment(toolsets=["terminal"])'))
    script, words = SCRIPT.replace(repr(HEAVY), repr(OPTIONAL)), ["run", "my_env.py", "--policy", "noop"]
    done = subprocess.run(
        [sys.executable, "-c", script, *words], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 []"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["run", "--help"], 0),
        (["run", "my_env.py", "--help"], 0),
        (["run", "my_env.py", "--show-config"], 0),
        (["run", "my_env.py", "--polcy", "x"], 2),
        (["run", "class_env.py", "--polcy", "x"], 2),
        (["run", "class_env.py", "--env.bogus", "1"], 2),
        (["run", "class_env.py", "--help"], 0),
        (["run", "class_env.py", "--show-config"], 0),
        (["run", "class_env.py", "process", "--policy", "oracle", "--gruop=2"], 2),
        (["eval", "terminal_test", "--polcy", "x"], 2),
        (["run", "my_env.py", "--env.n", "many"], 2),
        (["runs"], 0),
    ],
)
def test_flags_are_checked_before_anything_heavy_is_loaded(words: list[str], code: int, tmp_path: Path) -> None:
    (tmp_path / "my_env.py").write_text(ENV)
    (tmp_path / "class_env.py").write_text(CLASS_ENV)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == f"{code} []"
