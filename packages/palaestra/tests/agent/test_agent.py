"""`Agent` over a real server on the loopback, with functions and a sandbox as its tools."""

from __future__ import annotations

import asyncio

import pytest

from golden_messages import check_message
from palaestra import Agent, AgentResult, ConfigError, Outcome, ToolError, ToolRegistry, tool
from palaestra_slots.core.types import JSON
from palaestra_tokens.testing.fake_chat_server import FakeAnswer, LoopbackServer, completion


def add(a: int, b: int) -> int:
    """Add two numbers."""
    if a < 0:
        raise ToolError("a must not be negative", least=0)
    return a + b


def call(name: str, arguments: str) -> JSON:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def ask(agent_of: type[Agent], *calls: JSON) -> AgentResult:
    async def go() -> AgentResult:
        answers = [FakeAnswer(completion(None, "tool_calls", tool_calls=[each])) for each in calls]
        async with LoopbackServer(*answers, FakeAnswer(completion("done"))) as server:
            return await agent_of("m", base_url=server.url, tools=[add, "terminal"], system_prompt="Be brief.").run(
                "Go"
            )

    return asyncio.run(go())


def test_functions_and_toolsets_are_tools() -> None:
    result = ask(Agent, call("add", '{"a": 1, "b": 2}'), call("terminal", '{"command": "echo hi > f; cat f"}'))
    assert (result.outcome, result.final_response) == (Outcome.NATURAL, "done")
    assert result.messages[0] == {"role": "system", "content": "Be brief."}
    assert '"result": 3' in result.messages[3]["content"]
    assert "hi" in result.messages[5]["content"]


def test_a_tool_that_raises_a_tool_error_answers_the_model() -> None:
    result = ask(Agent, call("add", '{"a": -1, "b": 2}'))
    check_message(result.messages[3]["content"], "error", "negative", "least")
    (error,) = result.tool_errors
    assert isinstance(error, ToolError)
    assert (error.turn, error.tool_name, error.error) == (1, "add", "a must not be negative")


def test_a_missing_server_names_an_argument() -> None:
    with pytest.raises(ConfigError, match="base_url=") as error:
        Agent("m")
    assert "--" not in str(error.value)


def test_a_registry_is_called_and_looked_into() -> None:
    registry = ToolRegistry([tool(add)])
    assert "add" in registry
    assert "sub" not in registry
    assert (list(registry), len(registry)) == (["add"], 1)
    assert asyncio.run(registry.call("add", {"a": 1, "b": 2})).output == '{"result": 3}'
    assert "negative" in asyncio.run(registry.call("add", {"a": -1, "b": 2})).error
    assert "Unknown tool" in asyncio.run(registry.call("sub")).error
