"""What the loop hands back: `AgentResult`, `ToolError`, `Turn`."""

from __future__ import annotations

from dataclasses import dataclass, field

from palaestra.core.types import JSON, Blame, Message, Outcome, Usage


@dataclass(slots=True)
class ToolError:
    """One call that failed, as the contract shapes it. `arguments` and `tool_result` are the raw text."""

    turn: int
    tool_name: str
    arguments: str
    error: str
    tool_result: str


@dataclass(slots=True)
class Turn:
    """One model call with its tool calls. Seconds are wall time."""

    number: int
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    model_s: float
    tool_s: float
    tool_names: tuple[str, ...] = ()


@dataclass(slots=True)
class AgentResult:
    """A finished conversation. `messages` is the very list that was passed to `run`, extended in place.

    `outcome` says why it ended; where something went wrong, `error` is the text of it and `blame` says whose fault it
    was. Every exit of the loop, cancellation included, leaves one of these.
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

    @property
    def final_response(self) -> str:
        """The text of the last assistant message, or the empty string."""
        for message in reversed(self.messages):
            if message.get("role") == "assistant":
                return str(message.get("content") or "")
        return ""
