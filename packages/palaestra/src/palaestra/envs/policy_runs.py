"""Plays policies on the tasks of an open environment, for commands that do not start a run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from palaestra.envs.config.command_line import CommandLine, Parsed
from palaestra.envs.config.dotenv import read_keys, shell_variables
from palaestra.envs.config.fields import BaseEnvConfig, HermesAgentEnvConfig
from palaestra.envs.run.run_folder import RunLine
from palaestra.rollouts.environment import Environment
from palaestra.rollouts.events import Subscriber
from palaestra.rollouts.group import GroupRun
from palaestra.rollouts.journal.journal import EventStream, Journal
from palaestra.rollouts.records import Group
from palaestra.rollouts.spec import RunContext
from palaestra.rollouts.workspaces import Workspaces
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON, Task, number
from palaestra_slots.sandbox.pool import SlotPool
from palaestra_slots.sandbox.slot import Snapshot
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engines.scripted import Policy, ScriptedEngine

FULL = 1.0
"""The least reward that the oracle must get."""


class PolicyRuns:
    """Plays policies on tasks of an open environment. Each policy plays each task as a separate group. If `prepared` is
    given, the workspace of a task is prepared only once and kept there, as for the rollouts of one group."""

    def __init__(
        self,
        environment: Environment,
        workspaces: Workspaces,
        events: EventStream,
        prepared: dict[str, Snapshot] | None = None,
    ) -> None:
        self.prepared = prepared
        """The prepared workspaces by task id; None if each play prepares its own."""
        self._environment = environment
        self._workspaces = workspaces
        self._events = events

    async def play(self, policy: Policy, task: Task, number: int = 0) -> Group:
        """Play one group and return it; `number` is the group's position in the run."""
        engine = ScriptedEngine(APIServerConfig(server_type="scripted", model_name="noop"), policy)
        context = RunContext(engine, self._workspaces, self._events)
        return await GroupRun(self._environment, context, number, task, snapshots=self.prepared).run()


@asynccontextmanager
async def policy_runs(
    environment: Environment,
    pool: SlotPool,
    workspaces: Workspaces | None = None,
    *subscribers: Subscriber,
    prepare_once: bool = False,
) -> AsyncIterator[PolicyRuns]:
    """Yield a `PolicyRuns` over an open pool, with a temporary journal. The default workspaces keep nothing. With
    `prepare_once`, all policies that play a task start from the same prepared workspace."""
    workspaces = workspaces or Workspaces(pool)
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder, "journal.jsonl"))
        prepared: dict[str, Snapshot] = {}
        try:
            events = EventStream(journal, *subscribers)
            yield PolicyRuns(environment, workspaces, events, prepared if prepare_once else None)
        finally:
            for snapshot in prepared.values():
                await pool.snapshots.forget(snapshot)
            await workspaces.aclose()
            journal.close()


async def first_tasks(environment: Environment, count: int | None, *, unique: bool = False) -> list[Task]:
    """Return the first `count` tasks of an open environment (None: all). Raises `ConfigError` if there are no tasks, if
    a task's floor is not a number, and, for `unique` ids, if two tasks have the same one."""
    tasks: list[Task] = []
    known: set[str] = set()
    async for task in environment.chosen_tasks():
        if unique and task.id in known:
            raise ConfigError(f"environment {environment.name} has two tasks with the id {task.id!r}; ids must differ")
        known.add(task.id)
        if number(task.floor) is None:
            raise ConfigError(f"task {task.id}: its floor {task.floor!r:.100} is not a number")
        tasks.append(task)
        if len(tasks) == count:
            break
    if not tasks:
        raise ConfigError(f"environment {environment.name} has no tasks to check")
    return tasks


def parse_settings(
    prog: str,
    settings: Sequence[str],
    *,
    env_type: type[BaseEnvConfig],
    env_values: Mapping[str, JSON] | None = None,
) -> RunLine:
    """Parse the settings of an environment, for a command that does not start a run. Raises `ConfigError`."""
    dotenv = read_keys(Path.cwd())
    parsed = CommandLine(
        prog=prog,
        env_type=env_type,
        server_type=APIServerConfig,
        env_values=env_values or {},
        command="process",
    ).parse(["process", "--policy", "noop", *settings], shell_variables(dotenv), dotenv)
    if not isinstance(parsed, Parsed) or parsed.dry_run:
        raise ConfigError("only settings are accepted here; use --help, --show-config and --dry-run with palaestra run")
    if isinstance(parsed.env_config, HermesAgentEnvConfig):
        parsed.env_config.take_variables({**dotenv, **os.environ})
    return parsed
