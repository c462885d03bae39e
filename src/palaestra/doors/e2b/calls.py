"""One call of the control API, and values in the API's form."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from aiohttp import web

from palaestra.doors.e2b.api_keys import ApiKey


@dataclass(frozen=True, slots=True)
class Call:
    """One request: the caller's key, the variable parts of the path, the query and the body."""

    key: ApiKey
    parts: tuple[str, ...]
    request: web.Request
    body: bytes


Handle = Callable[[Call], Awaitable[web.Response]]


def moment(seconds: float) -> str:
    """Return a time as the API writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def cpu_count(cpus: float | None) -> int:
    """Return the number of processors of a sandbox with this limit."""
    return max(1, round(cpus or os.cpu_count() or 1))
