"""Evaluates the environment every `steps_per_eval` steps during a run.

Each evaluation has its own folder in the run's folder, with a journal and result files. `eval_handling` decides how
much of the run continues meanwhile. Groups in flight always finish; new groups wait (`STOP_TRAIN`), are limited to a
share of the workers (`LIMIT_TRAIN`), or are not affected (`NONE`). Invariant: a failed evaluation is reported and never
ends the run.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from palaestra.envs.config.fields import BaseEnvConfig, EvalHandlingEnum
from palaestra.envs.run.evaluate import EvaluatedEnvironment, Evaluation, in_short, save_evaluation
from palaestra.rollouts.events import GroupBegun, GroupFinished, Handlers, RunEnded, RunStarted
from palaestra.rollouts.journal.journal import EventStream, Journal
from palaestra.rollouts.limits import RunStopped
from palaestra.rollouts.resume.state import EarlierWork
from palaestra.rollouts.runner import Totals
from palaestra.rollouts.spec import RecordedTools, RunContext
from palaestra_slots.core.cancel_scope import end_tasks
from palaestra_slots.core.errors import ConfigError, PalaestraError
from palaestra_slots.core.types import numeric_values

EVALUATIONS = "evaluations"
"""The folder of the evaluations in a run's folder."""


class PeriodicEvaluation:
    """The evaluations of one run. `workers` is the maximum number of groups in flight in the run. `step` returns the
    trainer's step; if it is None, finished groups are counted instead. `log` receives the metrics."""

    def __init__(
        self,
        environment: EvaluatedEnvironment,
        context: RunContext,
        config: BaseEnvConfig,
        folder: Path,
        workers: int,
        log: Callable[[Mapping[str, float]], None],
        *,
        recorded_tools: Callable[[], RecordedTools] = RecordedTools,
        step: Callable[[], int] | None = None,
    ) -> None:
        self._environment = environment
        self._context = context
        self._config = config
        self._folder = folder / EVALUATIONS
        self._workers = workers
        self._eval_workers = config.evaluation_workers(workers)
        self._log = log
        self._recorded_tools = recorded_tools
        self._step = step
        self._finished = 0
        self._last = 0
        self._in_flight: set[str] = set()
        self._evaluating = False
        self._over = False
        self._due = asyncio.Event()
        self._admitted = 0
        self._room = asyncio.Event()

    def handlers(self) -> Handlers:
        return {GroupBegun: self._on_begun, GroupFinished: self._on_finished}

    def _on_begun(self, event: GroupBegun) -> None:
        self._in_flight.add(event.group.group_id)
        self._admitted = max(0, self._admitted - 1)

    def _on_finished(self, event: GroupFinished) -> None:
        self._in_flight.discard(event.group.group_id)
        self._finished += 1
        self._due.set()
        self._room.set()

    async def during(self, roll_out: Callable[[], Awaitable[Totals]]) -> Totals:
        """Roll out, and run the evaluations that become due. Returns after the last of them has finished."""
        self._context.events.subscribe(self)
        evaluating = asyncio.create_task(self._evaluations(), name="evaluations")
        try:
            totals = await roll_out()
            self._over = True
            self._due.set()
            await evaluating
            return totals
        finally:
            await end_tasks(evaluating)

    async def gate(self) -> bool:
        """Wait until an evaluation leaves room for another group of the run. Always returns True."""
        while not self._has_room():
            self._room.clear()
            await self._room.wait()
        # A group that has passed the gate is in flight only when it begins, and others may ask before that.
        self._admitted += 1
        return True

    def _has_room(self) -> bool:
        handling = self._config.eval_handling
        if not self._evaluating or handling is EvalHandlingEnum.NONE:
            return True
        if handling is EvalHandlingEnum.STOP_TRAIN:
            return False
        return len(self._in_flight) + self._admitted < max(1, int(self._workers * (1 - self._config.eval_limit_ratio)))

    async def _evaluations(self) -> None:
        every = self._config.steps_per_eval
        while True:
            await self._due.wait()
            self._due.clear()
            step = self._finished if self._step is None else self._step()
            step -= step % every
            if step > self._last:
                self._last = step
                self._evaluating = True
                try:
                    await self._evaluate(step)
                finally:
                    self._evaluating = False
                    self._room.set()
            elif self._over:
                return
            # The run has ended, so no group sets the event any more: look once more, and end.
            if self._over:
                self._due.set()

    async def _evaluate(self, step: int) -> None:
        folder, note = self._folder / f"step-{step:06d}", self._context.events.note
        if (folder / "metrics.json").exists():  # done in an earlier part of the run
            return
        try:
            evaluation = await self._rolled_out(folder)
            if evaluation.logged:
                save_evaluation(evaluation.logged, folder, self._context.engine.name)
        except RunStopped:
            return
        except PalaestraError as error:
            note(f"the evaluation at step {step} failed: {error}")
            if self._config.only_tasks and isinstance(error, ConfigError):
                self._last = sys.maxsize  # no chosen task is held out, so each later evaluation would fail too
            return
        shown = "it logged no metrics"
        if evaluation.logged:
            metrics = evaluation.logged["metrics"]
            self._log({f"eval/{name.removeprefix('eval/')}": value for name, value in numeric_values(metrics).items()})
            shown = in_short(metrics)
        note(f"evaluation at step {step} in {folder}: {shown}".removesuffix(": "))

    async def _rolled_out(self, folder: Path) -> Evaluation:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "journal.jsonl").unlink(missing_ok=True)  # left by an evaluation that was interrupted
        context, journal, recorded_tools = self._context, Journal(folder / "journal.jsonl"), self._recorded_tools()
        name = self._environment.name
        started = RunStarted(
            at=time.time(), run_id=folder.name, env=name, model=context.engine.name, seed=context.settings.seed
        )
        reason = "failed"
        try:
            journal.append(started)
            own = replace(
                context,
                # Costs and failures of an evaluation count for the run. Its other subscribers must not take the groups
                # for the run's.
                events=EventStream(journal, context.limits),
                earlier=EarlierWork(),
                recorded_tools=recorded_tools,
            )
            evaluation = Evaluation(self._environment, own, self._eval_workers, lambda group: None, context.limits.gate)
            await evaluation.run()
            reason = "done"
            return evaluation
        finally:
            recorded_tools.close()
            with suppress(PalaestraError):
                journal.append(RunEnded(at=time.time(), reason=reason))
            journal.close()
