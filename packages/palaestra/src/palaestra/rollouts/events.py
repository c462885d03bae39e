"""The events of a run, as one union of types. `EventStream` (`journal/journal.py`) passes them to subscribers.

Journal events are lines of the journal: their tags, fields and defaults are the journal's format. The other events
exist in memory only. A journal event is written to the journal first. Then the subscribers get it, in the order of
subscription, on the event loop. A subscriber must return quickly, and must not raise because of the text of a task or a
model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

import msgspec

from palaestra.rollouts.records import Group, Trajectory
from palaestra_slots.core.types import JSON, Blame, Message
from palaestra_tokens.ledger import SampledTurn

JOURNAL_SCHEMA = "palaestra.journal/2"

FIRST_SCHEMA = "palaestra.journal/1"
"""The schema of the older format. Its turns contain only messages, so rollouts that were cut off start over."""


class JournalEvent(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="event"):
    """One line of the journal. `at` is seconds since the epoch."""

    at: float = 0.0


class RunStarted(JournalEvent, tag="run", kw_only=True, omit_defaults=False):
    """The first line: the run's environment, model, seed and configuration. Default values are written too, so that the
    line always has its schema."""

    schema: str = JOURNAL_SCHEMA
    run_id: str
    env: str
    model: str
    seed: int
    config: dict[str, JSON] = {}


class RunResumed(JournalEvent, tag="resume", kw_only=True):
    """Another process continues the run. `torn` is true if the line before this one was incomplete."""

    schema: str = FIRST_SCHEMA
    torn: bool = False
    config: dict[str, JSON] = {}


class GroupStarted(JournalEvent, tag="group", kw_only=True):
    """A group with its tools and preparation, but without trajectories.

    A later event of the same group replaces the earlier one, so a resumed run can continue the group. A finished
    rollout of the group counts until the resumed run records a new rollout with the same index.
    """

    group: Group


class TurnTaken(JournalEvent, tag="messages", kw_only=True):
    """The messages that one turn added, with the data for resuming the rollout after it.

    `turn` 0 has the opening messages. `tokens` has the model server's token counts for the prompt and the reply,
    `seconds` the time that the model took and the time that the tools took. If the server returns tokens, `sampled` has
    the model calls since the last such event, including those of sub-agents. `cost` is the cost of `tokens`, if prices
    are known. `recalled` is true if the reply came from an earlier part of the run, which ended during this turn.
    `state` is the environment's state after the turn, if the turn has changed it, and `model_calls` the calls of models
    that the environment has made so far, if the turn has made any.
    """

    rollout_id: str
    turn: int
    messages: list[Message]
    finish_reason: str | None = None
    tokens: tuple[int, int] = (0, 0)
    seconds: tuple[float, float] = (0.0, 0.0)
    sampled: list[SampledTurn] = []
    cost: float | None = None
    recalled: bool = False
    state: JSON = None
    model_calls: dict[str, float] = {}


class ReplyReceived(JournalEvent, tag="reply", kw_only=True):
    """One reply of the model during a turn that delegates work. Such turns are long, so each reply is written
    immediately.

    `branch` is the sub-agent's number, or 0 for the rollout's own reply. `asked` is the checksum of the conversation
    that the reply answers. If the server returns tokens, they are in `sampled` and `message` is empty.
    """

    rollout_id: str
    branch: int = 0
    asked: str = ""
    message: Message = {}
    finish_reason: str | None = None
    tokens: tuple[int, int] = (0, 0)
    cost: float | None = None
    sampled: list[SampledTurn] = []


class RolloutResumed(JournalEvent, tag="taken_up", kw_only=True):
    """A rollout that was cut off continues after `turns` turns and `replies` replies of the next turn.

    If `anew` gives a reason, the rollout starts from its beginning instead, and the turns and replies are discarded.
    With a `parent`, the rollout is new and continues rollout `parent` of its group after `turns` turns, which are in
    the parent's events.
    """

    rollout_id: str
    turns: int
    replies: int = 0
    anew: str = ""
    parent: int | None = None


class RolloutEnded(JournalEvent, tag="rollout", kw_only=True):
    """A rollout's complete record."""

    trajectory: Trajectory


class AttemptDiscarded(JournalEvent, tag="discarded", kw_only=True):
    """The record of an attempt that does not count. It ended with an infrastructure failure and is retried, or it was
    cut off and cannot be continued."""

    trajectory: Trajectory


class NodeChanged(JournalEvent, tag="node", kw_only=True):
    """A node of a cluster belongs to the run from now on, or is lost, with the reason in `lost`. `node` is its id, and
    `level` its isolation level."""

    node: str
    host: str = ""
    level: str = ""
    slots: int = 0
    lost: str = ""


class GroupPlaced(JournalEvent, tag="placed", kw_only=True):
    """A group begins or continues on this node of a cluster."""

    group_id: str
    node: str


class GroupEnded(JournalEvent, tag="group_end", kw_only=True):
    """Every rollout of the group has ended. `error` is the reason if the group failed, and `blame` its attribution,
    which journals of earlier versions do not have here."""

    group_id: str
    number: int
    error: str = ""
    blame: Blame | None = None


class RunEnded(JournalEvent, tag="end", kw_only=True):
    """A run, or a part of it, has ended. A run that was killed has no such line. `reason` is done, failed, paused or
    interrupted."""

    reason: str


AnyJournalEvent: TypeAlias = (
    RunStarted
    | RunResumed
    | GroupStarted
    | TurnTaken
    | ReplyReceived
    | RolloutResumed
    | RolloutEnded
    | AttemptDiscarded
    | NodeChanged
    | GroupPlaced
    | GroupEnded
    | RunEnded
)


class GroupsPlanned(msgspec.Struct):
    """The group size, and the number of groups in the run (`total`, None if it is unknown)."""

    total: int | None
    group_size: int


class GroupBegun(msgspec.Struct):
    """A group is about to be prepared."""

    group: Group


# Some events are made at every step. They have only texts and numbers, so the garbage collector need not track them.
class RolloutBegun(msgspec.Struct, gc=False):
    """An attempt at a rollout starts."""

    rollout_id: str


class Alive(msgspec.Struct, gc=False):
    """A sign of life of a rollout, or of a group (under the group's id). `stage` is the current stage, or empty.

    `entered` and `left` name a stage that begins or ends now; stages nest and may overlap. `error` names the class of
    the exception that ended the stage in `left`.
    """

    name: str
    stage: str
    entered: str = ""
    left: str = ""
    error: str = ""


class TokensSpent(msgspec.Struct, gc=False):
    """The tokens of one model call of a rollout, made in this part of the run or in an earlier one."""

    rollout_id: str
    prompt_tokens: int
    completion_tokens: int


class CostSpent(msgspec.Struct, gc=False):
    """The cost of a model that a rollout's environment asked, in this part of the run or in an earlier one."""

    rollout_id: str
    cost: float


class Graded(msgspec.Struct, gc=False):
    """A rollout got its reward. The reward is not in the journal yet."""

    rollout_id: str
    reward: float


class RolloutKept(msgspec.Struct):
    """A rollout that an earlier part of the run finished is kept and counts for this part too."""

    trajectory: Trajectory


class GroupFinished(msgspec.Struct):
    """A group is complete and in the journal. `kept` groups come from an earlier part of the run."""

    group: Group
    kept: bool = False


class MetricsLogged(msgspec.Struct):
    """Metrics for the run's trackers, such as those of a trainer's step."""

    numbers: dict[str, float]


class Note(msgspec.Struct):
    """A message to show to the user."""

    text: str


MemoryEvent: TypeAlias = (
    GroupsPlanned
    | GroupBegun
    | RolloutBegun
    | Alive
    | TokensSpent
    | CostSpent
    | Graded
    | RolloutKept
    | GroupFinished
    | MetricsLogged
    | Note
)
Event: TypeAlias = AnyJournalEvent | MemoryEvent
InFlight: TypeAlias = dict[str, tuple[str, float]]
"""The rollouts and groups in flight: the stage of each, and the time of its last sign of life in seconds since the
epoch. The entry that has been idle longest comes first."""

Handlers: TypeAlias = Mapping[type, Callable[[Any], None]]


class Subscriber(Protocol):
    """An object that follows a run through its events."""

    def handlers(self) -> Handlers:
        """Return the function to call for each class of event."""
        ...
