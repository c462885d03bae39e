"""What MCP's specification and its servers' own reports say about lists, calls, notifications and failures, played
against real processes over stdio and HTTP.

Sources: the specification at modelcontextprotocol.io, revisions 2026-07-28 (cursors, an empty one included, are
opaque), 2025-11-25, 2025-06-18 (structured results, resource links), 2025-03-26 (audio, progress messages) and
2024-11-05; reports to servers and clients, by their project and number, newest first.
"""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from golden_messages import raises
from palaestra.tools.mcp.mcp_config import MCPServerConfig
from palaestra.tools.mcp.run_servers import MCPServers
from palaestra.tools.registry.build import build_tool_registry
from palaestra.tools.runtime.runtime import ToolRuntime
from palaestra_slots.core.errors import ToolServerError, ToolServerRefused, ToolServerUnavailable
from palaestra_slots.core.types import JSON

pytest.importorskip("mcp", reason="needs the extra 'mcp'")

SERVER = str(Path(__file__).with_name("documented_servers.py"))
OBJECT: JSON = {"type": "object"}
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def tool(name: str, schema: JSON = None, **more: JSON) -> JSON:
    return {"name": name, "inputSchema": OBJECT if schema is None else schema, **more}


GOOD = tool("good", {"type": "object", "properties": {"city": {"type": "string"}}})

ABOVE_0 = {"type": "number", "minimum": 0, "exclusiveMinimum": True}
DRAFT_4 = {
    "type": "object",
    "properties": {"n": ABOVE_0, "o": {"type": "object", "properties": {"n": ABOVE_0}, "required": []}},
}


def page(*names: str, **cursor: JSON) -> JSON:
    return {"tools": [GOOD if name == "good" else tool(name) for name in names], **cursor}


def notice(method: str, **params: JSON) -> JSON:
    return {"jsonrpc": "2.0", "method": method, "params": params}


def asks(method: str, **params: JSON) -> JSON:
    return {"jsonrpc": "2.0", "id": "from-server", "method": method, "params": params}


@contextmanager
def configured(way: str, how: JSON) -> Iterator[MCPServerConfig]:
    words = [SERVER, way, json.dumps(how)]
    if way == "stdio":
        yield MCPServerConfig(command=sys.executable, args=words, timeout=10)
        return
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        yield MCPServerConfig(url=process.stdout.readline().strip(), timeout=10)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def played(way: str, how: JSON, calls: int = 1) -> tuple[list[str], list[JSON]]:
    """Return the names of the tools, and the replies to calls of `good`."""

    async def scenario(config: MCPServerConfig) -> tuple[list[str], list[JSON]]:
        async with MCPServers({"w": config}) as servers:
            registry = build_tool_registry(servers.toolsets(), installed=servers.installed())
            runtime = ToolRuntime(registry, None, "task-1")
            replies = [await runtime.handle("mcp_w_good", {"city": "Elis"}) for _ in range(calls)]
            return [name.removeprefix("mcp_w_") for name in registry.list_tools()], [
                json.loads(each) for each in replies
            ]

    with configured(way, how) as config:
        return asyncio.run(asyncio.wait_for(scenario(config), 60))


LISTS: dict[str, tuple[list[JSON], set[str]]] = {
    "2026-07-28: an empty cursor is a cursor (fastmcp#5025, MCPJam/inspector#4462)": (
        [page("good", nextCursor=""), page("second")],
        {"good", "second"},
    ),
    "the same page and cursor again and again (codebase-memory-mcp#1247)": ([page("good", nextCursor="x")], {"good"}),
    "an empty cursor on every page (java-sdk#628, csharp-sdk#1072)": ([page("good", nextCursor="")], {"good"}),
    "2024-11-05: three pages": (
        [page("good", nextCursor="b"), page("second", nextCursor="c"), page("third")],
        {"good", "second", "third"},
    ),
    "a null cursor": ([page("good", nextCursor=None)], {"good"}),
    "a page without tools in the middle": ([page(nextCursor="b"), page("good")], {"good"}),
    "one tool on two pages": ([page("good", nextCursor="b"), page("good", "second")], {"good", "second"}),
    "a tool without a name beside others": ([{"tools": [{"inputSchema": OBJECT}, GOOD]}], {"good"}),
    "a schema that is not one": ([{"tools": [tool("bad", {"type": "objekt"}), GOOD]}], {"good"}),
    "2025-11-25: 2020-12 as the default dialect": (
        [{"tools": [GOOD, tool("other", {"type": "object", "properties": {"x": {"prefixItems": [{}]}}})]}],
        {"good", "other"},
    ),
    "a schema of draft 4, named": (
        [{"tools": [GOOD, tool("other", {"$schema": "http://json-schema.org/draft-04/schema#", **DRAFT_4})]}],
        {"good", "other"},
    ),
    "a schema of draft 4, without its name": ([{"tools": [GOOD, tool("other", DRAFT_4)]}], {"good", "other"}),
    "an unknown dialect": (
        [{"tools": [GOOD, tool("other", {"$schema": "https://example.com/own", "type": "object"})]}],
        {"good", "other"},
    ),
    "unknown fields of tools": ([{"tools": [{**GOOD, "icons": [], "execution": {"x": 1}, "_meta": {}}]}], {"good"}),
}


@pytest.mark.parametrize("way", ["stdio", "http"])
@pytest.mark.parametrize("what", LISTS)
def test_lists(what: str, way: str) -> None:
    pages, expected = LISTS[what]
    names, (reply,) = played(way, {"pages": pages})
    assert (set(names), len(names), reply) == (expected, len(expected), {"output": "sunny"})


TEXT = {"type": "text", "text": "sunny"}
RESULTS: dict[str, tuple[JSON, tuple[str, ...]]] = {
    "2025-06-18: a structured result beside its text": (
        {"content": [TEXT], "structuredContent": {"degrees": 3}},
        ("sunny",),
    ),
    "2025-06-18: only a structured result (hermes-agent#101330)": (
        {"content": [], "structuredContent": {"degrees": 3}},
        ("degrees", "3"),
    ),
    "2025-06-18: a link to a resource": (
        {"content": [{"type": "resource_link", "uri": "file:///a.txt", "name": "a.txt"}]},
        ("file:///a.txt",),
    ),
    "2024-11-05: an embedded text": (
        {"content": [{"type": "resource", "resource": {"uri": "x://a", "mimeType": "text/plain", "text": "sunny"}}]},
        ("sunny",),
    ),
    "2024-11-05: embedded bytes": (
        {"content": [{"type": "resource", "resource": {"uri": "x://a", "blob": "AAAA"}}]},
        ("x://a",),
    ),
    "2024-11-05: an image": ({"content": [TEXT, {"type": "image", "data": PNG, "mimeType": "image/png"}]}, ("sunny",)),
    "2025-03-26: audio": ({"content": [TEXT, {"type": "audio", "data": "AAAA", "mimeType": "audio/wav"}]}, ("sunny",)),
    "a kind of content that nobody knows": ({"content": [TEXT, {"type": "hologram", "x": 1}]}, ("sunny",)),
    "annotations on content": ({"content": [{**TEXT, "annotations": {"priority": 1.5}}]}, ("sunny",)),
    "several texts": ({"content": [TEXT, {"type": "text", "text": "warm"}]}, ("sunny", "warm")),
    "2024-11-05: a tool's own error": ({"content": [TEXT], "isError": True}, ("sunny",)),
    "an error with a structure (repomix#833)": (
        {"content": [TEXT], "structuredContent": {"code": 7}, "isError": True},
        ("sunny",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", ["stdio", "http"])
@pytest.mark.parametrize("what", RESULTS)
def test_results(what: str, way: str) -> None:
    result, expected = RESULTS[what]
    (reply,) = played(way, {"result": result})[1]
    assert ("error" in reply) is bool(result.get("isError"))
    assert all(text in json.dumps(reply) for text in expected), reply


BEHAVIOURS: dict[str, tuple[dict[str, Any], str]] = {
    "2024-11-05: a notification of a log line": (
        {"before": [notice("notifications/message", level="info", data="working")]},
        "sunny",
    ),
    "2024-11-05: progress of the call": (
        {"before": [notice("notifications/progress", progressToken="TOKEN", progress=1, total=2)]},
        "sunny",
    ),
    "2025-03-26: progress with a message": (
        {"before": [notice("notifications/progress", progressToken="TOKEN", progress=0.5, message="half")]},
        "sunny",
    ),
    "progress of a call that nobody made": (
        {"before": [notice("notifications/progress", progressToken="never", progress=1)]},
        "sunny",
    ),
    "a notification that nobody knows": ({"before": [notice("notifications/weather", x=1)]}, "sunny"),
    "a notification that the tools changed": ({"before": [notice("notifications/tools/list_changed")]}, "sunny"),
    "a reply to a request that nobody sent": (
        {"before": [{"jsonrpc": "2.0", "id": 9999, "result": {"content": []}}]},
        "sunny",
    ),
    "a second reply to the same call": (
        {"after": [{"jsonrpc": "2.0", "id": "RESULT_ID", "result": {"content": [{"type": "text", "text": "late"}]}}]},
        "sunny",
    ),
    "2024-11-05: a ping of the server": ({"before": [asks("ping")]}, "sunny"),
    "2024-11-05: a request for a sample": (
        {"before": [asks("sampling/createMessage", messages=[], maxTokens=5)]},
        "sunny",
    ),
    "2024-11-05: a request for roots": ({"before": [asks("roots/list")]}, "sunny"),
    "2025-06-18: a request for input of the person": (
        {"before": [asks("elicitation/create", message="Which?", requestedSchema=OBJECT)]},
        "sunny",
    ),
    "a request that nobody knows": ({"before": [asks("weather/now")]}, "sunny"),
    "an error of the protocol": ({"error": {"code": -32602, "message": "Unknown tool: good"}}, "Unknown tool"),
    **{
        f"an error with the code {code}": ({"error": {"code": code, "message": "broken"}}, "broken")
        for code in (-32000, -32001, -32002, -32099, -32603, 0, 1, 404)
    },
    "an error with data": ({"error": {"code": -32000, "message": "broken", "data": {"why": "x"}}}, "broken"),
    "2024-11-05 as the version": ({"version": "2024-11-05"}, "sunny"),
    "2025-03-26 as the version": ({"version": "2025-03-26"}, "sunny"),
    "2025-06-18 as the version": ({"version": "2025-06-18"}, "sunny"),
    "2025-11-25 as the version": ({"version": "2025-11-25"}, "sunny"),
    "no capabilities at all": ({"capabilities": {}}, "sunny"),
    "capabilities that nobody knows": ({"capabilities": {"tools": {"listChanged": True}, "weather": {}}}, "sunny"),
}


@pytest.mark.parametrize("way", ["stdio", "http"])
@pytest.mark.parametrize("what", BEHAVIOURS)
def test_behaviours(what: str, way: str, capfd: pytest.CaptureFixture[str]) -> None:
    how, expected = BEHAVIOURS[what]
    if way == "http" and what == "a reply to a request that nobody sent":
        pytest.skip("the package mcp takes the first reply in the answer to a request for its reply")
    replies = played(way, how, calls=2)[1]
    assert all(expected in json.dumps(reply) for reply in replies), replies
    assert "Traceback" not in capfd.readouterr().err


def test_replies_of_http_servers_need_no_stream() -> None:
    assert played("http", {"plain": True}) == (["good"], [{"output": "sunny"}])


def test_noise_on_the_standard_output_is_no_message(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert played("stdio", {"noise": ["Starting…", "", "{}", "[1]", "null"]})[1] == [{"output": "sunny"}]
    assert len([record for record in caplog.records if "standard output" in record.getMessage()]) == 1


@pytest.mark.parametrize("version", ["1999-01-01", "draft", 7])
def test_a_version_that_nobody_knows_leaves_the_server_out_with_a_reason(
    version: JSON,
) -> None:
    with pytest.raises(Exception, match=r"(?i)version|mcp_w_good"):
        played("stdio", {"version": version})


def test_a_server_that_ends_in_a_call_is_no_mistake_of_the_model() -> None:
    with raises(ToolServerUnavailable, "good"):
        played("stdio", {"die": True})


def said(message: str, code: int = -32000) -> JSON:
    return {"code": code, "message": message}


LOST: dict[str, JSON] = {
    "2025-06-18: 404 without a body": [404, None],
    "2025-06-18: 404 with an error (typescript-sdk)": [404, said("Session not found", -32001)],
    "404 with an error (python-sdk)": [404, said("Not Found: Session has been terminated", -32600)],
    "400 with an error (typescript-sdk, after a restart)": [400, said("Bad Request: Server not initialized")],
    "400 with an error (typescript-sdk's examples)": [400, said("Bad Request: No valid session ID provided")],
}


@pytest.mark.parametrize("what", LOST)
def test_a_lost_session_is_opened_again_and_the_model_does_not_notice(what: str) -> None:
    how = {"sessions": True, "refused": [None, LOST[what], None, LOST[what]]}
    assert played("http", how, calls=4)[1] == [{"output": "sunny"}] * 4


@pytest.mark.parametrize("what", [*LOST][1::2])
@pytest.mark.parametrize("how", [{"once": True}, {"twice": True}])
def test_a_session_that_stays_lost_is_an_infrastructure_failure(what: str, how: dict[str, JSON]) -> None:
    refused = [LOST[what]] * (2 if how.get("twice") else 1)
    with pytest.raises(ToolServerUnavailable):
        played("http", {"sessions": True, "refused": refused, **how})


@pytest.mark.parametrize("sessions", [True, False])
@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        ([401, said("token expired")], ToolServerRefused),
        ([403, None], ToolServerRefused),
        ([429, said("slow down")], ToolServerUnavailable),
        ([500, None], ToolServerUnavailable),
        ([502, None], ToolServerUnavailable),
        ([503, said("restarting")], ToolServerUnavailable),
    ],
)
def test_a_failure_of_the_way_to_the_server_is_no_reply_to_the_model(
    refusal: JSON, kind: type[ToolServerError], sessions: bool
) -> None:
    with pytest.raises(kind, match=f"status {refusal[0]}"):
        played("http", {"sessions": sessions, "refused": [None, refusal]}, calls=2)


@pytest.mark.parametrize(
    ("sessions", "refusal"),
    [
        (True, [400, said("city must be a string", -32602)]),
        (True, [500, said("the database has no such city", -32603)]),
        (False, [404, said("Unknown tool", -32601)]),  # 2026-07-28, which has no sessions
        (False, [400, said("bad city")]),
    ],
)
def test_the_model_reads_an_error_with_which_the_server_answers_the_call(sessions: bool, refusal: JSON) -> None:
    replies = played("http", {"sessions": sessions, "refused": [refusal]}, calls=2)[1]
    assert refusal[1]["message"] in replies[0]["error"]
    assert replies[1] == {"output": "sunny"}


async def test_calls_that_find_the_session_lost_together_open_one_new_session() -> None:
    lost = LOST["2025-06-18: 404 without a body"]

    async def scenario(config: MCPServerConfig) -> list[JSON]:
        async with MCPServers({"w": config}) as servers:
            registry = build_tool_registry(servers.toolsets(), installed=servers.installed())
            runtime = ToolRuntime(registry, None, "task-1")
            calls = [runtime.handle("mcp_w_good", {"city": "Elis"}) for _ in range(4)]
            return [json.loads(each) for each in await asyncio.gather(*calls)]

    with configured("http", {"sessions": True, "refused": [lost] * 4}) as config:
        assert await asyncio.wait_for(scenario(config), 60) == [{"output": "sunny"}] * 4


def test_a_tool_with_a_schema_of_no_draft_is_left_out_and_named(caplog: pytest.LogCaptureFixture) -> None:
    bad = tool("bad", {"type": "object", "properties": {"x": {"exclusiveMinimum": True}, "y": {"exclusiveMinimum": 3}}})
    with caplog.at_level(logging.WARNING):
        assert played("stdio", {"pages": [{"tools": [GOOD, bad]}]})[0] == ["good"]
    assert ["'bad'" in record.getMessage() for record in caplog.records] == [True]


def test_arguments_are_checked_by_the_draft_of_the_schema() -> None:
    (reply,) = played("stdio", {"pages": [{"tools": [tool("good", {**DRAFT_4, "properties": {"city": ABOVE_0}})]}]})[1]
    assert "number" in reply["error"]


@pytest.mark.parametrize(
    ("schema", "taken"),
    [
        ({"type": "object"}, True),
        ({"type": "object", "minProperties": 1}, True),
        ({"type": "object", "additionalProperties": {"type": "string"}}, True),
        ({"type": "object", "properties": {}}, False),
        ({"type": "object", "additionalProperties": False}, False),
    ],
)
def test_a_schema_without_properties_takes_every_argument(schema: JSON, taken: bool) -> None:
    (reply,) = played("stdio", {"pages": [{"tools": [tool("good", schema)]}]})[1]
    assert ("unknown argument" not in str(reply.get("error"))) == taken
