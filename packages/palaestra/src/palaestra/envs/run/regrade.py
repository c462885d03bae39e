"""Scores the stored workspaces of a run again, without an agent, so that a corrected score function needs no new
rollouts.

The run must have kept each rollout's sealed workspace (`save_workspaces`). The workspace is graded as in the run: in a
fresh sandbox, with the agent's changes over the prepared workspace, but with the environment's current code. A judge is
asked only questions that the run's recording does not answer, and its replies are added to the recording. Nothing else
is written or deleted in the run's folder; that is left to the caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from palaestra.agent.result import AgentResult, ToolError, Turn
from palaestra.envs.run.library import environment_form
from palaestra.envs.run.replay_run import ReopenedRun, recorded_form, reopened, where_it_ran
from palaestra.rollouts.environment import LIVE_PROCESSES
from palaestra.rollouts.finished_run import Run
from palaestra.rollouts.grading.grader import FILES, LIVE
from palaestra.rollouts.journal.reader import Recording, open_recording
from palaestra.rollouts.records import Trajectory
from palaestra.rollouts.rollout import Rollout
from palaestra.rollouts.spec import Phase, RolloutSpec, Seeded
from palaestra.rollouts.workspaces import UNTOUCHED
from palaestra_slots.core.config import python_names
from palaestra_slots.core.errors import ConfigError, InfraError, TaskError
from palaestra_slots.core.types import JSON, Blame, Outcome, Score, Task, Usage
from palaestra_slots.sandbox.slot import Snapshot


@dataclass(frozen=True, slots=True)
class Regraded:
    """A recorded rollout and its new score. If grading failed, `score` is None and `error` gives the reason.

    `only_until_scored` is the folder of the work if the run kept it only because it had no score. Once the new score is
    stored, the folder may be deleted. It is None for work that the user asked to keep.
    """

    trajectory: Trajectory
    score: Score | None
    error: str = ""
    only_until_scored: Path | None = None

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
        recording = open_recording(_workspace(trajectory).parents[2])
        with where_it_ran(recording):
            async with reopened(recording, environment_form(env), changed=settings, asks_models=True) as run:
                return await _Grader(run, recording).grade(trajectory)


async def grade_run(
    run: Run, env: str | None = None, *, network: bool = False, settings: Mapping[str, JSON] = {}
) -> AsyncIterator[Regraded]:
    """Grade the rollouts of a run whose work was kept, in the order of the run's groups.

    If the run kept only the work of rollouts without a score, only these are graded. `env` is the environment's file,
    if it has moved. `settings` replace those of the run. With `network`, tasks get the network access that they
    request. Raises `ConfigError`.
    """
    recording = run.recording
    form = recorded_form(recording, env)
    # Without `save_workspaces`, only the work of rollouts without a score was kept. An earlier part of a resumed run
    # may have had the setting; then rollouts with a score have kept work too.
    saved = bool((recording.meta.config.get("env") or {}).get("save_workspaces"))
    saved = saved or any(each.reward is not None and _kept_folder(each) is not None for each in run.trajectories)
    every = saved or not any(map(_is_kept_unscored, run.trajectories))
    with where_it_ran(recording):
        async with reopened(recording, form, network=network, changed=settings, asks_models=True) as again:
            grader = _Grader(again, recording)
            for group in run.groups:
                wanted = [each for each in group.trajectories if _is_wanted(each, every)]
                for regraded in await asyncio.gather(*map(grader.try_grade, wanted)):
                    kept = None if saved or regraded.score is None else _kept_folder(regraded.trajectory)
                    yield replace(regraded, only_until_scored=kept)


class _Grader:
    """Grades rollouts of one run in its open environment."""

    def __init__(self, run: ReopenedRun, recording: Recording) -> None:
        self._run = run
        self._folder = recording.path.parent.resolve()
        self._evaluates = recording.meta.config.get("command") == "evaluate"
        self._tasks: dict[str, Task] | None = None
        self._reading = asyncio.Lock()

    async def try_grade(self, trajectory: Trajectory) -> Regraded:
        """Grade one rollout. If its check fails, the result contains the error."""
        try:
            return Regraded(trajectory, await self.grade(trajectory))
        except (InfraError, TaskError) as error:
            return Regraded(trajectory, None, f"{type(error).__name__}: {error}")

    async def grade(self, trajectory: Trajectory) -> Score:
        """Grade one rollout. Raises `ConfigError`, `GraderError` and other errors of grading."""
        folder = _workspace(trajectory)
        if not folder.resolve().is_relative_to(self._folder):
            raise ConfigError(f"the workspace of {trajectory.rollout_id} is in {folder}, outside of {self._folder}")
        if not _is_wanted(trajectory, every=True):
            raise ConfigError(f"{trajectory.rollout_id} ended with {trajectory.outcome}, which is not scored")
        environment, context = self._run.environment, self._run.context
        task = await environment.resolve(await self._task(trajectory))
        if task.grading == LIVE:
            if trajectory.detail.get(LIVE_PROCESSES):
                raise TaskError(
                    f"{trajectory.rollout_id} was graded while its processes ran, and these are gone, so it cannot be "
                    "graded again"
                )
            task = replace(task, grading=FILES)
        spec = environment.slot_spec(task, Phase.AGENT)
        try:
            # An empty folder stands for the bare image.
            whole = await self._run.pool.snapshots.load(folder, spec) if any(folder.iterdir()) else None
        except OSError as error:
            raise ConfigError(f"the workspace of {trajectory.rollout_id} in {folder} cannot be used: {error}") from None
        sealed, before = (None, whole) if folder.name.endswith(UNTOUCHED) else (whole, _below(whole))
        # The seeds of `GroupRun`, so that the tools and the random choices are those of the run.
        seed = f"{context.settings.seed}:{trajectory.group_id}"
        kit = environment.kit(task, Seeded(f"{seed}:tools")())
        seeded = Seeded(f"{seed}:rollout:{trajectory.index}")
        rollout = Rollout(
            environment, context, RolloutSpec(trajectory.group_id, trajectory.index, task, seeded, kit, before)
        )
        score = await rollout.regrade(_result(trajectory), sealed, trajectory.state)
        asked = rollout.log.model_calls
        return replace(score, metrics={**score.metrics, **asked}) if asked else score

    async def _task(self, trajectory: Trajectory) -> Task:
        # Rollouts of a group are graded concurrently, and the tasks are read once.
        async with self._reading:
            if self._tasks is None:
                limit, tasks = self._run.config.total_steps, await self._recorded_tasks()
                self._tasks, read = {}, 0
                async for task in tasks:
                    self._tasks[task.id] = task
                    read += 1  # not the number of ids: an environment may give the same tasks again and again
                    if read == limit:
                        break
        found = self._tasks.get(trajectory.task_id)
        if found is None:
            raise ConfigError(f"{self._run.environment.name} no longer has the task {trajectory.task_id!r}")
        return found

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


def _result(trajectory: Trajectory) -> AgentResult:
    """Return the recorded conversation, as a score hook reads it."""
    turns = [
        Turn(each.number, each.finish_reason, each.prompt_tokens, each.completion_tokens, 0.0, 0.0, each.tools)
        for each in trajectory.turns
    ]
    return AgentResult(
        messages=trajectory.messages,
        turns_used=len(turns),
        finished_naturally=trajectory.outcome is Outcome.NATURAL,
        outcome=Outcome.NATURAL if _is_kept_unscored(trajectory) else trajectory.outcome,
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
    failed = trajectory.reward is None and trajectory.blame in (Blame.GRADER, Blame.TASK)
    return failed and _kept_folder(trajectory) is not None


def _kept_folder(trajectory: Trajectory) -> Path | None:
    """Return the folder in which the rollout's work is kept; None if there is no such folder."""
    kept = trajectory.beside.sandbox.get("workspace")
    return Path(kept) if isinstance(kept, str) and Path(kept).is_dir() else None


def _is_wanted(trajectory: Trajectory, every: bool) -> bool:
    return _is_kept_unscored(trajectory) or (every and trajectory.outcome.scored)


def _workspace(trajectory: Trajectory) -> Path:
    kept = trajectory.beside.sandbox.get("workspace")
    if not isinstance(kept, str):
        raise ConfigError(f"the workspace of {trajectory.rollout_id} was not kept; run with --env.save_workspaces")
    if not Path(kept).is_dir():
        raise ConfigError(f"the workspace of {trajectory.rollout_id} was kept in {kept}, which no longer exists")
    return Path(kept)
