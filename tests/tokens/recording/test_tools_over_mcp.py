"""The tools of a rollout at the recording endpoint, for the official MCP client and for clients that behave badly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import aiohttp
import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp_types._v2026_07_28 import CallToolResult, DiscoverResult, ListToolsResult

from generated_client import FORMAT, TOKENIZER
from palaestra.tools.decorator import tool
from palaestra.tools.mcp.mcp_endpoint import McpTools
from palaestra.tools.registry.registry import ToolRegistry
from palaestra.tools.runtime.runtime import ToolRuntime
from palaestra.tools.tool import ToolMistake, ToolOutcome
from palaestra_slots.core.types import JSON
from palaestra_tokens.recording import CallLimits, Conversations, RecordingEndpoint, RolloutAddress
from palaestra_tokens.testing.fake_engine import ToyEngine
from palaestra_tokens.token_exact.managed_chat import ManagedChat


@tool
def forecast(city: str) -> str:
    """The weather of a city."""
    if city == "Atlantis":
        raise ToolMistake("There is no weather at the bottom of the sea.")
    return f"{city}: 21 °C"


RUNTIME = ToolRuntime(ToolRegistry([forecast]))


async def run(name: str, arguments: str) -> ToolOutcome:
    return await RUNTIME.call(name, arguments, by_agent=True)


def served(
    use: Callable[[RolloutAddress, RolloutAddress], Awaitable[None]], limits: CallLimits | None = None
) -> Conversations:
    """Use the addresses of a rollout with tools and of one without; return the conversations of the first."""

    def conversations() -> Conversations:
        return Conversations(ManagedChat(ToyEngine(TOKENIZER, iter(["hi"])), FORMAT, "hermes"), limits=limits)

    mine = conversations()

    async def main() -> None:
        async with RecordingEndpoint() as endpoint:
            tools = McpTools(RUNTIME.registry.definitions(), run)
            with endpoint.open(mine, tools) as here, endpoint.open(conversations()) as there:
                await use(here, there)

    asyncio.run(main())
    return mine


async def sent(url: str, key: str, body: JSON, method: str = "POST") -> tuple[int, JSON]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession() as session, session.request(method, url, data=data, headers=headers) as response:
        raw = await response.read()
        return response.status, json.loads(raw) if raw else None


def asks(method: str, **params: JSON) -> JSON:
    return {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}


@pytest.mark.parametrize("mode", ["auto", "legacy", "2026-07-28"])
def test_the_official_client_lists_and_calls_tools(mode: str) -> None:
    async def use(here: RolloutAddress, there: RolloutAddress) -> None:
        headers = {"Authorization": f"Bearer {here.key}"}
        async with (
            httpx2.AsyncClient(headers=headers) as http,
            Client(streamable_http_client(here.tools_url, http_client=http), mode=mode) as client,
        ):
            (shown,) = (await client.list_tools()).tools
            right = await client.call_tool("forecast", {"city": "Paris"})
            failed = await client.call_tool("forecast", {"city": "Atlantis"})
            invalid = await client.call_tool("forecast", {"town": "Paris"})
        assert (shown.name, shown.description) == ("forecast", "The weather of a city.")
        assert shown.input_schema["properties"] == {"city": {"type": "string"}}
        assert (right.content[0].text, right.is_error) == ("Paris: 21 °C", False)
        assert (failed.is_error, invalid.is_error) == (True, True)
        assert "no weather" in failed.content[0].text

    served(use)


def test_a_request_that_names_its_version_needs_no_handshake() -> None:
    async def use(here: RolloutAddress, there: RolloutAddress) -> None:
        async def asked(method: str, named: str | None = "2026-07-28", **params: JSON) -> tuple[int, JSON]:
            meta = {"_meta": {"io.modelcontextprotocol/protocolVersion": named}} if named else {}
            return await sent(here.tools_url, here.key, asks(method, **params, **meta))

        status, found = await asked("server/discover")
        DiscoverResult.model_validate(found["result"])
        assert (status, found["result"]["supportedVersions"]) == (200, ["2026-07-28"])
        status, listed = await asked("tools/list")
        assert [each.name for each in ListToolsResult.model_validate(listed["result"]).tools] == ["forecast"]
        status, done = await asked("tools/call", name="forecast", arguments={"city": "Rome"})
        assert CallToolResult.model_validate(done["result"]).result_type == "complete"
        for named in ("2030-01-01", None):
            status, refused = await asked("server/discover", named)
            assert (status, refused["error"]["code"]) == (400, -32022)
            assert "2026-07-28" in refused["error"]["data"]["supported"]
        assert (await asked("prompts/list"))[0] == 404
        status, unknown = await asked("tools/call", name="thunder", arguments={})
        assert (status, unknown["error"]["code"]) == (400, -32602)

    served(use)


def test_a_rollouts_key_opens_its_own_tools_alone() -> None:
    async def use(here: RolloutAddress, there: RolloutAddress) -> None:
        assert there.tools_url == ""
        listed = asks("tools/list")
        assert (await sent(f"{there.url}/mcp", there.key, listed))[0] == 404
        for url, key in ((here.tools_url, there.key), (f"{there.url}/mcp", here.key), (here.tools_url, "")):
            assert (await sent(url, key, listed))[0] == 401
        for path in ("mcp/", "mcp/x", "v1/mcp", "mcp/../v1/models"):
            assert (await sent(f"{here.url}/{path}", here.key, listed))[0] in (404, 405)
        for method in ("GET", "DELETE", "PUT"):
            assert (await sent(here.tools_url, here.key, listed, method))[0] == 405

    served(use)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, -32700),
        (b"[" * 5000, 400, -32700),
        ([asks("ping")], 400, -32600),
        ({"jsonrpc": "2.0", "id": {}, "method": "ping"}, 400, -32600),
        (asks("resources/list"), 200, -32601),
        (asks("tools/call", name="terminal", arguments={}), 200, -32602),
        (asks("tools/call", name=["forecast"]), 200, -32602),
        ({"jsonrpc": "2.0", "method": "notifications/initialized"}, 202, None),
        ({"jsonrpc": "2.0", "id": 3, "result": {}}, 202, None),
    ],
)
def test_any_message_is_answered(body: JSON, status: int, code: int | None) -> None:
    async def use(here: RolloutAddress, there: RolloutAddress) -> None:
        answered, reply = await sent(here.tools_url, here.key, body)
        assert (answered, None if reply is None else reply["error"]["code"]) == (status, code)
        right = await sent(here.tools_url, here.key, asks("tools/call", name="forecast", arguments={"city": "Oslo"}))
        assert right[1]["result"]["content"][0]["text"] == "Oslo: 21 °C"

    served(use)


async def test_calls_are_bounded_and_end_with_the_rollout() -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def never(name: str, arguments: str) -> ToolOutcome:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError

    server = ManagedChat(ToyEngine(TOKENIZER, iter(["hi"])), FORMAT, "hermes")
    conversations = Conversations(server, limits=CallLimits(concurrent=1, text_bytes=1000))
    async with RecordingEndpoint() as endpoint:
        with endpoint.open(conversations, McpTools(RUNTIME.registry.definitions(), never)) as here:
            call = asks("tools/call", name="forecast", arguments={"city": "x" * 2000})
            assert (await sent(here.tools_url, here.key, call))[0] == 413
            call["params"]["arguments"] = {"city": "x"}
            waiting = asyncio.create_task(sent(here.tools_url, here.key, call))
            await begun.wait()
            assert (await sent(here.tools_url, here.key, call))[0] == 429
        await asyncio.wait_for(cancelled.wait(), 10)
        with pytest.raises(aiohttp.ClientError):
            await asyncio.wait_for(waiting, 10)
        assert (await sent(here.tools_url, here.key, call))[0] == 401
