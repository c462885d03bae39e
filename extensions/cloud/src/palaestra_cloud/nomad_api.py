"""Calls the parts of Nomad's HTTP API that the nomad backend uses, and finds the reasons for failures in the answers.

Source of paths and bodies: developer.hashicorp.com/nomad/api-docs, and the `api` package of Nomad's repository.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

import aiohttp

from palaestra_slots.core.clock import SystemClock
from palaestra_slots.core.errors import ConfigError, SandboxError
from palaestra_slots.core.printable import without_middle
from palaestra_slots.core.retry import RetryPolicy, TransientFailure, persist, retry_after_s
from palaestra_slots.core.types import JSON

_TIMEOUT_S = 20.0
_RETRY = RetryPolicy(attempts=5, first_s=0.2, longest_s=5.0)
_TOO_MANY = 429
_TRANSIENT = frozenset({_TOO_MANY, 502, 503, 504})
_NEVER_RUNS = ("Driver Failure", "Setup Failure", "Failed Validation", "Failed Artifact Download")
"""Types of task events after which Nomad may try again, although the problem rarely goes away by itself."""


_FILES = ("ca_cert", "client_cert", "client_key")


class NomadRefused(SandboxError):
    """Nomad answered a request with an error; `status` is the HTTP status of the answer."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class NomadAccess:
    """How to reach the jobs of a cluster: an ACL token, the namespace and the region of the jobs, and for an agent with
    TLS the files of its authority (`ca_cert`), of the client's certificate and key, and the name in the agent's
    certificate, such as `server.global.nomad`. None means Nomad's default."""

    token: str | None = field(default=None, repr=False)
    namespace: str | None = None
    region: str | None = None
    ca_cert: str | None = None
    client_cert: str | None = None
    client_key: str | None = None
    tls_server_name: str | None = None

    @property
    def query(self) -> dict[str, str]:
        """The parameters of every request."""
        return {name: each for name, each in (("namespace", self.namespace), ("region", self.region)) if each}

    def tls(self) -> ssl.SSLContext:
        """Return the context for HTTPS. Raises `ConfigError` for a file that cannot be used."""
        try:
            context = ssl.create_default_context(cafile=self.ca_cert)
            if self.client_cert is not None:
                context.load_cert_chain(self.client_cert, self.client_key)
        except (OSError, ssl.SSLError) as error:
            given = (getattr(self, name) for name in _FILES)
            files = ", ".join(f"nomad_{name} {each}" for name, each in zip(_FILES, given, strict=True) if each)
            raise ConfigError(f"the certificates for Nomad ({files}) cannot be used: {error}") from error
        return context


class NomadAPI:
    """A client of one Nomad agent. Requests are repeated while the agent is briefly unreachable or overloaded;
    `throttled` is called with the number of seconds for which an overloaded agent asks clients to wait, or None if it
    names no time. Raises `ConfigError` for certificates that cannot be used."""

    def __init__(
        self, address: str, access: NomadAccess, *, throttled: Callable[[float | None], Awaitable[object]]
    ) -> None:
        self._throttled = throttled
        self.address = address.rstrip("/")
        self._access = access
        self._tls = access.tls() if self.address.startswith("https://") else True
        self._headers = {} if access.token is None else {"X-Nomad-Token": access.token}
        self._session: aiohttp.ClientSession | None = None
        self._rng = random.Random()

    async def aclose(self) -> None:
        """Close the connections. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def check(self) -> None:
        """Raise `ConfigError` if the agent does not answer, refuses the token or has no leader."""
        try:
            leader, _ = await self._call_api("GET", "/v1/status/leader", None, {}, _TIMEOUT_S)
            await self._call_api("GET", "/v1/jobs", None, {"prefix": "palaestra-check"}, _TIMEOUT_S)
        except TransientFailure as failure:
            raise ConfigError(
                f"Nomad at {self.address} does not answer: {failure.problem}. Start it, set nomad_address, or use this "
                "machine with --env.tool_pool_mode local"
            ) from None
        except NomadRefused as refused:
            raise ConfigError(
                f"Nomad at {self.address} refuses requests: {refused}. Set nomad_token, nomad_namespace or nomad_region"
            ) from None
        if not leader:
            raise ConfigError(f"Nomad at {self.address} has no leader: wait for it, or set another nomad_address")

    async def get(self, path: str, **query: str) -> JSON:
        """Return the answer to a GET request."""
        return (await self._request("GET", path, None, query))[0]

    async def find(self, path: str) -> JSON:
        """Return the answer to a GET request; None for an object that does not exist."""
        try:
            return await self.get(path)
        except NomadRefused as refused:
            if refused.status == HTTPStatus.NOT_FOUND:
                return None
            raise

    async def wait(self, path: str, index: int, wait_s: float) -> tuple[JSON, int]:
        """Return the answer to a blocking query, with its index. Nomad answers once the index exceeds `index`, or after
        `wait_s` seconds."""
        query = {"index": str(index), "wait": f"{wait_s:g}s"}
        return await self._request("GET", path, None, query, wait_s * (1 + 1 / 16) + _TIMEOUT_S)

    async def post(self, path: str, body: JSON) -> JSON:
        """Return the answer to a POST request."""
        return (await self._request("POST", path, body, {}))[0]

    async def delete(self, path: str, **query: str) -> JSON:
        """Return the answer to a DELETE request."""
        return (await self._request("DELETE", path, None, query))[0]

    async def _request(
        self, method: str, path: str, body: JSON, query: Mapping[str, str], timeout_s: float = _TIMEOUT_S
    ) -> tuple[JSON, int]:
        async def send(tries: int, left_s: float) -> tuple[JSON, int]:
            try:
                return await self._call_api(method, path, body, query, min(left_s, timeout_s))
            except TransientFailure as failure:
                if isinstance(failure.problem, NomadRefused) and failure.problem.status == _TOO_MANY:
                    await self._throttled(failure.asked_s)
                raise

        return await persist(send, retry=_RETRY, timeout_s=2 * timeout_s, clock=SystemClock(), rng=self._rng)

    async def _call_api(
        self, method: str, path: str, body: JSON, query: Mapping[str, str], timeout_s: float
    ) -> tuple[JSON, int]:
        if self._session is None:
            self._session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), headers=self._headers)
        limit = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(
                method,
                self.address + path,
                json=body,
                params={**self._access.query, **query},
                timeout=limit,
                ssl=self._tls,
                server_hostname=self._access.tls_server_name if self._tls is not True else None,
            ) as answer:
                text = await answer.text()
                said = without_middle(text.strip(), 500)
                if answer.status in _TRANSIENT:
                    refused = NomadRefused(f"{method} {path}: {answer.status} {said}", answer.status)
                    raise TransientFailure(refused, retry_after_s(answer.headers.get("Retry-After"), 0))
                if answer.status >= 400:
                    raise NomadRefused(f"{method} {path}: {answer.status} {said}", answer.status)
                index = int(answer.headers.get("X-Nomad-Index", "0"))
                kind = answer.content_type
                return (await answer.json() if kind == "application/json" else text), index
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            problem = SandboxError(f"Nomad at {self.address}: {method} {path}: {type(error).__name__}: {error}")
            raise TransientFailure(problem) from error


def placement_problem(metrics: Mapping[str, JSON]) -> str:
    """Return the reason why the scheduler found no node, from an AllocationMetric."""
    parts = [f"{metrics.get('NodesEvaluated', 0)} nodes evaluated"]
    available = metrics.get("NodesAvailable") or {}
    parts += [f"no node in datacenter {name}" for name, count in available.items() if not count]
    for name, count in (metrics.get("ConstraintFiltered") or {}).items():
        parts.append(f"{count} filtered by {name!r}")
    for name, count in (metrics.get("DimensionExhausted") or {}).items():
        parts.append(f"{name!r} exhausted on {count}")
    parts += [f"quota exhausted: {name}" for name in metrics.get("QuotaExhausted") or ()]
    return "; ".join(parts)


def task_problem(state: Mapping[str, JSON], restarts_before: int = 0) -> str | None:
    """Return the reason why a task does not start, from its TaskState; None if it may still start. The first
    `restarts_before` restarts do not count."""
    events: Iterable[Mapping[str, JSON]] = state.get("Events") or ()
    latest = list(reversed(list(events)))
    last_started = next((n for n, event in enumerate(latest) if event["Type"] == "Started"), len(latest))
    for event in latest[:last_started]:
        if event["Type"] in _NEVER_RUNS:
            return f"{event['Type']}: {_event_text(event)}"
    if state.get("Failed") or int(state.get("Restarts") or 0) - restarts_before >= 2:
        ended = next((event for event in latest if event["Type"] == "Terminated"), None)
        return f"it ends as soon as it has started ({_event_text(ended) if ended is not None else 'no reason given'})"
    return None


def _event_text(event: Mapping[str, JSON]) -> str:
    return str(event.get("DisplayMessage") or event.get("DriverError") or event.get("Message") or "no reason given")


async def log_tail(api: NomadAPI, allocation: str, task: str) -> str:
    """Return the end of a task's standard error; empty if there is none or it cannot be read."""
    query = {"task": task, "type": "stderr", "plain": "true", "origin": "end", "offset": "1000"}
    try:
        async with asyncio.timeout(5):
            return str(await api.get(f"/v1/client/fs/logs/{allocation}", **query)).strip()
    except (SandboxError, TimeoutError):
        return ""
