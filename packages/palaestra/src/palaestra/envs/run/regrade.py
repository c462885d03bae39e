"""Scores the recorded work of a run again, without an agent, so that a corrected score function needs no new rollouts.

The run must have kept each rollout's sealed workspace (`save_workspaces`), unless the scores read only the
conversation. The workspace is graded as in the run: in a fresh sandbox, with the agent's changes over the prepared
workspace, but with the environment's current code. A judge is asked only questions that the run's recording does not
answer, and its replies are added to the recording. Invariant: the new scores of a run are stored together, after the
last rollout was graded, so an interrupted command changes no score.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from palaestra.agent.result import AgentResult, ToolError, Turn
from palaestra.envs.run.evaluate import EvaluatedEnvironment, Evaluation, HeldOutEnvironment, Logged, save_evaluation
from palaestra.envs.run.library import environment_form
from palaestra.envs.run.provenance import environment_hash
from palaestra.envs.run.replay_run import ReopenedRun, recorded_form, reopened, where_it_ran
from palaestra.envs.run.run_folder import REPORT_NAME, write_report
from palaestra.rollouts.annotations import append_lines
from palaestra.rollouts.environment import LIVE_PROCESSES, Environment
from palaestra.rollouts.finished_run import Run, located
from palaestra.rollouts.grading.grader import FILES, LIVE
from palaestra.rollouts.group import prompt_checksum
from palaestra.rollouts.journal.journal import encoded
from palaestra.rollouts.journal.reader import Recording, open_recording
from palaestra.rollouts.observe.last_metrics import last_metrics
from palaestra.rollouts.records import OF_MODELS, Group, Trajectory
from palaestra.rollouts.regraded import GRADE_SCHEMA, Grade, with_grade, write_grades
from palaestra.rollouts.rollout import Rollout
from palaestra.rollouts.spec import Phase, RolloutSpec, RunContext, Seeded
from palaestra.rollouts.workspaces import UNTOUCHED
from palaestra_slots.core.config import python_names
from palaestra_slots.core.errors import ConfigError, InfraError, PalaestraError, TaskError
from palaestra_slots.core.exits import plural
from palaestra_slots.core.types import JSON, Blame, Outcome, Score, Task, Usage, numeric_values
from palaestra_slots.sandbox.slot import Snapshot

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Regraded:
    """A rollout with the score that it had so far, and its new score. If it could not be graded, `score` is None and
    `error` gives the reason."""

    trajectory: Trajectory
    score: Score | None
    error: str = ""

    @property
    def changed(self) -> bool:
        """Whether the reward or the official verdict is different now."""
        if self.score is None:
            return False
        official = self.score.reward if self.score.official is None else self.score.official
        return (self.score.reward, official) != (self.trajectory.reward, self.trajectory.official_reward)


async def grade(env: object, trajectory: Trajectory, **settings: JSON) -> Score:
    """Score the stored workspace of a recorded rollout again with `env`. The run needs `save_workspaces=True`.

    The environment's settings are those of the run; arguments of `env`, and `settings` such as `reward="official"` or
    `graded_paths=["/root"]`, replace them. Raises `ConfigError` for a rollout that cannot be graded again, and
    `GraderError` if the check fails.
    """
    with python_names():
        if (kept := _kept_folder(trajectory)) is None:
            raise ConfigError(_lost(trajectory))
        recording = open_recording(kept.parents[2])
        with where_it_ran(recording):
            async with reopened(recording, environment_form(env), changed=settings, asks_models=True) as run:
                return await _Grader(run, recording).grade(trajectory)


async def regrade(
    run: Run,
    env: str | None = None,
    *,
    network: bool = False,
    settings: Mapping[str, JSON] = {},
    on_rollout: Callable[[Regraded], None] = lambda _: None,
) -> list[Regraded]:
    """Grade the rollouts of a run whose work was kept, in the order of the run's groups, and store the new scores. A
    rollout that cannot be graded keeps its score.

    If the run kept only the work of rollouts without a score, only these are graded, and their work is deleted once it
    has a score. `env` is the environment's file, if it has moved. `settings` replace those of the run. With `network`,
    tasks get the network access that they request. Raises `ConfigError`, also if no rollout can be graded, and
    `DiskError`.
    """
    recording = Recording(run.recording.path, as_recorded=True)
    groups = located(recording, run.path)
    recorded = [trajectory for group in groups for trajectory in group.trajectories]
    saved = _keeps_workspaces(recording, recorded)
    every = saved or not any(map(_is_kept_unscored, recorded))
    form = recorded_form(recording, env)
    found: list[Regraded] = []
    with where_it_ran(recording):
        async with reopened(recording, form, network=network, changed=settings, asks_models=True) as again:
            grader = _Grader(again, recording)
            if asked := await grader.asked_otherwise(groups):
                logger.warning(
                    "the prompt of %s (the first is %s) has changed since the work was done, so the new scores judge "
                    "answers to another question", plural(len(asked), "task"), asked[0],
                )  # fmt: skip
            wanted = [[each for each in group.trajectories if grader.is_wanted(each, every)] for group in groups]
            async for trajectory, score, error in grader.grades(wanted):
                found.append(Regraded(with_grade(trajectory, run.recording.grades), score, error))
                on_rollout(found[-1])
            before = {each.rollout_id: each.reward for group in wanted for each in group}
            code = _version(environment_hash(form.reference), settings)
            write_grades(run.path, [_grade(each, before[each.trajectory.rollout_id], code) for each in found])
            await _renew_files(run.path, again)
    if not saved:
        scored = (_kept_folder(each.trajectory) for each in found if each.score is not None)
        for kept in filter(None, scored):
            await asyncio.to_thread(shutil.rmtree, kept, ignore_errors=True)
    return found


def _keeps_workspaces(recording: Recording, recorded: Sequence[Trajectory]) -> bool:
    """Return whether the run kept the work of rollouts with a score."""
    if (recording.meta.config.get("env") or {}).get("save_workspaces"):
        return True
    # An earlier part of a resumed run may have had the setting.
    return any(each.reward is not None and _kept_folder(each) is not None for each in recorded)


def _version(code: str, settings: Mapping[str, JSON]) -> str:
    """Return the version of the score that this code gives with these settings."""
    return hashlib.sha256(code.encode() + encoded(settings)).hexdigest() if code and settings else code


def _grade(regraded: Regraded, before: float | None, code: str) -> Grade:
    score = regraded.score or Score(0.0)
    # What the rollout has cost stays as it was; the cost of grading is not its own.
    own = {name: value for name, value in regraded.trajectory.metrics.items() if name in OF_MODELS}
    metrics = {name: value for name, value in score.metrics.items() if name not in OF_MODELS}
    return Grade(
        schema=GRADE_SCHEMA,
        at=time.time(),
        rollout_id=regraded.trajectory.rollout_id,
        before=before,
        reward=None if regraded.score is None else score.reward,
        official=score.official,
        labels=list(score.labels),
        metrics=metrics | own,
        version=code,
        error=regraded.error,
    )


async def _renew_files(folder: Path, again: ReopenedRun) -> None:
    """Write the files that the run made of its scores again: the evaluation, the metrics of the whole run, and the
    report."""
    run, path = Run(folder), folder / "metrics.jsonl"
    metrics = last_metrics(path)
    own = {name: value for name, value in metrics.items() if name.startswith("eval/")}
    if (folder / "evaluation" / "metrics.json").is_file():
        try:
            logged = await _evaluated(again, run.groups)
        except PalaestraError as error:
            logger.warning("the figures in %s are those of the earlier scores: %s", folder / "evaluation", error)
        else:
            save_evaluation(logged, folder / "evaluation", run.recording.meta.model)
            figures = numeric_values(logged["metrics"])
            own |= {f"eval/{name.removeprefix('eval/')}": value for name, value in figures.items()}
    if metrics:
        line = {"time": time.time(), **metrics, **run.metrics, **own}
        append_lines(path, encoded(line) + b"\n")
    if (folder / REPORT_NAME).is_file():
        write_report(folder, folder / REPORT_NAME, own)


async def _evaluated(again: ReopenedRun, groups: Sequence[Group]) -> Logged:
    """Return the result of the run's evaluation with these groups. Raises `ConfigError`."""
    environment = again.environment
    if not isinstance(environment, HeldOutEnvironment):  # its `evaluate` may ask the model
        raise ConfigError(f"only {environment.name} itself can compute them, in a new evaluation")
    return await environment.evaluate(_FinishedEvaluation(environment, again.context, groups))


class _FinishedEvaluation(Evaluation):
    """An evaluation whose rollouts are those of a finished run."""

    def __init__(self, environment: EvaluatedEnvironment, context: RunContext, groups: Sequence[Group]) -> None:
        super().__init__(environment, context, 1, lambda _: None)
        self._groups = groups

    async def roll_out(
        self, environment: Environment, samples: int, first: int = 0, limit: int | None = None
    ) -> list[Group]:
        return [
            each for each in self._groups if first <= each.number and (limit is None or each.number < first + limit)
        ]


class _Grader:
    """Grades rollouts of one run in its open environment."""

    def __init__(self, run: ReopenedRun, recording: Recording) -> None:
        self._run = run
        self._folder = recording.path.parent.resolve()
        self._evaluates = recording.meta.config.get("command") == "evaluate"
        self._read: dict[str, Task] | None = None
        self._reading = asyncio.Lock()

    def is_wanted(self, trajectory: Trajectory, every: bool) -> bool:
        """Return whether the rollout is to be graded: with `every`, all rollouts that were scored."""
        if not self._run.environment.scores_read_sandbox:
            return trajectory.outcome.scored or trajectory.blame is Blame.GRADER
        return _is_kept_unscored(trajectory) or (every and trajectory.outcome.scored)

    async def asked_otherwise(self, groups: Sequence[Group]) -> list[str]:
        """Return the ids of the tasks whose prompts are not those for which the groups did their work."""
        tasks = await self._tasks()
        return [
            group.task_id for group in groups
            if group.asked and group.task_id in tasks and group.asked != prompt_checksum(tasks[group.task_id])
        ]  # fmt: skip

    async def obstacle(self, trajectory: Trajectory) -> str:
        """Return the reason why a rollout cannot be graded; empty if it can."""
        if not self.is_wanted(trajectory, every=True):
            return f"{trajectory.rollout_id} ended with {trajectory.outcome}, which is not scored"
        folder = _kept_folder(trajectory)
        if folder is None and self._run.environment.scores_read_sandbox:
            return _lost(trajectory)
        if folder is not None and not folder.resolve().is_relative_to(self._folder):
            return f"the workspace of {trajectory.rollout_id} is in {folder}, outside of {self._folder}"
        if trajectory.task_id not in await self._tasks():
            return f"{self._run.environment.name} no longer has the task {trajectory.task_id!r}"
        return ""

    async def grades(
        self, groups: Sequence[Sequence[Trajectory]]
    ) -> AsyncIterator[tuple[Trajectory, Score | None, str]]:
        """Grade rollouts, those of a group concurrently. Yields each with its score, or the reason why it has none.
        Raises `ConfigError` if none of them can be graded."""
        obstacles = {each.rollout_id: await self.obstacle(each) for group in groups for each in group}
        if obstacles and all(obstacles.values()):
            raise ConfigError(next(iter(obstacles.values())))
        for group in groups:
            tried = (self.try_grade(each, obstacles[each.rollout_id]) for each in group)
            for trajectory, (score, error) in zip(group, await asyncio.gather(*tried), strict=True):
                yield trajectory, score, error

    async def try_grade(self, trajectory: Trajectory, obstacle: str) -> tuple[Score | None, str]:
        """Grade one rollout. Returns its score, or the reason why it has none."""
        if obstacle:
            return None, obstacle
        try:
            return await self.grade(trajectory), ""
        except (InfraError, TaskError) as error:
            return None, f"{type(error).__name__}: {error}"

    async def grade(self, trajectory: Trajectory) -> Score:
        """Grade one rollout. Raises `ConfigError`, `GraderError` and other errors of grading."""
        if obstacle := await self.obstacle(trajectory):
            raise ConfigError(obstacle)
        environment, context = self._run.environment, self._run.context
        task = await environment.resolve((await self._tasks())[trajectory.task_id])
        if task.grading == LIVE:
            if trajectory.detail.get(LIVE_PROCESSES):
                raise TaskError(
                    f"{trajectory.rollout_id} was graded while its processes ran, and these are gone, so it cannot be "
                    "graded again"
                )
            task = replace(task, grading=FILES)
        spec, folder = environment.slot_spec(task, Phase.AGENT), _kept_folder(trajectory)
        try:
            # An empty folder stands for the bare image.
            kept = folder is not None and any(folder.iterdir())
            whole = await self._run.pool.snapshots.load(folder, spec) if folder is not None and kept else None
        except OSError as error:
            raise ConfigError(f"the workspace of {trajectory.rollout_id} in {folder} cannot be used: {error}") from None
        untouched = folder is None or folder.name.endswith(UNTOUCHED)
        sealed, before = (None, whole) if untouched else (whole, _below(whole))
        # The seeds of `GroupRun`, so that the tools and the random choices are those of the run.
        seed = f"{context.settings.seed}:{trajectory.group_id}"
        kit = environment.kit(task, Seeded(f"{seed}:tools")())
        seeded = Seeded(f"{seed}:rollout:{trajectory.index}")
        rollout = Rollout(
            environment, context, RolloutSpec(trajectory.group_id, trajectory.index, task, seeded, kit, before)
        )
        lost = _lost(trajectory) if folder is None else ""
        score = await rollout.regrade(_agent_result(trajectory), sealed, trajectory.state, lost)
        asked = rollout.log.model_calls
        return replace(score, metrics={**score.metrics, **asked}) if asked else score

    async def _tasks(self) -> Mapping[str, Task]:
        """Return the tasks of the run by id. They are read once."""
        # Rollouts of a group are graded concurrently.
        async with self._reading:
            if self._read is None:
                limit, tasks = self._run.config.total_steps, await self._recorded_tasks()
                self._read, read = {}, 0
                async for task in tasks:
                    self._read[task.id] = task
                    read += 1  # not the number of ids: an environment may give the same tasks again and again
                    if read == limit:
                        break
            return self._read

    async def _recorded_tasks(self) -> AsyncIterator[Task]:
        """Return the tasks that the recorded command played: an evaluation plays held-out tasks."""
        environment = self._run.environment
        evaluated = await environment.evaluated_tasks() if self._evaluates else None
        return environment.chosen_tasks() if evaluated is None else evaluated


def _below(snapshot: Snapshot | None) -> Snapshot | None:
    """Return the prepared workspace below an agent's change; None if that is the bare image."""
    if snapshot is None or len(snapshot.layers) < 2:
        return None
    # The topmost layer, which is the agent's, comes first.
    return replace(snapshot, snapshot_id=f"{snapshot.snapshot_id}-below", layers=snapshot.layers[1:])


def _agent_result(trajectory: Trajectory) -> AgentResult:
    """Return the recorded conversation, as a score hook reads it."""
    turns = [
        Turn(each.number, each.finish_reason, each.prompt_tokens, each.completion_tokens, 0.0, 0.0, each.tools)
        for each in trajectory.turns
    ]
    return AgentResult(
        messages=trajectory.messages,
        turns_used=len(turns),
        finished_naturally=trajectory.outcome is Outcome.NATURAL,
        outcome=trajectory.outcome if trajectory.outcome.scored else Outcome.NATURAL,
        error=trajectory.error,
        blame=trajectory.blame,
        usage=Usage(trajectory.prompt_tokens, trajectory.completion_tokens, len(turns)),
        turns=turns,
        tool_errors=[ToolError(each.turn, each.tool, each.arguments, each.error) for each in trajectory.tool_errors],
        tool_calls_attempted=trajectory.tool_calls_attempted,
        tool_calls_schema_valid=trajectory.tool_calls_schema_valid,
    )


def _is_kept_unscored(trajectory: Trajectory) -> bool:
    """Return whether the rollout has no score because its check failed, and its work was kept."""
    failed = not trajectory.outcome.scored and trajectory.blame in (Blame.GRADER, Blame.TASK)
    return failed and _kept_folder(trajectory) is not None


def _kept_folder(trajectory: Trajectory) -> Path | None:
    """Return the folder in which the rollout's work is kept; None if there is no such folder."""
    kept = trajectory.beside.sandbox.get("workspace")
    return Path(kept) if isinstance(kept, str) and Path(kept).is_dir() else None


def _lost(trajectory: Trajectory) -> str:
    """Return the reason why a rollout has no kept work."""
    kept = trajectory.beside.sandbox.get("workspace")
    if not isinstance(kept, str):
        return f"the workspace of {trajectory.rollout_id} was not kept; run with --env.save_workspaces"
    return f"the workspace of {trajectory.rollout_id} was kept in {kept}, which no longer exists"
