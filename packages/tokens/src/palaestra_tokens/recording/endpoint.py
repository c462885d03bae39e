"""The server of the recording endpoint: each rollout gets its own address and key, for clients of four APIs.

    async with RecordingEndpoint() as endpoint:
        with endpoint.open(Conversations(engine.session(context))) as address:
            …                                     # an agent calls address.openai_url with address.key
        recorded = address.conversations.recorded()

Invariants: a key opens its own rollout's paths and nothing else, and is checked before a body is read; a rollout's end
closes its key and cancels its calls; bodies, time, connections and concurrent calls are bounded, and long requests are
read and rendered in a thread, so that no agent delays another or the run. Errors are reported in the format of the
caller's dialect.

A rollout may have tools (`ToolService`), at `/mcp` below its address, with the same key and limits.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import re
import secrets
import time
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Protocol, Self

import msgspec
from aiohttp import web

from palaestra_slots.core.io.http_server import invite_body, listening
from palaestra_slots.core.io.threads import OneThread
from palaestra_slots.core.printable import printable
from palaestra_slots.core.types import JSON
from palaestra_tokens.engine import ChatCompletion
from palaestra_tokens.recording.dialects.chat import ChatDialect
from palaestra_tokens.recording.dialects.completions import CompletionsDialect
from palaestra_tokens.recording.dialects.messages import MessagesDialect
from palaestra_tokens.recording.dialects.responses import ResponsesDialect
from palaestra_tokens.recording.recorded_conversations import LONG_BYTES, Conversations
from palaestra_tokens.recording.request import Dialect, ModelRequest, Refusal, ReplyStream

MAX_BODY_BYTES = 64 << 20
"""The maximum size of a request in bytes. For a model that does not accept images, `CallLimits.text_bytes` is a further
limit."""

PING_S, WRITE_S = 10.0, 60.0
"""Seconds between the keep-alive events of a streamed reply, and the seconds within which a client must read the
written data."""

WHOLE_BYTES = 256 << 10
"""The maximum size in bytes of a streamed reply that may be sent in one piece. The connection's buffers can hold this
much."""

MODEL = "policy"
"""The name of the rollout's model in the list of models. Requests may name any model."""

_PATHS: Mapping[str, Dialect] = {
    "v1/chat/completions": ChatDialect(),
    "v1/responses": ResponsesDialect(),
    "v1/messages": MessagesDialect(),
    "v1/completions": CompletionsDialect(),
}
_UNSAFE = re.compile(r"[^A-Za-z0-9_.\[\]-]")
"""The characters of field names that are replaced before the names are put into a header."""
_COUNT_PATH = "v1/messages/count_tokens"
TOOLS_PATH = "mcp"


class ToolService(Protocol):
    """Answers the messages of an MCP client (`tools.mcp.mcp_endpoint.McpTools`)."""

    async def answer(self, body: bytes) -> tuple[int, JSON]:
        """Return the status and the JSON of the reply, which is None for an empty reply."""


@dataclass(frozen=True, slots=True)
class RolloutAddress:
    """Where the agent of one rollout finds its model: `url` for clients of Anthropic's API, `openai_url` for clients of
    OpenAI's APIs, and the `key` for both. `tools_url` is where MCP clients find the rollout's tools, with the same
    key."""

    url: str
    key: str
    conversations: Conversations
    tools: ToolService | None = None

    @property
    def openai_url(self) -> str:
        """The base URL for OpenAI's clients."""
        return f"{self.url}/v1"

    @property
    def tools_url(self) -> str:
        """The URL for MCP clients, or an empty string if the rollout has no tools."""
        return "" if self.tools is None else f"{self.url}/{TOOLS_PATH}"

    def at(self, origin: str) -> RolloutAddress:
        """Return the address for programs that reach this server at a different origin (`http://127.0.0.1:8000`)."""
        path = self.url.split("/", 3)[3]
        return replace(self, url=f"{origin}/{path}")


class RecordingEndpoint:
    """Serves any number of rollouts. An async context manager; `origin` is the server's own address."""

    def __init__(self, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._host, self._port = host, port
        self._rollouts: dict[str, RolloutAddress] = {}
        self._numbers = itertools.count(1)
        # Compared for unknown rollouts, so that the time taken does not distinguish them from wrong keys.
        self._nobody = secrets.token_urlsafe(32)

    async def __aenter__(self) -> Self:
        self._listening = listening(
            self._handle,
            self._host,
            self._port,
            token=self._nobody,  # each rollout has a key of its own, which `_address` checks
            shutdown_s=0.5,
            handler_cancellation=True,
        )
        self.origin = await self._listening.__aenter__()
        self._thread = OneThread("long-requests")
        return self

    async def __aexit__(self, *_: object) -> None:
        for address in self._rollouts.values():
            # Calls in progress end first, because a server that closes waits for its handlers.
            address.conversations.end()
        await self._listening.__aexit__(None, None, None)
        self._thread.close()

    @contextmanager
    def open(self, conversations: Conversations, tools: ToolService | None = None) -> Iterator[RolloutAddress]:
        """Serve a rollout's conversations, and its tools if there are any, during the block."""
        name = secrets.token_hex(8)
        address = RolloutAddress(f"{self.origin}/rollouts/{name}", secrets.token_urlsafe(32), conversations, tools)
        self._rollouts[name] = address
        conversations.thread = self._thread
        try:
            yield address
        finally:
            del self._rollouts[name]
            conversations.end()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        # Not the decoded path, in which %2F would be a slash and end a name early.
        path = request.raw_path.partition("?")[0].lstrip("/")
        root, _, rest = path.partition("/")
        name, _, rest = rest.partition("/")
        dialect = _PATHS.get("v1/messages" if rest == _COUNT_PATH else rest, _PATHS["v1/chat/completions"])
        # An error at a path that does not exist must also have the form that the caller's client can read.
        if "anthropic-version" in request.headers and rest not in _PATHS:
            dialect = _PATHS["v1/messages"]
        try:
            address = self._address(root, name, request.headers)
            if request.method == "GET" and rest in ("v1/models", f"v1/models/{MODEL}"):
                return _models(single=rest != "v1/models")
            if rest == TOOLS_PATH and address.tools is not None:
                return await _answer_tools(request, address.tools, address.conversations)
            if rest not in _PATHS and rest != _COUNT_PATH:
                raise Refusal(404, f"There is nothing at {printable(request.method)} /{printable(rest[:200])}.")
            if request.method != "POST":
                raise Refusal(405, f"/{rest} accepts only POST.")
            with address.conversations.call():
                asked = await _read_request(request, dialect, address.conversations)
                if rest == _COUNT_PATH:
                    return _json({"input_tokens": await address.conversations.prompt_tokens(asked)})
                reply_id = f"{name}{next(self._numbers):06x}"
                return await _Call(request, dialect, asked, address.conversations, reply_id).answer()
        except Refusal as refusal:
            answer = _json(dialect.error(refusal), refusal.status, _error_headers(refusal))
            if refusal.status == 401:
                answer.force_close()  # the connection does not belong to a rollout
            return answer

    def _address(self, root: str, name: str, headers: Mapping[str, str]) -> RolloutAddress:
        """Return the rollout at a path, if the caller has its key. Raises `Refusal`."""
        scheme, _, token = headers.get("Authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        address = self._rollouts.get(name) if root == "rollouts" else None
        key = self._nobody if address is None else address.key
        # As bytes, because `compare_digest` refuses texts with characters outside ASCII, which a header may have.
        same = hmac.compare_digest(given.encode("utf-8", "surrogateescape"), key.encode())
        if address is None or not same:
            raise Refusal(401, "The key is not valid for the rollout at this address.", code="invalid_api_key")
        return address


class _Call:
    """One request and its reply."""

    def __init__(
        self,
        request: web.Request,
        dialect: Dialect,
        asked: ModelRequest,
        conversations: Conversations,
        reply_id: str,
    ) -> None:
        self._request, self._dialect, self._asked, self._conversations = request, dialect, asked, conversations
        self._id, self._created = reply_id, int(time.time())

    async def answer(self) -> web.StreamResponse:
        """Answer the request. Raises `Refusal` unless a part of a stream was already sent."""
        headers = {"x-request-id": f"req_{self._id}"}
        if self._asked.ignored:
            headers["x-ignored-fields"] = ",".join(_UNSAFE.sub("_", name) for name in self._asked.ignored)[:4000]
        if not self._asked.stream:
            completion = await self._conversations.answer(self._asked, self._id)
            return _json(self._dialect.reply(self._asked, completion, self._id, self._created), 200, headers)
        headers |= {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        return await self._stream_reply(headers)

    async def _stream_reply(self, headers: Mapping[str, str]) -> web.StreamResponse:
        """Stream the reply. Sampling begins before the headers are sent, so an early refusal has its own status, and a
        reply that is soon complete is sent in one piece."""
        response = _Events(headers=headers)
        writer = self._dialect.stream(self._asked, self._id, self._created)
        pieces: list[JSON] = []
        news = asyncio.Event()

        def hook(delta: JSON) -> None:
            pieces.append(delta)
            news.set()

        shown = hook if "on_delta" in self._conversations.features else None
        # In a task of its own, so that pings keep the connection open while the model works.
        answering = asyncio.ensure_future(self._conversations.answer(self._asked, self._id, shown))
        answering.add_done_callback(lambda _: news.set())
        try:
            while not await _ended(answering, news):
                data = _take_events(writer, pieces) if pieces else writer.ping()
                if not response.prepared:
                    data = writer.begin() + data
                    await response.prepare(self._request)
                await self._write_in_time(response.write(data))
            begun = _take_events(writer, pieces) if response.prepared else writer.begin()
            last = begun + writer.end(answering.result())
            if not response.prepared:
                if len(last) < WHOLE_BYTES:
                    return web.Response(body=last, headers=headers)
                await response.prepare(self._request)
        except Refusal as refusal:
            if not response.prepared:
                # Before the headers are sent, a refusal has its own status; after that,
                # it can only be an event of the stream.
                raise
            self._conversations.note(refusal)
            last = writer.failure(refusal)
        finally:
            # Also if the client has disconnected: nobody would read the rest of the reply.
            answering.cancel()
        await self._write_in_time(response.write_eof(last))
        return response

    async def _write_in_time(self, writing: Awaitable[None]) -> None:
        """Await a write; close the connection if the client does not read the data within `WRITE_S` seconds."""
        try:
            async with asyncio.timeout(WRITE_S):
                await writing
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            # The handler ends as if the client had disconnected.
            raise asyncio.CancelledError from None


class _Events(web.StreamResponse):
    """A response whose headers are sent with its first piece."""

    _send_headers_immediately = False


async def _ended(answering: asyncio.Future[ChatCompletion], news: asyncio.Event) -> bool:
    """Wait for news of a reply, at most `PING_S` seconds. Returns whether the reply has ended."""
    with suppress(TimeoutError):
        async with asyncio.timeout(PING_S):
            await news.wait()
    news.clear()
    return answering.done()


def _take_events(writer: ReplyStream, pieces: list[JSON]) -> bytes:
    """Return the pieces as events, and empty the list. Raises `Refusal`."""
    data = b""
    for delta in pieces:
        if delta.restarted:
            raise Refusal(503, "The model's reply broke off in the middle.", code="server_error")
        if delta.index == 0:
            data += writer.reasoning(delta.reasoning) if delta.reasoning else b""
            data += writer.text(delta.content) if delta.content else b""
    pieces.clear()
    return data


async def _answer_tools(request: web.Request, tools: ToolService, conversations: Conversations) -> web.Response:
    """Answer an MCP client. Raises `Refusal`."""
    if request.method != "POST":
        raise Refusal(405, f"/{TOOLS_PATH} accepts only POST.")
    with conversations.call(of_model=False):
        body = await _raw(request, min(conversations.limits.text_bytes, MAX_BODY_BYTES))
        status, reply = await tools.answer(body)
    return web.Response(status=status) if reply is None else _json(reply, status)


async def _raw(request: web.Request, most_bytes: int) -> bytes:
    """Return the body of a request. Raises `Refusal`."""
    body = bytearray()
    try:
        await invite_body(request)
        while piece := await request.content.readany():
            body += piece
            if len(body) > most_bytes:
                raise Refusal(413, f"The body is longer than {most_bytes} bytes.")
    except web.HTTPRequestTimeout as late:
        raise Refusal(408, f"{late.text}") from None
    except web.RequestPayloadError:
        raise Refusal(400, "The encoding of the body is invalid.") from None
    return bytes(body)


async def _read_request(request: web.Request, dialect: Dialect, conversations: Conversations) -> ModelRequest:
    """Read the request, within the size and time limits. Raises `Refusal`."""
    features = conversations.features
    most_bytes = MAX_BODY_BYTES if "images" in features else min(conversations.limits.text_bytes, MAX_BODY_BYTES)
    raw = await _raw(request, most_bytes)

    def read() -> ModelRequest:
        return dialect.read(_body(raw), features)

    asked = await conversations.in_thread(read) if len(raw) >= LONG_BYTES else read()
    asked.size = len(raw)
    return asked


def _body(raw: bytes) -> dict[str, JSON]:
    """Parse the body as a JSON object. Raises `Refusal`."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Refusal(400, f"The body is not JSON: {error}.") from None
    if not isinstance(body, dict):
        raise Refusal(400, "The body is not a JSON object.")
    return body


def _models(*, single: bool) -> web.Response:
    model = {"id": MODEL, "object": "model", "type": "model", "display_name": MODEL, "owned_by": "palaestra"}
    model |= {"created": 0, "created_at": "1970-01-01T00:00:00Z"}  # type: ignore[dict-item]
    listed = {"object": "list", "data": [model], "has_more": False, "first_id": MODEL, "last_id": MODEL}
    return _json(model if single else listed)


def _json(body: JSON, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, headers=headers, content_type="application/json")


def _error_headers(refusal: Refusal) -> dict[str, str]:
    headers = {"x-should-retry": "true" if refusal.status in (429, 500, 503) else "false"}
    if refusal.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if refusal.status == 429:
        headers["Retry-After"] = "1"
    return headers
