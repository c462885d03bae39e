"""Which tasks of a folder can be trusted: doing nothing fails, and the reference solution passes.

Both are played through the real loop, slots and grading. A task whose solution passes only when it is graded in the
agent's own slot is about a running service, and is named as one; so is every other thing that is wrong with a task.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path

from palaestra.core.types import JSON, Task
from palaestra.inference.config import APIServerConfig
from palaestra.inference.engines.policies import NoopPolicy, OraclePolicy, Policy
from palaestra.inference.engines.scripted import ScriptedEngine
from palaestra.rollouts.admission import AdmittedSlots
from palaestra.rollouts.group import GroupRun, Services
from palaestra.rollouts.journal.journal import Journal
from palaestra.rollouts.observe.console import NullObserver
from palaestra.rollouts.shared_setup import Foundations
from palaestra.sandbox.pool import SlotPool
from palaestra.suites.terminal_bench.environment import TerminalBenchEnvironment
from palaestra.suites.terminal_bench.find_tasks import LeftOut

FULL = 1.0


class Finding(StrEnum):
    """What a task turned out to be."""

    GOOD = "good"
    NEEDS_LIVE = "needs live grading"
    UNPROVEN = "no solution to try"
    PAYS_FOR_NOTHING = "doing nothing passes"
    SOLUTION_FAILS = "its solution does not pass"
    VERIFIER_FAILS = "its verifier does not work"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Line:
    """One task. Rewards are None where there was none; `reason` says why a task is not good."""

    name: str
    finding: Finding
    noop: float | None = None
    solution: float | None = None
    reason: str = ""
    category: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """Every task of the source, in order, those that could not even be read included."""

    lines: tuple[Line, ...]

    @property
    def bad(self) -> tuple[Line, ...]:
        """The tasks that are not good."""
        return tuple(line for line in self.lines if line.finding is not Finding.GOOD)

    def to_json(self) -> dict[str, JSON]:
        """For machines."""
        return {"tasks": [asdict(line) for line in self.lines], "good": len(self.lines) - len(self.bad)}


@dataclass(frozen=True, slots=True)
class _Played:
    reward: float | None
    error: str
    ran: bool


class Proving:
    """Tries the tasks of one open environment, over an open pool."""

    def __init__(
        self,
        environment: TerminalBenchEnvironment,
        pool: SlotPool,
        *,
        width: int | None = None,
        progress: Callable[[Line], None] = lambda line: None,
    ) -> None:
        self._environment = environment
        self._slots = AdmittedSlots(pool, pool.total_slots)
        self._width = asyncio.Semaphore(width or os.cpu_count() or 1)
        self._progress = progress

    async def run(self, left_out: Sequence[LeftOut]) -> Report:
        """Try every task that the environment has; `left_out` are those that it could not read."""
        tasks = [task async for task in self._environment.tasks()]
        foundations = Foundations(self._slots)
        with tempfile.TemporaryDirectory() as folder:
            journal = Journal(Path(folder, "journal.jsonl"))
            try:
                async with asyncio.TaskGroup() as group:
                    tries = [group.create_task(self._line(task, journal, foundations)) for task in tasks]
            finally:
                await foundations.aclose()
                journal.close()
        refused = [Line(each.name, Finding.REFUSED, reason=each.reason) for each in left_out]
        for line in refused:
            self._progress(line)
        return Report((*(each.result() for each in tries), *refused))

    async def _line(self, task: Task, journal: Journal, foundations: Foundations) -> Line:
        async with self._width:
            line = await self._tried(task, journal, foundations)
        self._progress(line)
        return line

    async def _tried(self, task: Task, journal: Journal, foundations: Foundations) -> Line:
        async def play(policy: Policy, tried: Task) -> _Played:
            return await self._play(policy, tried, journal, foundations)

        line = Line(task.id, Finding.GOOD, category=task.data.category)
        noop = await play(NoopPolicy(), task)
        if not noop.ran:
            return replace(line, finding=Finding.REFUSED, reason=noop.error)
        line = replace(line, noop=noop.reward)
        if task.data.solution is None:
            return replace(line, finding=Finding.UNPROVEN)
        solved = await play(OraclePolicy(), task)
        line = replace(line, solution=solved.reward)
        if solved.reward is not None and solved.reward >= FULL:
            if noop.reward is None:
                return replace(line, finding=Finding.VERIFIER_FAILS, reason=noop.error)
            return replace(line, finding=Finding.PAYS_FOR_NOTHING if noop.reward >= FULL else Finding.GOOD)
        if solved.reward is not None and not task.data.live:
            live = await play(OraclePolicy(), replace(task, data=replace(task.data, live=True)))
            if live.reward is not None and live.reward >= FULL:
                reason = 'it passes in its own slot: name it in live_tasks, or set metadata.grading = "live"'
                return replace(line, finding=Finding.NEEDS_LIVE, reason=reason)
        fails = Finding.VERIFIER_FAILS if solved.reward is None else Finding.SOLUTION_FAILS
        return replace(line, finding=fails, reason=solved.error)

    async def _play(self, policy: Policy, task: Task, journal: Journal, foundations: Foundations) -> _Played:
        engine = ScriptedEngine(APIServerConfig(server_type="scripted", model_name="noop"), policy)
        services = Services(
            engine=engine, slots=self._slots, journal=journal, observer=NullObserver(), foundations=foundations
        )
        group = await GroupRun(self._environment, services, 0, task).run()
        if not group.trajectories:
            return _Played(None, group.error or "", False)
        trajectory = group.trajectories[0]
        error = trajectory.error or str(trajectory.detail.get("tampering") or trajectory.detail.get("output") or "")
        return _Played(trajectory.reward, error[-800:].strip() if not trajectory.error else error[:800], True)
