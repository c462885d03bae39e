"""Trying the miniature tasks as `palaestra env import` does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from palaestra.envs.config.build import make_pool
from palaestra.envs.policy_runs import policy_runs
from palaestra.rollouts.records import Group, Trajectory
from palaestra_audit.cheats.cheat import Cheat
from palaestra_audit.cheats.proof import CheatPolicy
from palaestra_slots.core.types import Message, ToolStep
from palaestra_suites.terminal_bench.find_tasks import LeftOut
from palaestra_suites.terminal_bench.import_tasks import TriedTask
from palaestra_suites.terminal_bench.import_tasks import try_tasks as try_all
from palaestra_suites.terminal_bench.terminalbench_2 import TerminalBenchEnvironment
from palaestra_suites.terminal_bench.terminalbench_2_config import TerminalBench2EvalConfig
from palaestra_suites.toolchain.toolchain import DependencyCache
from palaestra_tokens.chat_server import SessionContext
from palaestra_tokens.engines.scripted import Act, OraclePolicy, Policy
from suites.terminal_bench.mini import HARBOR

collect_ignore = ["tasks"]

Try = Callable[..., dict[str, TriedTask]]


@pytest.fixture
def try_tasks(installed_pytest: DependencyCache, tmp_path: Path) -> Try:
    """Try tasks of a source as `palaestra env import` does; the lines by name. `settings` are the environment's."""

    def run(source: Path | str = HARBOR, **settings: object) -> dict[str, TriedTask]:
        own = {"base_image": "host", "cache_dir": str(tmp_path / "cache"), "dataset_name": str(source)}
        config = TerminalBench2EvalConfig(**{**own, **settings})  # type: ignore[arg-type]

        async def main() -> dict[str, TriedTask]:
            async with make_pool(config) as pool:
                environment = TerminalBenchEnvironment(config, installed_pytest)
                await environment.sort_out()
                refused = [each for each in environment.left_out if isinstance(each, LeftOut)]
                report = await try_all(environment, pool, refused)
            return {line.name: line for line in report.lines}

        return asyncio.run(main())

    return run


class StepScripts(Policy):
    """Runs one script in the terminal for each step."""

    def __init__(self, scripts: Sequence[str]) -> None:
        self._scripts = scripts

    def act(self, context: SessionContext, messages: Sequence[Message]) -> Act:
        if messages[-1].get("role") != "user":
            return "Done."
        asked = sum(message.get("role") == "user" for message in messages)
        return [ToolStep("terminal", {"command": self._scripts[asked - 1], "timeout": 60})]


def played(
    task: Path,
    packages: DependencyCache,
    tmp_path: Path,
    policy: Policy | None = None,
    begun: Callable[[], None] = lambda: None,
) -> Group:
    """One rollout of a task's own solution, or of another policy. `begun` is called once the pool has started."""
    config = TerminalBench2EvalConfig(dataset_name=str(task), base_image="host", cache_dir=str(tmp_path / "cache"))

    async def main() -> Group:
        async with make_pool(config) as pool:
            begun()
            environment = TerminalBenchEnvironment(config, packages)
            await environment.open()
            async with policy_runs(environment, pool) as runs:
                return await runs.play(policy or OraclePolicy(), await anext(environment.tasks()))

    return asyncio.run(main())


def played_all(
    tasks: Path,
    packages: DependencyCache,
    tmp_path: Path,
    works: Mapping[str, str | Sequence[str]] | None = None,
    **settings: object,
) -> dict[str, Trajectory]:
    """One rollout of every task in a folder, by the task's name: of a script in `works`, of one for each step, or of
    the task's own solution."""
    own = {"dataset_name": str(tasks), "base_image": "host", "cache_dir": str(tmp_path / "cache")}
    config = TerminalBench2EvalConfig(**{**own, **settings})  # type: ignore[arg-type]

    def policy(name: str) -> Policy:
        if works is None:
            return OraclePolicy()
        work = works[name]
        return CheatPolicy(Cheat(name, name, work)) if isinstance(work, str) else StepScripts(work)

    async def main() -> dict[str, Trajectory]:
        async with make_pool(config) as pool:
            environment = TerminalBenchEnvironment(config, packages)
            await environment.open()
            async with policy_runs(environment, pool) as runs:
                wanted = [task async for task in environment.tasks()]
                groups = [await runs.play(policy(task.id), task) for task in wanted]
        assert all(group.trajectories for group in groups), [group.error for group in groups if group.error]
        return {group.trajectories[0].task_id: group.trajectories[0] for group in groups}

    return asyncio.run(main())
