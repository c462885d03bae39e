"""Every method of the class contract that a script may override, with a script that does and the call that proves it.

The scripts of `tests/envs/contract` are run as they are, from their own command line.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from talking import Talk, trainer

from palaestra.rollouts.journal.reader import Recording
from palaestra.rollouts.records import Group
from palaestra_slots.core.types import JSON
from palaestra_train.atropos.trajectory_server import serving

pytestmark = pytest.mark.slots

SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class Done:
    """A finished command."""

    code: int
    stderr: str
    folder: Path
    groups: list[Group]
    metrics: dict[str, JSON] = field(default_factory=dict)

    @property
    def rewards(self) -> list[list[float | None]]:
        return [[each.reward for each in group.trajectories] for group in self.groups]


def run_script(path: Path, folder: Path, *flags: str, command: str = "process", policy: str = "oracle") -> Done:
    argv = [sys.executable, str(path), command, "--policy", policy, "--env.use_wandb", "false", *flags]
    argv += ["--env.ensure_scores_are_not_same", "false"]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=120, env=dict(os.environ))
    journals = sorted(folder.glob("runs/*/*/journal.jsonl"))
    groups = sorted(Recording(journals[-1]), key=lambda group: group.number) if journals else []
    metrics: dict[str, JSON] = {}
    for found in sorted(folder.glob("runs/*/*/metrics.jsonl")):
        for line in found.read_text().splitlines():
            metrics |= json.loads(line)
    return Done(done.returncode, done.stderr, folder, groups, metrics)


def offered(done: Done) -> bool:
    shown = [[tool["function"] for tool in group.tools] for group in done.groups]
    described = {tool["description"] for tools in shown for tool in tools}
    names = [[tool["name"] for tool in tools] for tools in shown]
    return names == [["terminal"], ["terminal"]] and described == {"Run one command in bash."}


def built(done: Done) -> bool:
    pair, row, own = (group.trajectories[0] for group in done.groups)
    assert pair.row is not None
    assert row.row is not None
    assert own.row is not None
    tokens = (pair.row.tokens, own.row.tokens) == ([7, 8, 9], [5, 6])
    sources = [each.source for each in (pair.row, row.row, own.row)] == ["environment", "placeholder", "environment"]
    return done.rewards == [[0.8], [0.8], [1.0]] and tokens and sources


def hinted(done: Done) -> bool:
    said = [message["content"] for message in done.groups[0].trajectories[0].messages[:3]]
    return said == ["Be short.", "Write hi to hi.txt", "Hint: use echo."] and done.rewards == [[1.0, 1.0]]


def kept_alive(done: Done) -> bool:
    said = (done.folder / "service.txt").read_text()
    return said.startswith("down after") and done.rewards[0] == [1.0, 1.0]


def logged(done: Done) -> bool:
    wanted = {"train/percent_correct": 1.0, "train/longest": -1, "train/group_tools": "None"}
    return wanted.items() <= done.metrics.items() and done.metrics["train/tool_errors_count"] == 0


HOOKS: dict[str, tuple[str, tuple[str, ...], Callable[[Done], bool]]] = {
    "_resolve_tools_for_group": ("resolve_tools", (), offered),
    "_run_agent_loop": ("agent_loop", (), lambda done: done.rewards == [[1.0]] * 3),
    "_build_scored_item": ("scored_item", (), built),
    "_format_trajectory_for_display": (
        "display",
        (),
        lambda done: done.metrics["train/shown"].startswith("=== ") and "[TOOL CALL]" in done.metrics["train/shown"],
    ),
    "_use_sandbox_backend: true": ("sandbox_choice", (), lambda done: done.rewards == [[0.75]]),
    "_use_sandbox_backend: false": (
        "sandbox_choice",
        ("--env.verify_in_sandbox", "false"),
        lambda done: done.rewards == [[0.25]],
    ),
    "_collect_trajectory_local": ("collect_paths", (), hinted),
    "_collect_trajectory_sandbox": (
        "collect_paths",
        ("--env.sandbox", "true"),
        lambda done: done.rewards == [[0.5, 0.5]],
    ),
    "_collect_trajectory_sandbox: a slot of its own": (
        "own_slot",
        ("--env.tool_pool_mode", "local"),
        lambda done: done.rewards == [[1.0, 1.0]],
    ),
    "process_manager": ("process_manager", (), kept_alive),
    "postprocess_histories": (
        "postprocess",
        (),
        lambda done: done.rewards == [[-0.25, 0.25]] * 2 and done.groups[0].trajectories[0].turns != [],
    ),
    "wandb_log": ("wandb_figures", (), logged),
    "add_rollouts_for_wandb": ("wandb_rollouts", (), lambda done: done.metrics["train/kept"] == "the best of best-1"),
    "super().collect_trajectory": ("wandb_rollouts", (), lambda done: done.rewards == [[2.0, 0.5]]),
    "super().collect_trajectories": ("postprocess", (), lambda done: len(done.groups) == 2),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_of_the_contract_is_called(hook: str, tmp_path: Path) -> None:
    script, flags, proves = HOOKS[hook]
    done = run_script(SCRIPTS / f"{script}_env.py", tmp_path, *flags)
    assert done.code == 0, done.stderr
    assert proves(done), (done.rewards, done.metrics, done.stderr)


def test_there_is_a_script_for_every_hook() -> None:
    used = {f"{script}_env.py" for script, _, _ in HOOKS.values()} | {"env_manager_env.py"}
    assert {path.name for path in SCRIPTS.glob("*_env.py")} == used


async def test_env_manager_surrounds_serve(tmp_path: Path) -> None:
    async with serving() as url, Talk(url) as api:
        await api.post("/register", trainer(starting_step=0, max_token_len=1 << 16, num_steps=1, batch_size=2))
        flags = ["--env.rollout_server_url", url, "--env.allow_placeholder_tokens", "true", "--tasks", "1"]
        script = SCRIPTS / "env_manager_env.py"
        running = asyncio.to_thread(run_script, script, tmp_path, *flags, command="serve")
        done = asyncio.create_task(running)
        while not done.done() and (await api.get("/batch"))["batch"] is None:  # noqa: ASYNC110 - the wire has only this
            await asyncio.sleep(0.05)
        done = await done
    assert done.code == 0, done.stderr
    assert kept_alive(done)
    assert f"{1 << 16} tokens at most" in (tmp_path / "service.txt").read_text()
