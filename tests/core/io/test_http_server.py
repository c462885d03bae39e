"""Servers and their callers: the check comes before the body; connections and times are bounded."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import cast

import aiohttp
import pytest
from aiohttp import web

from palaestra.rollouts.observe.prometheus import serving_metrics
from palaestra.rollouts.observe.status import RunReader
from palaestra.rollouts.observe.status_file import StatusFile
from palaestra.tools.registry.registry import ToolRegistry
from palaestra_contract.tools.executor import ToolExecutor
from palaestra_contract.tools.executor_service import ExecutorService
from palaestra_contract.tools.http_common import application
from palaestra_contract.tools.tool_server import ToolServer
from palaestra_gateway.config import PlatformConfig
from palaestra_gateway.platform import Deliver
from palaestra_gateway.platforms.openai_api import OpenAIServer
from palaestra_gateway.platforms.webhook import Webhook
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io import http_server
from palaestra_slots.core.io.http_server import is_loopback, listening, refusal
from palaestra_slots.sandbox.pool import SlotPool, SlotPoolConfig
from palaestra_tokens.engine import TokenEngine
from palaestra_tokens.recording.endpoint import RecordingEndpoint
from palaestra_tokens.serving.token_server import TokenLoopback
from palaestra_tokens.tokenizers import Tokenizer
from palaestra_train.atropos.trajectory_server import serving


async def _ok(body: bytes) -> dict[str, int]:
    return {"bytes": len(body)}


def _raw(url: str, head: str, body: bytes = b"") -> Awaitable[bytes]:
    """The first bytes of the answer to a request that is written by hand."""

    async def ask() -> bytes:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode("latin-1") + b"\r\n\r\n" + body)
        try:
            async with asyncio.timeout(10):
                return await reader.readline()
        finally:
            writer.close()

    return ask()


def with_tool_server(scenario: Callable[[str], Awaitable[None]], token: str | None) -> None:
    async def run() -> None:
        async with listening(application(token, {}, {"/execute": _ok}), "127.0.0.1", 0, token=token) as url:
            await scenario(url)

    asyncio.run(run())


def with_trajectory_server(scenario: Callable[[str], Awaitable[None]], token: str | None) -> None:
    async def run() -> None:
        async with serving(token=token) as url:
            await scenario(url)

    asyncio.run(run())


BOTH = pytest.mark.parametrize(
    ("start", "path"), [(with_tool_server, "/execute"), (with_trajectory_server, "/scored_data")]
)
Start = Callable[[Callable[[str], Awaitable[None]], str | None], None]


@BOTH
def test_a_caller_is_refused_before_its_body_is_read(start: Start, path: str) -> None:
    """The body of 300 MB is announced and never sent."""

    async def scenario(url: str) -> None:
        for sent in (
            "",
            "\r\nAuthorization: Bearer wrong",
            "\r\nAuthorization: Bearer \xe4\xf6",
            "\r\nAuthorization: Basic x",
        ):
            head = (
                f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 300000000{sent}"
            )
            assert b" 401 " in await _raw(url, head)

    start(scenario, "right")


@BOTH
def test_a_token_that_is_not_ascii(start: Start, path: str) -> None:
    async def scenario(url: str) -> None:
        headers = {"Content-Type": "application/json"}
        async with aiohttp.ClientSession() as session:
            for token, refused in (("grün", False), ("gr\udcffn", True), ("blau", True)):
                with contextlib.suppress(UnicodeEncodeError):
                    sent = {**headers, "Authorization": f"Bearer {token}"}
                    async with session.post(url + path, data=b"{}", headers=sent) as reply:
                        assert (reply.status == 401) == refused

    start(scenario, "grün")


@BOTH
@pytest.mark.parametrize(
    "sent", [{"Origin": "https://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}]
)
def test_a_page_may_not_ask_a_server_without_token(start: Start, path: str, sent: dict[str, str]) -> None:
    async def scenario(url: str) -> None:
        async with aiohttp.ClientSession() as session:
            async with session.post(url + path, json={}, headers=sent) as reply:
                assert reply.status == 403
            async with session.get(f"{url}/reset_data", headers=sent) as reply:
                assert reply.status in (403, 404)

    start(scenario, None)


EXPECTING = "\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 2\r\nExpect: "


@BOTH
@pytest.mark.parametrize("sent", ["", "\r\nAuthorization: Bearer wrong"])
@pytest.mark.parametrize("expected", ["100-continue", "anything"])
def test_nobody_without_the_token_is_asked_for_a_body(start: Start, path: str, sent: str, expected: str) -> None:
    async def scenario(url: str) -> None:
        assert b" 401 " in await _raw(url, f"POST {path} HTTP/1.1{EXPECTING}{expected}{sent}")
        right = "\r\nAuthorization: Bearer right"
        if expected == "100-continue":
            assert b" 100 " in await _raw(url, f"POST {path} HTTP/1.1{EXPECTING}{expected}{right}")
        assert b" 401 " in await _raw(url, f"POST /nothing HTTP/1.1{EXPECTING}{expected}{sent}")

    start(scenario, "right")


DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize("path", ["/scored_data", "/scored_data_list", "/register", "/register-env"])
@pytest.mark.parametrize(
    ("head", "tail"), [(b"", b""), (b'{"zzz":', b"}"), (b'[{"zzz":', b"}]")], ids=["bare", "member", "list"]
)
def test_a_body_of_any_depth_is_a_wrong_request(path: str, head: bytes, tail: bytes) -> None:
    async def scenario(url: str) -> None:
        headers = {"Content-Type": "application/json"}
        body = head + DEEP + tail
        async with aiohttp.ClientSession() as session, session.post(url + path, data=body, headers=headers) as reply:
            assert reply.status == 422

    with_trajectory_server(scenario, None)


@BOTH
def test_two_lengths_and_upgrades_open_nothing(start: Start, path: str) -> None:
    """A second request in the body of one that is refused is never answered by its own right."""
    inner = b"GET /status HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer right\r\n\r\n"

    async def scenario(url: str) -> None:
        both = f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 5"
        assert b" 400 " in await _raw(url, both, b"0\r\n\r\n" + inner)
        upgrade = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x"
        assert b" 401 " in await _raw(url, upgrade, b"x" * 1000)
        assert b" 401 " in await _raw(url, f"POST //{path}?x=/health HTTP/1.1\r\nHost: x\r\nContent-Length: 9")
        assert b" 40" in await _raw(url, f"GET /%2e%2e/health/..{path} HTTP/1.1\r\nHost: x")

    start(scenario, "right")


def test_only_json_is_a_body_of_the_trajectory_server() -> None:
    async def scenario(url: str) -> None:
        async with aiohttp.ClientSession() as session:
            for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
                async with session.post(f"{url}/register", data=b"{}", headers={"Content-Type": kind}) as reply:
                    assert reply.status == 415

    with_trajectory_server(scenario, None)


def _metrics(host: str, token: str | None) -> AbstractAsyncContextManager[str]:
    reader = cast("RunReader", None)  # nobody gets as far as to read
    return serving_metrics(reader, cast("StatusFile", None), host, 0, token)


def _executor(host: str, token: str | None) -> AbstractAsyncContextManager[str]:
    pool = SlotPool(SlotPoolConfig(max_slots=1))
    return ExecutorService(ToolExecutor(pool, ToolRegistry()), pool, token=token).serving(host)


def _model_server(host: str, token: str | None) -> AbstractAsyncContextManager[object]:
    server = TokenLoopback(cast("TokenEngine", None), cast("Tokenizer", None), token=token)
    server.host = host
    return server


@contextlib.asynccontextmanager
async def _gateway(platform: type[OpenAIServer] | type[Webhook], host: str, token: str | None) -> AsyncIterator[str]:
    extra: dict[str, str | int] = {"host": host, "port": 0}
    if platform is Webhook:
        extra["reply_url"] = "http://127.0.0.1:1/"
    server = platform("door", PlatformConfig(token=token, extra=extra))
    try:
        await server.start(cast("Deliver", None))
        yield server.url.removesuffix("/v1")
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def _recorder(host: str, token: str | None) -> AsyncIterator[str]:
    async with RecordingEndpoint(host=host) as endpoint:
        yield endpoint.origin


SERVERS: list[Callable[[str, str | None], AbstractAsyncContextManager[object]]] = [
    lambda host, token: serving(host, token=token),
    lambda host, token: ToolServer(ToolRegistry(), token=token).serving(host),
    _executor,
    _metrics,
    _model_server,
    functools.partial(_gateway, OpenAIServer),
    functools.partial(_gateway, Webhook),
]
NAMES = ["trajectories", "tools", "executor", "metrics", "model", "chat", "webhook"]
EACH = pytest.mark.parametrize("server", SERVERS, ids=NAMES)
Server = Callable[[str, str | None], AbstractAsyncContextManager[object]]


@EACH
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org", ""])
def test_beyond_the_loopback_a_server_needs_a_token(server: Server, host: str) -> None:
    async def run(token: str | None) -> None:
        async with server(host, token):
            pass

    assert not is_loopback(host)
    for none in (None, ""):
        with pytest.raises(ConfigError, match="needs a token"):
            asyncio.run(run(none))


@EACH
async def test_every_path_of_a_server_wants_its_token(server: Server) -> None:
    """Except greetings, which tell nothing of a run."""

    async def run() -> None:
        async with server("127.0.0.1", "right") as started, aiohttp.ClientSession() as session:
            url = started.url if isinstance(started, TokenLoopback) else str(started).removesuffix("/metrics")
            for path in ("/execute", "/status", "/tools", "/metrics", "/v1/models", "/generate", "/batch", "/nothing"):
                for method in ("GET", "POST"):
                    for sent in ("", "Bearer wrong", "Basic right"):
                        headers = {"Authorization": sent} if sent else {}
                        async with session.request(method, url + path, headers=headers) as reply:
                            assert reply.status == 401, path

    await run()


def _address(started: object) -> tuple[str, int]:
    url = started.url if isinstance(started, TokenLoopback) else str(started).removesuffix("/metrics")
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


REFUSED = (
    "GET / HTTP/1.1", "GET /health HTTP/1.1", "GET /tools HTTP/1.1\r\nAuthorization: Bearer wrong",
    "POST /nothing HTTP/1.1\r\nContent-Length: 2", "GET /rollouts/x/v1/models HTTP/1.1\r\nx-api-key: wrong",
)  # fmt: skip


@pytest.mark.parametrize("server", [*SERVERS, _recorder], ids=[*NAMES, "recorder"])
async def test_a_refused_caller_keeps_no_connection(server: Server) -> None:
    """Otherwise one that sends a request and then nothing would hold it for an hour."""

    async def run() -> None:
        async with server("127.0.0.1", "right") as started:
            for head in REFUSED:
                reader, writer = await asyncio.open_connection(*_address(started))
                writer.write(f"{head}\r\nHost: x\r\n\r\n".encode() + (b"{}" if "POST" in head else b""))
                async with asyncio.timeout(10):
                    assert (await reader.read()).startswith((b"HTTP/1.1 401 ", b"HTTP/1.1 200 "))
                writer.close()

    await run()


@EACH
async def test_no_path_reads_a_body_of_a_caller_without_token(server: Server) -> None:
    """The body is announced and does not come: a server that waited for it would not answer."""

    async def run() -> None:
        async with server("127.0.0.1", "right") as started:
            for begin in ("POST /", "POST /health", "GET /health", "POST /metrics", "POST /v1/models"):
                for body in ("Content-Length: 60000000", "Transfer-Encoding: chunked"):
                    reader, writer = await asyncio.open_connection(*_address(started))
                    writer.write(f"{begin} HTTP/1.1\r\nHost: x\r\n{body}\r\n\r\n".encode())
                    async with asyncio.timeout(10):
                        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
                    writer.close()

    await run()


def test_a_caller_with_the_token_keeps_its_connection() -> None:
    async def scenario(url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        for _ in range(3):
            writer.write(b"POST /execute HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer t\r\nContent-Length: 2\r\n\r\n{}")
            async with asyncio.timeout(10):
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200 ")
                await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
        writer.close()

    with_tool_server(scenario, "t")


def test_no_page_by_any_name() -> None:
    assert refusal(None, {"Host": "localhost:1"}) is None
    assert refusal(None, {"Host": "[::1]:1", "Sec-Fetch-Site": "none"}) is None
    for host in ("localhost", "localhost:1", "127.0.0.1:1", "[::1]"):
        assert refusal(None, {"Host": host}) is None
    for host in ("evil.example", "evil.example:1", "192.0.2.1", "localhost.evil.example:1"):
        assert (refusal(None, {"Host": host}) or (0,))[0] == 403
    assert refusal("t", {"Authorization": "bearer t"}) is None
    assert (refusal("t", {"Authorization": "Bearer  "}) or (0,))[0] == 401


def test_connections_that_send_nothing_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_S", 0.2)

    async def scenario(url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /execute HT")
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()

    with_tool_server(scenario, None)


def test_connections_beyond_the_bound_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MOST_CONNECTIONS", 3)

    async def scenario(url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        opened = [await asyncio.open_connection(host, int(port)) for _ in range(8)]
        await asyncio.sleep(0.1)
        ended = sum(reader.at_eof() for reader, _ in opened)
        for _, writer in opened:
            writer.close()
        assert ended == 5

    with_tool_server(scenario, None)


@pytest.mark.parametrize("turns", range(5))
def test_connections_that_arrive_as_the_server_closes_are_closed(turns: int) -> None:
    async def scenario() -> list[socket.socket]:
        callers = []
        async with listening(web.Application(), "127.0.0.1", 0) as url:
            for _ in range(3):
                callers.append(socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=5))
            for _ in range(turns):
                await asyncio.sleep(0)
        return callers

    for caller in asyncio.run(scenario()):
        with caller, contextlib.suppress(ConnectionResetError):
            assert caller.recv(1) == b""


FORM = "Content-Type: application/x-www-form-urlencoded"
SLOW = f"POST {{path}} HTTP/1.1\r\nHost: localhost\r\n{FORM}\r\nContent-Length: 100"


def test_a_body_that_trickles_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "BODY_S", 0.2)

    async def scenario(url: str) -> None:
        assert b" 408 " in await _raw(url, SLOW.format(path="/execute"), b"x")

    with_tool_server(scenario, None)
    assert isinstance(web.HTTPRequestTimeout(), web.HTTPException)


async def _read(request: web.Request) -> web.Response:
    return web.Response(body=await request.read())


async def _read_pieces(request: web.Request) -> web.Response:
    return web.Response(body=b"".join([piece async for piece in request.content.iter_any()]))


async def _read_form(request: web.Request) -> web.Response:
    return web.json_response(list(await request.post()))


@pytest.mark.parametrize("handler", [_read, _read_pieces, _read_form])
@pytest.mark.parametrize("wrapped", [True, False])
async def test_no_handler_waits_for_a_body_without_end_or_logs_its_caller(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    wrapped: bool,
) -> None:
    """Also without a guard, which reads the bodies of other servers."""
    monkeypatch.setattr(http_server, "BODY_S", 0.2)
    app = web.Application()
    app.router.add_post("/x", handler)

    async def run() -> None:
        async with listening(app if wrapped else handler, "127.0.0.1", 0) as url:
            assert b" 408 " in await _raw(url, SLOW.format(path="/x"), b"x")
            host, port = url.removeprefix("http://").split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(SLOW.format(path="/x").encode() + b"\r\n\r\nx")
            await writer.drain()
            await asyncio.sleep(0.05)
            writer.transport.abort()
            await asyncio.sleep(0.05)
            assert b" 200 " in await _raw(url, "POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 3", b"a=b")

    await run()
    assert not caplog.records


async def test_only_the_time_of_the_body_counts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A slow answer goes on, a failure of the handler is logged, and streams may last."""
    monkeypatch.setattr(http_server, "BODY_S", 0.1)

    async def slow(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(0.2)
        if request.path == "/broken":
            raise ConnectionResetError("the other side of the handler")
        return web.Response(text="late")

    async def run() -> None:
        head = "POST {} HTTP/1.1\r\nHost: x\r\nContent-Length: 1"
        async with listening(slow, "127.0.0.1", 0) as url:
            assert b" 200 " in await _raw(url, head.format("/"), b"x")
            assert b" 500 " in await _raw(url, head.format("/broken"), b"x")
        async with listening(slow, "127.0.0.1", 0, limits_bodies=True) as url, aiohttp.ClientSession() as session:

            async def stream() -> AsyncIterator[bytes]:
                yield b"x"
                await asyncio.sleep(0.2)
                yield b"y"

            assert (await session.post(url, data=stream())).status == 200

    await run()
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ConnectionResetError]


@pytest.mark.parametrize("asks", ["GET / HTTP/1.1\r\nHost: x\r\n\r\n", "POST / HTTP/1.0\r\nContent-Length: 0\r\n\r\n"])
async def test_a_caller_who_hangs_up_within_the_answer_is_not_logged(
    caplog: pytest.LogCaptureFixture, asks: str
) -> None:
    ended = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        try:
            while True:
                await reply.write(b"x" * 1000)
                await asyncio.sleep(0.01)
        finally:
            ended.set()

    app = web.Application()
    app.router.add_route("*", "/", stream)
    async with listening(app, "127.0.0.1", 0) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(asks.encode())
        await reader.readline()
        writer.transport.abort()
        async with asyncio.timeout(10):
            await ended.wait()
        await asyncio.sleep(0.05)
    assert not caplog.records
