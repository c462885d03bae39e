"""What the tool server and the executor service share: who may ask, how a body is read, how an error is answered.

Invariant: a token is compared in constant time and is in no message; every failure is answered as JSON with `detail`
and `error`, the name of its class.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from palaestra.core.errors import (
    AcquireTimeout,
    InfraError,
    IsolationUnavailable,
    PalaestraError,
    StaleLease,
    ToolServerUnavailable,
)
from palaestra.core.types import JSON

logger = logging.getLogger(__name__)

ModelT = TypeVar("ModelT", bound=BaseModel)
Handle = Callable[[bytes], Awaitable[JSON]]
"""From a body to what is answered with status 200."""

MOST_REQUEST_BYTES = 64 << 20
OPEN_PATHS = frozenset({"/", "/health"})
"""What anybody may ask."""


class Refusal(Exception):
    """An answer other than 200. `status` is HTTP's."""

    def __init__(self, status: int, detail: str, error: str = "Refusal", **more: JSON) -> None:
        super().__init__(detail)
        self.status = status
        self.answer: dict[str, JSON] = {"detail": detail, "error": error, **more}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request comes to, whether it came over a socket or not."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


def read(body: bytes, model: type[ModelT]) -> ModelT:
    """A request's body. Raises `Refusal` with status 422."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, each['loc'])) or 'body'}: {each['msg']}" for each in error.errors())
        raise Refusal(422, f"not a {model.__name__}: {'; '.join(problems)}") from None


def check_caller(token: str | None, authorization: str | None, origin: str | None) -> None:
    """Raises `Refusal` with status 401 unless the header is `Bearer` and the token.

    Without a token all programs may ask, but no web page (which sends its `origin`, 403): otherwise every site that is
    open in a browser of this machine could run commands.
    """
    if not token:
        if origin is not None:
            raise Refusal(403, f"a page of {origin} may not ask: this server has no token")
        return
    scheme, _, given = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
        problem = "no bearer token was sent" if not given else "the bearer token is not the server's"
        raise Refusal(401, f"{problem}: send the header Authorization: Bearer TOKEN")


async def respond(
    handle: Handle, body: bytes, token: str | None, authorization: str | None, origin: str | None = None
) -> Answer:
    """The answer to a request: what `handle` makes of its body, or what became of that."""
    try:
        check_caller(token, authorization, origin)
        value = await handle(body)
        return Answer(200, value if isinstance(value, bytes) else encoded(value))
    except Refusal as refusal:
        headers = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else {}
        return Answer(refusal.status, encoded(refusal.answer), headers)
    except PalaestraError as error:
        status = _status(error)
        headers = {"Retry-After": "1"} if status == 503 else {}
        return Answer(status, encoded({"detail": str(error), "error": type(error).__name__}), headers)
    except Exception as error:
        logger.exception("a request failed")
        detail = f"{type(error).__name__}: {error}"
        return Answer(500, encoded({"detail": detail, "error": type(error).__name__}))


def _status(error: PalaestraError) -> int:
    match error:
        case StaleLease():
            return 409
        case AcquireTimeout() | IsolationUnavailable() | ToolServerUnavailable():
            return 503
        case InfraError():
            return 502
    return 400


def encoded(value: JSON) -> bytes:
    """A body. What UTF-8 cannot hold, such as parts of odd file names, is replaced as it is for models."""
    plain = value.model_dump() if isinstance(value, BaseModel) else value
    return json.dumps(plain, ensure_ascii=False).encode("utf-8", "replace")


def route(app: web.Application, method: str, path: str, token: str | None, handle: Handle) -> None:
    """Answer a path as `respond` does."""

    async def handler(request: web.Request) -> web.Response:
        told: tuple[str | None, str | None, str | None] = (None, None, None)
        if path not in OPEN_PATHS:
            told = (token, request.headers.get("Authorization"), request.headers.get("Origin"))
        answer = await respond(handle, await request.read(), *told)
        return web.Response(
            status=answer.status, body=answer.body, headers=answer.headers, content_type="application/json"
        )

    app.router.add_route(method, path, handler)


@asynccontextmanager
async def beside(work: Awaitable[None]) -> AsyncIterator[None]:
    """Run some endless work for as long as the block runs."""
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
