"""One rollout's tools: the model reads its mistakes, the world's failure propagates, the slot comes once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

import pytest

from palaestra.core.errors import SlotLost
from palaestra.core.types import JSON
from palaestra.sandbox.slot import Slot
from palaestra.tools.registry.registry import ToolRegistry, builtin_tools
from palaestra.tools.runtime.bound_tools import SlotTools, reply_text
from palaestra.tools.tool import FunctionTool, ToolMistake, ToolReply, ToolRun, ToolSchema


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


def tools(timeout_s: float = 120.0) -> SlotTools:
    schema = ToolSchema("misbehave", "", {"how": {"type": "string"}}, ("how",))
    registry = ToolRegistry([FunctionTool(schema, misbehave, "mine"), *builtin_tools()])
    return SlotTools(registry, no_slot, "task-1", user_task="do it", timeout_s=timeout_s)


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
    reply = asyncio.run(SlotTools(registry, no_slot, "t").reply("rub", {}))
    assert reply == {"error": "Unknown tool 'rub'. Available tools: ['misbehave']"}
    reply = asyncio.run(SlotTools(registry, no_slot, "t").reply("paint", {"colour": 1}))
    assert reply == {"error": "paint cannot be used here: there is no paint"}


def test_arguments_are_checked_here_too() -> None:
    assert "missing required argument 'how'" in handled("misbehave", {})["error"]
    assert "unknown argument 'hwo'" in handled("misbehave", {"how": "text", "hwo": 1})["error"]


def test_the_worlds_failure_is_never_a_reply() -> None:
    with pytest.raises(SlotLost):
        handled("terminal", {"command": "ls"})
    with pytest.raises(SlotLost):
        handled("read_file", {"path": "a"})


def test_a_tool_sees_who_it_runs_for_and_the_time_limit_of_its_call() -> None:
    async def both() -> list[ToolReply]:
        bound = tools(timeout_s=30.0)
        return [await bound.reply("misbehave", {"how": ""}), await bound.reply("misbehave", {"how": ""}, timeout_s=5.0)]

    usual, limited = asyncio.run(both())
    assert usual == {"timeout_s": 30.0, "task_id": "task-1", "user_task": "do it"}
    assert limited == {"timeout_s": 5.0, "task_id": "task-1", "user_task": "do it"}


def test_reading_searching_and_asking_may_run_at_the_same_time_and_nothing_else() -> None:
    asking = {"web_search", "web_extract", "web_crawl", "vision_analyze"}
    assert tools().parallel_safe == {"read_file", "search_files"} | asking


def test_a_reply_is_text_that_can_be_encoded() -> None:
    assert reply_text({"name": "\udc80ä"}).encode() == b'{"name": "?\xc3\xa4"}'
    assert reply_text("plain") == "plain"


def test_the_slot_is_acquired_once_however_many_calls_ask() -> None:
    asked = 0

    async def source() -> Slot:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0)
        return object()  # type: ignore[return-value]

    async def scenario() -> list[Slot]:
        bound = SlotTools(ToolRegistry(), source, "task-1")
        return await asyncio.gather(*(bound.slot() for _ in range(5)))

    assert len({id(slot) for slot in asyncio.run(scenario())}) == 1
    assert asked == 1


def test_a_slot_that_could_not_be_had_is_asked_for_again() -> None:
    outcomes: list[Exception | None] = [SlotLost("first"), None]

    async def source() -> Slot:
        outcome = outcomes.pop(0)
        if outcome is not None:
            raise outcome
        return object()  # type: ignore[return-value]

    async def scenario() -> None:
        bound = SlotTools(ToolRegistry(), source, "task-1")
        with pytest.raises(SlotLost):
            await bound.slot()
        await bound.slot()

    asyncio.run(scenario())
    assert outcomes == []
