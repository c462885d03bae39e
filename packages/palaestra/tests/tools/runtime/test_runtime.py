"""The runtime of one rollout: the model reads its mistakes, infrastructure failures are raised, one slot."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

import pytest

from golden_messages import check_message
from palaestra.tools.registry.build import builtin_tools
from palaestra.tools.registry.registry import ToolRegistry
from palaestra.tools.runtime.runtime import CheckedCall, Next, ToolRuntime
from palaestra.tools.tool import FunctionTool, ToolMistake, ToolOutcome, ToolReply, ToolRun, ToolSchema
from palaestra_slots.core.errors import SlotLost
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import Slot


async def no_slot() -> Slot:
    raise SlotLost("the slot's server is gone")


async def misbehave(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    match arguments["how"]:
        case "mistake":
            raise ToolMistake("no such file", similar_files=["a"])
        case "bug":
            raise KeyError("x")
        case "odd":
            return {"name": "\udc80ä"}
        case "text":
            return "plain"
    return {"timeout_s": run.timeout_s, "task_id": run.task_id, "user_task": run.user_task}


def tools(timeout_s: float = 120.0) -> ToolRuntime:
    schema = ToolSchema("misbehave", "", {"how": {"type": "string"}}, ("how",))
    registry = ToolRegistry([FunctionTool(schema, misbehave, "mine"), *builtin_tools()])
    return ToolRuntime(registry, no_slot, "task-1", user_task="do it", timeout_s=timeout_s)


def handled(name: str, arguments: Mapping[str, JSON]) -> JSON:
    return json.loads(asyncio.run(tools().handle(name, arguments, "task-1")))


def test_a_mistake_is_a_reply_with_its_details() -> None:
    assert handled("misbehave", {"how": "mistake"}) == {"error": "no such file", "similar_files": ["a"]}


def test_a_failing_tool_is_told_with_the_type(caplog: pytest.LogCaptureFixture) -> None:
    assert handled("misbehave", {"how": "bug"}) == {"error": "Tool execution failed: KeyError: 'x'"}
    assert "Traceback" in caplog.text


def test_an_unknown_tool_is_told_with_those_there_are() -> None:
    error = handled("bash", {})["error"]
    assert error.startswith("Unknown tool 'bash'. Available tools: ['misbehave', 'terminal'")
    missing = FunctionTool(ToolSchema("paint", ""), misbehave, missing=lambda: "there is no paint")
    registry = ToolRegistry([missing, FunctionTool(ToolSchema("misbehave", ""), misbehave)])
    outcome = asyncio.run(ToolRuntime(registry, no_slot, "t").call("rub", {}))
    assert outcome.reply == {"error": "Unknown tool 'rub'. Available tools: ['misbehave']"}
    outcome = asyncio.run(ToolRuntime(registry, no_slot, "t").call("paint", {"colour": 1}))
    assert outcome.reply == {"error": "paint cannot be used here: there is no paint"}


def test_arguments_are_checked_here_too() -> None:
    check_message(handled("misbehave", {})["error"], "how")
    assert "unknown argument 'hwo'" in handled("misbehave", {"how": "text", "hwo": 1})["error"]


def test_the_worlds_failure_is_never_a_reply() -> None:
    with pytest.raises(SlotLost):
        handled("terminal", {"command": "ls"})
    with pytest.raises(SlotLost):
        handled("read_file", {"path": "a"})


async def test_a_tool_sees_who_it_runs_for_and_the_time_limit_of_its_call() -> None:
    bound = tools(timeout_s=30.0)
    calls = bound.call("misbehave", {"how": ""}), bound.call("misbehave", {"how": ""}, timeout_s=5.0)
    usual, limited = [(await each).reply for each in calls]
    assert usual == {"timeout_s": 30.0, "task_id": "task-1", "user_task": "do it"}
    assert limited == {"timeout_s": 5.0, "task_id": "task-1", "user_task": "do it"}


def test_reading_searching_and_asking_may_run_at_the_same_time_and_nothing_else() -> None:
    pytest.importorskip("palaestra_toolsets")
    asking = {"web_search", "web_extract", "web_crawl", "vision_analyze", "mixture_of_agents"} | {
        "image_generate",
        "text_to_speech",
    }
    assert tools().parallel_safe == {"read_file", "search_files"} | asking


def test_the_text_of_a_reply_can_be_encoded() -> None:
    assert ToolOutcome.of({"name": "\udc80ä"}).text.encode() == b'{"name": "?\xc3\xa4"}'
    assert ToolOutcome.of("plain").text == "plain"
    assert ToolOutcome.of({"error": "no \udc80"}).error == "no ?"


@pytest.mark.parametrize(
    ("reply", "failed"),
    [
        ({"error": "no"}, True),
        ({"error": "no", "exit_code": -1}, True),
        ({"error": "Exit code: 2", "exit_code": 2}, False),
        ({"error": None, "exit_code": -1}, False),
        ({"error": {"why": "no"}}, True),
        ({"output": "error"}, False),
        ('{"error": "no"}', True),
        ('{"error": "x", "exit_code": 124}', False),
        ("error", False),
        ('{"error": ', False),
        ('["error"]', False),
        ('{"a": ' + "[" * 100_000 + ', "error": 1', False),
    ],
)
def test_a_negative_exit_code_or_an_error_without_one_is_a_failure(reply: ToolReply, failed: bool) -> None:
    assert ToolOutcome.of(reply).failed is failed


async def test_a_reply_that_cannot_be_written_as_json_is_a_failure_of_the_tool() -> None:
    async def broken(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
        return {"names": {"a"}}

    runtime = ToolRuntime(ToolRegistry([FunctionTool(ToolSchema("broken", ""), broken)]))
    assert "TypeError" in (await runtime.call("broken", "")).error


async def test_middleware_surrounds_each_call_in_order_and_may_answer_it() -> None:
    seen: list[str] = []

    async def outer(call: CheckedCall, then: Next) -> ToolOutcome:
        seen.append(f"{call.name} {call.by_agent} {call.conversation}")
        outcome = await then(call)
        seen.append(outcome.text)
        return outcome

    async def inner(call: CheckedCall, then: Next) -> ToolOutcome:
        return ToolOutcome.of("recorded") if call.arguments["how"] == "old" else await then(call)

    runtime = ToolRuntime(tools().registry, no_slot, "t", middleware=[outer, inner], conversation="subagent-1")
    await runtime.call("misbehave", {"how": "old"}, by_agent=True)
    await runtime.call("misbehave", '{"how": "text"}')
    await runtime.call("misbehave", {"how": 1})
    assert seen == ["misbehave True subagent-1", "recorded", "misbehave False subagent-1", "plain"]


async def test_a_runtime_without_a_slot_says_so_to_tools_that_need_one() -> None:
    outcome = await ToolRuntime(ToolRegistry(builtin_tools())).call("terminal", {"command": "ls"})
    assert "there is none" in outcome.error


def test_the_slot_is_acquired_once_however_many_calls_ask() -> None:
    asked = 0

    async def source() -> Slot:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0)
        return object()  # type: ignore[return-value]

    async def scenario() -> list[Slot]:
        bound = ToolRuntime(ToolRegistry(), source, "task-1")
        return await asyncio.gather(*(bound.slot() for _ in range(5)))

    assert len({id(slot) for slot in asyncio.run(scenario())}) == 1
    assert asked == 1


async def test_a_slot_that_could_not_be_had_is_asked_for_again() -> None:
    outcomes: list[Exception | None] = [SlotLost("first"), None]

    async def source() -> Slot:
        outcome = outcomes.pop(0)
        if outcome is not None:
            raise outcome
        return object()  # type: ignore[return-value]

    bound = ToolRuntime(ToolRegistry(), source, "task-1")
    with pytest.raises(SlotLost):
        await bound.slot()
    await bound.slot()
    assert outcomes == []
