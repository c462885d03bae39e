"""Runs HTTP servers for the duration of a block, and checks their callers.

Every server in the project uses this module. It limits the number of connections, the time until a connection begins a
request, and the time for a request's body, whatever the application does. Invariants: a server has a token unless its
address is a loopback address, a caller is checked before its body is requested or read (`guard`, `invite_body`), and
tokens are compared in constant time. Input that is not HTTP, and callers that disappear within a body or within the
answer, are not logged.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from aiohttp import ClientConnectionResetError, HttpVersion11, StreamReader, hdrs, web
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDictProxy

from palaestra_slots.core.errors import ConfigError

MOST_CONNECTIONS = 4096
HEAD_S, BODY_S = 30.0, 300.0
"""The time limits, in seconds, for the arrival of a connection's first request head and of a request's body."""

_BROKEN = "the body's encoding is broken, or the connection ended within it"
_EXPECTED = "X-Palaestra-Expected"
"""The header to which a request's `Expect` is moved, because aiohttp would answer `Expect` before the caller is
checked."""

_CALLERS_FAULT = (HttpProcessingError, web.RequestPayloadError, web.HTTPRequestTimeout, ClientConnectionResetError)
"""The last is raised by a write to a caller who has hung up."""

logger = logging.getLogger(__name__)
logger.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], _CALLERS_FAULT)))

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def is_loopback(host: str) -> bool:
    """Return whether only programs on this machine can reach a server that listens on `host`."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def refusal(token: str | None, headers: Mapping[str, str]) -> tuple[int, str] | None:
    """Return the status and the reason for refusing the sender of these headers; None if the sender may call.

    If the server has a token, callers must send it as `Authorization: Bearer TOKEN`. Without a token, programs may call
    but web pages may not; otherwise any site that is open in a browser on this machine could call the server. A page is
    recognised by its origin, by the browser's `Sec-Fetch-Site`, or by a host name that is not the loopback's.
    """
    if token:
        scheme, _, given = headers.get("Authorization", "").partition(" ")
        # `compare_digest` compares text only if it is ASCII.
        sent = given.strip().encode("utf-8", "surrogateescape")
        if scheme.lower() != "bearer" or not hmac.compare_digest(sent, token.encode("utf-8", "surrogateescape")):
            problem = "no bearer token was sent" if not sent else "the bearer token does not match the server's"
            return 401, f"{problem}: send the header Authorization: Bearer TOKEN"
        return None
    origin = headers.get("Origin")
    if origin is None and headers.get("Sec-Fetch-Site", "none") != "none":
        origin = "another site"
    if origin is not None:
        return 403, f"a page from {origin} may not call this server, which has no token"
    name = headers.get("Host", "localhost")
    if not is_loopback(name if name.endswith("]") else name.rpartition(":")[0] or name):
        return 403, f"this server is localhost, not {name}: a page that uses a different host name may not call it"
    return None


def guard(
    token: str | None,
    open_paths: Collection[str] = (),
    *,
    key_header: str | None = None,
    error: Callable[[int, str], web.Response] | None = None,
) -> Any:
    """Return middleware that refuses the callers whom `refusal` rejects, and reads the bodies of all other requests. On
    `open_paths`, it refuses these callers only if the request has a body. The connections of callers that `refusal`
    rejects are closed. `key_header` is a second header that may carry the token, for clients that use that header.
    `error` makes the response from the status and the reason, for protocols with their own error format."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        headers: Mapping[str, str] = request.headers
        if key_header is not None and key_header in headers:
            # As a bearer token, so that `refusal` has one place that compares tokens.
            headers = {**headers, "Authorization": f"Bearer {headers[key_header]}"}
        refused = refusal(token, headers)
        if refused is None:
            if request.can_read_body:
                await invite_body(request)
                try:
                    # Here, because a body that breaks off raises an error that a handler would report as its own.
                    await request.read()
                except web.RequestPayloadError:
                    raise web.HTTPBadRequest(text=_BROKEN) from None
            return await handler(request)
        # A body from a stranger would be read into memory, however long it is.
        if request.path in open_paths and not request.can_read_body:
            answer = await handler(request)
            answer.force_close()
            return answer
        status, reason = refused
        if error is None:
            response = web.json_response({"detail": reason, "error": "Refusal", "field": None}, status=status)
        else:
            response = error(status, reason)
        # RFC 9110, section 11.6.1: a 401 response must name the scheme, and clients ask for a token only then.
        if status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        response.force_close()
        return response

    return check


def require_token(host: str, token: str | None) -> None:
    """Raise `ConfigError` if `host` is not a loopback address and there is no token."""
    if not token and not is_loopback(host):
        raise ConfigError(
            f"a server on {host} needs a token, because programs on other machines and in slots could call it; "
            "set one, or listen on 127.0.0.1"
        )


@asynccontextmanager
async def listening(
    app: web.Application | Handler,
    host: str,
    port: int,
    *,
    token: str | None = None,
    shutdown_s: float = 2.0,
    handler_cancellation: bool = False,
    tls: ssl.SSLContext | None = None,
    limits_bodies: bool = False,
) -> AsyncIterator[str]:
    """Serve while the block runs, and yield the URL, without a path. Port 0 selects a free port. If `app` is a handler
    instead of an application, it gets every request directly.

    `token` is the token that the application's `guard` requires. At the end, requests in progress have `shutdown_s`
    seconds to finish. `handler_cancellation` cancels the handler of a client that disconnects. With `tls`, the server
    speaks HTTPS. A body that does not arrive in `BODY_S` seconds is answered with status 408, unless the application
    itself `limits_bodies`, for example because they are streams. Raises `ConfigError` if the port cannot be opened, or
    if `host` is not a loopback address and there is no token.
    """
    require_token(host, token)
    runner = _Runner(
        app, None if limits_bodies else BODY_S,
        access_log=None, logger=logger, shutdown_timeout=shutdown_s, handler_cancellation=handler_cancellation,
    )  # fmt: skip
    try:
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port, ssl_context=tls).start()
        except OSError as error:
            problem = error.strerror or error
            raise ConfigError(f"cannot listen on {host}:{port}: {problem}; choose another port") from None
        scheme = "http" if tls is None else "https"
        yield f"{scheme}://{f'[{host}]' if ':' in host else host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def invite_body(request: web.Request) -> None:
    """Ask a caller that waits before it sends the body (`Expect: 100-continue`) to send it. Does nothing for other
    callers."""
    if request.headers.get(_EXPECTED, "").lower() == "100-continue" and request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # aiohttp counts the response's bytes here, and the response has not begun


class _Runner(web.AppRunner):
    """A runner that refuses a connection if `MOST_CONNECTIONS` are open, and closes one that does not begin a request
    within `HEAD_S` seconds, or whose body has not arrived within `body_s` seconds."""

    def __init__(self, app: web.Application | Handler, body_s: float | None, **settings: Any) -> None:
        self._handler, self._body_s = None if isinstance(app, web.Application) else app, body_s
        super().__init__(app if isinstance(app, web.Application) else web.Application(), **settings)
        self._silent: set[web.RequestHandler] = set()  # connections that have not begun a request

    async def _make_server(self) -> web.Server:
        """Return the server. It records which connections have begun a request, and keeps each request's `Expect` under
        `_EXPECTED`."""
        server = await super()._make_server()
        answer = server.request_handler if self._handler is None else self._handler
        server.request_handler = partial(self._answer, answer)
        make = server.request_factory

        def make_request(message: Any, payload: Any, protocol: Any, *rest: Any) -> Any:
            self._silent.discard(protocol)
            expected = message.headers.get(hdrs.EXPECT)
            if expected is not None:
                headers = message.headers.copy()
                del headers[hdrs.EXPECT]
                headers[_EXPECTED] = expected
                message = message._replace(headers=CIMultiDictProxy(headers))
            return make(message, payload, protocol, *rest)

        server.request_factory = make_request
        return server

    async def _answer(self, answer: Handler, request: web.Request) -> web.StreamResponse:
        """Answer a request. Whoever reads its body gets `HTTPRequestTimeout` if it does not arrive in time."""
        body, late = request.content, None
        if self._body_s is not None and not body.is_eof():
            late = asyncio.get_running_loop().call_later(self._body_s, _end_body, body, self._body_s)
        try:
            return await answer(request)
        except (web.RequestPayloadError, ConnectionError) as error:
            if body.exception() is not error:
                raise
            raise web.HTTPBadRequest(text=_BROKEN) from None
        finally:
            if late is not None:
                late.cancel()

    @property
    def server(self) -> Any:
        """The function that creates the protocol of each connection."""
        return None if self._server is None else self._accept

    async def cleanup(self) -> None:
        """Accept no more connections, and close the server with those that there are.

        A connection that was accepted, but not yet handed over when the server closes, would stay open: asyncio's
        server then fails an assertion (`Server._attach` in Python 3.11).
        """
        loop = asyncio.get_running_loop()
        for site in self.sites:
            server = getattr(site, "_server", None)  # aiohttp does not show a site's sockets
            for each in () if server is None else server.sockets:
                loop.remove_reader(each.fileno())
        for _ in range(3):  # the turns of the event loop from the acceptance of a connection to its first use
            await asyncio.sleep(0)
        await super().cleanup()

    def _accept(self) -> asyncio.BaseProtocol:
        assert self._server is not None
        if len(self._server.connections) >= MOST_CONNECTIONS:
            return _Refused()
        protocol = self._server()
        asyncio.get_running_loop().call_later(HEAD_S, self._end_silent, protocol)
        self._silent.add(protocol)
        return protocol

    def _end_silent(self, protocol: web.RequestHandler) -> None:
        if protocol in self._silent:
            self._silent.discard(protocol)
            protocol.force_close()


def _end_body(body: StreamReader, limit_s: float) -> None:
    if not body.is_eof():
        error = web.HTTPRequestTimeout(text=f"the body did not arrive in {limit_s:g} s")
        error.force_close()
        body.set_exception(error)


class _Refused(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
