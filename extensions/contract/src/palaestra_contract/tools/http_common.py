"""HTTP code shared by the tool server and the executor service: access checks, request bodies, and error replies.

Invariant: no message contains a token; a `Handle` that fails is answered with a JSON object that has `detail` and
`error`, the kind of failure.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from palaestra_contract.tools.payloads import encoded
from palaestra_slots.core.cancel_scope import end_tasks
from palaestra_slots.core.errors import (
    AcquireTimeout,
    InfraError,
    IsolationUnavailable,
    PalaestraError,
    StaleLease,
    ToolServerUnavailable,
)
from palaestra_slots.core.io.http_server import guard
from palaestra_slots.core.types import JSON

logger = logging.getLogger(__name__)

ModelT = TypeVar("ModelT", bound=BaseModel)
Handle = Callable[[bytes], Awaitable[JSON]]
"""Maps a request body to the value of a reply with status 200."""

MOST_REQUEST_BYTES = 64 << 20
OPEN_PATHS = frozenset({"/", "/health"})
"""Paths that need no token."""


class RequestRefused(Exception):
    """Raised to reply with the HTTP status `status`, which is not 200."""

    def __init__(self, status: int, detail: str, error: str = "Refusal", **more: JSON) -> None:
        super().__init__(detail)
        self.status = status
        self.body: dict[str, JSON] = {"detail": detail, "error": error, **more}


def read(body: bytes, model: type[ModelT]) -> ModelT:
    """Parse a request body. Raises `RequestRefused` with status 422."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, each['loc'])) or 'body'}: {each['msg']}" for each in error.errors())
        raise RequestRefused(422, f"not a {model.__name__}: {'; '.join(problems)}") from None


def _http_status(error: PalaestraError) -> int:
    match error:
        case StaleLease():
            return 409
        case AcquireTimeout() | IsolationUnavailable() | ToolServerUnavailable():
            return 503
        case InfraError():
            return 502
    return 400


def application(token: str | None, gets: Mapping[str, Handle], posts: Mapping[str, Handle]) -> web.Application:
    """Return a web application that replies to a path with the result of its `Handle`, or with an error status if the
    handle fails."""
    app = web.Application(client_max_size=MOST_REQUEST_BYTES, middlewares=[guard(token, OPEN_PATHS)])
    for method, routes in (("GET", gets), ("POST", posts)):
        for path, handle in routes.items():
            app.router.add_route(method, path, _handler(handle))
    return app


def _handler(handle: Handle) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handler(request: web.Request) -> web.Response:
        headers: dict[str, str] = {}
        try:
            return web.Response(body=encoded(await handle(await request.read())), content_type="application/json")
        except web.HTTPException:
            raise
        except RequestRefused as error:
            status, value = error.status, error.body
        except PalaestraError as error:
            status, value = _http_status(error), {"detail": str(error), "error": type(error).__name__}
            headers = {"Retry-After": "1"} if status == 503 else {}
        except Exception as error:
            logger.exception("a request failed")
            status = 500
            value = {"detail": f"{type(error).__name__}: {error}", "error": type(error).__name__}
        return web.Response(status=status, body=encoded(value), headers=headers, content_type="application/json")

    return handler


@asynccontextmanager
async def running(work: Awaitable[None]) -> AsyncIterator[None]:
    """Run endless work in the background during the block."""
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        await end_tasks(task)
