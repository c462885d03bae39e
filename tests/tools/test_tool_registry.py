"""The registry, and the schemas that models see: a change to one is a change of its golden file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from palaestra.core.errors import ConfigError
from palaestra.core.types import JSON
from palaestra.tools.arguments import compiled
from palaestra.tools.registry import ToolRegistry, build_tool_registry, builtin_tools, get_tool_definitions, schema_hash
from palaestra.tools.schema import Tool, ToolReply, ToolRun, ToolSchema
from palaestra.tools.toolsets import TOOLSETS

GOLDEN = Path(__file__).parent / "golden"


async def echo(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    return dict(arguments)


def tool(name: str = "echo", toolset: str = "mine", missing: str | None = None) -> Tool:
    return Tool(ToolSchema(name, "Say it back"), echo, toolset, missing=lambda: missing)


@pytest.mark.parametrize("name", [tool.name for tool in builtin_tools()])
def test_schemas_are_those_of_the_golden_files(name: str) -> None:
    schema = next(tool.schema for tool in builtin_tools() if tool.name == name)
    assert schema.to_dict() == json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


def test_every_schema_compiles_and_describes_every_argument() -> None:
    for schema in build_tool_registry().get_schemas():
        compiled(schema)
        assert set(schema.required) <= set(schema.parameters)
        assert all(parameter["description"] for parameter in schema.parameters.values())


def test_every_tool_is_in_the_toolset_that_it_names() -> None:
    assert {tool.name: tool.toolset for tool in builtin_tools()} == {
        name: key for key, toolset in TOOLSETS.items() for name in toolset.tools
    }


def test_definitions_are_fresh_copies() -> None:
    first = get_tool_definitions(["terminal"], quiet_mode=True)
    first[0]["function"]["parameters"]["properties"].clear()
    assert "command" in get_tool_definitions(["terminal"], quiet_mode=True)[0]["function"]["parameters"]["properties"]


def test_the_hash_names_the_set_and_order_of_schemas() -> None:
    definitions = get_tool_definitions(quiet_mode=True)
    reordered_keys = json.loads(json.dumps(definitions, sort_keys=True))
    assert schema_hash(definitions) == schema_hash(reordered_keys)
    assert schema_hash(definitions) != schema_hash(definitions[::-1])
    assert schema_hash(definitions) != schema_hash(definitions[1:])


def test_the_prompt_description_has_one_json_line_per_tool() -> None:
    lines = build_tool_registry(["file"]).get_prompt_description().split("\n")
    assert [json.loads(line)["name"] for line in lines] == ["read_file", "write_file", "patch", "search_files"]


def test_tools_of_an_environment_are_in_unless_their_toolset_is_disabled() -> None:
    assert build_tool_registry(["terminal"], extra=[tool()]).list_tools() == ["terminal", "process", "echo"]
    assert build_tool_registry(["mine"], extra=[tool()]).list_tools() == ["echo"]
    assert build_tool_registry(["terminal"], ["mine"], extra=[tool()]).list_tools() == ["terminal", "process"]
    assert build_tool_registry([], extra=[tool(toolset="terminal")]).list_tools() == ["echo"]


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="'terminal'"):
        build_tool_registry(extra=[tool("terminal")])


def test_a_tool_that_cannot_be_used_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert build_tool_registry([], extra=[tool(missing="no key")]).list_tools() == []
    assert "echo is left out: no key" in caplog.text


def test_a_tool_server_is_refused_instead_of_ignored() -> None:
    with pytest.raises(ConfigError, match="not supported yet"):
        build_tool_registry(tool_server_url="http://localhost:1")


def test_a_registry_finds_tools_by_name() -> None:
    registry = ToolRegistry([tool()])
    found = registry.get("echo")
    assert found is not None
    assert found.name == "echo"
    assert registry.get("nothing") is None
