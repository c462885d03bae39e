"""Extracts the model calls of a recorded rollout with their exact tokens, for trainers that train on calls instead of
rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from palaestra import JSON, ConfigError, Message, Task, Trajectory


class TurnTokens(NamedTuple):
    """One model call: `prompt_ids[P]`, `completion_ids[T]` as sampled, and the engine's `logprobs[T]`."""

    number: int
    segment: int
    reason: str
    finish_reason: str | None
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]


def sampled_turns(trajectory: Trajectory) -> Iterator[TurnTokens]:
    """Yield the calls in order. Each sampled token occurs once. Raises `ConfigError` for a rollout without recorded
    tokens."""
    if trajectory.ledger is None:
        raise ConfigError(f"{trajectory.rollout_id} has no recorded tokens: use a token-exact model server")
    rows = {row.segment: row for row in trajectory.rows}
    for turn in trajectory.ledger.turns:
        row, start = rows[turn.segment], turn.prompt_tokens
        stop = start + turn.sampled_tokens
        assert row.logprobs is not None
        yield TurnTokens(
            turn.number,
            turn.segment,
            str(row.reason),
            turn.finish_reason,
            row.tokens[:start],
            row.tokens[start:stop],
            row.logprobs[start:stop],
        )


def response_items(message: Message, name: str) -> Iterator[dict[str, JSON]]:
    """Yield the output items of the Responses API for a reply or a tool result. `name` makes the id of a text unique.
    Source: OpenAI's Responses API, `ResponseOutputMessage`, `ResponseFunctionToolCall` and `FunctionCallOutput`."""
    text = message.get("content") or ""
    if message["role"] == "tool":
        yield {"type": "function_call_output", "call_id": message["tool_call_id"], "output": str(text)}
        return
    calls = message.get("tool_calls") or []
    if text or not calls:
        content: JSON = [{"type": "output_text", "text": text, "annotations": []}]
        yield {"type": "message", "id": f"msg_{name}", "role": "assistant", "status": "completed", "content": content}
    for call in calls:
        function: Mapping[str, JSON] = call["function"]
        named = {"name": function["name"], "arguments": function["arguments"], "call_id": call["id"], "id": call["id"]}
        yield {"type": "function_call", "status": "completed", **named}


def prompt_length(task: Task, messages: Sequence[Message]) -> int:
    """Return how many of a rollout's messages came before the agent: those of the task and, in front of them, the run's
    own system message, if it has one."""
    return len(task.messages()) + (messages[:1] != task.messages()[:1])
