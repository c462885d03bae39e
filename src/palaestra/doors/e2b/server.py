"""The server: one address for the control API and for the calls into sandboxes.

Which sandbox a call goes into is named by the header `E2b-Sandbox-Id` (with `E2B_SANDBOX_URL`) or by the host name
`PORT-ID.DOMAIN` (with `E2B_DOMAIN`). Everything else is the control API, whose callers send their key in `X-API-Key`.
Invariant: a caller is checked before the body of its request is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from aiohttp import web

from palaestra.core.errors import PalaestraError
from palaestra.core.io.http_server import invite_body, listening
from palaestra.doors.e2b.api_keys import ApiKey, ApiKeys
from palaestra.doors.e2b.control_api import MOST_BODY_BYTES, ControlApi
from palaestra.doors.e2b.envd import ENVD_PORT, MOST_CALLS, Envd, OpenCalls, error_body
from palaestra.doors.e2b.port_proxy import pass_on
from palaestra.doors.e2b.sandboxes import Sandboxes, resumed
from palaestra.doors.e2b.template_api import UPLOADS, TemplateApi
from palaestra.doors.e2b.wire_errors import ApiError, api_error

logger = logging.getLogger(__name__)

_BODY_S = 60.0
_HOST = re.compile(r"(\d{1,5})-([a-z0-9]{1,60})\..+")


class E2BServer:
    """Answers every request of a server."""

    def __init__(
        self, keys: ApiKeys, control: ControlApi, envd: Envd, templates: TemplateApi, sandboxes: Sandboxes
    ) -> None:
        self._keys, self._control, self._envd = keys, control, envd
        self._templates, self._sandboxes, self._open = templates, sandboxes, OpenCalls(MOST_CALLS)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        try:
            return await self._handle(request)
        except ApiError as error:
            answer = error_body(error)
            if error.status in (401, 403, 413):
                answer.force_close()
            return answer
        except web.HTTPException:
            raise
        except (PalaestraError, TimeoutError) as error:
            return error_body(api_error(error, ""))
        except ConnectionError:
            raise
        except Exception:
            logger.exception("%s %s failed", request.method, request.path)
            return error_body(ApiError(500, "the server failed to answer; its log has the reason"))

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        inside = _inside(request)
        if inside is not None:
            sandbox_id, port = inside
            return await (self._envd.handle(request, sandbox_id) if port == ENVD_PORT
                          else self._port(request, sandbox_id, port))  # fmt: skip
        if request.path == "/health":
            return web.Response(text="ok")
        if request.path == "/files" and "signature" in request.query:
            return await self._envd.signed(request)
        if request.path.startswith(UPLOADS):
            return await self._templates.upload(request)
        key = self._key(request)
        with self._open.one(key.name):
            return await self._control.handle(key, request, await _body(request))

    def _key(self, request: web.Request) -> ApiKey:
        given = request.headers.get("X-API-Key", "")
        if not given:
            scheme, _, given = request.headers.get("Authorization", "").partition(" ")
            given = given.strip() if scheme.lower() == "bearer" else ""
        key = self._keys.find(given) if given else None
        if key is None:
            raise ApiError(401, "the API key is not one of this server" if given else "no API key was sent")
        return key

    async def _port(self, request: web.Request, sandbox_id: str, port: int) -> web.StreamResponse:
        sandbox = self._sandboxes.inside(sandbox_id)
        if sandbox.traffic_token is not None:
            sent = request.headers.get("e2b-traffic-access-token", "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(sent, sandbox.traffic_token.encode()):
                raise ApiError(403, "the ports of this sandbox need its traffic access token")
        try:
            async with resumed(self._sandboxes, sandbox) as slot:
                return await pass_on(request, slot, port)
        except (PalaestraError, OSError, ValueError) as error:
            raise api_error(error, sandbox_id) from None


def _inside(request: web.Request) -> tuple[str, int] | None:
    """Return the sandbox and the port that a request goes to; None for the control API. Raises `ApiError`."""
    named = request.headers.get("E2b-Sandbox-Id")
    if named is not None:
        port = request.headers.get("E2b-Sandbox-Port", str(ENVD_PORT))
    else:
        found = _HOST.fullmatch(request.host.lower())
        if found is None:
            return None
        port, named = found.groups()
    if not port.isdigit() or not 0 < int(port[:6]) < 1 << 16:
        raise ApiError(400, f"{port[:20]!r} is not a port")
    return named, int(port)


async def _body(request: web.Request) -> bytes:
    await invite_body(request)
    data = bytearray()
    async with asyncio.timeout(_BODY_S):
        with contextlib.suppress(web.RequestPayloadError):
            async for piece in request.content.iter_chunked(1 << 16):
                data += piece
                if len(data) > MOST_BODY_BYTES:
                    raise ApiError(413, f"a request may have at most {MOST_BODY_BYTES} bytes")
    return bytes(data)


@asynccontextmanager
async def serving(
    server: E2BServer, keys: ApiKeys, host: str, port: int, *, tls: ssl.SSLContext | None = None, tls_port: int = 0
) -> AsyncIterator[tuple[str, str | None]]:
    """Serve during the block, and yield the URLs: of HTTP and, with `tls`, of HTTPS. Raises `ConfigError`."""
    token = keys.first.secret  # every caller needs a key, so any address may be listened on
    async with AsyncExitStack() as stack:
        plain = await stack.enter_async_context(listening(server.handle, host, port, token=token))
        secure = None
        if tls is not None:
            secure = await stack.enter_async_context(listening(server.handle, host, tls_port, token=token, tls=tls))
        yield plain, secure
