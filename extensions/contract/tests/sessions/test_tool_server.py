"""External tools at a tool server, over a socket and without one: the same replies, and errors that name the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from golden_messages import check_message
from palaestra.tools.call_text import ToolCall, ToolResult
from palaestra.tools.decorator import tool
from palaestra.tools.registry.registry import ToolRegistry
from palaestra.tools.tool import ToolMistake, ToolRun, ToolSchema
from palaestra_contract.tools.executor import ToolExecutor, ToolExecutorConfig
from palaestra_contract.tools.tool_server import ToolServer
from palaestra_contract.tools.tool_server_client import elsewhere
from palaestra_slots.core.errors import (
    ToolServerError,
    ToolServerRefused,
    ToolServerReplyError,
    ToolServerUnavailable,
)
from palaestra_slots.core.io.http_server import listening
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import Slot
from sessions.asking import Client
from sessions.held_clock import HeldClock


class Count:
    """What a trajectory has at the server."""

    def __init__(self) -> None:
        self.calls = 0


@tool(external=True)
async def count(run: ToolRun) -> dict[str, JSON]:
    """Count the calls of the trajectory."""
    state = run.state(Count)
    state.calls += 1
    return {"calls": state.calls, "limit": run.timeout_s}


@tool(external=True)
async def say(text: str) -> str:
    """Say it."""
    if text == "nothing":
        raise ToolMistake("say something", hint="anything")
    return "\udc80ä" if text == "odd" else text


@tool(external=True)
async def hang() -> str:
    """Never come back."""
    await asyncio.Event().wait()
    return ""


@tool
async def near(text: str) -> str:
    """Say it where the executor is."""
    return f"near {text}"


def registry() -> ToolRegistry:
    return ToolRegistry([count, say, hang, near])


class NoSlots:
    """Hands out no slot: external tools need none."""

    async def acquire(self, trajectory_id: str, **_: object) -> Slot:
        raise AssertionError("a slot was asked for")


@asynccontextmanager
async def executor_at(url: str | None, token: str | None = None) -> AsyncIterator[ToolExecutor]:
    config = ToolExecutorConfig(tool_server_url=url, tool_server_token=token)
    async with ToolExecutor(NoSlots(), registry(), config) as executor:  # type: ignore[arg-type]
        yield executor


async def results(executor: ToolExecutor) -> list[ToolResult]:
    said = [ToolCall("say", arguments) for arguments in ({"text": "hello"}, {"text": "nothing"}, {})]
    others = [ToolCall("count", {}), ToolCall("count", {}), ToolCall("near", {"text": "x"}), ToolCall("gone", {})]
    done = [await executor.execute("t1", call) for call in (*said, *others)]
    return [*done, await executor.execute("t2", ToolCall("count", {}))]


async def test_a_socket_makes_no_difference() -> None:
    server = ToolServer(registry(), token="sesame")
    async with (
        server.serving() as url,
        executor_at(None) as here,
        executor_at("inprocess", "sesame") as inside,
        executor_at(url, "sesame") as elsewhere,
    ):
        told = await results(here)
        assert told == await results(inside)
        assert told == await results(elsewhere)
        assert told[0].output == "hello"
        assert (told[1].error, told[1].metadata) == ("say something", {"hint": "anything"})
        check_message(told[2].error, "text")
        assert [each.metadata.get("calls") for each in (told[3], told[4], told[7])] == [1, 2, 1]
        assert server.total_requests == 5  # what does not fit its schema is not sent, nor what is not external
        assert len(server.leases) == 2
        await elsewhere.release_trajectory("t1")
        assert len(server.leases) == 1
        assert (await elsewhere.execute("t1", ToolCall("count", {}))).metadata["calls"] == 1


async def test_what_a_client_may_ask() -> None:
    clock = HeldClock()
    server = ToolServer(registry(), lease_s=100.0, clock=clock)
    async with server.serving() as url, Client(url) as client:
        assert (await client.get("/health"))[1]["status"] == "ok"
        status, told = await client.get("/tools")
        assert [each["function"]["name"] for each in told["tools"]] == ["count", "say", "hang"]
        result = await client.call("t1", "count", {}, slot_id="slot_1", container_addr="x")
        assert (result["success"], result["metadata"]["calls"], result["reply"]["calls"]) == (True, 1, 1)
        assert "timed" not in (await client.call("t1", "say", {"text": "a"}))["error"]
        slow = await client.call("t1", "hang", {}, timeout_s=1)
        assert "answer within 1 s." in slow["error"]
        assert (await client.call("t1", "say", {"text": "odd"}))["output"] == "?ä"
        status, refused = await client.post("/execute", {"tool": {"name": "near", "arguments": {"text": "a"}}})
        assert status == 404
        check_message(refused["detail"], "'near'", "count, say, hang")
        assert (await client.post("/execute", {"tool": []}))[0] == 422
        await clock.pass_by(101.0)
        assert len(server.leases) == 0
        status, late = await client.post("/execute", {"trajectory_id": "t1", "tool": {"name": "count"}})
        assert (status, late["error"]) == (409, "StaleLease")
        assert (await client.post("/release", {"trajectory_id": "t1"}))[0] == 200
        assert (await client.call("t1", "count", {}))["metadata"]["calls"] == 1


async def test_a_call_that_hangs_holds_up_no_other() -> None:
    async with ToolServer(registry()).serving() as url, executor_at(url) as executor:
        hanging = asyncio.create_task(executor.execute("t0", ToolCall("hang", {})))
        says = [executor.execute(f"t{n}", ToolCall("say", {"text": str(n)})) for n in range(1, 20)]
        assert [each.output for each in await asyncio.gather(*says)] == [str(n) for n in range(1, 20)]
        assert not hanging.done()
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)


@asynccontextmanager
async def answering(status: int, body: str) -> AsyncIterator[str]:
    """A server that is none of ours."""

    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=status, text=body)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    async with listening(app, "127.0.0.1", 0) as url:
        yield url


@pytest.mark.parametrize(
    ("status", "body", "error", "says"),
    [
        (200, "<html>", ToolServerReplyError, "answered say with something other than a result: '<html>'"),
        (200, '{"ok": 1}', ToolServerReplyError, "something other than a result"),
        (401, '{"detail": "who?"}', ToolServerRefused, "status 401: who?; set tool_server_token"),
        (404, "{}", ToolServerRefused, "status 404: '{}'; start the server with that tool"),
        (500, '{"detail": "oh"}', ToolServerUnavailable, "status 500: oh"),
        (503, '{"detail": "full"}', ToolServerUnavailable, "status 503: full"),
        (302, "", ToolServerRefused, "status 302"),
    ],
)
async def test_what_a_server_answers_wrongly_names_it(
    status: int, body: str, error: type[ToolServerError], says: str
) -> None:
    async with answering(status, body) as url, executor_at(url) as executor:
        with pytest.raises(error) as raised:
            await executor.execute("t1", ToolCall("say", {"text": "a"}))
        assert str(raised.value).startswith(f"tool server {url} ")
        assert says in str(raised.value)


async def test_a_server_that_is_not_there_is_named_with_the_way_out(unused: Callable[[], int]) -> None:
    async with executor_at(f"http://127.0.0.1:{unused()}") as executor:
        with pytest.raises(ToolServerUnavailable, match=r"http://127.*palaestra serve tools"):
            await executor.execute("t1", ToolCall("say", {"text": "a"}))


@pytest.fixture
def unused() -> Callable[[], int]:
    """A port that nobody listens on."""
    import socket

    def port() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    return port


def test_an_approval_of_a_tool_names_its_server_and_covers_no_other() -> None:
    one, other = (elsewhere(ToolSchema("pay", ""), f"http://{host}:1").asks for host in ("one", "other"))
    assert one is not None
    assert other is not None
    check_message(one.what, "pay", "//one")
    assert one.key != other.key
