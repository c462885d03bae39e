"""Every tool against the contract's tables: its name, its parameters, and what it replies in a local slot."""

from __future__ import annotations

import pytest

from palaestra.tools.registry.build import build_tool_registry, builtin_tools
from palaestra.tools.registry.registry import ToolRegistry
from palaestra.tools.tool import Tool
from palaestra_slots.core.types import JSON
from tools.desk import AtDesk, Desk

from .contract import FROM_REPLY, PARAMETERS, SCENES

TOOLS = {tool.name: tool for tool in builtin_tools()}
HERE = [tool for tool in TOOLS.values() if tool.missing() is None]


def test_the_tools_are_those_of_the_contract() -> None:
    pytest.importorskip("palaestra_toolsets")
    assert sorted(TOOLS) == sorted(PARAMETERS)


def test_every_tool_has_the_parameters_of_the_contract() -> None:
    for name, tool in TOOLS.items():
        schema = tool.schema.to_dict()["function"]
        wanted = PARAMETERS[name].split()
        assert schema["name"] == name
        assert {each.rstrip("!") for each in wanted} <= set(schema["parameters"]["properties"]), name
        required = {each.rstrip("!") for each in wanted if each.endswith("!")}
        assert required == set(schema["parameters"]["required"]), name


def test_every_tool_that_is_here_has_its_scene() -> None:
    pytest.importorskip("palaestra_toolsets")
    assert {tool.name for tool in HERE} <= SCENES.keys() <= TOOLS.keys(), "add its steps to SCENES"


@pytest.mark.slots
def test_every_tool_that_is_here_replies_as_the_contract_says(at_desk: AtDesk) -> None:
    async def scenario(desk: Desk) -> None:
        desk.tools.registry = ToolRegistry(HERE)
        said: dict[str, JSON] = {}
        for name, steps in SCENES.items():
            for step in steps if desk.tools.registry.get(name) is not None else ():
                arguments = {key: said[key] if each is FROM_REPLY else each for key, each in step.arguments.items()}
                reply: JSON = await desk.call(name, **arguments)
                said |= reply
                assert step.keys <= reply.keys(), (name, step.arguments, reply)
                assert step.holds(reply), (name, step.arguments, reply)

    at_desk(scenario)


@pytest.mark.parametrize("tool", [tool for tool in TOOLS.values() if tool.missing()], ids=lambda tool: tool.name)
def test_a_tool_that_is_not_here_is_not_shown_and_says_why(tool: Tool) -> None:
    assert tool.name not in build_tool_registry().list_tools()
    registry = build_tool_registry([tool.toolset])
    assert registry.get(tool.name) is None
    assert registry.missing[tool.name] == tool.missing()
