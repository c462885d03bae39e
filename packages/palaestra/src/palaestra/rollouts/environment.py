"""The `Environment` class, through which the runner gets tasks, prepares workspaces and scores rollouts.

The modules of `envs/api` adapt each way of writing an environment to this class. `Environment` is an abstract class and
not a `typing.Protocol` because most of its hooks have a default.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from palaestra.agent.result import AgentResult
from palaestra.rollouts.grading.grader import Grading
from palaestra.rollouts.records import Group
from palaestra.rollouts.rollout import Rollout
from palaestra.rollouts.schedule import TaskChoice
from palaestra.rollouts.spec import AgentSettings, Phase, Projection, RecordedTools
from palaestra.tools.registry.registry import Kit
from palaestra.tools.runtime.runtime import JUDGING
from palaestra.tools.tool import States
from palaestra_slots.core.errors import GraderError, PrepareError, SlotEnded, TaskError, WorkError
from palaestra_slots.core.printable import without_middle
from palaestra_slots.core.types import JSON, Message, Score, Task
from palaestra_slots.core.user_code import checked_score, run_hook
from palaestra_slots.sandbox.slot import Slot, SlotSpec

MISSING = "missing_in_check"
"""The key of a score's detail with the commands of a check that failed because a network, a program or a file is
missing, as a list of text."""

LIVE_PROCESSES = "live_processes"
"""The part of a score's detail with the number of processes that ran while the work was graded in its own slot."""

WORK_BREAKS_CHECK = "work_breaks_check"
"""The metric, and the part of a score's detail with the error, of work on which the check fails."""

CHECK_FAILURES = (GraderError, PrepareError, SlotEnded, TaskError)
"""The errors of a check that work can cause."""


@dataclass(frozen=True, slots=True)
class GroupCollection:
    """A group for an environment with `collects_groups`: the number of requested rollouts, the tools, and `play`.

    `play` plays the group's next rollout to its end, with retries, through `begin`, `act` and `grade`. The rollout is
    recorded only after `collect` has ended, so that `collect` can still change its score and projection.
    """

    group_id: str
    wanted: int
    kit: Kit
    play: Callable[[], Awaitable[Rollout]]


class Environment(ABC):
    """Provides the tasks of a run, prepares their workspaces and scores the results.

    While a task is prepared, `world` records or answers the calls of tools that reach outside this machine. It is set
    only during a run or a replay. During a rollout, the rollout's own recording is used for such calls.
    """

    world: RecordedTools | None = None

    def use_recordings(self, world: RecordedTools) -> None:
        """Set `world`, before the first task."""
        self.world = world

    @property
    @abstractmethod
    def name(self) -> str:
        """The name used for the run folder and the output files."""

    @cached_property
    def shared(self) -> States:
        """Objects that the tools of all rollouts share. Close them after the environment."""
        return States()

    @property
    def label_names(self) -> Collection[str]:
        """The names of labels that only this environment's scores have."""
        return ()

    @property
    def scores_read_sandbox(self) -> bool:
        """Whether a score may read the agent's sandbox. Otherwise, a rollout is graded again from its record alone."""
        return True

    @property
    def agent(self) -> AgentSettings:
        """The agent's settings."""
        return AgentSettings()

    def agent_of(self, task: Task) -> AgentSettings:
        """Return the agent's settings for a task, which may declare limits of its own."""
        return self.agent

    def limits_of(self, task: Task) -> Mapping[str, JSON]:
        """Return the limits that the task declares, each with the value that holds and its source."""
        return {}

    async def open(self) -> None:
        """Load data and resources. Called once, before the first task."""

    async def aclose(self) -> None:
        """Release the data and resources. Called once, even after a failure."""

    @property
    def counts_tasks(self) -> bool:
        """Whether the run may read the tasks in advance to count them."""
        return False

    @abstractmethod
    def tasks(self) -> AsyncIterator[Task]:
        """Return all tasks of the environment, in order."""

    choice: TaskChoice | None = None
    """The tasks that the user chose; None means all."""

    def choose(self, words: Sequence[str]) -> None:
        """Limit the environment to the tasks with these ids or patterns; no words mean all tasks."""
        self.choice = TaskChoice(words) if words else None

    @property
    def refused(self) -> Mapping[str, str]:
        """The reasons why tasks cannot be used, by task id, if the environment knows them before the run."""
        return {}

    def chosen_tasks(self) -> AsyncIterator[Task]:
        """Return the tasks of the run, in order: those that the user chose. Every command gets its tasks here."""
        return self.tasks() if self.choice is None else self.choice.of(self.tasks(), self.name, self.refused)

    @abstractmethod
    def kit(self, task: Task, rng: random.Random) -> Kit:
        """Return the tools of this task's group. `rng` is the group's random generator."""

    def changed(self, number: int, was: str, now: str) -> str:
        """Return the error message for a resumed run whose task `number` had the id `was` and now has the id `now`."""
        return f"task {number} is now {now}, but was {was} before"

    def slot_spec(self, task: Task, phase: Phase) -> SlotSpec:
        """Return the image, limits and network of the task's slot in a phase."""
        policy = task.network
        networks = {Phase.PREPARE: policy.prepare, Phase.AGENT: policy.agent, Phase.GRADE: policy.grade}
        return SlotSpec(image=task.image, limits=task.limits, network=networks[phase])

    installs_packages = False
    """Whether a task's sandboxes have its `packages`."""

    async def resolve(self, task: Task) -> Task:
        """Complete the task on the host when its group starts. A failure here fails only this task."""
        return task

    def hidden_files(self, task: Task) -> Mapping[str, bytes]:
        """Return the files of a resolved task that only its check or its solution needs, by names such as `test.sh of
        the check`, as far as the environment knows them. An audit looks for copies of them where the agent works."""
        return {}

    def shared_setup(self, task: Task) -> str | None:
        """Return the key of the preparation that this task shares with other tasks; None if it shares none."""
        return None

    async def prepare_shared(self, task: Task, sandbox: Slot) -> None:
        """Do the shared preparation, once per key in a run unless the slot or the result is lost. The task's own
        preparation then starts from the result."""

    def prepares(self, task: Task) -> bool:
        """Return whether the task has a workspace of its own to prepare. If it has none and shares no preparation,
        rollouts start from the bare image."""
        return bool(task.files or task.setup)

    def has_own_preparation(self, task: Task) -> bool:
        """Return whether `prepare` may do something for this task."""
        return type(self).prepare is not Environment.prepare

    async def prepare(self, task: Task, sandbox: Slot) -> None:
        """Prepare the workspace, once per group unless the slot or the workspace is lost. Every rollout starts from a
        fork of it."""

    def recipe(self, task: Task) -> JSON:
        """Return, as JSON, what the preparation depends on in addition to the task's image, `files`, `setup` and slot;
        None if unknown.

        Runs on this machine with the same recipe share the prepared workspace and skip `prepare_shared` and `prepare`,
        so the recipe must cover everything on which these two hooks depend. Default: `task.recipe`, or None if
        `prepare` or `shared_setup` is overridden.
        """
        own = type(self)
        hooks = own.prepare is not Environment.prepare or own.shared_setup is not Environment.shared_setup
        return None if hooks else task.recipe

    @property
    def collects_groups(self) -> bool:
        """Whether `collect` itself rolls out the whole group and decides its size."""
        return False

    async def collect(self, task: Task, group: GroupCollection) -> int:
        """Return the number of rollouts in the group. With `collects_groups`, also roll out the group and keep its
        results for `act`."""
        return group.wanted

    async def ended(self, task: Task, group: Group) -> None:
        """React to the end of a group. Called for each group, failed or not, once it is in the journal."""

    async def begin(self, rollout: Rollout) -> None:
        """Set up one rollout, in its own fork, before the agent starts."""

    @property
    def has_user(self) -> bool:
        """Whether `next_message` answers the agent's replies without tool calls."""
        return False

    @property
    def user_works(self) -> bool:
        """Whether the user works in the agent's sandbox, so that a repeated turn must repeat this work."""
        return False

    async def next_message(self, rollout: Rollout, messages: Sequence[Message]) -> Message | None:
        """Return the user's next message in this conversation; None if the conversation is over."""
        return None

    async def act(self, rollout: Rollout) -> AgentResult:
        """Let the agent work."""
        return await rollout.run_agent()

    async def grade(self, rollout: Rollout) -> Score:
        """Score the rollout in a grading view of its workspace. The work of a rollout without a score is kept."""
        grading = Grading(rollout, self.slot_spec(rollout.task, Phase.GRADE))
        try:
            score = await self.check(rollout, grading, lambda shown: self.score(rollout, shown))
        except (GraderError, TaskError) as error:
            await grading.keep_unscored(error)
            raise
        if rollout.workspace.run.kept is not None and rollout.workspace.kept is None and not grading.live:
            await grading.seal()  # which keeps the work that the score did not look at
        return score

    async def check(self, rollout: Rollout, grading: Grading, score: Callable[[Grading], Awaitable[Score]]) -> Score:
        """Score what `grading` shows. A check that fails is played over the reference solution, which must get through
        it, and again over the work. If it fails again, the score is 0; otherwise the repetition decides, because work
        that makes a check fail at random must not escape its score.

        Raises the failure of a check that fails over the reference too. Raises an `InfraError` that occurred during the
        check, even if `score` caught it and returned a value.
        """
        live = grading.live
        try:
            return await _score_soundly(rollout, grading, score)
        except CHECK_FAILURES as error:
            failure = error
        from palaestra.rollouts.grading.blame import blame  # imported here, because most checks do not fail

        if not live:
            # The reference needs a slot of its own, and a rollout that holds one slot must not wait for another.
            await grading.restart()
            reference = await blame(rollout, failure)
            grading.repeat_after(reference)
        # A live check cannot be repeated in a slot that has ended, nor once its live part has been settled.
        if not live or (grading.live and not isinstance(failure, SlotEnded)):
            with suppress(*CHECK_FAILURES):
                repeated = await _score_soundly(rollout, grading, score)
                first = {"first_check_failed": without_middle(str(failure), 2000)}
                return replace(repeated, detail={**repeated.detail, **first})
        if live:  # the agent's processes end with its slot, so the reference comes last
            await rollout.release()
            reference = await blame(rollout, failure)
        return broken(failure, reference)

    @abstractmethod
    async def score(self, rollout: Rollout, grading: Grading) -> Score:
        """Score the agent's work, which `grading` shows. Raises `GraderError` if the check itself cannot be run."""

    def project(self, rollout: Rollout, score: Score | None) -> Projection:
        """Return the environment's additions to the rollout's record."""
        return Projection()

    async def figures(self) -> Mapping[str, float | str]:
        """Return the environment's own metrics for the run, as numbers or strings. Called during the run and after the
        last group."""
        return {}

    def shown(self) -> Sequence[tuple[str, float]]:
        """Return rollouts for trackers to show next to the metrics, each as text with its score. Called after the last
        group."""
        return ()


def broken(failure: Exception, reference: Rollout) -> Score:
    """Return the score of work that is to blame for the failure of its check, through which the reference got."""
    # Whether the environment has official verdicts shows only in the score of the reference.
    official = None if reference.score is None or reference.score.official is None else 0.0
    return Score(0.0, {WORK_BREAKS_CHECK: 1.0}, {WORK_BREAKS_CHECK: without_middle(str(failure), 2000)}, official)


async def _score_soundly(rollout: Rollout, grading: Grading, score: Callable[[Grading], Awaitable[Score]]) -> Score:
    doing = f"scoring {rollout.rollout_id}"
    judging = JUDGING.set(True)
    try:
        found = checked_score(await run_hook(GraderError, score(grading), doing), doing)
    except WorkError as error:
        found = Score(0.0, detail={"work_failed": str(error)})
    finally:
        JUDGING.reset(judging)
    await grading.check_sound()
    seen: dict[str, JSON] = {}
    if grading.left_out:
        seen["left_out"] = list(grading.left_out)
    if grading.live and grading.processes_at_end:
        seen[LIVE_PROCESSES] = grading.processes_at_end
    labels = (*found.labels, *grading.labels)
    return replace(found, detail={**found.detail, **seen}, labels=labels) if seen or labels else found
