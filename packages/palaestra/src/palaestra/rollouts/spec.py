"""Defines the values that are decided before a rollout starts, such as settings, tools and middleware."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from palaestra.agent.budget import Budget
from palaestra.agent.loop import LoopSettings
from palaestra.agent.middleware import ChatMiddleware
from palaestra.agent.result import AgentResult
from palaestra.rollouts.grading.reward import RewardRule
from palaestra.rollouts.idle_limits import IDLE_LIMITS
from palaestra.rollouts.journal.journal import EventStream
from palaestra.rollouts.limits import RunLimits
from palaestra.rollouts.resume.state import EarlierWork
from palaestra.rollouts.workspaces import Workspaces
from palaestra.tools.registry.registry import Kit
from palaestra.tools.runtime.runtime import ToolMiddleware
from palaestra_slots.core.types import JSON, Message, Prices, Task
from palaestra_slots.sandbox.slot import Mount, Snapshot
from palaestra_tokens.chat_server import Engine
from palaestra_tokens.ledger.records import TokenRow

if TYPE_CHECKING:
    from palaestra.rollouts.counterfactual import Continuation
    from palaestra.rollouts.recorded_tools.recorded_session import RolloutWorld
    from palaestra.rollouts.recorded_tools.recording_policy import RunWorld
    from palaestra.rollouts.records import Group
    from palaestra.rollouts.schedule import Places


class Seeded:
    """A random generator that is created on first use, because it takes 2.5 KB and most rollouts never use it."""

    __slots__ = ("_generator", "_seed")

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._generator: random.Random | None = None

    def __call__(self) -> random.Random:
        """Return the generator, which is the same at every call."""
        if self._generator is None:
            self._generator = random.Random(self._seed)
        return self._generator


class Phase(StrEnum):
    """The three phases in which a task has a slot; each has its own network policy."""

    PREPARE = "prepare"
    AGENT = "agent"
    GRADE = "grade"


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Settings that all groups of a run share. If `whole_groups` is set, rollouts that ended with infrastructure
    failures are replaced, at most `group_size` times in a group."""

    seed: int = 0
    group_size: int = 1
    infra_retries: int = 0
    whole_groups: bool = False
    idle_limits: Mapping[str, float] = field(default_factory=lambda: IDLE_LIMITS)


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """The agent's settings in a rollout. `max_tokens` is per reply; `tool_timeout_s` is a command's default time limit.

    `beyond` names tools that may read what earlier rollouts left; rollouts with them cannot be compared. If `freeze`
    is set, slots are frozen while the model thinks. `reward` is the rule by which scores become rewards.
    `strict_labels` names the labels that `RewardRule.STRICT` does not accept; if it is empty, it accepts none.
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
    beyond: frozenset[str] = frozenset()
    freeze: bool = False
    reward: RewardRule = RewardRule.GUARDED
    strict_labels: frozenset[str] = frozenset()

    @property
    def loop(self) -> LoopSettings:
        """The settings of the agent loop."""
        return LoopSettings(
            self.max_turns,
            self.temperature,
            self.max_tokens,
            self.extra_body,
            self.max_context_tokens,
            self.budget,
            self.beyond,
        )


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """One rollout of a group. `snapshot` is the group's prepared workspace; None for the bare image. `sampling` is the
    random generator of a scripted model, if that is not the rollout's own (`seeded`). A rollout that `replays` another
    one (`grading/blame.py`) raises the failures of its own check."""

    group_id: str
    index: int
    task: Task
    seeded: Seeded
    kit: Kit
    snapshot: Snapshot | None
    sampling: Seeded | None = None
    replays: bool = False

    @property
    def rollout_id(self) -> str:
        return f"{self.group_id}/{self.index}"


@dataclass(frozen=True, slots=True)
class Middleware:
    """A run's chat and tool middleware, as functions that create it for a rollout; the outermost comes first."""

    chat: tuple[Callable[[str], ChatMiddleware], ...] = ()
    """Each function gets the rollout's id."""
    tool: tuple[Callable[[str], ToolMiddleware], ...] = ()
    """Each function gets the rollout's id."""


def _live() -> RunWorld:
    # Imported here, because most runs call no tool that reaches outside.
    from palaestra.rollouts.recorded_tools.recording_policy import RunWorld

    return RunWorld()


class RecordedTools:
    """The recorded replies of a run's tools. The recordings are opened on first use.

    Implements `ToolRecordings`.
    """

    def __init__(self, open_world: Callable[[], RunWorld] = _live) -> None:
        self._open = open_world
        self._world: RunWorld | None = None
        self._kept: Path | None = None

    def opened(self) -> RunWorld:
        """Return the recordings; the first call opens them. Raises `ConfigError`."""
        if self._world is None:
            self._world = self._open()
            if self._kept is not None:
                self._world.keep(self._kept)
        return self._world

    @property
    def replayed(self) -> bool:
        """Whether all replies come from a recording."""
        return self.opened().replayed

    def rollout(self, rollout_id: str, repeats: Callable[[], bool] = lambda: False) -> RolloutWorld:
        """Return the recorded replies for a rollout that starts now; see `RunWorld.rollout`."""
        return self.opened().rollout(rollout_id, repeats)

    def remember(self, path: Path) -> None:
        """Let continued rollouts use the replies that an earlier part of the run recorded at `path`."""
        if path.is_file():
            self.opened().remember(path)

    def keep(self, path: Path) -> None:
        """Record all further replies at `path`. The file is created with its first line."""
        self._kept = path
        if self._world is not None:
            self._world.keep(path)

    async def commit(self) -> None:
        """Return once all recorded replies are on the disk."""
        if self._world is not None:
            await self._world.commit()

    def close(self) -> None:
        """Flush and close the files. Idempotent."""
        if self._world is not None:
            self._world.close()


class ForeignAgent(Protocol):
    """Plays rollouts in place of the agent loop (`program_agent.py`). Its `mounts` are mounted in the slots."""

    @property
    def name(self) -> str: ...

    @property
    def mounts(self) -> tuple[Mount, ...]: ...

    async def play(self, rollout: JSON, messages: list[Message]) -> AgentResult: ...


class GroupPlay(Protocol):
    """One group that is being played. `group.GroupRun` plays it in this process."""

    begun: bool
    """Whether this part of the run has written that the group starts."""
    reserved: int
    """The number of places that are still reserved for the group; at least one until the group has been passed on."""

    async def run(self) -> Group:
        """Return the finished group, already in the journal."""
        ...


class GroupPlayer(Protocol):
    """Plays the groups of a run elsewhere, such as on the nodes of a cluster (`palaestra_cloud.cluster`)."""

    def group(self, env: JSON, run: RunContext, number: int, task: Task, places: Places | None) -> GroupPlay:
        """Return what plays the group. It frees the `places` that are reserved for the group, except the last one, as
        the group's rollouts end."""
        ...


@dataclass(frozen=True, slots=True)
class RunContext:
    """The objects that all groups of a run share."""

    engine: Engine
    workspaces: Workspaces
    events: EventStream
    settings: RunSettings = field(default_factory=RunSettings)
    limits: RunLimits = field(default_factory=RunLimits)
    recorded_tools: RecordedTools = field(default_factory=RecordedTools)
    middleware: Middleware = field(default_factory=Middleware)
    earlier: EarlierWork = field(default_factory=EarlierWork)
    counterfactual: Continuation | None = None
    """What all rollouts of a counterfactual run continue; None for another run."""
    program: ForeignAgent | None = None
    """The program that plays the rollouts in their slots. If it is None, Palaestra's own agent loop plays them."""
    elsewhere: GroupPlayer | None = None
    """What plays the groups elsewhere. If it is None, this process plays them."""


@dataclass(slots=True)
class Projection:
    """An environment's additions to a trajectory: a token row and the environment's own keys."""

    row: TokenRow | None = None
    extra: dict[str, JSON] = field(default_factory=dict)
