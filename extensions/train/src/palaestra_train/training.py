"""`Training` repeats these steps: roll out tasks, turn their groups into rows with advantages, take an optimizer step,
and sample with the new weights.

`Training` changes only the order in which a run takes its tasks, so slots, sealed grading and the journal work as in
every run. Everything that a step does follows from the seed, the settings and the recorded groups. A resumed training
run therefore continues from its last checkpoint by repeating the same steps: groups in the journal are not rolled out
again, and interrupted rollouts continue. No step is lost, and no step counts twice in the weights.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import statistics
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TypeAlias

from palaestra.rollouts.events import MetricsLogged
from palaestra.rollouts.export.token_rows import ExportedRow
from palaestra.rollouts.limits import RunStopped
from palaestra.rollouts.observe.console import duration
from palaestra.rollouts.observe.intervals import in_words, interval_of, mean_interval, with_interval
from palaestra.rollouts.observe.training_steps import EVALUATION, FOLDER, STEP, WARM_START, read_steps
from palaestra.rollouts.records import Group
from palaestra.rollouts.runner import Runner, Totals
from palaestra.rollouts.spec import RunSettings
from palaestra_slots.core.errors import ConfigError, TrainerError
from palaestra_slots.core.types import Task
from palaestra_train.advantages import EQUAL, Batch, Verdicts
from palaestra_train.checkpoints import StepGroups, TrainingFiles, TrainingState
from palaestra_train.config import TrainingConfig
from palaestra_train.models.merge import weights_folder
from palaestra_train.rollouts_ahead import Drawn, RolloutsAhead
from palaestra_train.task_memory import next_task, remember
from palaestra_train.trainer import Trainer
from palaestra_train.warm_start import CrossEntropy, keep_rows, kept_rows, rows_of_step

logger = logging.getLogger(__name__)

Demonstrate: TypeAlias = Callable[[Sequence[Task], Sequence[Task]], Awaitable[list[ExportedRow]]]
"""Makes the rows of a warm start from the tasks to train on and the held-out tasks."""

_NEVER = (
    "no rollout has earned a reward above 0 so far. Either the tasks are too hard for this model, so that it needs a "
    "warm start on the reference solutions (`--warm-start oracle`), or the score is wrong: look at a rollout with "
    "`palaestra view last`, and at the score with `palaestra env check`"
)

_TOO_FEW = 0.1
"""The mean reward after a warm start below which more supervised steps are suggested."""

_LAST_DRAWS = 3
"""While no group of a step can be trained on, so many times as many groups are drawn: chance alone can make all of them
equal."""

_RECENT = 4
"""The number of steps that tell how many groups must be drawn for one that teaches something."""
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """How a training run ended. `before` and `after` are the mean rewards of its first and last evaluation, or None if
    there was no evaluation; `best` is the checkpoint with the best evaluation. `overhead` is the share of the time in
    which nothing sampled, trained or ran a command. `difference` is the largest mean difference of a row between the
    log-probabilities of sampler and trainer, in nats."""

    steps: int
    reason: str
    overhead: float
    difference: float
    before: float | None
    after: float | None
    best: Path | None
    last: Path


class Training:
    """One training run. `drive` is passed to `envs.run.run.run`; `result` is set when training has ended. `reference`
    returns the reward of a reference solution, or None if there is none. `demonstrate` makes the rows of a warm
    start."""

    def __init__(
        self,
        trainer: Trainer,
        config: TrainingConfig,
        reference: Callable[[], Awaitable[float | None]] | None = None,
        demonstrate: Demonstrate | None = None,
    ) -> None:
        if config.async_steps and not trainer.overlaps:
            raise ConfigError(f"the trainer {trainer.name} cannot sample during its steps: set async_steps to 0")
        self.trainer = trainer
        self.config = config
        self.busy = trainer.busy
        self.result: TrainingResult | None = None
        self._reference = reference
        self._demonstrate = demonstrate
        self._demonstrations: list[ExportedRow] = []
        self._losses: list[float] = []
        self._noted: set[str] = set()
        self._noted_weights = False
        self._evaluations: list[float] = []
        self._rewards: list[float] = []
        self._difference = 0.0

    async def drive(self, runner: Runner) -> Totals:
        """Train until the last step, an early stop, or the end of the run. Raises `TrainerError`, `ConfigError`,
        `DiskError` and the errors of a run; the training run can then be resumed."""
        began, busy = time.monotonic(), self.busy.seconds
        self._runner = runner
        self._files = TrainingFiles(runner.run_context.events.journal.path.parent / FOLDER)
        self._files.write_settings({"trainer": self.trainer.name, "training": self.config.recorded()})
        self._train, self._held_out = await self._split()
        await self._check_reference()
        self._state = await self._restored()
        pending = self._pending(self._state)
        runner.hand_on_finished(self._state.number, {number for number, _ in pending})
        reason, most = "done", (self.config.async_steps + 1) * self.config.groups
        self._places = asyncio.Semaphore(runner.concurrency)
        ahead = RolloutsAhead(self._one, self._draw, most)
        self._ahead = None
        if self._state.step == 0:
            runner.run_context.events.note(self._plan())
        try:
            await self._until(self.config.warm)  # nothing is rolled out ahead of it
            self._ahead = ahead if self.config.async_steps else None
            async with ahead.opened(pending) if self._ahead else nullcontext():
                await self._until(self.config.last_step)
        except _Done as done:
            reason = str(done)
        finally:
            runner.hand_on_finished()  # those drawn ahead by an earlier process, which no step took
        state = self._state
        if self._files.latest() != state:
            await self._save_checkpoint()
        self.result = TrainingResult(
            steps=state.step,
            reason=reason,
            overhead=1 - (self.busy.seconds - busy) / (time.monotonic() - began),
            difference=self._difference,
            before=self._evaluations[0] if self._evaluations else None,
            after=self._evaluations[-1] if self._evaluations else None,
            best=self._files.checkpoint(state.best_step) if state.best is not None else None,
            last=self._files.checkpoint(state.step),
        )
        return runner.totals

    def _plan(self) -> str:
        config, parts = self.config, []
        if config.warm:
            parts.append(f"{config.warm} supervised steps")
        if not config.only:
            every = f" (an evaluation every {config.eval_every})" if config.eval_every else ""
            parts.append(f"{config.steps} steps on rollouts{every}")
        return f"plan: {', then '.join(parts)}; {len(self._train)} tasks to train on, {len(self._held_out)} held out"

    async def _check_reference(self) -> None:
        if self._reference is not None and any(task.solution for task in self._train):
            reward = await self._reference()
            if reward is not None and reward <= 0:
                self._warn(
                    f"the reference solution of the first task earns {reward:g}, so a model cannot learn to earn more: "
                    "check the score with `palaestra env check`"
                )

    def _warn(self, text: str) -> None:
        logger.warning("%s", text)
        self._runner.run_context.events.note(f"warning: {text}")

    async def _until(self, last: int) -> None:
        """Take the steps up to the step `last`, with the evaluation before the first one."""
        state, config = self._state, self.config
        if state.step == 0 and last and config.eval_every:
            await self._evaluate(0)
        if state.step < config.warm:
            self._demonstrations = await self._demonstrated()
        while state.step < last:
            await (self._warm_step() if state.step < config.warm else self._train_step())
            done = state.step - config.warm
            due = config.eval_every and done >= 0 and (done % config.eval_every == 0 or state.step == config.last_step)
            better = await self._evaluate(state.step) if due else False
            if better or state.step % config.save_every == 0:
                await self._save_checkpoint()
            if due and config.target is not None and self._evaluations[-1] >= config.target:
                raise _Done(f"the evaluation reached {config.target:g}")
            if config.patience is not None and state.worse >= config.patience:
                raise _Done(f"none of the last {state.worse} evaluations was better")

    async def _demonstrated(self) -> list[ExportedRow]:
        """Return the rows of the warm start, which an earlier process may have written."""
        rows = kept_rows(self._files.path)
        if not rows:
            if self._demonstrate is None:
                raise ConfigError("a warm start needs demonstrations: start it with `palaestra train`")
            rows = await self._demonstrate(self._train, self._held_out)
            keep_rows(rows, self._files.path)
        replies = [sum(reply) for row in rows for learned, reply in groupby(row.mask) if learned]
        self._runner.run_context.events.note(
            f"warm start: {len(rows)} demonstrations, {sum(replies)} tokens to learn (the longest reply has "
            f"{max(replies)})"
        )
        return rows

    async def _warm_step(self) -> None:
        """Take a supervised step on demonstrations."""
        began, state, seed = time.monotonic(), self._state, self._runner.run_context.settings.seed
        with self.busy.working():
            rows = rows_of_step(self._demonstrations, state.step, self.config.groups, seed)
            learned = CrossEntropy()
            numbers = {**await self.trainer.step(rows, str(state.step + 1), learned.weigh), "loss": learned.nats}
        self._check_finite(numbers)
        state.step += 1
        self._losses.append(learned.nats)
        counts = {"rows": len(rows), "trained_tokens": sum(row.sampled for row in rows)}
        self._report_metrics(WARM_START, {**counts, "train_s": time.monotonic() - began, **numbers})

    def _check_finite(self, numbers: Mapping[str, float]) -> None:
        """Raise `TrainerError` if a step has ruined the weights."""
        for name in ("loss", "weight_norm"):
            if not math.isfinite(value := numbers.get(name, 0.0)):
                saved = self._files.latest()
                raise TrainerError(
                    f"step {self._state.step + 1}: the {name} is {value}, so the step is lost. Resume with a lower "
                    f"learning_rate; the training run continues after step {saved.step if saved else 0}"
                )

    async def _train_step(self) -> None:
        began, busy = time.monotonic(), self.busy.seconds
        state, config = self._state, self.config
        batch, groups = await self._collect()
        if not batch.rows:
            if config.eval_every and (state.step - config.warm) % config.eval_every:
                await self._evaluate(state.step)
            raise _Done(f"nothing is left to learn: each of {len(groups.taken)} groups has equal rewards")
        self._files.log_groups(groups)
        rolled_out = time.monotonic()
        with self.busy.working():
            weigh = batch.weighing(config, state.step + 1)
            numbers = await self.trainer.step(batch.rows, str(state.step + 1), weigh)
            mismatch = batch.mismatch
            self._difference = max(self._difference, mismatch.largest)
        self._check_finite(numbers)
        if state.step == config.warm and not any(reward > 0 for reward in [*self._evaluations, *batch.rewards]):
            self._warn(_NEVER)
        state.step += 1
        if self._ahead is not None:
            self._ahead.release(len(groups.trained))
        ended = time.monotonic()
        self._rewards.append(statistics.fmean(batch.rewards))
        self._report_metrics(
            STEP,
            {
                "reward": self._rewards[-1],
                **batch.verdicts.numbers(),
                **mismatch.numbers(),
                "rows": len(batch.rows),
                "sampled_tokens": sum(row.sampled for row in batch.rows),
                "rollouts": batch.rollouts,
                "groups": batch.groups,
                "dull_groups": batch.refused[EQUAL],
                "completion_tokens": statistics.fmean(row.sampled for row in batch.rows),
                **batch.staleness(groups.version),
                **batch.refused,
                "rollout_s": rolled_out - began,
                "train_s": ended - rolled_out,
                "overhead": max(0.0, 1 - (self.busy.seconds - busy) / (ended - began)),
                **numbers,
            },
        )

    async def _collect(self) -> tuple[Batch, StepGroups]:
        """Take groups until there are enough to learn from, or `most_draws` is reached. The batch has no rows if all
        rewards of each group are equal, after steps that taught something. Raises `TrainerError` if there is nothing to
        learn from for another reason."""
        batch, config, state = Batch(), self.config, self._state
        found = StepGroups(
            step=state.step + 1, version=state.step, most_behind=config.most_behind, taken=[], trained=[]
        )
        most, recorded = math.ceil(config.groups * config.most_draws), self._files.step_groups.get(found.step)
        again = deque(recorded.taken if recorded else ())
        taught = any(each.trained for number, each in self._files.step_groups.items() if number < found.step)
        longest = most * (_LAST_DRAWS if taught else 1)
        while batch.groups < config.groups and len(found.taken) < (most if batch.groups else longest):
            if self._ahead is not None:
                groups = [await self._ahead.take(again.popleft() if again else None)]
            else:
                wanted = self._draws_for(config.groups - batch.groups, found.step)
                left = most - len(found.taken) % most
                groups = await self._roll_out(self._next_tasks(min(wanted, left)))
            for group in groups:
                rewards = [each.reward for each in group.scored if each.reward is not None]
                remember(state.rates, group.task_id, rewards, state.drawn)
                added = batch.groups < config.groups and batch.add(
                    group,
                    version=state.step,
                    most_behind=config.most_behind,
                    scaled=config.scale_advantages,
                    advantage=config.advantage,
                )
                found.taken.append(group.number)
                if added:
                    found.trained.append(group.number)
                elif self._ahead is not None:
                    self._ahead.release(1)
        for name in batch.late:
            self._runner.run_context.events.note(
                f"step {found.step}: group {name} is dropped, because weights more than {config.most_behind} versions "
                "old sampled it"
            )
        over = taught and any(reward > 0 for reward in batch.rewards) and batch.refused[EQUAL] == len(found.taken)
        if not batch.rows and not over:
            if not any(reward > 0 for reward in [*self._evaluations, *batch.rewards]):
                self._warn(_NEVER)
            reasons = ", ".join(f"{count} {name}" for name, count in batch.refused.items() if count)
            hint = (
                "all tasks are too hard or too easy for this model"
                if batch.refused[EQUAL]
                else "see `palaestra report`"
            )
            raise TrainerError(
                f"step {found.step}: none of {len(found.taken)} groups can be trained on ({reasons}); {hint}"
            )
        return batch, found

    def _draws_for(self, missing: int, step: int) -> int:
        """Return how many groups to draw so that about `missing` of them teach something, judging by the steps before
        this one: a second round of few rollouts takes nearly as long as the first."""
        recent = [each for number, each in self._files.step_groups.items() if step - _RECENT <= number < step]
        needed = sum(each.needed(self.config.groups) for each in recent)
        trained = sum(len(each.trained) for each in recent)
        return math.ceil(missing * needed / trained) if trained else missing

    async def _evaluate(self, step: int) -> bool:
        """Roll out the held-out tasks; return whether the mean reward is the best so far."""
        groups = await self._roll_out(self._held_out, self.config.eval_samples)
        by_task = [[each.reward for each in group.scored if each.reward is not None] for group in groups]
        rewards = [reward for task in by_task for reward in task]
        if not rewards:
            raise TrainerError(f"step {step}: no rollout of the {len(groups)} held-out tasks was scored")
        mean, state = statistics.fmean(rewards), self._state
        self._evaluations.append(mean)
        better = state.best is None or mean > state.best
        state.worse = 0 if better else state.worse + 1
        if better:
            state.best, state.best_step = mean, step
        rollouts = sum(len(group.trajectories) for group in groups)
        verdicts = Verdicts()
        for group in groups:
            verdicts.add(group.scored)
        counts = {"rollouts": rollouts, "unscored_rollouts": rollouts - len(rewards)}
        rewarded = with_interval("reward", mean, mean_interval(by_task))
        self._report_metrics(EVALUATION, {**rewarded, **verdicts.numbers(), **counts})
        return better

    async def _roll_out(self, tasks: Sequence[Task], group_size: int | None = None) -> list[Group]:
        """Return one group per task, in the order of the tasks. Groups are numbered before anything waits, so that a
        resumed training run assigns the same numbers. Raises `RunStopped` if the run must stop."""
        runner, first = self._runner, self._state.number
        self._state.number += len(tasks)
        settings = runner.run_context.settings
        if group_size is not None:
            settings = replace(settings, group_size=group_size)
        try:
            async with asyncio.TaskGroup() as group:
                running = [
                    group.create_task(self._one(first + place, task, settings)) for place, task in enumerate(tasks)
                ]
        except* RunStopped as stopped:
            raise stopped.exceptions[0] from None
        except* Exception as failures:
            raise _first_error(failures) from None
        return [each.result() for each in running]

    async def _one(self, number: int, task: Task, settings: RunSettings | None = None) -> Group:
        """Roll out one group, once there is a place for it."""
        runner = self._runner
        async with self._places:
            if runner.gate is not None and not await runner.gate():
                raise RunStopped(runner.run_context.limits.message)
            return await runner.roll_out(number, task, settings)

    def _draw(self) -> Drawn:
        """Draw the next group for the rollouts that are ahead."""
        assert self._ahead is not None
        (task,) = self._next_tasks(1, [each for _, each in self._ahead.pending])
        self._state.number += 1
        return self._state.number - 1, task

    def _next_tasks(self, count: int, taken: Sequence[str] = ()) -> list[Task]:
        """Draw the next tasks. If `replay` is 1, their order is random and drawn again for each pass over them;
        otherwise the memory chooses different ones as far as possible, and not those in `taken`."""
        settings, found = self._runner.run_context.settings, list[Task]()
        for _ in range(count):
            if self.config.replay == 1:
                passed, place = divmod(self._state.drawn, len(self._train))
                self._state.drawn += 1
                order = list(range(len(self._train)))
                random.Random(f"{settings.seed}:tasks:{passed}").shuffle(order)
                found.append(self._train[order[place]])
                continue
            rng = random.Random(f"{settings.seed}:tasks:{self._state.drawn}")
            self._state.drawn += 1
            out = {*taken, *(each.id for each in found)}
            found.append(
                next_task(
                    self._train,
                    self._state.rates,
                    self.config,
                    taken=out,
                    size=settings.group_size,
                    drawn=self._state.drawn,
                    rng=rng,
                )
            )
        return found

    def _pending(self, state: TrainingState) -> list[Drawn]:
        """Return the groups that were drawn before the checkpoint and not trained. Raises `ConfigError` if a task of
        theirs is missing."""
        tasks = {task.id: task for task in self._train}
        if lost := [task for _, task in state.pending if task not in tasks]:
            raise ConfigError(f"the environment no longer has the task {lost[0]}, of which rollouts have begun")
        return [(number, tasks[task]) for number, task in state.pending]

    async def _split(self) -> tuple[list[Task], list[Task]]:
        """Return the tasks to train on and the held-out tasks, which are disjoint by id."""
        config, tasks = self.config, dict[str, Task]()
        source = self._runner.env.chosen_tasks()
        try:
            async for task in source:
                tasks.setdefault(task.id, task)
                if len(tasks) >= config.max_tasks:
                    break
        finally:
            if isinstance(source, AsyncGenerator):
                await source.aclose()
        held_out = config.eval_tasks if config.eval_every else 0
        if len(tasks) <= held_out:
            raise ConfigError(
                f"{self._runner.env.name} has {len(tasks)} tasks, but {held_out} are to be held out for evaluation: "
                "lower eval_tasks, or set eval_every to 0"
            )
        for task in tasks.values():
            # The losses are those of one temperature, and a task may declare its own.
            own = self._runner.env.agent_of(task).temperature
            if own != self._runner.env.agent.temperature:
                raise ConfigError(
                    f"task {task.id} declares the temperature {own:g}, but a model is trained at one temperature: set "
                    "--env.agent_temperature instead"
                )
        return split_tasks(list(tasks.values()), held_out, self._runner.run_context.settings.seed)

    async def _restored(self) -> TrainingState:
        state = self._files.latest()
        if state is None:
            return TrainingState(trainer=self.trainer.name, model=self.trainer.model)
        state.check(self.trainer.name, self.trainer.model)
        await self.trainer.load(self._files.checkpoint(state.step), str(state.step))
        for line in read_steps(self._files.path.parent):
            if line["step"] <= state.step:
                curve = {EVALUATION: self._evaluations, STEP: self._rewards, WARM_START: self._losses}[line["kind"]]
                curve.append(line["loss" if line["kind"] == WARM_START else "reward"])
        self._runner.run_context.events.note(f"continues after step {state.step}")
        return state

    async def _save_checkpoint(self) -> None:
        if self._ahead is not None:
            self._state.pending = self._ahead.pending
        part = self._files.begin(self._state.step)
        await self.trainer.save(part)
        await asyncio.to_thread(self._files.commit, part, self._state, self.config.keep)
        self._note_weights(self._files.checkpoint(self._state.step))

    def _note_needs(self, kind: str, numbers: Mapping[str, float]) -> None:
        """Print what the steps of a kind need and when they end, after the first one of this process."""
        if kind == EVALUATION or kind in self._noted:
            return
        self._noted.add(kind)
        config, done = self.config, self._state.step
        seconds = numbers.get("rollout_s", 0.0) + numbers["train_s"]
        left = (config.warm if kind == WARM_START else config.last_step) - done
        memory = f" and the trainer {numbers['memory_gib']:.1f} GiB at most" if "memory_gib" in numbers else ""
        end = f"; {left} more end in about {duration(left * seconds)}, without evaluations" if left else ""
        self._runner.run_context.events.note(f"a step takes about {seconds:.0f} s{memory}{end}")

    def _note_weights(self, checkpoint: Path) -> None:
        """Print where the weights lie, after the first checkpoint of this process."""
        if self._noted_weights:
            return
        self._noted_weights = True
        with suppress(ConfigError):  # the weights of a service are not on this machine
            folder = weights_folder(checkpoint)
            self._runner.run_context.events.note(f"the weights of step {self._state.step} are in {folder}")

    def _report_metrics(self, kind: str, numbers: Mapping[str, float]) -> None:
        """Write the metrics to the file of steps, the trackers and the console."""
        events, step = self._runner.run_context.events, self._state.step
        self._files.log(kind, step, numbers)
        prefix = {EVALUATION: "training/eval/", WARM_START: "training/warm_start/"}.get(kind, "training/")
        named = {f"{prefix}{name}": value for name, value in numbers.items()}
        events.announce(MetricsLogged({"training/step": step, **named}))
        self._note_needs(kind, numbers)
        if kind == EVALUATION:
            known, curve = in_words(interval_of(numbers, "reward")), sparkline(self._evaluations)
            events.note(f"step {step}: held-out tasks {numbers['reward']:.3f}{known} {curve}")
            if 0 < self.config.warm == step < self.config.last_step and numbers["reward"] < _TOO_FEW:
                # Few groups then have rewards that differ, and a step on rollouts takes much longer than these steps.
                events.note(
                    "the model earns so little after the warm start that it will learn slowly; stop the run and give "
                    f"more than {step} --warm-steps"
                )
        elif kind == WARM_START:
            curve = sparkline(self._losses)
            events.note(
                f"warm start, step {step}/{self.config.warm}: {numbers['loss']:.3f} nats per token {curve} "
                f"{numbers['train_s']:.1f} s"
            )
        else:
            events.note(
                f"step {step}/{self.config.last_step}: reward {numbers['reward']:.3f} {sparkline(self._rewards)} "
                f"loss {numbers['loss']:.3g}, log-probabilities differ by {numbers['logprob_difference']:.1e}, "
                f"{numbers['rollout_s']:.1f} s + {numbers['train_s']:.1f} s"
            )


class _Done(Exception):
    """Raised if training ends before the last step; the text gives the reason."""


def split_tasks(tasks: Sequence[Task], held_out: int, seed: int) -> tuple[list[Task], list[Task]]:
    """Return the tasks to train on and the held-out tasks, drawn with the seed."""
    order = list(tasks)
    random.Random(f"{seed}:held-out").shuffle(order)
    return order[held_out:], order[:held_out]


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Return the curve of values as text, averaged to `width` bars. The scale is 0 to 1, or wider if values lie
    outside."""
    if not values:
        return ""
    size = max(1, math.ceil(len(values) / width))
    means = [statistics.fmean(values[at : at + size]) for at in range(0, len(values), size)]
    low, high = min(0.0, *means), max(1.0, *means)
    return "".join(_BARS[min(len(_BARS) - 1, int((mean - low) / (high - low) * len(_BARS)))] for mean in means)


def _first_error(failures: BaseExceptionGroup[Exception]) -> Exception:
    found = failures.exceptions[0]
    return _first_error(found) if isinstance(found, BaseExceptionGroup) else found
