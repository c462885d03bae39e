"""The other end of a tool server: `ToolServerLink`, and external tools whose calls go through one.

Invariants: nothing is sent twice; the model's mistakes come back as the reply that the tool gave, everything else is a
`ToolServerError` that names the server and the way out. A link in this process has no socket and otherwise differs in
nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from typing import Protocol
from weakref import WeakSet

import aiohttp
from pydantic import ValidationError
from yarl import URL

from palaestra.core.config import sent_secret
from palaestra.core.errors import (
    ConfigError,
    ToolServerError,
    ToolServerRefused,
    ToolServerReplyError,
    ToolServerUnavailable,
)
from palaestra.core.types import JSON
from palaestra.tools.builtin.terminal import clamp_timeout
from palaestra.tools.call_text import ToolCall, reply_of
from palaestra.tools.registry.registry import ToolRegistry
from palaestra.tools.runtime.scoped_objects import States
from palaestra.tools.serving.http_common import Answer, encoded
from palaestra.tools.serving.payloads import ToolCallPayload, ToolServerExecuteRequest, ToolServerResultPayload
from palaestra.tools.serving.tool_server import ToolServer
from palaestra.tools.tool import FunctionTool, Tool, ToolReply, ToolRun, ToolSchema

logger = logging.getLogger(__name__)

INPROCESS = "inprocess"
"""The address of a tool server in this process."""
_CONNECT_S = 10.0
_SLACK_S = 10.0
"""How much longer than the call's own limit its answer may take."""
_SHOWN_CHARS = 300


class _Wire(Protocol):
    """How a request gets there."""

    async def post(self, path: str, body: bytes, authorization: str | None, timeout_s: float) -> Answer: ...


class ToolServerLink:
    """A tool server at an address, or (`inprocess`) one in this process for each set of tools that it serves.

    Opens on first use, and again after `aclose`, which is idempotent. Raises `ConfigError` for what is no address and
    for a token that cannot be sent.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        self.url = url
        self._token = sent_secret(token, "tool_server_token")
        self._http = None if url == INPROCESS else _Http(url)
        self._here: WeakSet[_InProcess] = WeakSet()
        self._shared = States()  # of the servers in this process, which come and go with their registries

    def served(self, tools: Iterable[Tool]) -> list[Tool]:
        """The tools, those that are external run by the server; one elsewhere need not lack what is lacking here."""
        tools = list(tools)
        wire: _Wire = self._http or self._made_here(tools)
        return [self._proxy(tool, wire) if tool.schema.external else tool for tool in tools]

    async def offered(self) -> list[ToolSchema]:
        """What a server elsewhere says that it has; nothing for one in this process. Raises `ToolServerError`."""
        if self._http is None:
            return []
        answer = await self._http.get("/tools", self._authorization, _CONNECT_S)
        if answer.status != 200:
            raise self._refused(answer, "the list of its tools")
        try:
            return [ToolSchema.from_dict(each, external=True) for each in json.loads(answer.body)["tools"]]
        except (ValueError, KeyError, TypeError, AttributeError):
            shown = _shown(answer.body)
            raise ToolServerReplyError(f"tool server {self.url} listed what are no tools: {shown}") from None

    async def release(self, trajectory_id: str) -> None:
        """Tell the server that a trajectory has ended. Raises `ToolServerError`."""
        body = encoded({"trajectory_id": trajectory_id})
        for wire in (self._http,) if self._http is not None else tuple(self._here):
            answer = await wire.post("/release", body, self._authorization, _CONNECT_S)
            if answer.status != 200:
                raise self._refused(answer, "release")

    async def aclose(self) -> None:
        """Close the connections, and what servers in this process hold."""
        if self._http is not None:
            await self._http.aclose()
        for wire in tuple(self._here):
            await wire.aclose()
        await self._shared.aclose()

    @property
    def _authorization(self) -> str | None:
        return f"Bearer {self._token}" if self._token else None

    def _made_here(self, tools: Iterable[Tool]) -> _InProcess:
        wire = _InProcess(ToolServer(ToolRegistry(tools), token=self._token, shared=self._shared))
        self._here.add(wire)
        return wire

    def _proxy(self, tool: Tool, wire: _Wire) -> Tool:
        name = tool.name

        async def run(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
            asked = arguments.get("timeout")
            limit = clamp_timeout(asked if isinstance(asked, (int, float)) else run.timeout_s)
            run.state(_Used).note(self, run.task_id)
            return await self._call(wire, name, arguments, run.task_id, limit)

        missing = tool.missing if self._http is None else lambda: None
        beyond = self._http is not None and not tool.touches_world
        return FunctionTool(
            tool.schema,
            run,
            tool.toolset,
            parallel_safe=tool.parallel_safe,
            missing=missing,
            touches_world=tool.touches_world or beyond,
            # What does not say that it touches the world may remember there what was asked before.
            world_session="tool-server" if beyond and not tool.parallel_safe else tool.world_session,
            world_key=tool.world_key,
        )

    async def _call(
        self, wire: _Wire, name: str, arguments: Mapping[str, JSON], trajectory_id: str, timeout_s: float
    ) -> ToolReply:
        """Run one call there. Raises `ToolServerError`."""
        call = ToolCallPayload.from_tool_call(ToolCall(name, dict(arguments)))
        request = ToolServerExecuteRequest(trajectory_id=trajectory_id or None, tool=call, timeout_s=timeout_s)
        answer = await wire.post("/execute", encoded(request), self._authorization, timeout_s)
        if answer.status != 200:
            raise self._refused(answer, name)
        try:
            result = ToolServerResultPayload.model_validate_json(answer.body)
        except ValidationError:
            raise ToolServerReplyError(
                f"tool server {self.url} answered {name} with what is no result: {_shown(answer.body)}; is it a tool "
                "server of this protocol?"
            ) from None
        return result.reply if isinstance(result.reply, (str, dict)) else reply_of(result.to_tool_result())

    def _refused(self, answer: Answer, name: str) -> ToolServerError:
        detail = _detail(answer.body)
        text = f"tool server {self.url} refused {name} with status {answer.status}: {detail}"
        if answer.status in (401, 403):
            return ToolServerRefused(f"{text}; set tool_server_token to the token that it was started with")
        if answer.status == 404:
            return ToolServerRefused(f"{text}; start it with that tool, or disable the tool's toolset here")
        if answer.status in (502, 503, 504):
            return ToolServerUnavailable(text)
        return ToolServerRefused(text) if answer.status < 500 else ToolServerUnavailable(text)


class _Used:
    """Where a rollout has called tool servers: they drop what they hold for it when it ends."""

    def __init__(self) -> None:
        self._names: dict[ToolServerLink, set[str]] = {}

    def note(self, link: ToolServerLink, trajectory_id: str) -> None:
        self._names.setdefault(link, set()).add(trajectory_id)

    async def aclose(self) -> None:
        """Where a server cannot be told, its lease runs out."""
        while self._names:
            link, names = self._names.popitem()
            for name in filter(None, names):
                try:
                    await link.release(name)
                except ToolServerError as error:
                    logger.warning("trajectory %s could not be released at the tool server: %s", name, error)


class _InProcess:
    """No socket: the server's own `answer`."""

    def __init__(self, server: ToolServer) -> None:
        self._server = server

    async def aclose(self) -> None:
        await self._server.aclose()

    async def post(self, path: str, body: bytes, authorization: str | None, timeout_s: float) -> Answer:
        return await self._server.answer(path, body, authorization)


class _Http:
    """A pool of connections to one server, without a bound: who calls bounds how much is under way."""

    def __init__(self, url: str) -> None:
        self._url = URL(url)
        if self._url.scheme not in ("http", "https") or not self._url.host:
            raise ConfigError(f"tool_server_url {url!r} is neither an http address nor '{INPROCESS}'")
        self._session: aiohttp.ClientSession | None = None

    async def post(self, path: str, body: bytes, authorization: str | None, timeout_s: float) -> Answer:
        return await self._send("POST", path, body, authorization, timeout_s)

    async def get(self, path: str, authorization: str | None, timeout_s: float) -> Answer:
        return await self._send("GET", path, None, authorization, timeout_s)

    async def _send(
        self, method: str, path: str, body: bytes | None, authorization: str | None, timeout_s: float
    ) -> Answer:
        headers = {"Content-Type": "application/json"}
        if authorization is not None:
            headers["Authorization"] = authorization
        timeout = aiohttp.ClientTimeout(total=timeout_s + _SLACK_S, sock_connect=_CONNECT_S)
        url = self._url.with_path(self._url.path.rstrip("/") + path)
        try:
            async with self._open().request(
                method, url, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as reply:
                return Answer(reply.status, await reply.read())
        except TimeoutError:
            raise ToolServerUnavailable(
                f"tool server {self._url} did not answer within {timeout_s + _SLACK_S:g} s; look whether it is "
                "overloaded"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise ToolServerUnavailable(
                f"tool server {self._url} cannot be reached: {error or type(error).__name__}; start it with "
                "`palaestra serve tools`, or correct tool_server_url"
            ) from None

    async def aclose(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar()
            )
        return self._session


def elsewhere(schema: ToolSchema) -> FunctionTool:
    """A tool that only its server has: `served` makes it one that can be called."""
    return FunctionTool(schema, _elsewhere, "tool-server")


async def _elsewhere(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    raise AssertionError("a tool that only its server has is called through its server")


def _detail(body: bytes) -> str:
    try:
        answer = json.loads(body)
    except ValueError:
        return _shown(body)
    return str(answer["detail"]) if isinstance(answer, dict) and "detail" in answer else _shown(body)


def _shown(body: bytes) -> str:
    text = body.decode(errors="replace")
    return repr(text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…")
