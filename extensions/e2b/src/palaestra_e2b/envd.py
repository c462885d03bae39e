"""What the SDK calls inside a sandbox: health, files, processes and the file system.

A caller sends the token that the control API gave with the sandbox. Without it, only `/health` and signed files are
answered.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import AsyncIterator
from contextlib import suppress

from aiohttp import web

from palaestra_e2b import filesystem_service, process_service
from palaestra_e2b.call_limits import MOST_CALLS, OpenCalls
from palaestra_e2b.connect_protocol import check_codec, dumps, envelope, read_stream, read_unary, timeout_of
from palaestra_e2b.file_transfer import FileTransfer, is_signed
from palaestra_e2b.sandbox_users import SandboxUser, name_in_header, user_of
from palaestra_e2b.sandboxes import HostedSandbox, Sandboxes, resumed
from palaestra_e2b.wire_errors import ApiError, NotRunning, RpcError, api_error, rpc_error
from palaestra_slots.core.errors import PalaestraError
from palaestra_slots.core.io.http_server import invite_body
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import Slot

ENVD_PORT = 49983
ENVD_VERSION = "0.6.4"
"""The version whose calls are served; the SDKs choose their calls by it."""

"""The calls into one sandbox that can be open at a time; each takes a connection, of which the server has a limit."""

_UNARY = {
    **{f"/process.Process/{name}": call for name, call in process_service.UNARY.items()},
    **{f"/filesystem.Filesystem/{name}": call for name, call in filesystem_service.UNARY.items()},
}
_STREAMS = frozenset({"/process.Process/Start", "/process.Process/Connect", "/filesystem.Filesystem/WatchDir"})
_INPUT = "/process.Process/StreamInput"
_KEEPALIVE_S = 50.0


class Envd:
    """Serves the calls into all sandboxes of a server."""

    def __init__(self, sandboxes: Sandboxes, files: FileTransfer) -> None:
        self._sandboxes, self._files, self._open = sandboxes, files, OpenCalls(MOST_CALLS)

    async def handle(self, request: web.Request, sandbox_id: str) -> web.StreamResponse:
        """Answer a call into a sandbox. Raises `ApiError`."""
        sandbox = self._sandboxes.inside(sandbox_id)
        with self._open.one(sandbox_id):
            return await self._route(request, sandbox)

    async def _route(self, request: web.Request, sandbox: HostedSandbox) -> web.StreamResponse:
        path = request.path
        if path == "/health":
            sandbox.running_slot  # noqa: B018 - raises if it is paused
            return web.Response(status=204)
        if path == "/files":
            return await self._file(request, sandbox)
        _check_token(request, sandbox)
        await invite_body(request)
        if path in _UNARY:
            return await self._unary(request, sandbox)
        if path in _STREAMS:
            return await self._stream(request, sandbox)
        if path == _INPUT:
            return await self._input(request, sandbox)
        raise ApiError(404, f"{path[:100]} is not served in a sandbox")

    async def signed(self, request: web.Request) -> web.StreamResponse:
        """Answer a file request whose address does not name its sandbox: the one whose token made the signature. Raises
        `ApiError`."""
        for sandbox in self._sandboxes.all():
            if is_signed(request, sandbox.token):
                return await self._file(request, sandbox)
        raise ApiError(401, "the signature is not that of any running sandbox")

    async def _file(self, request: web.Request, sandbox: HostedSandbox) -> web.StreamResponse:
        if request.method not in ("GET", "POST"):
            raise ApiError(405, "files are read with GET and written with POST")
        if not ("signature" in request.query and is_signed(request, sandbox.token)):
            _check_token(request, sandbox)
        await invite_body(request)
        try:
            async with resumed(self._sandboxes, sandbox) as slot:
                user = await user_of(sandbox, slot, request.query.get("username", ""))
                if request.method == "GET":
                    return await self._files.read(request, user)
                return await self._files.write(request, user)
        except (PalaestraError, OSError, ValueError, RpcError) as error:
            raise api_error(error, sandbox.sandbox_id) from None

    async def _unary(self, request: web.Request, sandbox: HostedSandbox) -> web.Response:
        check_codec(request, stream=False)
        try:
            message = await read_unary(request)
            async with resumed(self._sandboxes, sandbox) as slot:
                user = await self._user(request, sandbox, slot)
                answer = await _UNARY[request.path](sandbox, slot, user, message)
        except (PalaestraError, OSError, ValueError, RpcError) as error:
            return _error_response(rpc_error(error, sandbox.sandbox_id))
        return web.json_response(answer, dumps=dumps)

    async def _input(self, request: web.Request, sandbox: HostedSandbox) -> web.StreamResponse:
        check_codec(request, stream=True)

        async def answer() -> AsyncIterator[dict[str, JSON]]:
            async with resumed(self._sandboxes, sandbox):
                yield await process_service.stream_input(sandbox, read_stream(request))

        return await _send_stream(request, sandbox, answer())

    async def _stream(self, request: web.Request, sandbox: HostedSandbox) -> web.StreamResponse:
        check_codec(request, stream=True)
        return await _send_stream(request, sandbox, self._messages(request, sandbox))

    async def _messages(self, request: web.Request, sandbox: HostedSandbox) -> AsyncIterator[dict[str, JSON]]:
        message: dict[str, JSON] = await anext(read_stream(request), {})
        timeout_s = timeout_of(request)

        def is_gone() -> bool:
            return request.transport is None or request.transport.is_closing()

        async with resumed(self._sandboxes, sandbox) as slot:
            user = await self._user(request, sandbox, slot)
            keepalive_s = _keepalive_of(request)
            if request.path.endswith("/WatchDir"):
                async for each in filesystem_service.watch(sandbox, user, message, keepalive_s, is_gone):
                    yield each
                return
            if request.path.endswith("/Start"):
                hosted, follower = await process_service.start(sandbox, slot, user, message, timeout_s)
            else:
                hosted, follower = process_service.connect(sandbox, message)
            try:
                async for each in process_service.events(hosted, follower, keepalive_s, is_gone):
                    yield each
            finally:
                hosted.leave(follower)

    async def _user(self, request: web.Request, sandbox: HostedSandbox, slot: Slot) -> SandboxUser:
        return await user_of(sandbox, slot, name_in_header(request.headers.get("Authorization", "")))


def _check_token(request: web.Request, sandbox: HostedSandbox) -> None:
    sent = request.headers.get("X-Access-Token", "").encode("utf-8", "surrogateescape")
    if not hmac.compare_digest(sent, sandbox.token.encode()):
        raise ApiError(401, "the header X-Access-Token does not hold the token of this sandbox")


def _keepalive_of(request: web.Request) -> float:
    text = request.headers.get("Keepalive-Ping-Interval", "")
    return float(text) if text.isdigit() and 0 < int(text[:6]) <= 3600 else _KEEPALIVE_S


def _error_response(error: RpcError | ApiError) -> web.Response:
    if isinstance(error, ApiError):
        raise error
    return web.json_response(error.body, status=error.status, dumps=dumps)


async def _send_stream(
    request: web.Request, sandbox: HostedSandbox, messages: AsyncIterator[dict[str, JSON]]
) -> web.StreamResponse:
    """Send a stream of messages. Its head is sent with the first message, so that a call into a sandbox that does not
    run is answered with its status."""
    response = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
    end: dict[str, JSON] = {}
    try:
        try:
            async for message in messages:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(envelope(message))
        except ConnectionError as error:
            if isinstance(error, PalaestraError):
                raise
            return response  # the caller is gone; its process runs on
        finally:
            await messages.aclose()  # type: ignore[attr-defined]
    except (PalaestraError, OSError, ValueError, RpcError, ApiError) as error:
        found = rpc_error(error, sandbox.sandbox_id)
        if isinstance(found, ApiError):
            if not response.prepared:
                raise found from None
            found = found.in_stream() if isinstance(found, NotRunning) else RpcError("unavailable", str(found))
        end = {"error": found.body}
    if not response.prepared:
        await response.prepare(request)
    with suppress(ConnectionError):
        await response.write_eof(envelope(end, end=True))
    return response


def error_body(error: ApiError) -> web.Response:
    """Return the answer for an error of the control API, of a file endpoint, or of a sandbox that does not run."""
    headers = {} if error.retry is None else {"Should-Retry": json.dumps(error.retry)}
    body = {"code": error.status, "message": str(error)}
    return web.json_response(body, status=error.status, headers=headers, dumps=dumps)
