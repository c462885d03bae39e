"""One session with an MCP server, which concurrent calls share. Other modules of this folder use only the types of the
package `mcp`.

A server that is a command runs on this machine, outside every slot, with the rights of this process;
`core/io/supervised_command.py` ends it when this process ends, and `StderrTail` keeps the end of its stderr.

The package refuses a whole list for one wrong tool, and a result that does not fit the protocol or the tool's
`outputSchema`, and then nobody learns what the server said. `_Reading` therefore changes such messages before the
package reads them. It also adds the HTTP status to an error, because the package does not report it.

Invariant: the session's own task enters and leaves the package's scopes, so that a cancelled caller leaves no process
behind; a failure of the session is a `ToolServerError` that names the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO, TypeAlias

from palaestra.tools.mcp.mcp_config import MCPServerConfig
from palaestra_slots.core.errors import ConfigError, ToolServerRefused, ToolServerReplyError, ToolServerUnavailable
from palaestra_slots.core.extras import install_command
from palaestra_slots.core.io.supervised_command import supervised
from palaestra_slots.core.printable import one_line
from palaestra_slots.core.redaction import redacted_arguments
from palaestra_slots.core.types import JSON

if TYPE_CHECKING:
    import httpx2
    from mcp import Client, MCPError
    from mcp.client import Transport
    from mcp.client._transport import ReadStream, TransportStreams
    from mcp.shared.message import SessionMessage
    from mcp.types import CallToolResult, Tool


_Drop: TypeAlias = Callable[[str, str], None]
OpenTransport: TypeAlias = "Callable[[contextlib.AsyncExitStack], Awaitable[Transport]]"
"""Opens the way to a server; what it enters on the stack is closed with the session."""

_TAIL_BYTES = 4096


class StderrTail:
    """The last kilobytes of a server's stderr, read without blocking. `ended` is true once no process can write
    to it."""

    def __init__(self) -> None:
        self.ended = False
        self._data = b""
        self._reading: int | None = None
        self._writing: TextIO | None = None
        self._at_end = asyncio.Event()

    def opened(self) -> TextIO:
        """Open a pipe and return the end that the server writes to."""
        self._reading, writing = os.pipe()
        os.set_blocking(self._reading, False)
        asyncio.get_running_loop().add_reader(self._reading, self._read_stderr)
        self._writing = os.fdopen(writing, "w")
        return self._writing

    def let_go(self) -> None:
        """Close this process's copy of the writing end, so that the reader sees when the server ends."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.close()

    async def settled(self, wait_s: float = 1.0) -> None:
        """Wait a moment for the last output of a server that has ended."""
        self.let_go()
        if self._reading is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._at_end.wait()

    def text(self) -> str:
        """Return the last kilobytes of the server's stderr as text."""
        return self._data.decode(errors="replace").strip()

    def close(self) -> None:
        """Stop reading. Idempotent."""
        self.let_go()
        reading, self._reading = self._reading, None
        if reading is not None:
            asyncio.get_running_loop().remove_reader(reading)
            os.close(reading)

    def _read_stderr(self) -> None:
        assert self._reading is not None
        try:
            piece = os.read(self._reading, 1 << 16)
        except BlockingIOError:
            return
        self._data = (self._data + piece)[-_TAIL_BYTES:]
        if not piece:
            self.ended = True
            self._at_end.set()
            self.close()


logger = logging.getLogger(__name__)

_CLOSE_S = 15.0
_TIMED_OUT, _CLOSED = "Request 'tools/call' timed out", "Connection closed"
"""What the package says if a call gets no reply in time, and if the connection ends."""

_MOST_PAGES = 100
_BAD_REQUEST_CODE = -32000
"""What the reference SDKs answer with status 400 if they no longer know the session."""
_WITHOUT_BODY = ("Not Found", "Server returned an error response")
"""What the package says if an HTTP error has no error of the protocol in its body."""
_NEVER_THE_CALLS = frozenset({401, 403, 407, 408, 429, 502, 503, 504})
"""Statuses that concern the way to the server, whatever is in the body."""


class _HttpError(NamedTuple):
    """A request that was answered with an HTTP error. `in_session`: whether it had a session id."""

    status: int
    in_session: bool

    def ends_session(self, code: int) -> bool:
        """Return whether the server no longer has the session, so it has not handled the call. MCP's specification:
        status 404 for a request with a session id."""
        return self.in_session and (self.status == 404 or (self.status == 400 and code == _BAD_REQUEST_CODE))

    def is_failure(self, message: str) -> bool:
        """Return whether the server, or what is in front of it, failed, rather than answered the call."""
        return self.status in _NEVER_THE_CALLS or message in _WITHOUT_BODY


class NotCarriedOut(ToolServerUnavailable):
    """Raised if the session had ended before the server accepted the call. The call may be sent again."""


class _Reading:
    """The stream of a server's messages, with lists that hold only valid tools, and with invalid results as text.

    `version` returns the protocol's version, and `drop` is told of each tool that is left out and why. An error that
    came with an HTTP status has it as its data: `http_errors`, by the id of the request.
    """

    def __init__(
        self,
        stream: ReadStream[SessionMessage | Exception],
        version: Callable[[], str],
        drop: _Drop,
        http_errors: dict[JSON, _HttpError],
    ) -> None:
        self._stream = stream
        self._version = version
        self._drop = drop
        self._http_errors = http_errors

    async def receive(self) -> SessionMessage | Exception:
        return self._usable(await self._stream.receive())

    async def aclose(self) -> None:
        await self._stream.aclose()

    def __aiter__(self) -> _Reading:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        return self._usable(await self._stream.__anext__())

    async def __aenter__(self) -> _Reading:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._stream.__aexit__(*error)

    @property
    def last_context(self) -> object:
        """The context of the sender, which some transports have and the package looks for."""
        return getattr(self._stream, "last_context", None)

    def _usable(self, item: SessionMessage | Exception) -> SessionMessage | Exception:
        message = getattr(item, "message", None)
        result = getattr(message, "result", None)
        status = self._http_errors.pop(getattr(message, "id", None), None)
        if status is not None and (error := getattr(message, "error", None)) is not None:
            error.data = status
        if not isinstance(result, dict):
            return item
        if isinstance(result.get("tools"), list):
            result["tools"] = [tool for tool in result["tools"] if self._is_valid(result, tool)]
        elif result.keys() & {"content", "structuredContent"} and self._problem("tools/call", result):
            content = [{"type": "text", "text": json.dumps(result, ensure_ascii=False)}]
            is_error = result.get("isError") is True
            result.clear()
            result.update(content=content, isError=is_error)
        return item

    def _is_valid(self, listed: dict[str, JSON], tool: JSON) -> bool:
        if isinstance(tool, dict):
            tool.pop("outputSchema", None)  # the model reads what the tool says, also where it breaks its own promise
        problem = self._problem("tools/list", {**listed, "tools": [tool]})
        if problem:
            self._drop(str(tool.get("name")) if isinstance(tool, dict) else repr(tool), problem)
        return not problem

    def _problem(self, method: str, result: dict[str, JSON]) -> str:
        from mcp_types.methods import validate_server_result
        from pydantic import ValidationError

        try:
            validate_server_result(method, self._version(), result)
        except ValidationError as error:
            return "; ".join(f"{'.'.join(map(str, each['loc'][-3:]))}: {each['msg']}" for each in error.errors()[:3])
        except (KeyError, ValueError):  # a method or version that the package does not check
            pass
        return ""


class Connection:
    """A live session. Created by `opened`; `aclose` is idempotent."""

    def __init__(self, name: str, config: MCPServerConfig, open_transport: OpenTransport | None = None) -> None:
        self.name = name
        self._config = config
        self._open_transport = open_transport or self._transport
        self._client: Client | None = None
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        self._stderr = StderrTail()
        self._task: asyncio.Task[None] | None = None
        self._told: set[str] = set()
        self._status = 200
        self._http_errors: dict[JSON, _HttpError] = {}
        self._in_flight = 0
        self._retired = False

    @classmethod
    async def opened(
        cls, name: str, config: MCPServerConfig, open_transport: OpenTransport | None = None
    ) -> Connection:
        """Open a session that is ready for calls. `config` must have its variables replaced. `open_transport` opens the
        way to a server that is not on this machine, such as one in a slot; then only the limits of `config` count.

        Raises `ConfigError` if the extra `mcp` is not installed, and `ToolServerUnavailable` or `ToolServerRefused` if
        the session cannot be opened.
        """
        await _need_extra(name)
        connection = cls(name, config, open_transport)
        # anyio's scopes must be left by the task that entered them, and callers come and go.
        connection._task = asyncio.create_task(connection._hold(), name=f"mcp {name}")
        try:
            async with asyncio.timeout(config.connect_timeout):
                # Shielded, because cancelling the wait would also cancel the future, which `_hold` reports to.
                await asyncio.shield(connection._ready)
        except TimeoutError:
            await connection.aclose()
            raise ToolServerUnavailable(
                f"MCP server '{name}' was not ready after {config.connect_timeout:g} s; raise its connect_timeout if "
                f"it needs longer{connection._stderr_suffix()}"
            ) from None
        except BaseException:
            await connection.aclose()
            raise
        return connection

    @property
    def alive(self) -> bool:
        """Whether the session is open, as far as this process knows."""
        return self._task is not None and not self._task.done() and not self._stderr.ended and not self._stop.is_set()

    async def list_tools(self) -> list[Tool]:
        """Return all tools of the server, page by page. A cursor that comes again ends the list, also the empty one
        that some servers send on every page. Raises `ToolServerError`."""
        from mcp import MCPError

        tools: dict[str, Tool] = {}  # the first of each name
        cursor: str | None = None
        seen: set[str | None] = {None}
        try:
            async with asyncio.timeout(self._config.connect_timeout):
                for _ in range(_MOST_PAGES):
                    page = await self._live_client().list_tools(cursor=cursor)
                    for tool in page.tools:
                        tools.setdefault(tool.name, tool)
                    cursor = page.next_cursor
                    if cursor in seen:
                        return list(tools.values())
                    seen.add(cursor)
        except TimeoutError:
            problem = f"did not list its tools within {self._config.connect_timeout:g} s"
            raise ToolServerUnavailable(f"MCP server '{self.name}' {problem}{self._stderr_suffix()}") from None
        except MCPError as error:
            raise ToolServerUnavailable(
                f"MCP server '{self.name}' could not list its tools: {error}{self._stderr_suffix()}"
            ) from None
        except ValueError as error:
            raise ToolServerReplyError(f"MCP server '{self.name}' sent an invalid list of tools: {error}") from None
        raise ToolServerReplyError(f"MCP server '{self.name}' sends an endless list of tools")

    async def call(self, tool: str, arguments: Mapping[str, JSON]) -> CallToolResult:
        """Make one call. Cancelling it notifies the server.

        Raises `TimeoutError` after the config's `timeout`, and `ServerSaid` for an error or an unreadable reply, which
        the model reads. If the session has ended, raises `NotCarriedOut` or `ToolServerUnavailable`; if the server
        failed or refused access, `ToolServerUnavailable` or `ToolServerRefused`.
        """
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        self._in_flight += 1
        try:
            return await self._live_client().call_tool(tool, dict(arguments), read_timeout_seconds=self._config.timeout)
        except MCPError as error:
            # Servers use the package's two codes for errors of their own, so its message decides too.
            if error.code == REQUEST_TIMEOUT and error.message == _TIMED_OUT:
                raise TimeoutError from None
            if isinstance(status := error.error.data, _HttpError):
                self._raise_failed(tool, status, error)
            if (error.code == CONNECTION_CLOSED and error.message == _CLOSED) or not self.alive:
                self._stop.set()
                raise ToolServerUnavailable(
                    f"MCP server '{self.name}' ended during a call of {tool}, which may or may not have taken "
                    f"effect: {error}{self._stderr_suffix()}"
                ) from None
            raise ServerSaid(error.message) from None
        except (RuntimeError, ValueError) as error:  # the package cannot use the reply
            raise ServerSaid(f"The server's reply cannot be read: {error}") from None
        finally:
            self._in_flight -= 1
            if self._retired:
                self.retire()

    def retire(self) -> None:
        """End the session as soon as the calls in flight have their replies."""
        self._retired = True
        if not self._in_flight:
            self._stop.set()

    def _raise_failed(self, tool: str, status: _HttpError, error: MCPError) -> None:
        """Raise what an HTTP error means for the session, if the server has not answered the call with it."""
        if status.ends_session(error.code):
            raise NotCarriedOut(f"MCP server '{self.name}' no longer knows the session: {error.message}") from None
        if status.is_failure(error.message):
            refused = status.status in (401, 403)
            raise (ToolServerRefused if refused else ToolServerUnavailable)(
                f"MCP server '{self.name}' answered a call of {tool} with status {status.status}: {error.message}"
            ) from None

    async def aclose(self) -> None:
        """End the session. If the server is a command, also end the command and all processes that it started."""
        self._stop.set()
        task = self._task
        if task is None or task is asyncio.current_task():
            return
        if not self._ready.done():
            task.cancel()  # the task is still in its handshake
        try:
            await asyncio.wait([task], timeout=_CLOSE_S)
            if not task.done():
                task.cancel()
                logger.warning("MCP server '%s' did not end within %g s", self.name, _CLOSE_S)
        finally:  # even if cancelled: the session then ends by itself
            self._stderr.close()

    def _live_client(self) -> Client:
        if self._client is None or not self.alive:
            raise NotCarriedOut(f"MCP server '{self.name}' has ended{self._stderr_suffix()}")
        return self._client

    async def _hold(self) -> None:
        """Enter the session, report that it is ready, and leave it once `_stop` is set."""
        from mcp import Client
        from mcp.types import Implementation

        try:
            async with contextlib.AsyncExitStack() as stack:
                transport = await self._open_transport(stack)
                info = Implementation(name="palaestra", version=version("palaestra"))
                client = Client(self._mended(transport), client_info=info, message_handler=self._hear, cache=None)
                self._client = await stack.enter_async_context(client)
                self._stderr.let_go()
                if not self._ready.done():
                    self._ready.set_result(None)
                await self._stop.wait()
        except asyncio.CancelledError:
            if not self._stop.is_set():
                raise
        except BaseException as error:
            if self._ready.done():
                logger.warning("The session with MCP server '%s' ended: %s", self.name, _first_error(error))
                return
            await self._stderr.settled()
            self._ready.set_exception(self._not_started(_first_error(error)))

    @contextlib.asynccontextmanager
    async def _mended(self, transport: Transport) -> AsyncIterator[TransportStreams]:
        def version() -> str:
            return (self._client and self._client.session.protocol_version) or ""

        async with transport as (reading, writing):
            yield _Reading(reading, version, self._warn_left_out, self._http_errors), writing

    def _warn_left_out(self, tool: str, problem: str) -> None:
        self._warn_once(f"leaves out the tool {one_line(tool, 80)!r}, whose definition is invalid: {problem}")

    def _warn_once(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            logger.warning("MCP server '%s' %s", self.name, what)

    def _not_started(self, error: BaseException) -> Exception:
        where = self._config.url or self._config.command
        if self._status in (401, 403):
            return ToolServerRefused(
                f"MCP server '{self.name}' ({where}) denied access with status {self._status}: check its headers"
            )
        status = f" (status {self._status})" if self._status >= 400 else ""
        problem = f"MCP server '{self.name}' ({where}) could not be opened: {error or type(error).__name__}{status}"
        return ToolServerUnavailable(f"{problem}{self._stderr_suffix()}")

    async def _transport(self, stack: contextlib.AsyncExitStack) -> Transport:
        if self._config.url is not None:
            return await self._http(stack, self._config.url)
        from mcp import StdioServerParameters, stdio_client

        assert self._config.command is not None
        if redacted_arguments(self._config.args) != list(self._config.args):
            logger.warning(
                "The arguments of MCP server '%s' contain a key, which other users of this machine can read while the "
                "server runs; pass the key in env instead",
                self.name,
            )
        command, *words = supervised(self._config.command, *self._config.args)
        parameters = StdioServerParameters(
            command=command, args=words, env=dict(self._config.env), cwd=self._config.cwd
        )
        return stdio_client(parameters, errlog=self._stderr.opened())

    async def _http(self, stack: contextlib.AsyncExitStack, url: str) -> Transport:
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        # The session applies a call's time limit; the HTTP client's limit only needs to be longer.
        timeout = httpx2.Timeout(self._config.connect_timeout, read=self._config.timeout + _CLOSE_S)
        client = httpx2.AsyncClient(
            headers=dict(self._config.headers), timeout=timeout, event_hooks={"response": [self._note_status]}
        )
        return streamable_http_client(url, http_client=await stack.enter_async_context(client))

    async def _note_status(self, response: httpx2.Response) -> None:
        """Keep the HTTP status, because the package's errors do not contain it."""
        self._status = response.status_code
        request = response.request
        if self._status >= 400 and request.method == "POST":
            with contextlib.suppress(ValueError, AttributeError):
                number = json.loads(request.content).get("id")
                if number is not None:
                    self._http_errors[number] = _HttpError(self._status, "mcp-session-id" in request.headers)

    async def _hear(self, message: object) -> None:
        """Handle notifications, and what is not a message. A run keeps the tools that it began with. What is wrong is
        logged once."""
        if isinstance(message, Exception):
            self._warn_once("writes lines that are not messages of MCP to its standard output; they are ignored")
        elif getattr(message, "method", "") == "notifications/tools/list_changed":
            self._warn_once("has changed its tools; this run keeps those that it began with")
        await asyncio.sleep(0)

    def _stderr_suffix(self) -> str:
        """Return a text for error messages with the end of the server's stderr, or an empty string if there is none."""
        text = self._stderr.text()
        return f"; its last output:\n{text}" if text else ""


class ServerSaid(ValueError):
    """Raised if the server answered a call with an error, which the model reads."""


async def _need_extra(name: str) -> None:
    """Import the package in a thread, because that takes a second. Raises `ConfigError` if it is not installed."""
    try:
        await asyncio.to_thread(import_module, "mcp")
    except ImportError:
        raise ConfigError(f"MCP server '{name}' needs the extra 'mcp': {install_command('mcp')}") from None
    packages = logging.getLogger("mcp.client")
    if packages.level == logging.NOTSET:  # its failures also reach us; it logs a traceback for each line of noise
        packages.setLevel(logging.CRITICAL)


def _first_error(error: BaseException) -> BaseException:
    """Return the first error inside groups of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
