"""The loop over the real chat completions engine and a real server on the loopback."""

from __future__ import annotations

import asyncio
import json

import pytest

from manual_clock import ManualClock
from palaestra import AgentResult
from palaestra.agent.budget import Budget
from palaestra_contract import HermesAgentLoop
from palaestra_slots.core.retry import RetryPolicy
from palaestra_slots.core.types import JSON, Outcome
from palaestra_tokens.config import APIServerConfig
from palaestra_tokens.engines.openai import OpenAIEngine
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer, completion

READ = {
    "type": "function",
    "function": {
        "name": "read",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}


async def read(name: str, arguments: dict[str, JSON], task_id: str | None) -> str:
    return json.dumps({"content": f"<{arguments['path']}>"})


def call(arguments: JSON, **more: JSON) -> JSON:
    return {"type": "function", "function": {"name": "read", "arguments": arguments}, **more}


def roll_out(server: LoopbackServer) -> tuple[AgentResult, OpenAIEngine]:
    async def go() -> tuple[AgentResult, OpenAIEngine]:
        async with server:
            engine = OpenAIEngine(APIServerConfig(base_url=server.url, model_name="m"), clock=ManualClock())
            loop = HermesAgentLoop(engine, [READ], {"read"}, tool_handler=read)
            try:
                return await loop.run([{"role": "user", "content": "go"}]), engine
            finally:
                await engine.aclose()

    return asyncio.run(go())


def test_several_turns_through_a_server_that_stumbles() -> None:
    server = LoopbackServer(
        FakeAnswer({}, 429, {"Retry-After": "2"}),
        FakeAnswer(completion(None, "tool_calls", tool_calls=[call('{"path": "a"}'), call({"path": "b"})])),
        FakeAnswer(cut=True),
        FakeAnswer({}, 500),
        FakeAnswer(completion("now c", "tool_calls", reasoning="hm", tool_calls=[call('{"path": "c"', id="z")])),
        FakeAnswer(completion([{"type": "text", "text": "do"}, {"type": "text", "text": "ne"}])),  # type: ignore[arg-type]
    )
    result, engine = roll_out(server)
    assert result.outcome is Outcome.NATURAL
    assert result.final_response == "done"
    assert engine.transport.retries == 3
    roles = [message["role"] for message in result.messages]
    assert roles == ["user", "assistant", "tool", "tool", "assistant", "tool", "assistant"]
    assert [message["tool_call_id"] for message in result.messages if message["role"] == "tool"] == [
        "call_1_0",
        "call_1_1",
        "z",
    ]
    assert json.loads(result.messages[3]["content"]) == {"content": "<b>"}
    assert "Invalid JSON" in result.messages[5]["content"]
    assert result.reasoning_per_turn == [None, "hm", None]
    assert result.usage.prompt_tokens == 21
    assert server.seen[-1].body["messages"] == result.messages[:-1]
    assert server.seen[-1].body["tools"] == [READ]


def test_a_context_that_fills_up_ends_with_length() -> None:
    full = FakeAnswer({"error": {"message": "too long", "code": "context_length_exceeded"}}, 400)
    asks = FakeAnswer(completion(None, "tool_calls", tool_calls=[call('{"path": "a"}')]))
    assert roll_out(LoopbackServer(asks, full))[0].outcome is Outcome.LENGTH


def test_a_refused_key_is_an_api_error_that_says_what_to_do() -> None:
    result, _ = roll_out(LoopbackServer(FakeAnswer({"error": {"message": "invalid key"}}, 401)))
    assert result.outcome is Outcome.API_ERROR
    assert "--openai.api_key" in result.error


async def test_a_server_that_is_overloaded_for_longer_than_the_budget_does_not_use_it_up() -> None:
    async def go() -> AgentResult:
        overloaded = FakeAnswer({}, 429, {"Retry-After": "0.6"})
        async with LoopbackServer(overloaded, overloaded, FakeAnswer(completion("done"))) as server:
            retry = RetryPolicy(first_s=0.01)
            engine = OpenAIEngine(APIServerConfig(base_url=server.url, model_name="m"), retry=retry)
            loop = HermesAgentLoop(engine, [], set(), budget=Budget(wall_s=0.5))
            try:
                return await loop.run([{"role": "user", "content": "go"}])
            finally:
                await engine.aclose()

    result = await go()
    assert (result.outcome, result.final_response) == (Outcome.NATURAL, "done")


async def test_cancelling_during_a_model_call_lets_go_of_the_connection() -> None:
    async with LoopbackServer(FakeAnswer(hang=True)) as server:
        engine = OpenAIEngine(APIServerConfig(base_url=server.url))
        loop = HermesAgentLoop(engine, [], set())
        rollout = asyncio.create_task(loop.run([{"role": "user", "content": "go"}]))
        await server.under_way(1)
        rollout.cancel()
        await asyncio.wait([rollout])
        in_flight = engine.transport.in_flight
        await engine.aclose()
        result = loop.result
    assert result.outcome is Outcome.CANCELLED
    assert result.messages == [{"role": "user", "content": "go"}]
    assert in_flight == 0


@pytest.mark.parametrize(
    ("word", "outcome"),
    [
        *((each, Outcome.NATURAL) for each in ("stop", "end_turn", "STOP", "eos", "tired_of_this")),
        *((each, Outcome.LENGTH) for each in ("length", "MAX_TOKENS", "model_length", "max_output_tokens")),
        *((each, Outcome.API_ERROR) for each in ("content_filter", "sensitive", "RECITATION", "SAFETY")),
        *((each, Outcome.API_ERROR) for each in ("network_error", "insufficient_system_resource", "error", "abort")),
    ],
)
def test_only_the_models_own_end_and_its_limits_are_scored(word: str, outcome: Outcome) -> None:
    first = FakeAnswer(completion(None, "tool_calls", tool_calls=[call('{"path": "a"}')]))
    result, _ = roll_out(LoopbackServer(first, FakeAnswer(completion("I will now wri", word))))
    assert (result.outcome, result.outcome.scored) == (outcome, outcome is not Outcome.API_ERROR)
    assert outcome.scored or word in result.error
