"""Tasks of several steps whose services run from the first step to the last one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from golden_messages import check_message, raises
from palaestra.envs.config.build import make_pool
from palaestra.envs.policy_runs import policy_runs
from palaestra_slots.core.errors import PrepareError
from palaestra_slots.core.types import Blame
from palaestra_slots.images.slot_commands import check_execute
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import SlotSpec
from palaestra_suites.terminal_bench.import_tasks import Finding
from palaestra_suites.terminal_bench.service import HealthCheck
from palaestra_suites.terminal_bench.service_group import wait_healthy
from palaestra_suites.terminal_bench.terminalbench_2 import TerminalBenchEnvironment
from palaestra_suites.terminal_bench.terminalbench_2_config import TerminalBench2EvalConfig
from palaestra_suites.toolchain.toolchain import DependencyCache
from palaestra_tokens.engines.scripted import OraclePolicy
from programs import killed_after, until
from sandbox.backends.test_local_lifetime import assert_gone
from sandbox.processes import descendants
from suites.terminal_bench.conftest import Try, played_all
from suites.terminal_bench.ledger import TOML, make_steps

pytestmark = pytest.mark.slots


def test_services_keep_their_state_from_step_to_step(try_tasks: Try, tmp_path: Path) -> None:
    """The second step has a verifier of its own, which reaches no service; the agent's slot runs on beside it."""
    make_steps(tmp_path / "tasks")
    line = try_tasks(tmp_path / "tasks")["ledger"]
    assert line.finding is Finding.GOOD, line.reason
    assert (line.noop, line.solution) == (0.0, 1.0)


async def test_rollouts_at_the_same_time_do_not_wait_for_each_others_places(
    installed_pytest: DependencyCache, tmp_path: Path
) -> None:
    """Each holds two slots while its verifiers need a third, and the pool has places for only one of them."""
    make_steps(tmp_path / "tasks")
    own = {"dataset_name": str(tmp_path / "tasks"), "base_image": "host", "cache_dir": str(tmp_path / "cache")}
    config = TerminalBench2EvalConfig(**own, slots=3)  # type: ignore[arg-type]
    async with make_pool(config) as pool, asyncio.timeout(100):
        environment = TerminalBenchEnvironment(config, installed_pytest)
        await environment.open()
        async with policy_runs(environment, pool) as runs:
            task = await anext(environment.tasks())
            groups = await asyncio.gather(*(runs.play(OraclePolicy(), task) for _ in range(2)))
        assert [group.trajectories[0].reward for group in groups] == [1.0, 1.0]
        assert (pool.available_slots, pool.get_stats()["acquired_slots"]) == (3, 0)
        assert pool.backend.stats()["slots"] == 0


@pytest.mark.parametrize(("strategy", "reward"), [("mean", 2 / 3), ("final", 0.0)], ids=["mean", "final"])
def test_rewards_of_steps_with_services_are_combined(
    installed_pytest: DependencyCache, tmp_path: Path, strategy: str, reward: float
) -> None:
    make_steps(tmp_path / "tasks", strategy, **{"steps/third/solution/solve.sh": "#!/bin/bash\ntrue\n"})
    done = played_all(tmp_path / "tasks", installed_pytest, tmp_path)["ledger"]
    assert (done.reward, done.official) == (pytest.approx(reward), pytest.approx(reward)), done.error
    assert [step["reward"] for step in done.detail["steps"]] == [1.0, 1.0, 0.0]
    assert all(step["services"]["ledger"]["exit_code"] is None for step in done.detail["steps"])


def test_an_early_step_that_fails_is_the_last_one(installed_pytest: DependencyCache, tmp_path: Path) -> None:
    make_steps(tmp_path / "tasks", **{"steps/first/solution/solve.sh": "#!/bin/bash\ntrue\n"})
    done = played_all(tmp_path / "tasks", installed_pytest, tmp_path)["ledger"]
    assert (done.reward, done.metrics["steps_verified"]) == (0.0, 1.0), done.error


def test_a_health_check_that_work_breaks_ends_the_steps(installed_pytest: DependencyCache, tmp_path: Path) -> None:
    """The third step waits for `two`; for Harbor, a step that cannot begin has no reward."""
    quick = TOML.replace("STRATEGY", "mean").replace("retries = 20", "retries = 1\ntimeout_sec = 1")
    make_steps(tmp_path / "tasks", **{"task.toml": quick})
    works = {"ledger": ["touch notes.txt; python3 /app/ask.py one", "true"]}
    done = played_all(tmp_path / "tasks", installed_pytest, tmp_path, works)["ledger"]
    assert [step["reward"] for step in done.detail["steps"]] == [1.0, 0.0, 0.0], done.error
    assert (done.reward, done.official) == (pytest.approx(1 / 3), 0.5)
    assert [label.name for label in done.labels] == ["set_up_failed"]


def test_a_health_check_of_the_first_step_that_fails_is_the_tasks_fault(
    installed_pytest: DependencyCache, tmp_path: Path
) -> None:
    check = '[steps.healthcheck]\ncommand = "false"\nretries = 1\ninterval_sec = 0.1\ntimeout_sec = 0.1\n'
    text = TOML.replace("STRATEGY", "mean").replace("min_reward = 1.0\n", f"min_reward = 1.0\n{check}")
    make_steps(tmp_path / "tasks", **{"task.toml": text})
    done = played_all(tmp_path / "tasks", installed_pytest, tmp_path)["ledger"]
    assert (done.reward, done.blame) == (None, Blame.TASK)
    assert "check of step first fails" in done.error


async def test_a_check_whose_directory_is_gone_has_not_succeeded() -> None:
    check = HealthCheck(("true",), interval_s=0.01, timeout_s=10.0, start_s=0.0, retries=1)
    async with LocalBackend() as backend:
        slot = await backend.create(SlotSpec(), "healthy")
        assert await wait_healthy(slot, check, "/workspace", 10.0) is None
        for spoil in ("rmdir /workspace", "touch /workspace"):
            await slot.execute(spoil, cwd="/")
            said = await wait_healthy(slot, check, "/workspace", 0.5)
            check_message(said or "", "directory")
            with raises(PrepareError, "set-up"):
                await check_execute(slot, "true", "the set-up failed", cwd="/workspace")


def test_a_killed_run_goes_on_and_leaves_nothing(tmp_path: Path) -> None:
    """The run is killed while its second step waits, and played to its end afterwards."""
    waiting = "#!/bin/bash\n[ -e /app/again ] || sleep 1.5\npython3 /app/ask.py two\n"
    make_steps(tmp_path / "tasks", **{"steps/second/solution/solve.sh": waiting})
    home = tmp_path / "tmp"
    home.mkdir()
    settings = ["--env.dataset_name", str(tmp_path / "tasks"), "--env.base_image", "host"]
    settings += ["--env.cache_dir", str(tmp_path / "cache"), "--policy", "oracle"]
    palaestra = [sys.executable, "-m", "palaestra"]
    command = [*palaestra, "run", "terminalbench_2", "evaluate", *settings]
    place: dict[str, Any] = {"cwd": tmp_path, "env": {**os.environ, "TMPDIR": str(home)}}

    def commands(pid: int) -> list[str]:
        found = []
        for process in descendants(pid):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                found.append(Path(f"/proc/{process.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
        return found

    with killed_after(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **place) as run:
        until(lambda: any("sleep 1.5" in each for each in commands(run.pid)), "the second step waits")
        pids = {process.pid for process in descendants(run.pid)}
    assert_gone(pids)
    done = subprocess.run([*command, "--resume", "last"], capture_output=True, text=True, **place)
    assert done.returncode == 0, done.stderr
    assert "mean reward 1.000" in done.stdout + done.stderr
    assert [path.name for path in home.iterdir()] == []
