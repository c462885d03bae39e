"""One request of the control API, its body, and values in the API's form. Keys that the SDK sends and this server does
not know are ignored, as the API does; what is known and cannot be done is refused by name (`refuse_unsupported`)."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, TypeVar

from aiohttp import web
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from palaestra_e2b.api_keys import ApiKey
from palaestra_e2b.wire_errors import ApiError
from palaestra_slots.core.io.http_server import invite_body
from palaestra_slots.core.types import JSON, AllowList, Network
from palaestra_slots.sandbox.slot import is_variable

_BODY_S = 60.0
LONGEST_S = 24 * 3600
DEFAULT_TIMEOUT_S = 300
_MOST_PAIRS, _MOST_TEXT = 256, 64 << 10
_EVERYWHERE = frozenset({"0.0.0.0/0", "::/0"})
_HOST = re.compile(r"(?=.{1,253}\Z)(?:\*\.)?[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?")

ModelT = TypeVar("ModelT", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class ControlCall:
    """One request: the caller's key, the variable parts of the path, the query and the body."""

    key: ApiKey
    parts: tuple[str, ...]
    request: web.Request
    body: bytes


Handle = Callable[[ControlCall], Awaitable[web.Response]]


async def read_all(request: web.Request, most_bytes: int) -> bytes:
    """Return the body of a request. Raises `ApiError` if it is too large, broken, or does not arrive in time."""
    await invite_body(request)
    data = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for piece in request.content.iter_chunked(1 << 16):
                data += piece
                if len(data) > most_bytes:
                    raise ApiError(413, f"a request may have at most {most_bytes} bytes")
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive in {_BODY_S:g} s") from None
    except web.RequestPayloadError:
        raise ApiError(400, "the body's encoding is broken") from None
    return bytes(data)


def moment(seconds: float) -> str:
    """Return a time as the API writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def cpu_count(cpus: float | None) -> int:
    """Return the number of processors of a sandbox with this limit."""
    return max(1, round(cpus or os.cpu_count() or 1))


def _bounded(pairs: dict[str, str]) -> dict[str, str]:
    if len(pairs) > _MOST_PAIRS or sum(len(name) + len(value) for name, value in pairs.items()) > _MOST_TEXT:
        raise ValueError(f"at most {_MOST_PAIRS} entries and {_MOST_TEXT} characters are accepted")
    return pairs


def _checked_variables(pairs: dict[str, str]) -> dict[str, str]:
    for name, value in pairs.items():
        if not is_variable(name, value):
            raise ValueError(f"{name[:200]!r} cannot be an environment variable")
    return _bounded(pairs)


Pairs = Annotated[dict[str, str], AfterValidator(_bounded)]
Variables = Annotated[dict[str, str], AfterValidator(_checked_variables)]
Timeout = Annotated[int, Field(ge=0, le=LONGEST_S)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True)


class AutoResume(_Body):
    """Whether a call into a paused sandbox resumes it."""

    enabled: bool = False


class NetworkRules(_Body):
    """The network rules of a new sandbox."""

    allow_public_traffic: bool | None = Field(default=None, alias="allowPublicTraffic")
    allow_out: tuple[str, ...] = Field(default=(), alias="allowOut", max_length=256)
    deny_out: tuple[str, ...] = Field(default=(), alias="denyOut", max_length=256)
    dns_servers: JSON = Field(default=None, alias="dnsServers")
    egress_proxy: JSON = Field(default=None, alias="egressProxy")
    mask_request_host: JSON = Field(default=None, alias="maskRequestHost")
    https_ports: JSON = Field(default=None, alias="httpsPorts")
    rules: JSON = None


class NewSandbox(_Body):
    """POST /sandboxes and /v2/sandboxes."""

    template: str = Field(alias="templateID", min_length=1, max_length=200)
    timeout_s: Timeout = Field(default=DEFAULT_TIMEOUT_S, alias="timeout")
    auto_pause: bool = Field(default=False, alias="autoPause")
    auto_pause_memory: bool = Field(default=True, alias="autoPauseMemory")
    auto_resume: AutoResume = Field(default=AutoResume(), alias="autoResume")
    internet: bool | None = Field(default=None, alias="allow_internet_access")
    network: NetworkRules = NetworkRules()
    metadata: Pairs = {}
    env: Variables = Field(default={}, alias="envVars")
    mcp: JSON = None
    iam: JSON = None
    volume_mounts: JSON = Field(default=None, alias="volumeMounts")

    def refuse_unsupported(self) -> None:
        """Raise `ApiError` for what a slot cannot do."""
        rules = self.network
        given = {
            "mcp": self.mcp, "iam": self.iam, "volumeMounts": self.volume_mounts, "network.rules": rules.rules,
            "network.dnsServers": rules.dns_servers, "network.egressProxy": rules.egress_proxy,
            "network.maskRequestHost": rules.mask_request_host, "network.httpsPorts": rules.https_ports,
        }  # fmt: skip
        for name, value in given.items():
            if value:
                raise ApiError(400, f"{name} is not supported by this server; leave it out")

    def wanted_network(self) -> Network | AllowList | None:
        """Return the network that the request names; None if it leaves the choice to the server. Raises `ApiError` for
        rules that a slot cannot keep."""
        allowed, denied = self.network.allow_out, self.network.deny_out
        if not allowed and not denied:
            return None if self.internet is None else Network.ON if self.internet else Network.OFF
        closed = self.internet is False or bool(_EVERYWHERE & set(denied))
        if set(denied) - _EVERYWHERE:
            raise ApiError(
                400, f"denyOut {sorted(set(denied) - _EVERYWHERE)} is not supported: only 0.0.0.0/0 can be denied, "
                "with the allowed host names in allowOut"
            )  # fmt: skip
        if not allowed:
            return Network.OFF if closed else Network.ON
        if not closed:
            return Network.ON  # everything is allowed anyway
        wrong = [host for host in allowed if not _HOST.fullmatch(host) or host.replace(".", "").isdigit()]
        if wrong:
            raise ApiError(400, f"allowOut {wrong} is not supported: only host names and *.NAME can be allowed")
        return AllowList(tuple(dict.fromkeys(allowed)))


class TimeoutBody(_Body):
    """POST /sandboxes/{id}/timeout."""

    timeout_s: Timeout = Field(alias="timeout")


class RefreshBody(_Body):
    """POST /sandboxes/{id}/refreshes."""

    duration_s: Timeout = Field(default=15, alias="duration")


class ConnectBody(_Body):
    """POST /sandboxes/{id}/connect, /v2/sandboxes/{id}/connect and /sandboxes/{id}/resume."""

    timeout_s: Timeout = Field(default=DEFAULT_TIMEOUT_S, alias="timeout")
    memory: bool | None = None


class ForkBody(_Body):
    """POST /sandboxes/{id}/fork."""

    timeout_s: Timeout = Field(default=DEFAULT_TIMEOUT_S, alias="timeout")
    count: int = Field(default=1, ge=1, le=20)


class PauseBody(_Body):
    """POST /sandboxes/{id}/pause."""

    memory: bool | None = None


class SnapshotBody(_Body):
    """POST /sandboxes/{id}/snapshots."""

    name: str | None = Field(default=None, pattern=r"^[a-zA-Z0-9][a-zA-Z0-9._/-]{0,127}(?::[a-zA-Z0-9._-]{1,64})?$")
    memory: bool | None = None


def read_body(body: bytes, model: type[ModelT]) -> ModelT:
    """Parse a request body; an empty body is an empty object. Raises `ApiError` with status 400."""
    try:
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, each['loc'])) or 'body'}: {each['msg']}" for each in error.errors())
        raise ApiError(400, f"invalid request: {'; '.join(problems)}") from None
