"""Playing rows of a data set of bug fixes, by the oracle and by doing nothing."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from palaestra.envs.config.build import make_pool
from palaestra.envs.discovery import load_environment
from palaestra.envs.policy_runs import PolicyRuns, first_tasks, parse_settings, policy_runs
from palaestra.envs.run.run import opened
from palaestra_slots.core.types import Task
from palaestra_tokens.engines.scripted import NoopPolicy, OraclePolicy, Policy
from palaestra_tokens.server_group import ServerGroup


@dataclass(frozen=True)
class Rewards:
    """The rewards of both policies on a row, and the reason if they are not 1 and 0. A reward is None if the rollout
    has no score. `seconds` is the time of both, with the preparation of the row."""

    oracle: float | None
    noop: float | None
    reason: str
    seconds: float = 0.0


async def play(title: str, settings: Sequence[str], ids: Sequence[str], workers: int) -> dict[str, Rewards]:
    """Play both policies over the rows of `swe_smith_oracle` with these settings, `workers` rows at a time. Returns the
    rewards by the row's id; rows that the environment left out are missing."""
    form, width = load_environment("swe_smith_oracle", Path.cwd()), asyncio.Semaphore(workers)
    parsed = parse_settings(title, list(settings), env_type=form.config_type())
    engine = ServerGroup(parsed.server_configs)

    async def reward(runs: PolicyRuns, policy: Policy, task: Task) -> tuple[float | None, str]:
        group = await runs.play(policy, task)
        played = group.trajectories[0] if group.trajectories else None
        return (played.reward, played.error or str(played.detail)) if played else (None, str(group.error))

    async def both(runs: PolicyRuns, task: Task) -> Rewards:
        async with width:
            started = time.monotonic()
            noop, noop_error = await reward(runs, NoopPolicy(), task)
            oracle, oracle_error = await reward(runs, OraclePolicy(), task)
        reason = "" if (oracle, noop) == (1.0, 0.0) else oracle_error if oracle != 1.0 else noop_error
        print(f"{task.id}: oracle {oracle}, noop {noop} {reason[:600]}", file=sys.stderr, flush=True)
        return Rewards(oracle, noop, reason, time.monotonic() - started)

    async with contextlib.aclosing(engine), make_pool(parsed.env_config, local=True) as pool:
        await engine.start()
        environment = form.build(parsed.env_config, parsed.server_configs, engine)
        async with opened(environment), policy_runs(environment, pool) as runs:
            tasks = [task for task in await first_tasks(environment, len(ids)) if task.id in ids]
            rewards = await asyncio.gather(*(both(runs, task) for task in tasks))
            return dict(zip((task.id for task in tasks), rewards, strict=True))
