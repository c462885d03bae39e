"""Reads the HTTP requests of a training server's clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec
import pydantic
from aiohttp import web

from palaestra_slots.core.types import JSON
from palaestra_train.tinker.model import UserError

_Model = TypeVar("_Model", bound=pydantic.BaseModel)


async def read_request(request: web.Request, kind: type[_Model]) -> _Model:
    """Return the body as one of the SDK's types. Raises `pydantic.ValidationError`."""
    return kind.model_validate_json(await request.read() or b"{}")


async def read_json(request: web.Request) -> dict[str, JSON]:
    """Return the body's JSON object. Raises `UserError` for any other body."""
    try:
        body = msgspec.json.decode(await request.read() or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"The body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise UserError("The body is not a JSON object.")
    return body


def page(request: web.Request) -> tuple[int, int]:
    """Return the first entry and the number of entries that a list request names. Raises `UserError`."""
    try:
        return max(0, int(request.query.get("offset", 0))), max(1, int(request.query.get("limit", 100)))
    except ValueError:
        raise UserError("offset and limit must be whole numbers.") from None


def texts(metadata: Mapping[str, JSON] | None) -> dict[str, str] | None:
    """Return metadata as the texts that the SDK requires."""
    return None if metadata is None else {name: str(value) for name, value in metadata.items()}
