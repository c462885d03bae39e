"""Passes an HTTP request on to a port of a sandbox, for `sandbox.get_host(PORT)`.

The request is sent whole and the answer read whole, over one connection that the slot closes; both are bounded.
WebSockets and endless answers are not supported.
"""

from __future__ import annotations

import http.client
import io

from aiohttp import web

from palaestra_e2b.wire_errors import ApiError
from palaestra_slots.sandbox.slot import Slot

MOST_BYTES = 4 << 20
_ANSWER_S = 60.0
_HOPS = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
     "upgrade", "content-length", "expect", "accept-encoding", "x-access-token", "e2b-sandbox-id", "e2b-sandbox-port",
     "x-palaestra-expected"}
)  # fmt: skip


class _Answer(io.BytesIO):
    """Stands for the socket that `http.client` reads an answer from."""

    def makefile(self, *_: object, **__: object) -> io.BytesIO:
        return self


async def pass_on(request: web.Request, body: bytes, slot: Slot, port: int) -> web.Response:
    """Send a request, whose `body` has been read, to a port of the slot's loopback, and return the answer. Raises
    `ApiError`."""
    lines = [f"{request.method} {request.raw_path} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in request.headers.items() if name.lower() not in _HOPS]
    lines += ["Connection: close", f"Content-Length: {len(body)}", "", ""]
    head = "\r\n".join(lines).encode("utf-8", "surrogateescape")
    try:
        data = await slot.ask(port, head + body, timeout_s=_ANSWER_S, max_bytes=MOST_BYTES)
    except ConnectionRefusedError:
        raise ApiError(502, f"the sandbox is running but port is not open: {port}") from None
    return _parsed_response(data, request.method, port)


def _parsed_response(data: bytes, method: str, port: int) -> web.Response:
    try:
        answer = http.client.HTTPResponse(_Answer(data), method=method)  # type: ignore[arg-type]
        answer.begin()
        body = answer.read()
    except (http.client.HTTPException, OSError, ValueError) as error:
        raise ApiError(502, f"port {port} of the sandbox did not answer with HTTP: {error!r:.200}") from None
    response = web.Response(status=answer.status, body=body)
    response.headers.popall("Content-Type", None)
    for name, value in answer.getheaders():
        if name.lower() not in _HOPS:
            response.headers.add(name, value)
    return response
