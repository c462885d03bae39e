"""The records of rollouts: `Trajectory`, and `Group`, the trajectories of one task.

The journal holds these records unchanged, and groups files, exports and reports are made from them. The same seed and
the same answers of the model and the tools reproduce all fields of a trajectory except `beside`, which has wall times
and facts about the sandbox.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from palaestra.agent.result import AgentResult
from palaestra.rollouts.grading.reward import DIFFERENCE, UNSEEN
from palaestra.tools.inner_calls import InnerCall
from palaestra_slots.core.types import JSON, Blame, Label, Message, Outcome, Score
from palaestra_tokens.ledger import UNTRAINED, LedgerRecord, TokenRow, record_rows, row_sizes

TRAJECTORY_SCHEMA = "palaestra.trajectory/1"
GROUP_SCHEMA = "palaestra.group/1"

PLACEHOLDER = "placeholder"
"""The source of a row whose tokens nobody sampled."""

CUT_OFF = frozenset({Blame.RUN, Blame.ENGINE})
"""A rollout whose failure has one of these attributions is continued or rolled out again."""

MODEL_CALLS, KNOWN_REPLIES, MODEL_COST = "model_calls", "model_calls_cached", "model_cost"
"""The metrics of a rollout about models that its environment asked: how often, how many of the replies the run had
already, and the cost of the others."""

OF_MODELS = (MODEL_CALLS, KNOWN_REPLIES, MODEL_COST, "model_prompt_tokens", "model_completion_tokens")
"""The metrics of a rollout that its score does not change."""


def whole_cost(tokens: float | None, metrics: Mapping[str, float]) -> float | None:
    """Return the cost of a rollout, from that of its tokens and its metrics about the models that its environment
    asked; None if no prices are known."""
    return (tokens or 0.0) + metrics[MODEL_COST] if MODEL_COST in metrics else tokens


class TurnRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One model call: its finish reason, its token counts and the names of the tools that it called."""

    number: int
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    tools: tuple[str, ...] = ()


class ToolErrorRecord(msgspec.Struct, kw_only=True):
    """One failed tool call: the request, and the error that the model read."""

    turn: int
    tool: str
    arguments: str
    error: str


class InnerCallRecord(msgspec.Struct, kw_only=True):
    """One tool call that a program made in a turn: a script of `execute_code`, or the run's agent program. Long texts
    are cut in the middle."""

    turn: int
    tool: str
    arguments: str
    reply: str


class SubagentRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The conversation of a sub-agent that `delegate_task` or the run's agent program started. Sub-agents are listed in
    the order in which they started.

    `turn` is the turn in which the work was delegated. `segments` has the indices of the ledger's segments that hold
    the sub-agent's tokens.
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
    """Data that may differ between otherwise identical runs. Seconds are wall time. `stages` has the seconds of each
    stage, such as setup, agent, tool, admit (the wait for a free slot), acquire (creating a slot), seal and grade.
    Stages may nest, and concurrent calls add up. `turn_s` has the seconds of the model and of the tools for each
    turn."""

    started_at: float = 0.0
    duration_s: float = 0.0
    stages: dict[str, float] = {}
    turn_s: list[tuple[float, float]] = []
    sandbox: dict[str, JSON] = {}


class Fork(msgspec.Struct, frozen=True):
    """The point at which a branch begins: after turn `turn` of the rollout with this `index` in the same group."""

    index: int
    turn: int


class Origin(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The point at which a counterfactual rollout begins: after turn `turn` of a rollout of the run `run_id`.

    `state` is `kept` if its sandbox started from the kept workspace of that turn, and `rebuilt` if the recorded calls
    were run again. `difference` describes the first of these calls whose result differs from the recorded one.
    """

    run_id: str
    rollout_id: str
    turn: int
    state: str = ""
    difference: str = ""


class Trajectory(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One rollout from first message to reward. `reward` is None exactly when the rollout was not scored.

    `blame` is set on every rollout that did not end naturally, and `error` describes what went wrong, if the outcome
    does not. `metrics` are numbers that can be averaged, and `detail` is evidence (test results, the agent's patch).
    `official` is the verdict of the benchmark's own protocol, if it was computed separately, and `labels` has the signs
    of reward hacking that the check noticed.
    `ledger` has the exact tokens if the model server returns them, and `row` has the environment's own token row, if it
    made one. `state` is the environment's state after the last turn. `inner_calls` and `subagents` record the work
    inside tool calls; the tokens of sub-agents count in `prompt_tokens`, `completion_tokens` and `cost`, but their
    turns are not in `turns`. `cost` is in the currency of the run's prices.

    A rollout with a `parent` continues another rollout. Its `messages`, `turns` and counts of tool calls cover the
    whole conversation; its tokens, cost and ledger cover only its own turns. `fork_points` are the turns after which
    other rollouts could continue this one. Only earlier versions made such rollouts; their records stay readable.

    A rollout with an `origin` is counterfactual: it continues a rollout of another run, as one with a `parent` does,
    and is not trained on unless somebody asks for it.
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
    official: float | None = None
    labels: list[Label] = []
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
    origin: Origin | None = None
    state: JSON = None
    extra: dict[str, JSON] = {}
    beside: Beside = msgspec.field(default_factory=Beside)

    @property
    def whole_cost(self) -> float | None:
        """The cost with that of the models that the environment asked; None if no prices are known."""
        return whole_cost(self.cost, self.metrics)

    @property
    def scored(self) -> bool:
        """Whether there is a reward to train on."""
        return self.reward is not None

    @property
    def shared_turns(self) -> int:
        """The number of turns at its beginning that belong to another rollout."""
        begins = self.parent or self.origin
        return 0 if begins is None else begins.turn

    @property
    def is_forked(self) -> bool:
        """Whether its ledger begins within a conversation, after turns that belong to another rollout."""
        # A conversation that was given as messages has been rendered as a whole, so its ledger begins with a prompt of
        # its own.
        rendered = self.ledger is not None and bool(self.ledger.segments) and self.ledger.segments[0].reason == "start"
        return self.parent is not None or (self.origin is not None and not rendered)

    @property
    def official_reward(self) -> float | None:
        """The benchmark's own verdict: `official`, or the reward if the environment has no separate verdict."""
        return self.reward if self.official is None else self.official

    @property
    def verdict(self) -> dict[str, JSON]:
        """The official verdict (`official`) and the labels (`labels`: name, evidence, certain) as JSON, for a trainer's
        additional fields; each key is left out if the rollout has none."""
        return verdict_fields(self)

    @property
    def difference(self) -> str:
        """The sentence that names why the reward differs from the official verdict; empty if it does not."""
        said = self.detail.get(DIFFERENCE)
        return said if isinstance(said, str) else ""

    @property
    def unseen(self) -> list[str]:
        """The changed paths that the check did not see."""
        found = self.detail.get(UNSEEN)
        return [str(path) for path in found] if isinstance(found, list) else []

    @property
    def unsaid(self) -> bool:
        """Whether the agent ended before the model had replied, for example because the prompt was too long. Such a
        rollout may have a reward, but it has nothing to train on."""
        made = bool(self.row_sizes) and (self.row is None or self.row.source != PLACEHOLDER)
        return self.outcome is not Outcome.NATURAL and not self.turns and not made

    @property
    def has_tokens(self) -> bool:
        """Whether there are tokens that a model sampled, or that the environment made."""
        return self.ledger is not None or (self.row is not None and self.row.source != PLACEHOLDER)

    def every_subagent(self) -> Iterator[SubagentRecord]:
        """Yield all sub-agents, each before the ones that it started."""
        waiting = list(reversed(self.subagents))
        while waiting:
            each = waiting.pop()
            yield each
            waiting += reversed(each.subagents)

    @property
    def of_subagents(self) -> set[int]:
        """The numbers of the ledger's segments that belong to sub-agents."""
        return {segment for each in self.every_subagent() for segment in each.segments}

    @property
    def rows(self) -> list[TokenRow]:
        """The training rows: the environment's own row if it made one, otherwise one for each segment of the ledger.

        Each access unpacks all tokens, so access this property only once; use `row_sizes` if you need only the sizes.
        """
        if self.row is not None:
            return [self.row]
        return [] if self.ledger is None else record_rows(self.ledger, self.rollout_id)

    @property
    def row_sizes(self) -> list[tuple[int, int]]:
        """For each of `rows`, the number of its tokens and the number of those tokens that are trained on."""
        if self.row is not None:
            return [(len(self.row.tokens), sum(mask != UNTRAINED for mask in self.row.masks))]
        return [] if self.ledger is None else row_sizes(self.ledger)

    @property
    def latest_row(self) -> TokenRow | None:
        """The last row of the rollout's own conversation; None if there is none."""
        beside = self.of_subagents if self.row is None else ()
        own = [row for row in self.rows if row.segment not in beside]
        return own[-1] if own else None


def verdict_fields(judged: Trajectory | Score | None) -> dict[str, JSON]:
    """Return the official verdict and the labels for a line of a file. A key without a value is left out, so that the
    lines of environments without official verdicts and labels do not have it."""
    if judged is None:
        return {}
    official = {} if judged.official is None else {"official": judged.official}
    return {**official, **({"labels": msgspec.to_builtins(list(judged.labels))} if judged.labels else {})}


def have_same_scores(scored: Sequence[Trajectory]) -> bool:
    """Return whether the rollouts have exactly one distinct score."""
    return len({trajectory.reward for trajectory in scored}) == 1


class Group(msgspec.Struct, kw_only=True, omit_defaults=True):
    """All rollouts of one task, in index order. `number` is the task's position in the run, from 0.

    `toolsets` are the configured or randomly drawn toolsets. `tools` are the schemas that the models saw, `tools_hash`
    identifies them, and `tools_missing` has the requested tools that are unavailable, each with the reason. If the task
    was invalid or could not be prepared, or its rollouts could not be collected, `error` and `blame` have the cause.
    `prepare_s` is the preparation time in seconds; `from_store` is true if the workspace had been prepared before.
    `asked` is a checksum of the task's prompt, empty in groups of earlier versions. `limits` has the limits that the
    task declares, each with the `value` that holds and where it comes `from`.
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
    limits: dict[str, JSON] = {}

    @property
    def same_scores(self) -> bool:
        """Whether there is a score and all scores are equal. A policy gradient learns nothing from such a group."""
        return have_same_scores(self.scored)

    @property
    def scored(self) -> list[Trajectory]:
        """The trajectories that have a reward."""
        return [trajectory for trajectory in self.trajectories if trajectory.scored]


def turns_of(result: AgentResult) -> list[TurnRecord]:
    """Return the records of a conversation's turns."""
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


def own_tokens_of(result: AgentResult, shared: int) -> tuple[int, int]:
    """Return the numbers of tokens read and written, without the first `shared` turns, which belong to the rollout that
    this one continues."""
    before = [turn for turn in result.turns if turn.number <= shared]
    read, written = (sum(turn.prompt_tokens for turn in before), sum(turn.completion_tokens for turn in before))
    return result.usage.prompt_tokens - read, result.usage.completion_tokens - written


def tool_errors_of(result: AgentResult) -> list[ToolErrorRecord]:
    """Return the records of a conversation's failed calls."""
    return [
        ToolErrorRecord(turn=error.turn, tool=error.tool_name, arguments=error.arguments, error=error.error)
        for error in result.tool_errors
    ]


def inner_calls_of(calls: Sequence[InnerCall]) -> list[InnerCallRecord]:
    """Return the records of the calls that programs made."""
    return [
        InnerCallRecord(turn=call.turn, tool=call.tool, arguments=call.arguments, reply=call.reply) for call in calls
    ]


def subagents_of(result: AgentResult, places: Mapping[int, int]) -> list[SubagentRecord]:
    """Return the records of an agent's sub-agents. `places` maps each ledger segment to its index in the ledger's
    record."""
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
