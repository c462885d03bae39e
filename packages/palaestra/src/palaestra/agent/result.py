"""The result of a conversation: `AgentResult`, with its `ToolError`, `Turn`, `AgentStep` and `Subagent`. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from palaestra.tools.call_text import ToolCall, ToolResult
from palaestra.tools.inner_calls import InnerCall
from palaestra.tools.tool import ToolMistake
from palaestra_slots.core.types import JSON, Blame, Message, Outcome, Usage


@dataclass(init=False)
class ToolError(ToolMistake):
    """An error that the model reads: raise `ToolError("…")` in a tool. The `details` become further keys of the reply.

    It is also the record of one failed call in `AgentResult.tool_errors`. There, `arguments` and `tool_result` are the
    raw texts.
    """

    turn: int
    tool_name: str
    arguments: str
    error: str
    tool_result: str

    def __init__(
        self,
        turn: int | str = 0,
        tool_name: str = "",
        arguments: str = "",
        error: str = "",
        tool_result: str = "",
        **details: JSON,
    ) -> None:
        # `raise ToolError("…")` passes the message where records pass the turn.
        number, error = (0, turn) if isinstance(turn, str) else (turn, error)
        super().__init__(error, **details)
        self.turn, self.tool_name, self.arguments, self.error = number, tool_name, arguments, error
        self.tool_result = tool_result

    __hash__ = ToolMistake.__hash__


@dataclass(slots=True)
class Turn:
    """One model call with its tool calls. `model_s` and `tool_s` are wall time; `tool_s` is also the time of a user who
    answers, and excludes the time that the budget does not charge, such as waiting for a slot."""

    number: int
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    model_s: float
    tool_s: float
    tool_names: tuple[str, ...] = ()


@dataclass(slots=True)
class SequenceData:
    """The tokens of a rollout in the format that existing environments use: `tokens[T]`, `masked_tokens[T]` (-100 if
    not trained) and `logprobs[T]` (1.0 if not sampled). Results hold the ledger's rows, which have the same fields."""

    full_text: str
    tokens: list[int]
    masked_tokens: list[int]
    logprobs: list[float]


@dataclass(slots=True)
class AgentStep:
    """One reply of an `AtroposAgent`, as it was sampled, with its calls and their results in call order.

    `step_number` counts from 1. `sequence_data` is the result's `trajectory_data` on the last step of a run, and None
    on other steps.
    """

    step_number: int
    assistant_message: str
    tool_calls: list[ToolCall] = field(default_factory=list)
    tool_results: list[ToolResult] = field(default_factory=list)
    sequence_data: JSON = None


@dataclass(slots=True)
class Subagent:
    """The conversation of one sub-agent, started by a call of `delegate_task`.

    `number` counts from 1 over the whole rollout; `turn` is the turn of the agent that delegated the work. `segments`
    are the indices of the ledger segments that hold the sub-agent's tokens, if the server reports tokens.
    """

    number: int
    turn: int
    goal: str
    result: AgentResult
    inner_calls: list[InnerCall] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)


@dataclass(slots=True)
class AgentResult:
    """The result of a conversation with either kind of agent. After a `HermesAgentLoop`, `messages` is the list passed
    to `run`, extended in place; after an `AtroposAgent` it has the text turns, and `steps` and `answer` are set.

    `outcome` is the reason why the conversation ended, and `error` may describe it. `blame` is the cause of a failure.
    Every exit of the loop, cancellation included, leaves a complete result.
    """

    messages: list[Message]
    managed_state: dict[str, JSON] | None = None
    turns_used: int = 0
    finished_naturally: bool = False
    reasoning_per_turn: list[str | None] = field(default_factory=list)
    tool_errors: list[ToolError] = field(default_factory=list)
    outcome: Outcome = Outcome.NATURAL
    error: str = ""
    blame: Blame | None = None
    usage: Usage = field(default_factory=Usage)
    turns: list[Turn] = field(default_factory=list)
    tool_calls_attempted: int = 0
    tool_calls_schema_valid: int = 0
    steps: list[AgentStep] = field(default_factory=list)
    metadata: dict[str, JSON] = field(default_factory=dict)
    answer: str | None = None
    subagents: list[Subagent] = field(default_factory=list)

    @property
    def success(self) -> bool:
        """Whether the agent finished by itself, not because of a limit or a failure."""
        return self.outcome is Outcome.NATURAL

    @property
    def num_steps(self) -> int:
        """The number of replies from the model."""
        return self.turns_used

    @property
    def total_tool_calls(self) -> int:
        """The number of requested calls, malformed ones included."""
        return self.tool_calls_attempted

    @property
    def total_tokens(self) -> int:
        """Prompt and completion tokens of all model calls, including those of sub-agents, as the server counted
        them."""
        return self.usage.prompt_tokens + self.usage.completion_tokens

    @property
    def trajectory_data(self) -> JSON:
        """The last row of exact tokens (`tokens[T]`, `masked_tokens[T]`, `logprobs[T]`, `full_text`), or None if the
        server returned no tokens.

        A rollout whose history was rewritten has several rows; `managed_state["nodes"]` holds all of them.
        """
        nodes = (self.managed_state or {}).get("nodes")
        return nodes[-1] if nodes else None

    def to_messages(self) -> list[Message]:
        """Return shallow copies of the messages."""
        return [dict(message) for message in self.messages]

    def to_scored_data(self, score: float) -> dict[str, JSON] | None:
        """Return the training row (`tokens[T]`, `masks[T]`, `inference_logprobs[T]`, `scores`, `messages`); None if the
        server returned no tokens."""
        node = self.trajectory_data
        if node is None:
            return None
        return {
            "tokens": node.tokens,
            "masks": node.masked_tokens,
            "inference_logprobs": node.logprobs,
            "scores": score,
            "messages": self.to_messages(),
        }

    @property
    def final_response(self) -> str:
        """The content of the last assistant message, or the empty string if there is none. Thinking and calls that were
        recognized are not part of the content."""
        if self.answer is not None:
            return self.answer
        for message in reversed(self.messages):
            if message.get("role") == "assistant":
                return str(message.get("content") or "")
        return ""


ENDED_LOOPS: ContextVar[list[AgentResult] | None] = ContextVar("ended_loops", default=None)
"""The list to which an agent loop adds its result when it ends, or None."""


@contextmanager
def ended_loops() -> Iterator[list[AgentResult]]:
    """Yield a list that collects the results of the agent loops that end in the block and in the tasks that it
    starts."""
    ended: list[AgentResult] = []
    token = ENDED_LOOPS.set(ended)
    try:
        yield ended
    finally:
        ENDED_LOOPS.reset(token)
