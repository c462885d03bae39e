"""The records of rollouts: `Trajectory`, and `Group`, the trajectories of one task.

The journal has them as they are; all other files are made from them. The same seed and the same answers reproduce all
fields of a trajectory except `beside`, which has wall times, hosts and slot ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from palaestra.agent.result import AgentResult
from palaestra.core.types import JSON, Blame, Message, Outcome
from palaestra.inference.ledger import UNTRAINED, LedgerRecord, TokenRow, record_rows, row_sizes
from palaestra.tools.runtime.inner_calls import InnerCall

TRAJECTORY_SCHEMA = "palaestra.trajectory/1"
GROUP_SCHEMA = "palaestra.group/1"


class TurnRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One model call: its finish reason, tokens and tool calls."""

    number: int
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    tools: tuple[str, ...] = ()


class ToolErrorRecord(msgspec.Struct, kw_only=True):
    """One call that failed: the request, and the error that the model read."""

    turn: int
    tool: str
    arguments: str
    error: str


class InnerCallRecord(msgspec.Struct, kw_only=True):
    """One call that a program made in a turn (`execute_code`): JSON texts, cut in the middle if they are long."""

    turn: int
    tool: str
    arguments: str
    reply: str


class SubagentRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The conversation of a sub-agent (`delegate_task`), in the order of their start.

    `turn` is the turn of the agent that delegated the work. `segments` are the ledger's segments with its tokens.
    """

    number: int
    turn: int
    goal: str
    messages: list[Message]
    outcome: Outcome
    error: str = ""
    turns: list[TurnRecord] = []
    tool_errors: list[ToolErrorRecord] = []
    inner_calls: list[InnerCallRecord] = []
    subagents: list[SubagentRecord] = []
    segments: list[int] = []


class Beside(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Data that differs between runs. Seconds are wall time. `stages` has setup, agent, tool, admit (the wait for a
    place), acquire (creating a slot), seal and grade; they may nest, and concurrent calls add up."""

    started_at: float = 0.0
    duration_s: float = 0.0
    stages: dict[str, float] = {}
    turn_s: list[tuple[float, float]] = []
    sandbox: dict[str, JSON] = {}


class Fork(msgspec.Struct, frozen=True):
    """Where a rollout that continues another one begins: after turn `turn` of the rollout `index` of its group."""

    index: int
    turn: int


class Trajectory(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One rollout from first message to reward. `reward` is None exactly when the rollout was not scored.

    `blame` and `error` are set on every rollout that did not finish cleanly. `metrics` are numbers worth averaging,
    `detail` is evidence (test results, the agent's patch). `ledger` has the exact tokens if the engine gives them, and
    `row` a token row that the environment made. `inner_calls` and `subagents` record the work inside tool calls; the
    tokens of sub-agents count in `prompt_tokens`, `completion_tokens` and `cost`, their turns not in `turns`. `cost` is
    in the currency of the run's prices.

    A rollout with a `parent` continues another one. It has the whole conversation in `messages` and `turns`, which its
    counts of tool calls cover too; its tokens, cost and ledger are those of its own turns alone. `fork_points` are the
    turns after which others could continue this one, if the run had asked for trees.
    """

    schema: str = TRAJECTORY_SCHEMA
    rollout_id: str
    group_id: str
    task_id: str
    index: int
    messages: list[Message]
    outcome: Outcome
    reward: float | None
    blame: Blame | None = None
    error: str = ""
    metrics: dict[str, float] = {}
    detail: dict[str, JSON] = {}
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None
    turns: list[TurnRecord] = []
    tool_calls_attempted: int = 0
    tool_calls_schema_valid: int = 0
    tool_errors: list[ToolErrorRecord] = []
    inner_calls: list[InnerCallRecord] = []
    subagents: list[SubagentRecord] = []
    row: TokenRow | None = None
    ledger: LedgerRecord | None = None
    parent: Fork | None = None
    fork_points: list[int] = []
    extra: dict[str, JSON] = {}
    beside: Beside = msgspec.field(default_factory=Beside)

    @property
    def scored(self) -> bool:
        """Whether there is a reward to train on."""
        return self.reward is not None

    @property
    def unsaid(self) -> bool:
        """Whether the agent was ended before the model had said anything, as by a prompt that is too long for it: there
        may be a reward then, and there is nothing to train."""
        made = bool(self.row_sizes) and (self.row is None or self.row.source != "placeholder")
        return self.outcome is not Outcome.NATURAL and not self.turns and not made

    def every_subagent(self) -> Iterator[SubagentRecord]:
        """All sub-agents, each before those that it started itself."""
        waiting = list(reversed(self.subagents))
        while waiting:
            each = waiting.pop()
            yield each
            waiting += reversed(each.subagents)

    @property
    def of_subagents(self) -> set[int]:
        """The segments of the ledger that are its sub-agents'."""
        return {segment for each in self.every_subagent() for segment in each.segments}

    @property
    def rows(self) -> list[TokenRow]:
        """The training rows: the environment's own if it made one, else one for each segment of the ledger.

        Unpacks all tokens: read it once, and `row_sizes` for the sizes alone.
        """
        if self.row is not None:
            return [self.row]
        return [] if self.ledger is None else record_rows(self.ledger, self.rollout_id)

    @property
    def row_sizes(self) -> list[tuple[int, int]]:
        """How many tokens each of `rows` has, and how many of them are trained."""
        if self.row is not None:
            return [(len(self.row.tokens), sum(mask != UNTRAINED for mask in self.row.masks))]
        return [] if self.ledger is None else row_sizes(self.ledger)

    @property
    def latest_row(self) -> TokenRow | None:
        """The row of the conversation in `messages`, as it stood at its end."""
        beside = self.of_subagents if self.row is None else ()
        own = [row for row in self.rows if row.segment not in beside]
        return own[-1] if own else None


def have_same_scores(scored: Sequence[Trajectory]) -> bool:
    """Whether there is exactly one score among them."""
    return len({trajectory.reward for trajectory in scored}) == 1


class Group(msgspec.Struct, kw_only=True, omit_defaults=True):
    """All rollouts of one task, in index order. `number` is the task's place in the run, from 0.

    `toolsets` were configured or drawn. `tools` are the schemas that the models saw, `tools_hash` identifies them, and
    `tools_missing` has the requested tools that are unavailable, with the reason. If preparing the task failed, there
    are no trajectories, and `error` and `blame` have the cause. `prepare_s` is the time of preparing in seconds;
    `from_store`: the workspace had been prepared before. `asked` is a checksum of the task's prompt, empty in groups of
    earlier versions.
    """

    schema: str = GROUP_SCHEMA
    group_id: str
    number: int
    task_id: str
    asked: str = ""
    toolsets: tuple[str, ...] = ()
    tools: list[dict[str, JSON]] = []
    tools_hash: str = ""
    tools_missing: dict[str, str] = {}
    trajectories: list[Trajectory] = []
    error: str = ""
    blame: Blame | None = None
    prepare_s: float = 0.0
    from_store: bool = False

    @property
    def same_scores(self) -> bool:
        """Whether all scores are the same and there is one at least: a policy gradient learns nothing from it."""
        return have_same_scores(self.scored)

    @property
    def scored(self) -> list[Trajectory]:
        """The trajectories that have a reward."""
        return [trajectory for trajectory in self.trajectories if trajectory.scored]


def turns_of(result: AgentResult) -> list[TurnRecord]:
    """The records of a conversation's turns."""
    return [
        TurnRecord(
            number=turn.number,
            finish_reason=turn.finish_reason,
            prompt_tokens=turn.prompt_tokens,
            completion_tokens=turn.completion_tokens,
            tools=turn.tool_names,
        )
        for turn in result.turns
    ]


def tool_errors_of(result: AgentResult) -> list[ToolErrorRecord]:
    """The records of a conversation's failed calls."""
    return [
        ToolErrorRecord(turn=error.turn, tool=error.tool_name, arguments=error.arguments, error=error.error)
        for error in result.tool_errors
    ]


def inner_calls_of(calls: Sequence[InnerCall]) -> list[InnerCallRecord]:
    """The records of the calls that programs made."""
    return [
        InnerCallRecord(turn=call.turn, tool=call.tool, arguments=call.arguments, reply=call.reply) for call in calls
    ]


def subagents_of(result: AgentResult, places: Mapping[int, int]) -> list[SubagentRecord]:
    """The records of an agent's sub-agents. `places` are the numbers of the ledger's segments in its record."""
    return [
        SubagentRecord(
            number=each.number,
            turn=each.turn,
            goal=each.goal,
            messages=each.result.messages,
            outcome=each.result.outcome,
            error=each.result.error,
            turns=turns_of(each.result),
            tool_errors=tool_errors_of(each.result),
            inner_calls=inner_calls_of(each.inner_calls),
            subagents=subagents_of(each.result, places),
            segments=[places[segment] for segment in each.segments],
        )
        for each in result.subagents
    ]
