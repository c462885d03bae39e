"""Proving an environment (invariant R3): the oracle scores full; doing nothing and every cheat score at most the floor.

Each policy plays the same few tasks through the real loop, tools, slots and grading. An environment whose tasks have no
solution is run without the oracle and called unproven.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from palaestra.core.errors import ConfigError
from palaestra.core.literals import number
from palaestra.core.types import JSON, Message, Task, ToolStep
from palaestra.envs.cheats.bank import BANK
from palaestra.envs.cheats.cheat import Cheat
from palaestra.inference.config import APIServerConfig
from palaestra.inference.engine import SessionContext
from palaestra.inference.engines.policies import Act, NoopPolicy, OraclePolicy, Policy
from palaestra.inference.engines.scripted import ScriptedEngine
from palaestra.rollouts.admission import AdmittedSlots
from palaestra.rollouts.environment import Environment
from palaestra.rollouts.group import GroupRun, Services
from palaestra.rollouts.journal.journal import Journal
from palaestra.rollouts.observe.console import NullObserver
from palaestra.rollouts.records import Group
from palaestra.rollouts.shared_setup import Foundations
from palaestra.sandbox.pool import SlotPool

FULL = 1.0
"""What the oracle must score."""


class CheatPolicy:
    """Runs one cheat in the terminal, then says that the work is done."""

    def __init__(self, cheat: Cheat) -> None:
        self._cheat = cheat

    async def start(self) -> None:
        """Nothing to read."""

    def act(self, context: SessionContext, messages: Sequence[Message]) -> Act:
        if any(message.get("role") == "assistant" for message in messages):
            return "Done."
        asked = "\n".join(str(message.get("content")) for message in messages if message.get("role") == "user")
        known = f"export TASK={shlex.quote(asked)}\n" if "$TASK" in self._cheat.script else ""
        return [ToolStep("terminal", {"command": known + self._cheat.script, "timeout": 60})]


@dataclass(frozen=True, slots=True)
class Line:
    """What one policy got. `rewards` has None where the rollout could not be scored, and then `error` says why."""

    policy: str
    what: str
    wanted: str
    rewards: tuple[float | None, ...]
    ok: bool
    error: str = ""


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of a check. `proven` is False where there was no solution to play."""

    environment: str
    tasks: tuple[str, ...]
    lines: tuple[Line, ...]
    proven: bool

    @property
    def holds(self) -> bool:
        """Whether every policy got what it must get."""
        return all(line.ok for line in self.lines)

    def to_json(self) -> dict[str, JSON]:
        """For machines."""
        return {**asdict(self), "holds": self.holds}


@dataclass(slots=True)
class Check:
    """One check of one environment, over an open pool."""

    environment: Environment
    pool: SlotPool
    cheats: Sequence[Cheat] = BANK
    progress: Callable[[Line], None] = lambda line: None
    _lines: dict[str, Line] = field(default_factory=dict)

    async def run(self, count: int) -> Proof:
        """Play `count` tasks with every policy. Raises `ConfigError` when there is no task."""
        tasks = await first_tasks(self.environment, count)
        slots = AdmittedSlots(self.pool, self.pool.total_slots)
        with tempfile.TemporaryDirectory() as folder:
            journal = Journal(Path(folder, "journal.jsonl"))
            try:
                solved = await self._play_all(tasks, slots, journal)
            finally:
                journal.close()
        lines = tuple(self._lines[name] for name in (*self._policies(solved),))
        return Proof(self.environment.name, tuple(task.id for task in tasks), lines, solved)

    async def _play_all(self, tasks: Sequence[Task], slots: AdmittedSlots, journal: Journal) -> bool:
        foundations = Foundations(slots)
        resolved = [await self.environment.resolve(task) for task in tasks]
        solved = all(task.solution is not None for task in resolved)
        width = asyncio.Semaphore(os.cpu_count() or 1)

        async def play(name: str, policy: Policy) -> None:
            async with width:
                engine = ScriptedEngine(APIServerConfig(server_type="scripted", model_name="noop"), policy)
                services = Services(
                    engine=engine, slots=slots, journal=journal, observer=NullObserver(), foundations=foundations
                )
                groups = [await GroupRun(self.environment, services, n, task).run() for n, task in enumerate(tasks)]
            line = self._judge(name, list(zip(tasks, groups, strict=True)))
            self._lines[name] = line
            self.progress(line)

        try:
            async with asyncio.TaskGroup() as group:
                for name, policy in self._policies(solved).items():
                    group.create_task(play(name, policy))
        finally:
            await foundations.aclose()
        return solved

    def _policies(self, solved: bool) -> Mapping[str, Policy]:
        oracle: dict[str, Policy] = {"oracle": OraclePolicy()} if solved else {}
        return {**oracle, "noop": NoopPolicy(), **{cheat.name: CheatPolicy(cheat) for cheat in self.cheats}}

    def _judge(self, name: str, groups: Sequence[tuple[Task, Group]]) -> Line:
        played = [(task, trajectory) for task, group in groups for trajectory in group.trajectories]
        rewards = tuple(trajectory.reward for _, trajectory in played)
        errors = [group.error for _, group in groups] + [trajectory.error for _, trajectory in played]
        error = next(filter(None, errors), "")
        good = len(played) == len(groups)  # what was not played is no proof
        if name == "oracle":
            good = good and all(reward is not None and reward >= FULL for reward in rewards)
            return Line(name, "the reference solution", f"{FULL:g}", rewards, good, error)
        good = good and all(each.reward is None or each.reward <= task.floor for task, each in played)
        what = next((cheat.what for cheat in self.cheats if cheat.name == name), "doing nothing")
        if name == "noop":
            good = good and None not in rewards
        return Line(name, what, f"<= {max(task.floor for task, _ in groups):g}", rewards, good, error)


async def first_tasks(environment: Environment, count: int) -> list[Task]:
    """The first tasks of an open environment."""
    tasks: list[Task] = []
    async for task in environment.tasks():
        if number(task.floor) is None:
            raise ConfigError(f"task {task.id}: its floor {task.floor!r:.100} is no number")
        tasks.append(task)
        if len(tasks) == count:
            break
    if not tasks:
        raise ConfigError(f"environment {environment.name} has no tasks to check")
    return tasks
