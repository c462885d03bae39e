"""The client of a tool server: `ToolServerLink`, which makes external tools run at the server.

Invariants: no request is sent twice. A mistake of the model is returned as the tool's reply. Every other failure of a
request raises a `ToolServerError` that names the server.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING
from weakref import WeakSet, WeakValueDictionary

from pydantic import ValidationError
from yarl import URL

from palaestra.tools.builtin.terminal import clamp_timeout
from palaestra.tools.call_text import ToolCall, reply_of
from palaestra.tools.human.approval import Permit
from palaestra.tools.tool import FunctionTool, Tool, ToolReply, ToolRun, ToolSchema
from palaestra_contract.tools.payloads import (
    ToolCallPayload,
    ToolServerExecuteRequest,
    ToolServerResultPayload,
    encoded,
)
from palaestra_slots.core.config import sent_secret
from palaestra_slots.core.errors import (
    ConfigError,
    ToolServerError,
    ToolServerRefused,
    ToolServerReplyError,
    ToolServerUnavailable,
)
from palaestra_slots.core.printable import without_middle
from palaestra_slots.core.redaction import redacted
from palaestra_slots.core.types import JSON

if TYPE_CHECKING:
    import aiohttp

logger = logging.getLogger(__name__)

INPROCESS = "inprocess"
"""Used in place of an address: external tools run in this process, as without a tool server."""
_CONNECT_S = 10.0
_SLACK_S = 10.0
"""The time, in seconds, that a reply may take beyond the call's own time limit."""
_SHOWN_CHARS = 300


class ToolServerLink:
    """A tool server at an address. If the address is `inprocess`, all tools run in this process.

    It connects on first use, and again after `aclose`, which is idempotent. A link without a token uses the token of an
    earlier link to the same address, and is closed with it, because existing environments pass only the address to
    `build_tool_registry`. Raises `ConfigError` for an invalid address and for a token that cannot be sent.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        self.url = url
        earlier = _FIRST.get(url) if token is None else None
        self._token: str | None = sent_secret(token, "tool_server_token") if earlier is None else earlier._token
        self._later: WeakSet[ToolServerLink] = WeakSet()
        if earlier is None:
            _FIRST[url] = self
        else:
            earlier._later.add(self)
        self._address = None if url == INPROCESS else _server_url(url)
        self._session: aiohttp.ClientSession | None = None

    def served(self, tools: Iterable[Tool]) -> list[Tool]:
        """Return the tools, with external tools replaced by calls to the server. These calls need no key and no package
        on this machine."""
        return [self._proxy(tool) if tool.schema.external and self._address is not None else tool for tool in tools]

    async def offered(self) -> list[ToolSchema]:
        """Return the schemas of the server's tools, or an empty list if the address is `inprocess`. Raises
        `ToolServerError`."""
        if self._address is None:
            return []
        body = await self._send_request("GET", "/tools", None, _CONNECT_S, "the list of its tools")
        try:
            return [ToolSchema.from_dict(each, external=True) for each in json.loads(body)["tools"]]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ToolServerReplyError(
                f"tool server {self.url} did not send a list of tools: {_body_excerpt(body)}"
            ) from None

    async def release(self, trajectory_id: str) -> None:
        """Report to the server that a trajectory has ended. Raises `ToolServerError`."""
        await self._send_request("POST", "/release", encoded({"trajectory_id": trajectory_id}), _CONNECT_S, "release")

    async def aclose(self) -> None:
        """Close the connections."""
        for link in (*self._later, self):
            session, link._session = link._session, None
            if session is not None:
                await session.close()

    def _proxy(self, tool: Tool) -> Tool:
        async def run(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
            asked = arguments.get("timeout")
            limit_s = clamp_timeout(asked if isinstance(asked, (int, float)) else run.timeout_s)
            if run.task_id:
                run.state(_Used).by.add((self, run.task_id))
            return await self._execute_call(ToolCall(tool.name, dict(arguments)), run.task_id, limit_s)

        # A tool without `touches_world` may still remember earlier calls at the server.
        stateful = not tool.touches_world and not tool.parallel_safe
        return FunctionTool(
            tool.schema,
            run,
            tool.toolset,
            parallel_safe=tool.parallel_safe,
            touches_world=True,
            world_session="tool-server" if stateful else tool.world_session,
            asks=tool.asks,
            world_key=tool.world_key,
        )

    async def _execute_call(self, call: ToolCall, trajectory_id: str, timeout_s: float) -> ToolReply:
        """Run one call at the server. Raises `ToolServerError`."""
        tool = ToolCallPayload.from_tool_call(call)
        request = ToolServerExecuteRequest(trajectory_id=trajectory_id or None, tool=tool, timeout_s=timeout_s)
        body = await self._send_request("POST", "/execute", encoded(request), timeout_s, call.name)
        try:
            result = ToolServerResultPayload.model_validate_json(body)
        except ValidationError:
            raise ToolServerReplyError(
                f"tool server {self.url} answered {call.name} with something other than a result: "
                f"{_body_excerpt(body)}; check that tool_server_url is the address of a `palaestra serve tools` server"
            ) from None
        return result.reply if isinstance(result.reply, (str, dict)) else reply_of(result.to_tool_result())

    def _status_error(self, status: int, body: bytes, name: str) -> ToolServerError:
        text = f"tool server {self.url} refused {name} with status {status}: {_detail(body)}"
        if status in (401, 403):
            return ToolServerRefused(f"{text}; set tool_server_token to the server's token")
        if status == 404:
            return ToolServerRefused(f"{text}; start the server with that tool, or disable the tool's toolset here")
        return ToolServerUnavailable(text) if status >= 500 else ToolServerRefused(text)

    async def _send_request(self, method: str, path: str, body: bytes | None, timeout_s: float, name: str) -> bytes:
        """Return the body of the reply with status 200. For any other status, raises an error that names `name`."""
        import aiohttp  # imported here because most runs have no tool server

        assert self._address is not None
        if self._session is None or self._session.closed:
            connector = aiohttp.TCPConnector(limit=0)  # callers limit concurrent calls
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        timeout = aiohttp.ClientTimeout(total=timeout_s + _SLACK_S, sock_connect=_CONNECT_S)
        url = self._address.with_path(self._address.path.rstrip("/") + path)
        try:
            async with self._session.request(
                method, url, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as reply:
                status, content = reply.status, await reply.read()
        except TimeoutError:
            raise ToolServerUnavailable(
                f"tool server {self._address} did not answer within {timeout_s + _SLACK_S:g} s; check whether it is "
                "overloaded"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise ToolServerUnavailable(
                f"tool server {self._address} cannot be reached: {error or type(error).__name__}; start it with "
                "`palaestra serve tools`, or correct tool_server_url"
            ) from None
        if status != 200:
            raise self._status_error(status, content, name)
        return content


_FIRST: WeakValueDictionary[str, ToolServerLink] = WeakValueDictionary()
"""The latest link with a token to each address, or otherwise the first."""


class _Used:
    """The tool servers that a rollout has called, each with the trajectory whose state it drops when the rollout
    ends."""

    def __init__(self) -> None:
        self.by: set[tuple[ToolServerLink, str]] = set()

    async def aclose(self) -> None:
        """Release the trajectories. If a server cannot be reached, its lease of the trajectory expires later."""
        while self.by:
            link, name = self.by.pop()
            try:
                await link.release(name)
            except ToolServerError as error:
                logger.warning("trajectory %s could not be released at the tool server: %s", name, error)


def elsewhere(schema: ToolSchema, url: str) -> FunctionTool:
    """Return a tool that exists only at its server, the one at `url`; `served` makes it callable."""
    server = redacted(url)
    asks = Permit(f"the tool {schema.name!r} of the tool server {server}", f"tool-server:{server}:{schema.name}")
    return FunctionTool(schema, _elsewhere, "tool-server", asks=asks)


async def _elsewhere(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    raise AssertionError("a tool that only its server has is called through its server")


def _server_url(url: str) -> URL:
    address = URL(url)
    if address.scheme not in ("http", "https") or not address.host:
        raise ConfigError(f"tool_server_url {url!r} is neither an http address nor '{INPROCESS}'")
    return address


def _detail(body: bytes) -> str:
    try:
        answer = json.loads(body)
    except ValueError:
        return _body_excerpt(body)
    return str(answer["detail"]) if isinstance(answer, dict) and "detail" in answer else _body_excerpt(body)


def _body_excerpt(body: bytes) -> str:
    return repr(without_middle(body.decode(errors="replace"), _SHOWN_CHARS))
