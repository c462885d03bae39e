"""The client of a tool server: `ToolServerLink`, and external tools whose calls it sends there.

Invariants: nothing is sent twice; mistakes of the model come back as the tool's own reply, every other failure is a
`ToolServerError` that names the server and the remedy. A server in this process only lacks the socket.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
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
from palaestra.tools.serving.http_common import HttpReply, encoded
from palaestra.tools.serving.payloads import ToolCallPayload, ToolServerExecuteRequest, ToolServerResultPayload
from palaestra.tools.serving.tool_server import ToolServer
from palaestra.tools.tool import FunctionTool, States, Tool, ToolReply, ToolRun, ToolSchema

logger = logging.getLogger(__name__)

INPROCESS = "inprocess"
"""The address of a tool server in this process."""
_CONNECT_S = 10.0
_SLACK_S = 10.0
"""How much longer than the call's own limit its reply may take."""
_SHOWN_CHARS = 300


class ToolServerLink:
    """A tool server at an address, or (`inprocess`) one in this process for each set of tools that it serves.

    Opens on first use, and again after `aclose`, which is idempotent. Raises `ConfigError` for an invalid address and
    for a token that cannot be sent.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        self.url = url
        self._token = sent_secret(token, "tool_server_token")
        self._address = None if url == INPROCESS else _address(url)
        self._session: aiohttp.ClientSession | None = None
        self._here: WeakSet[ToolServer] = WeakSet()
        self._shared = States()  # of the servers in this process, which come and go with their registries

    def served(self, tools: Iterable[Tool]) -> list[Tool]:
        """The tools, with the external ones run by the server. At a server elsewhere they need nothing here."""
        tools, server = list(tools), None
        if self._address is None:
            server = ToolServer(ToolRegistry(tools), token=self._token, shared=self._shared)
            self._here.add(server)
        return [self._proxy(tool, server) if tool.schema.external else tool for tool in tools]

    async def offered(self) -> list[ToolSchema]:
        """The tools of a server elsewhere; none for one in this process. Raises `ToolServerError`."""
        if self._address is None:
            return []
        reply = await self._send("GET", "/tools", None, _CONNECT_S)
        if reply.status != 200:
            raise self._refused(reply, "the list of its tools")
        try:
            return [ToolSchema.from_dict(each, external=True) for each in json.loads(reply.body)["tools"]]
        except (ValueError, KeyError, TypeError, AttributeError):
            shown = _shown(reply.body)
            raise ToolServerReplyError(f"tool server {self.url} listed what are no tools: {shown}") from None

    async def release(self, trajectory_id: str) -> None:
        """Report to the server that a trajectory has ended. Raises `ToolServerError`."""
        body = encoded({"trajectory_id": trajectory_id})
        for server in (None,) if self._address is not None else tuple(self._here):
            reply = await self._post(server, "/release", body, _CONNECT_S)
            if reply.status != 200:
                raise self._refused(reply, "release")

    async def aclose(self) -> None:
        """Close the connections, and what servers in this process hold."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        for server in tuple(self._here):
            await server.aclose()
        await self._shared.aclose()

    def _proxy(self, tool: Tool, server: ToolServer | None) -> Tool:
        async def run(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
            asked = arguments.get("timeout")
            limit_s = clamp_timeout(asked if isinstance(asked, (int, float)) else run.timeout_s)
            run.state(_Used).note(self, run.task_id)
            return await self._call(server, ToolCall(tool.name, dict(arguments)), run.task_id, limit_s)

        # A tool elsewhere that is not marked as touching the world may still remember earlier calls there.
        stateful = server is None and not tool.touches_world and not tool.parallel_safe
        return FunctionTool(
            tool.schema,
            run,
            tool.toolset,
            parallel_safe=tool.parallel_safe,
            missing=tool.missing if server is not None else lambda: None,
            touches_world=tool.touches_world or server is None,
            world_session="tool-server" if stateful else tool.world_session,
            world_key=tool.world_key,
        )

    async def _call(self, server: ToolServer | None, call: ToolCall, trajectory_id: str, timeout_s: float) -> ToolReply:
        """Run one call there. Raises `ToolServerError`."""
        tool = ToolCallPayload.from_tool_call(call)
        request = ToolServerExecuteRequest(trajectory_id=trajectory_id or None, tool=tool, timeout_s=timeout_s)
        reply = await self._post(server, "/execute", encoded(request), timeout_s)
        if reply.status != 200:
            raise self._refused(reply, call.name)
        try:
            result = ToolServerResultPayload.model_validate_json(reply.body)
        except ValidationError:
            raise ToolServerReplyError(
                f"tool server {self.url} answered {call.name} with what is no result: {_shown(reply.body)}; is it a "
                "tool server of this protocol?"
            ) from None
        return result.reply if isinstance(result.reply, (str, dict)) else reply_of(result.to_tool_result())

    def _refused(self, reply: HttpReply, name: str) -> ToolServerError:
        text = f"tool server {self.url} refused {name} with status {reply.status}: {_detail(reply.body)}"
        if reply.status in (401, 403):
            return ToolServerRefused(f"{text}; set tool_server_token to the token that it was started with")
        if reply.status == 404:
            return ToolServerRefused(f"{text}; start it with that tool, or disable the tool's toolset here")
        return ToolServerUnavailable(text) if reply.status >= 500 else ToolServerRefused(text)

    async def _post(self, server: ToolServer | None, path: str, body: bytes, timeout_s: float) -> HttpReply:
        if server is not None:
            return await server.answer(path, body, self._authorization)
        return await self._send("POST", path, body, timeout_s)

    @property
    def _authorization(self) -> str | None:
        return f"Bearer {self._token}" if self._token else None

    async def _send(self, method: str, path: str, body: bytes | None, timeout_s: float) -> HttpReply:
        assert self._address is not None
        if self._session is None or self._session.closed:
            connector = aiohttp.TCPConnector(limit=0)  # callers bound how many calls run
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        headers = {"Content-Type": "application/json"}
        if self._authorization is not None:
            headers["Authorization"] = self._authorization
        timeout = aiohttp.ClientTimeout(total=timeout_s + _SLACK_S, sock_connect=_CONNECT_S)
        url = self._address.with_path(self._address.path.rstrip("/") + path)
        try:
            async with self._session.request(
                method, url, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as reply:
                return HttpReply(reply.status, await reply.read())
        except TimeoutError:
            raise ToolServerUnavailable(
                f"tool server {self._address} did not answer within {timeout_s + _SLACK_S:g} s; look whether it is "
                "overloaded"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise ToolServerUnavailable(
                f"tool server {self._address} cannot be reached: {error or type(error).__name__}; start it with "
                "`palaestra serve tools`, or correct tool_server_url"
            ) from None


class _Used:
    """The tool servers that a rollout has called: they drop its state when it ends."""

    def __init__(self) -> None:
        self._names: dict[ToolServerLink, set[str]] = {}

    def note(self, link: ToolServerLink, trajectory_id: str) -> None:
        self._names.setdefault(link, set()).add(trajectory_id)

    async def aclose(self) -> None:
        """At a server that cannot be reached, the trajectory's lease runs out."""
        while self._names:
            link, names = self._names.popitem()
            for name in filter(None, names):
                try:
                    await link.release(name)
                except ToolServerError as error:
                    logger.warning("trajectory %s could not be released at the tool server: %s", name, error)


def elsewhere(schema: ToolSchema) -> FunctionTool:
    """A tool that only its server has; `served` makes it callable."""
    return FunctionTool(schema, _elsewhere, "tool-server")


async def _elsewhere(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    raise AssertionError("a tool that only its server has is called through its server")


def _address(url: str) -> URL:
    address = URL(url)
    if address.scheme not in ("http", "https") or not address.host:
        raise ConfigError(f"tool_server_url {url!r} is neither an http address nor '{INPROCESS}'")
    return address


def _detail(body: bytes) -> str:
    try:
        answer = json.loads(body)
    except ValueError:
        return _shown(body)
    return str(answer["detail"]) if isinstance(answer, dict) and "detail" in answer else _shown(body)


def _shown(body: bytes) -> str:
    text = body.decode(errors="replace")
    return repr(text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…")
