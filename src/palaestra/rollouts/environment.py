"""The Environment protocol: all that the runner knows of where tasks come from and how they are scored. No I/O.

`envs/api/function_env.py` and `envs/adapters/hermes_adapter.py` adapt the two ways of writing an environment to it.
It is an abstract class rather than a `typing.Protocol` since most of its hooks have a default that does nothing;
`name`, `tasks`, `kit` and `score` are always the environment's own.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from palaestra.agent.budget import Budget
from palaestra.agent.result import AgentResult
from palaestra.core.types import JSON, AllowList, Network, Prices, Score, Task
from palaestra.inference.ledger import TokenRow
from palaestra.rollouts.records import Group
from palaestra.sandbox.slot import Slot, SlotSpec
from palaestra.tools.registry.registry import ToolRegistry
from palaestra.tools.runtime.scoped_objects import States

if TYPE_CHECKING:
    from palaestra.rollouts.grading.grader import Grading
    from palaestra.rollouts.recorded_tools.recording_policy import RunWorld
    from palaestra.rollouts.rollout import Rollout


class Phase(StrEnum):
    """The three times at which a task has a slot; each has its own network policy."""

    PREPARE = "prepare"
    AGENT = "agent"
    GRADE = "grade"


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """How the agent of a rollout is run. `max_tokens` is per reply; `tool_timeout_s` is a command's default limit.

    `memory` and `sessions` are folders for the tools `memory` and `session_search`. None, as rollouts that are compared
    need it, refuses them: with a folder, what one rollout writes the next one knows. With `freeze`, slots stand still
    while the model thinks.
    """

    max_turns: int = 30
    temperature: float = 1.0
    max_tokens: int | None = None
    system_prompt: str | None = None
    extra_body: Mapping[str, JSON] | None = None
    tool_timeout_s: float = 120.0
    max_context_tokens: int | None = None
    budget: Budget = field(default_factory=Budget)
    prices: Prices | None = None
    memory: Path | None = None
    sessions: Path | None = None
    freeze: bool = False

    @property
    def beyond(self) -> frozenset[str]:
        """The tools that reach beyond a rollout and have the folder they need."""
        folders = {"memory": self.memory, "session_search": self.sessions}
        return frozenset(name for name, folder in folders.items() if folder is not None)


@dataclass(frozen=True)
class Kit:
    """The tools of one group, resolved once and passed as a value: every rollout of the group has the same."""

    registry: ToolRegistry
    toolsets: tuple[str, ...] = ()

    @cached_property
    def definitions(self) -> list[dict[str, JSON]]:
        """The tools as models are shown them. The group's rollouts and its record share them: not to be changed."""
        return self.registry.definitions()


@dataclass(slots=True)
class Projection:
    """What an environment adds to a trajectory's record: the token row and keys of its own."""

    row: TokenRow | None = None
    extra: dict[str, JSON] = field(default_factory=dict)


class Environment(ABC):
    """Where tasks come from, how a workspace is prepared, how a result is scored.

    `world` answers for tools that touch the world when a task is prepared; a run that records it sets it. In a rollout
    the rollout's own does.
    """

    world: RunWorld | None = None

    @property
    @abstractmethod
    def name(self) -> str:
        """Names the run folder and the output files."""

    @cached_property
    def shared(self) -> States:
        """What the tools of all rollouts have together. Closed after the environment, by whoever closes that."""
        return States()

    @property
    def agent(self) -> AgentSettings:
        """How the agent is run."""
        return AgentSettings()

    async def open(self) -> None:
        """Load what the environment needs. Called once, before the first task."""

    async def aclose(self) -> None:
        """Let go of it again. Called once, whatever happened."""

    @abstractmethod
    def tasks(self) -> AsyncIterator[Task]:
        """The tasks of the run, in order."""

    @abstractmethod
    def kit(self, task: Task, rng: random.Random) -> Kit:
        """The tools of this task's group. `rng` is the group's own."""

    def slot_spec(self, task: Task, phase: Phase) -> SlotSpec:
        """What the task's slots are made from."""
        return SlotSpec(image=task.image, limits=task.limits, network=network_of(task, phase))

    async def resolve(self, task: Task) -> Task:
        """Complete the task on the host, when its group starts. What fails here fails this task alone."""
        return task

    def foundation(self, task: Task) -> str | None:
        """The key of the preparation that this task shares with others; None where it shares none."""
        return None

    async def lay(self, task: Task, sandbox: Slot) -> None:
        """Do the shared preparation, once per key in a run. The task's own preparation then starts from it."""

    def prepares(self, task: Task) -> bool:
        """Whether the task has a workspace to prepare. Without one, rollouts start from the bare image."""
        return bool(task.files or task.setup)

    async def prepare(self, task: Task, sandbox: Slot) -> None:
        """Prepare the workspace, once per group. Every rollout starts from a fork of it."""

    def recipe(self, task: Task) -> JSON:
        """What the task's whole preparation depends on besides its image, `files`, `setup` and slot, as JSON; None
        where that cannot be said.

        Saying it lets runs on this machine share the prepared workspace: `lay` and `prepare` are then not called where
        it is there already, so all that they do must be in it. By default what the task says, unless there are hooks.
        """
        own = type(self)
        hooks = own.prepare is not Environment.prepare or own.foundation is not Environment.foundation
        return None if hooks else task.recipe

    @property
    def collects_groups(self) -> bool:
        """Whether `collect` rolls out the whole group, and says how large it is."""
        return False

    async def collect(self, task: Task, group_id: str, wanted: int) -> int:
        """How many rollouts the group has. One that is collected in one go is collected here; `act` takes its rows."""
        return wanted

    async def ended(self, task: Task, group: Group) -> None:
        """The group has ended and is in the journal. Called for every group, however it went."""

    async def begin(self, rollout: Rollout) -> None:
        """Set up one rollout, in its own fork, before the agent starts."""

    async def act(self, rollout: Rollout) -> AgentResult:
        """Let the agent work."""
        return await rollout.run_agent()

    @abstractmethod
    async def score(self, rollout: Rollout, grading: Grading) -> Score:
        """Score the sealed result. Raises `GraderError` when the check itself could not be made."""

    def project(self, rollout: Rollout, score: Score | None) -> Projection:
        """What to record besides."""
        return Projection()

    async def figures(self) -> Mapping[str, float]:
        """Numbers of the environment's own for the run's metrics. Asked while the run goes on, and after the last
        group."""
        return {}

    def shown(self) -> Sequence[tuple[str, float]]:
        """Rollouts to look at beside the metrics: each as text, with its score. Asked after the last group."""
        return ()


def network_of(task: Task, phase: Phase) -> Network | AllowList:
    """The network of a phase as the task says."""
    policy = task.network
    return {Phase.PREPARE: policy.prepare, Phase.AGENT: policy.agent, Phase.GRADE: policy.grade}[phase]
