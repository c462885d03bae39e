"""Servers that break the protocol: a wrong tool costs that tool, and a wrong result is a reply to the model."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path

import pytest

from palaestra.tools.mcp.mcp_config import MCPServerConfig
from palaestra.tools.mcp.run_servers import MCPServers
from palaestra.tools.registry.build import build_tool_registry
from palaestra.tools.runtime.runtime import ToolRuntime
from palaestra_slots.core.types import JSON

pytest.importorskip("mcp", reason="needs the extra 'mcp'")

FINE: JSON = {"content": [{"type": "text", "text": "sunny"}]}
TEXT: JSON = {"type": "text", "text": "sunny"}
OBJECT: JSON = {"type": "object"}


def tools_and_reply(tools: JSON, result: JSON) -> tuple[list[str], JSON]:
    """Return the names of the server's tools, and its reply to a call of `good`."""
    words = [str(Path(__file__).parent / "wrong_server.py"), json.dumps(tools), json.dumps(result)]

    async def scenario() -> tuple[list[str], JSON]:
        async with MCPServers({"w": MCPServerConfig(command=sys.executable, args=words)}) as servers:
            registry = build_tool_registry(servers.toolsets(), installed=servers.installed())
            reply = await ToolRuntime(registry, None, "task-1").handle("mcp_w_good", {"city": "Elis"})
            return registry.list_tools(), json.loads(reply)

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "bad", "inputSchema": {"type": "object", "properties": {"x": {"type": "string"}, "required": ["x"]}}},
        {"name": "bad", "inputSchema": ["x"]},
        {"name": "bad"},
        {"name": 5, "inputSchema": OBJECT},
        {"name": "bad", "inputSchema": OBJECT, "annotations": "read only"},
        {"name": "bad", "inputSchema": OBJECT, "description": ["two", "lines"]},
        "bad",
        None,
    ],
)
def test_a_wrong_tool_costs_only_itself(wrong: JSON, caplog: pytest.LogCaptureFixture) -> None:
    name = str(wrong["name"]) if isinstance(wrong, dict) else repr(wrong)
    assert tools_and_reply([wrong], FINE) == (["mcp_w_good"], {"output": "sunny"})
    (said,) = (record.getMessage() for record in caplog.records if "leaves out" in record.getMessage())
    assert name in said


@pytest.mark.parametrize(
    "result",
    [
        {"content": [], "structuredContent": [1, "sunny"]},
        {"structuredContent": "sunny"},
        {"content": [{"type": "text", "text": 5, "weather": "sunny"}]},
        {"content": [{"type": "weather", "weather": "sunny"}]},
        {"content": "sunny"},
        {"content": None, "structuredContent": {"weather": "sunny"}},
        {"content": ["sunny"]},
    ],
)
def test_the_model_reads_a_result_that_the_protocol_does_not_allow(result: JSON) -> None:
    assert "sunny" in tools_and_reply([], result)[1]["output"]
    assert "sunny" in tools_and_reply([], {**result, "isError": True})[1]["error"]


@pytest.mark.parametrize("result", [FINE, {**FINE, "structuredContent": {"degrees": "warm"}}])
def test_a_result_is_read_also_if_it_breaks_the_tools_own_promise(result: JSON) -> None:
    promise = {"type": "object", "properties": {"degrees": {"type": "integer"}}, "required": ["degrees"]}
    arguments = {"type": "object", "properties": {"city": {"type": "string"}}}
    promised = {"name": "good", "inputSchema": arguments, "outputSchema": promise}
    reply = tools_and_reply([promised], result)[1]
    assert reply["output"] == "sunny", reply


@pytest.mark.parametrize("result", [{}, {"weather": "sunny"}])
def test_a_reply_without_content_is_an_error_for_the_model(result: JSON) -> None:
    assert "cannot be read" in tools_and_reply([], result)[1]["error"]


def test_other_lines_on_the_standard_output_are_named_once(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG):
        tools_and_reply([], FINE)
    shown = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(shown) == 1
    assert "standard output" in shown[0].getMessage()
    assert "Traceback" not in capfd.readouterr().err
