"""The registry: which tools there are, which of them somebody gets, and what is missing."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping

import pytest

from golden_messages import check_message, raises
from palaestra.tools.arguments import compiled
from palaestra.tools.registry.build import BUILTIN_NAMES, build_tool_registry, builtin_tools, get_tool_definitions
from palaestra.tools.registry.registry import ToolRegistry, schema_hash
from palaestra.tools.registry.toolsets import TOOLSETS
from palaestra.tools.runtime.runtime import ToolRuntime
from palaestra.tools.tool import FunctionTool, Tool, ToolCall, ToolReply, ToolResult, ToolRun, ToolSchema
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import Slot


async def echo(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    return dict(arguments)


def tool(name: str = "echo", toolset: str = "mine", missing: str | None = None) -> Tool:
    return FunctionTool(ToolSchema(name, "Say it back"), echo, toolset, missing=lambda: missing)


def test_every_schema_compiles_and_describes_every_argument() -> None:
    for schema in (tool.schema for tool in builtin_tools()):
        compiled(schema)
        assert set(schema.required) <= set(schema.parameters)
        assert all(parameter["description"] for parameter in schema.parameters.values())


def test_every_tool_is_in_the_toolset_that_it_names() -> None:
    for known in builtin_tools():
        assert known.name in TOOLSETS[known.toolset].tools


def test_the_names_of_built_in_tools_are_those_of_their_modules() -> None:
    assert {tool.name: tool.toolset for tool in builtin_tools()} == BUILTIN_NAMES
    assert [tool.name for tool in builtin_tools()] == list(BUILTIN_NAMES)


def test_only_the_modules_of_chosen_toolsets_are_loaded() -> None:
    script = (
        "import sys\n"
        "from palaestra.tools.registry.build import build_tool_registry\n"
        "build_tool_registry(['terminal', 'todo'])\n"
        "print(*sorted(name for name in sys.modules if name.startswith('palaestra.tools.builtin.')))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    loaded = {name.rpartition(".")[2] for name in done.stdout.split()}
    assert {"terminal", "todo"} <= loaded
    assert not {"browser", "web", "web_crawl", "vision", "patch", "tmux"} & loaded


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


def test_a_tool_that_cannot_be_used_is_left_out_with_its_reason() -> None:
    registry = build_tool_registry([], extra=[tool(missing="no key")])
    assert registry.list_tools() == []
    assert registry.missing == {"echo": "no key"}
    assert build_tool_registry(extra=[tool(missing="no key")]).missing == {"echo": "no key"}


def test_tools_that_were_asked_for_and_are_missing_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert get_tool_definitions(["vision"]) == []
    check_message(caplog.messages, "vision_analyze")


def test_all_that_work_here_leaves_nothing_out() -> None:
    registry = build_tool_registry()
    assert {"terminal", "read_file", "todo"} <= set(registry.list_tools())
    assert "vision_analyze" not in registry.list_tools()
    assert registry.missing == {}


def test_strict_fails_instead_of_hiding() -> None:
    with raises(ConfigError, "vision_analyze"):
        get_tool_definitions(["file", "vision"], strict=True)
    assert len(get_tool_definitions(["file", "vision"], ["vision"], quiet_mode=True, strict=True)) == 4
    with pytest.raises(ConfigError, match="named toolsets"):
        build_tool_registry(strict=True)


async def test_a_tool_of_the_contract_that_is_missing_refuses_to_run() -> None:
    absent = next(tool for tool in builtin_tools() if tool.name == "web_search")
    result = await ToolRegistry([absent]).execute(ToolCall("web_search", {"query": "x"}))
    assert not result.success
    check_message(result.error, "web_search")


class Add(Tool):
    """A tool as the contract has it written."""

    @property
    def schema(self) -> ToolSchema:
        number = {"type": "integer", "description": "A number"}
        return ToolSchema("add", "Add two numbers", {"a": number, "b": number}, ("a", "b"))

    async def execute(self, **arguments: JSON) -> ToolResult:
        return ToolResult(True, str(arguments["a"] + arguments["b"]))


class Unavailable(Add):
    def is_available(self) -> tuple[bool, str | None]:
        return False, "no numbers here"


def test_a_tool_written_to_the_contract_runs_where_it_is_available() -> None:
    registry = ToolRegistry([Add()])
    done = asyncio.run(registry.execute(ToolCall("add", {"a": 1, "b": 2}, uniq_id="c1")))
    assert done == ToolResult(True, "3", uniq_id="c1")
    refused = asyncio.run(registry.execute(ToolCall("add", {"a": "1", "b": 2})))
    assert not refused.success
    check_message(refused.error, "'a'", "integer")
    assert build_tool_registry([], extra=[Unavailable()]).missing == {"add": "no numbers here"}
    missing = asyncio.run(ToolRegistry([Unavailable()]).execute(ToolCall("add", {"a": 1, "b": 2})))
    check_message(missing.error, "add", "no numbers here")


async def test_a_tool_that_needs_a_slot_says_so_outside_of_one() -> None:
    registry = build_tool_registry(["terminal"])
    result = await registry.execute(ToolCall("terminal", {"command": "ls"}))
    assert not result.success
    assert "no slot" in result.error or "there is none" in result.error


def test_unknown_and_malformed_calls_are_results() -> None:
    registry = build_tool_registry(["todo"])
    assert asyncio.run(registry.execute(ToolCall("nothing", {}))).error == "Unknown tool: nothing"
    name = registry.list_tools()[0]
    assert f"Did you mean {name}?" in asyncio.run(registry.execute(ToolCall(f"{name}x", {}))).error
    assert name in repr(registry)
    (torn,) = ToolCall.parse_from_text('<tool_call>{"name": "todo", "argum</tool_call>')
    assert asyncio.run(registry.execute(torn)).error.startswith("Malformed tool call")


def test_a_tool_server_elsewhere_may_have_what_is_lacking_here() -> None:
    assert "image_generate" in build_tool_registry(["image_gen"], tool_server_url="http://localhost:1").list_tools()
    assert "image_generate" in build_tool_registry(["image_gen"], tool_server_url="inprocess").missing
    assert "cronjob" in build_tool_registry(["cronjob"], tool_server_url="http://localhost:1").missing


def test_callers_in_code_may_use_the_other_names_of_a_tool() -> None:
    registry = build_tool_registry(["default", "todo"])
    assert [registry.known_as(name) for name in ("bash", "todo_list", "terminal")] == ["terminal", "todo", "terminal"]
    assert ToolRegistry().known_as("bash") == "bash"
    assert ToolRegistry([tool("bash"), tool("terminal")]).known_as("bash") == "bash"


def test_a_registry_finds_tools_by_name() -> None:
    registry = ToolRegistry([tool()])
    found = registry.get("echo")
    assert found is not None
    assert found.name == "echo"
    assert registry.get("nothing") is None


@pytest.mark.parametrize(
    ("given", "reply"),
    [
        (ToolResult(True, "text"), "text"),
        (ToolResult(True, "", metadata={"ids": {1}}), '{"ids": [1], "output": "", "error": null}'),
        (ToolResult(True, {"a": 1}), '{"output": {"a": 1}, "error": null}'),  # type: ignore[arg-type]
        (ToolResult(True, "", metadata={"x": object()}), "Unable to serialize unknown type"),
        ("text", "execute of Given returned str, not a ToolResult"),
        (None, "execute of Given returned NoneType, not a ToolResult"),
    ],
)
def test_whatever_a_tool_of_the_contract_gives_is_an_answer(given: object, reply: str) -> None:
    class Given(Tool):
        @property
        def schema(self) -> ToolSchema:
            return ToolSchema("give", "Give.")

        def execute(self) -> ToolResult:  # not async: so it was written before
            return given  # type: ignore[return-value]

        def is_available(self) -> tuple[bool, str | None]:
            return True  # type: ignore[return-value]

    tools = ToolRuntime(ToolRegistry([Given()]), no_slot, "t")
    assert reply in asyncio.run(tools.handle("give", {}))


def test_a_tool_that_cannot_say_whether_it_is_there_is_missing() -> None:
    class Broken(Tool):
        @property
        def schema(self) -> ToolSchema:
            return ToolSchema("ask", "Ask.")

        async def execute(self) -> ToolResult:
            return ToolResult(True)

        def is_available(self) -> tuple[bool, str | None]:
            raise KeyError("TOKEN")

    assert Broken().missing() == "is_available of Broken failed: KeyError: 'TOKEN'"


async def no_slot() -> Slot:
    raise AssertionError("no slot is needed")
