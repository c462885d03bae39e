"""Objects that outlive a call: made once, closed once, the newest first."""

from __future__ import annotations

import logging

import pytest

from golden_messages import check_message
from palaestra.tools.registry.registry import ToolRegistry
from palaestra.tools.runtime.runtime import ToolRuntime
from palaestra.tools.tool import FunctionTool, States, ToolCall, ToolReply, ToolRun, ToolSchema
from palaestra_slots.sandbox.slot import Slot

CLOSED: list[str] = []


class First:
    async def aclose(self) -> None:
        CLOSED.append("first")


class Second:
    async def aclose(self) -> None:
        CLOSED.append("second")
        raise RuntimeError("stuck")


class Plain:
    aclose = "not a method"


@pytest.fixture(autouse=True)
def _fresh() -> None:
    CLOSED.clear()


async def _hold(arguments: object, run: ToolRun) -> ToolReply:
    run.state(First)
    run.shared.get(Second)
    return {"same": run.state(First) is run.state(First)}


HOLD = FunctionTool(ToolSchema("hold", "Hold."), _hold)


async def _no_slot() -> Slot:
    raise AssertionError("not needed")


async def test_the_newest_is_closed_first_and_one_that_fails_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        states = States()
        assert states.get(First) is states.get(First)
        states.get(Plain)
        states.get(Second)
        await states.aclose()
        await states.aclose()
        assert states.get(First) is not None
    assert CLOSED == ["second", "first"]
    check_message(caplog.text, "Second")


async def test_what_was_put_there_is_its_owners_to_close() -> None:
    states, second = States(), Second()
    states.put(second)
    assert states.get(Second) is second
    await states.aclose()
    assert CLOSED == []


async def test_a_binding_closes_its_own_and_leaves_what_is_shared() -> None:
    shared = States()
    tools = ToolRuntime(ToolRegistry([HOLD], shared=shared), _no_slot, "t")
    assert (await tools.call("hold", {})).reply == {"same": True}
    await tools.aclose()
    assert CLOSED == ["first"]
    await shared.aclose()
    assert CLOSED == ["first", "second"]


async def test_a_binding_that_shares_nothing_closes_all() -> None:
    tools = ToolRuntime(ToolRegistry([HOLD]), _no_slot, "t")
    await tools.call("hold", {})
    await tools.aclose()
    assert CLOSED == ["first", "second"]


async def test_a_call_outside_any_rollout_leaves_nothing() -> None:
    result = await ToolRegistry([HOLD]).execute(ToolCall("hold", {}))
    assert result.success
    assert CLOSED == ["first", "second"]
