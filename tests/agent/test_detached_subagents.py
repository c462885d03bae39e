"""`delegate_task` where calls come without an agent of ours: executors, sessions, and plain function calls."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from palaestra.agent.budget import Budget
from palaestra.agent.loop import LoopSettings
from palaestra.agent.result import Subagent
from palaestra.agent.subagents import SYSTEM_PROMPT
from palaestra.tools.call_text import ToolCall
from palaestra.tools.registry.build import build_tool_registry
from palaestra_contract import Delegates, ToolExecutor, ToolSession, handle_function_call, use_session
from palaestra_slots.core.errors import ConfigError, EngineUnavailable, IsolationUnavailable, StaleLease
from palaestra_slots.core.types import JSON, Outcome
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.pool import SlotPool, SlotPoolConfig
from palaestra_tokens import APIServerConfig
from palaestra_tokens.serving.token_server import TokenLoopback
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer, completion
from palaestra_tokens.testing.fake_engine import ToyEngine
from palaestra_tokens.testing.tiny_model import save_tokenizer, train_tokenizer
from palaestra_tokens.tokenizers import load_tokenizer


def calls(name: str, **arguments: JSON) -> FakeAnswer:
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    return FakeAnswer(completion(None, "tool_calls", tool_calls=[call]))


def says(text: str) -> FakeAnswer:
    return FakeAnswer(completion(text))


def config(server: LoopbackServer) -> APIServerConfig:
    return APIServerConfig(model_name="m", base_url=f"{server.url}/v1", health_check=False)


@asynccontextmanager
async def session_with(delegates: Delegates | None) -> AsyncIterator[ToolSession]:
    session = ToolSession(delegates=delegates)
    try:
        await session.handle_async("read_file", {"path": "/etc/hostname"}, "probe")
        yield session
    except IsolationUnavailable as error:
        pytest.skip(str(error))
    finally:
        await asyncio.to_thread(session.close)


async def delegated(session: ToolSession, task_id: str = "t", **arguments: JSON) -> JSON:
    return json.loads(await session.handle_async("delegate_task", arguments, task_id))


@pytest.mark.slots
async def test_a_session_has_work_done_in_the_slot_of_the_task() -> None:
    ended: list[tuple[str, Subagent]] = []
    answers = [calls("terminal", command="echo 42 > found"), says("It is in found.")]
    async with LoopbackServer(*answers) as server:
        delegates = Delegates(
            config(server), settings=LoopSettings(max_tokens=99), on_end=lambda *end: ended.append(end)
        )
        async with session_with(delegates) as session:
            assert server.seen == [], "nothing is asked before the first work"
            reply = await delegated(session, goal="Find it", context="It is a number.")
            assert reply == {
                "results": [
                    {
                        "task_index": 0,
                        "status": "completed",
                        "summary": "It is in found.",
                        "api_calls": 2,
                        "tool_calls": 1,
                    }
                ]
            }
            read = await session.handle_async("terminal", {"command": "cat found"}, "t")
            assert json.loads(read)["output"] == "42\n"
        first = next(each.body for each in server.seen if each.method == "POST")
    assert first["max_tokens"] == 99
    assert [message["content"] for message in first["messages"]] == [SYSTEM_PROMPT, "Find it\n\nIt is a number."]
    named = {tool["function"]["name"] for tool in first["tools"]}
    assert "terminal" in named
    assert named.isdisjoint({"delegate_task", "clarify", "memory"})
    ((task, record),) = ended
    assert (task, record.goal, record.result.outcome, len(record.result.messages)) == (
        "t",
        "Find it",
        Outcome.NATURAL,
        5,
    )


@pytest.mark.slots
async def test_a_budget_is_for_all_the_work_of_a_task() -> None:
    async with (
        LoopbackServer(calls("todo")) as server,
        session_with(Delegates(config(server), settings=LoopSettings(max_turns=2, budget=Budget(turns=3)))) as session,
    ):
        ended = [(await delegated(session, goal="on and on"))["results"][0] for _ in range(3)]
        assert [each["api_calls"] for each in ended] == [2, 1, 0]
        assert [each["outcome"] for each in ended] == ["max_turns", "budget", "budget"]
        (other,) = (await delegated(session, "other", goal="on and on"))["results"]
        assert other["api_calls"] == 2


@pytest.mark.slots
async def test_work_ends_when_its_time_is_over_and_when_the_session_is_closed() -> None:
    ended: list[Subagent] = []
    async with LoopbackServer(FakeAnswer(hang=True)) as server:
        limited = Delegates(config(server), settings=LoopSettings(budget=Budget(wall_s=0.3)))
        async with session_with(limited) as session:
            (result,) = (await delegated(session, goal="hangs"))["results"]
            assert (result["status"], result["outcome"]) == ("stopped", "budget")
    async with LoopbackServer(FakeAnswer(hang=True)) as server:
        unlimited = Delegates(config(server), on_end=lambda _, each: ended.append(each))
        async with session_with(unlimited) as session:
            working = asyncio.create_task(delegated(session, goal="hangs"))
            await server.under_way(1)
            await asyncio.to_thread(session.release, "t")
            with pytest.raises(StaleLease, match="Trajectory t was released"):
                await working
            working = asyncio.create_task(delegated(session, goal="hangs"))
            await server.under_way(2)
            await asyncio.to_thread(session.close)
            with pytest.raises(StaleLease, match="was released while sub-agents worked for it"):
                await working
    assert [each.result.outcome for each in ended] == [Outcome.CANCELLED] * 2


@pytest.mark.slots
async def test_who_gave_no_model_server_is_told_and_one_that_is_away_is_the_worlds_failure() -> None:
    async with session_with(None) as session:
        assert (await delegated(session, goal="x"))["error"] == (
            "delegate_task cannot be used here: no model server was given for sub-agents (delegates=). "
            "Do the work yourself"
        )
    async with LoopbackServer(says("x")) as server:
        away = config(server).model_copy(update={"health_check": True})
    async with session_with(Delegates(away)) as session:
        with pytest.raises(EngineUnavailable, match=r"127\.0\.0\.1"):
            await delegated(session, goal="x")
    with pytest.raises(ConfigError, match="No model server"):
        Delegates([])


@pytest.mark.slots
async def test_plain_function_calls_use_the_session_that_was_chosen() -> None:
    async with LoopbackServer(says("Done.")) as server, session_with(Delegates(config(server))) as session:
        use_session(session)
        try:
            reply = await asyncio.to_thread(handle_function_call, "delegate_task", {"goal": "x"}, "chosen")
        finally:
            use_session(ToolSession())
    assert json.loads(reply)["results"][0]["summary"] == "Done."


@pytest.mark.slots
async def test_sub_agents_of_an_executors_trajectories_work_at_the_same_time() -> None:
    async with LoopbackServer(calls("todo"), calls("todo"), says("Done.")) as server:
        server.gate = asyncio.Event()
        async with (
            SlotPool(SlotPoolConfig(), LocalBackend()) as pool,
            ToolExecutor(
                pool, build_tool_registry(["delegation", "todo"]), delegates=Delegates(config(server))
            ) as executor,
        ):
            call = ToolCall("delegate_task", {"goal": "x"})
            both = asyncio.gather(*(executor.execute(name, call) for name in ("a", "b")))
            await server.under_way(2)
            server.gate.set()
            results = await both
            assert executor.slot_of("a") is None, "no tool of theirs needed one"
    assert [result.success for result in results] == [True, True]
    assert [json.loads(result.output)["results"][0]["summary"] for result in results] == ["Done.", "Done."]


@pytest.mark.slots
async def test_a_token_exact_server_gives_the_tokens_of_the_work(tmp_path: Path) -> None:
    save_tokenizer(train_tokenizer(), tmp_path)
    ended: list[Subagent] = []

    async def scenario(said: Sequence[str]) -> None:
        tokenizer = load_tokenizer(str(tmp_path))
        async with TokenLoopback(ToyEngine(tokenizer, itertools.cycle(said), rate=0.2), tokenizer) as server:
            exact = APIServerConfig(
                server_type="vllm", base_url=server.url, tokenizer_name=str(tmp_path), model_name="toy"
            )
            async with session_with(Delegates(exact, on_end=lambda _, each: ended.append(each))) as session:
                for _ in range(2):
                    assert (await delegated(session, goal="say it"))["results"][0]["summary"] == "said"

    await scenario(['<tool_call>\n{"name": "todo", "arguments": {}}\n</tool_call>', "said"])
    assert [(each.number, each.segments) for each in ended] == [(1, [0]), (2, [1])]
    nodes = (ended[-1].result.managed_state or {})["nodes"]
    trained = [sum(mask != -100 for mask in node.masked_tokens) for node in nodes]
    assert trained == [sum(turn.completion_tokens for turn in each.result.turns) for each in ended]
