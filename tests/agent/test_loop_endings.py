"""However a rollout goes and wherever it is cut, its result is complete (A1 to A3): random conversations, real loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from palaestra import AgentResult, Budget
from palaestra.agent.result import Turn
from palaestra_contract import HermesAgentLoop
from palaestra_slots.core.errors import EngineUnavailable, SlotLost
from palaestra_slots.core.types import JSON, Message, Outcome

SCHEMAS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("safe", "plain")
]


@dataclass(frozen=True)
class Call:
    """One call of the made-up model: its tool, its arguments, and what the tool does."""

    name: str
    arguments: str
    does: str


@dataclass(frozen=True)
class Plan:
    """A made-up rollout. The `cut_at`-th thing that happens, a model call or a tool call, cancels the rollout."""

    turns: Sequence[tuple[Sequence[Call], str]]
    cut_at: int | None


calls = st.builds(
    Call,
    st.sampled_from(["safe", "safe", "plain", "unknown"]),
    st.sampled_from(["{}", "", "{", "[]", '{"extra": 1}']),
    st.sampled_from(["answers", "answers", "answers", "raises", "loses its slot"]),
)
finish_reasons = st.sampled_from(["tool_calls", "stop", "length"])
plans = st.builds(
    Plan,
    st.lists(st.tuples(st.lists(calls, max_size=4), finish_reasons), max_size=4),
    st.none() | st.integers(0, 12),
)


class PlannedWorld:
    """The model server and the tools of one plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.happened = 0
        self.turn = -1
        self.ran: list[str] = []
        self.rollout: asyncio.Task[AgentResult] | None = None

    async def _happens(self) -> None:
        if self.happened == self.plan.cut_at:
            assert self.rollout is not None
            self.rollout.cancel()
        self.happened += 1
        await asyncio.sleep(0)

    async def chat_completion(self, **request: JSON) -> JSON:
        await self._happens()
        self.turn += 1
        if self.turn >= len(self.plan.turns):
            raise EngineUnavailable("the model is gone")
        wanted, finish = self.plan.turns[self.turn]
        tool_calls = [
            {"id": f"{self.turn}.{i}", "function": {"name": call.name, "arguments": call.arguments}}
            for i, call in enumerate(wanted)
        ]
        message = {"content": f"turn {self.turn}", "tool_calls": tool_calls}
        return {"choices": [{"message": message, "finish_reason": finish}], "usage": {"completion_tokens": 1}}

    async def handle(self, name: str, arguments: dict[str, JSON], task_id: str | None) -> str:
        assert arguments == {}
        self.ran.append(name)
        await self._happens()
        wanted, _ = self.plan.turns[self.turn]
        does = {call.does for call in wanted if call.name == name}
        if "loses its slot" in does:
            raise SlotLost("gone")
        if "raises" in does:
            raise ValueError("tool bug")
        return '{"ok": true}'


def roll_out(plan: Plan) -> tuple[AgentResult, PlannedWorld, list[Message]]:
    reported: list[Message] = []

    def on_turn(turn: Turn, new: list[Message]) -> None:
        reported.extend(new)

    async def go() -> tuple[AgentResult, PlannedWorld]:
        world = PlannedWorld(plan)
        loop = HermesAgentLoop(
            world,
            SCHEMAS,
            {"safe", "plain"},
            max_turns=3,
            tool_handler=world.handle,
            parallel_safe={"safe"},
            on_turn=on_turn,
            budget=Budget(completion_tokens=1000),
        )
        world.rollout = asyncio.create_task(loop.run([{"role": "user", "content": "go"}]))
        await asyncio.wait([world.rollout])
        if world.rollout.cancelled():
            assert loop.result.outcome is Outcome.CANCELLED
        else:
            assert world.rollout.result() is loop.result
        return loop.result, world

    result, world = asyncio.run(go())
    return result, world, reported


def unanswered(messages: Sequence[Message]) -> list[str]:
    """Ids of calls that are not answered, in order, right after the message that asked for them."""
    missing: list[str] = []
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            if not waiting or waiting.pop(0) != message["tool_call_id"]:
                missing.append(message["tool_call_id"])
        else:
            missing += waiting
            waiting = [call["id"] for call in message.get("tool_calls", ())]
    return missing + waiting


@settings(max_examples=300, deadline=None)
@given(plans)
def test_every_ending_leaves_a_complete_trajectory(plan: Plan) -> None:
    result, world, reported = roll_out(plan)
    assert unanswered(result.messages) == []
    assert len(result.turns) == result.turns_used == len(result.reasoning_per_turn) == result.usage.calls
    asked = [call for message in result.messages for call in message.get("tool_calls", ())]
    assert result.tool_calls_attempted == len(asked)
    assert len(world.ran) <= result.tool_calls_schema_valid <= len(asked)
    assert "unknown" not in world.ran
    assert result.finished_naturally is (result.outcome is Outcome.NATURAL)
    assert (result.blame is not None) is (result.outcome in (Outcome.API_ERROR, Outcome.INFRA_ERROR))
    assert "gone" not in json.dumps(result.messages)
    if result.outcome is not Outcome.CANCELLED:
        assert reported == result.messages[1:]
    else:
        assert reported == result.messages[1 : 1 + len(reported)]


@settings(max_examples=100, deadline=None)
@given(plans)
def test_the_same_answers_give_the_same_trajectory(plan: Plan) -> None:
    first, _, _ = roll_out(plan)
    second, _, _ = roll_out(plan)
    assert json.dumps(first.messages) == json.dumps(second.messages)
    assert first.outcome is second.outcome
    assert first.tool_errors == second.tool_errors
