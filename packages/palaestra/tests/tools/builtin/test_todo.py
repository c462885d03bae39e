"""The `todo` tool: one list per rollout, written whole or merged, and refused calls change nothing."""

from __future__ import annotations

import asyncio
import json

from golden_messages import check_message
from palaestra.tools.registry.build import build_tool_registry
from palaestra.tools.runtime.runtime import ToolRuntime
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import Slot


async def no_slot() -> Slot:
    raise AssertionError("the list needs no slot")


def rollout() -> ToolRuntime:
    return ToolRuntime(build_tool_registry(["todo"]), no_slot, "task-1")


def call(tools: ToolRuntime, **arguments: JSON) -> JSON:
    return json.loads(asyncio.run(tools.handle("todo", arguments)))


def step(name: str, status: str = "pending", content: str = "do it") -> JSON:
    return {"id": name, "content": content, "status": status}


def test_a_list_is_written_and_shown_with_its_counts() -> None:
    tools = rollout()
    counts = {"total": 2, "pending": 1, "in_progress": 1, "completed": 0, "cancelled": 0}
    written = {"todos": [step("b", "in_progress"), step("a")], "summary": counts}
    assert call(tools, todos=[step("b", "in_progress"), step("a")]) == written
    assert call(tools) == written


def test_merging_changes_steps_in_place_and_adds_the_others() -> None:
    tools = rollout()
    call(tools, todos=[step("a"), step("b")])
    merged = call(tools, todos=[step("c"), step("a", "completed", "done it")], merge=True)
    assert merged["todos"] == [step("a", "completed", "done it"), step("b"), step("c")]
    assert call(tools, todos=[step("d")])["todos"] == [step("d")]
    assert call(tools, todos=[])["summary"]["total"] == 0


def test_a_refused_call_changes_nothing() -> None:
    tools = rollout()
    call(tools, todos=[step("a")])
    check_message(call(tools, todos=[step("x"), step("x")])["error"])
    assert "error" in call(tools, todos=[step("y", "finished")])
    assert "error" in call(tools, todos=[{"id": "z"}], merge=True)
    assert call(tools)["todos"] == [step("a")]


def test_rollouts_do_not_share_a_list() -> None:
    first, second = rollout(), rollout()
    call(first, todos=[step("a")])
    assert call(second)["todos"] == []
