"""The control API: what the SDK calls with its API key to create, find, keep and end sandboxes.

Source: the generated client of the SDK, which names the routes, fields and status codes. Invariant: an answer about a
sandbox or template depends only on what the caller's key may see.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TypeVar
from urllib.parse import parse_qsl, unquote

from aiohttp import web

from palaestra_e2b.api_keys import ApiKey
from palaestra_e2b.envd import ENVD_VERSION
from palaestra_e2b.requests import (
    ConnectBody,
    ControlCall,
    ForkBody,
    Handle,
    NewSandbox,
    PauseBody,
    RefreshBody,
    SnapshotBody,
    TimeoutBody,
    cpu_count,
    moment,
    read_body,
)
from palaestra_e2b.sandboxes import HostedSandbox, Sandboxes, SandboxState
from palaestra_e2b.template_api import TemplateApi
from palaestra_e2b.templates import Template
from palaestra_e2b.wire_errors import ApiError
from palaestra_slots.core.types import JSON, AllowList, Limits, Network

MOST_BODY_BYTES = 1 << 20
_MOST_ON_PAGE = 100
_IDEMPOTENCY = re.compile(r"[a-z0-9-]{1,255}")
_CLIENT = "palaestra"

# Prints what the processes of a sandbox use, from the kernel's numbers: pages of memory, ticks, and `df` of the disk.
_MEASURE = r"""pages=0
for f in /proc/[0-9]*/statm; do read -r _ rss _ < "$f" 2>/dev/null && pages=$((pages + rss)); done
echo "$pages"; cat /proc/[0-9]*/stat 2>/dev/null | sed 's/^.*) //' | {
ticks=0; while read -r _ _ _ _ _ _ _ _ _ _ _ user system _; do ticks=$((ticks + user + system)); done; echo "$ticks"; }
df -kP / | tail -n 1"""

T = TypeVar("T")


class ControlApi:
    """Answers the requests of all keys. `domain` is the domain of the sandboxes' own addresses, or None."""

    def __init__(self, sandboxes: Sandboxes, templates: TemplateApi, *, domain: str | None) -> None:
        self._sandboxes, self._domain, self._metrics = sandboxes, domain, SandboxMetrics()
        one = r"/sandboxes/([^/]+)"
        table: Sequence[tuple[str, str, Handle]] = (
            ("POST", r"(?:/v2)?/sandboxes", self.create),
            ("GET", r"(?:/v2)?/sandboxes", self.list),
            ("GET", r"/sandboxes/metrics", self.metrics_of_several),
            ("GET", one, self.detail),
            ("DELETE", one, self.kill),
            ("POST", one + "/timeout", self.set_timeout),
            ("POST", one + "/refreshes", self.refresh),
            ("POST", "(?:/v2)?" + one + "/connect", self.connect),
            ("POST", one + "/resume", self.resume),
            ("POST", one + "/pause", self.pause),
            ("POST", one + "/fork", self.fork),
            ("POST", one + "/snapshots", self.save),
            ("GET", one + "/metrics", self.metrics),
            ("GET", "(?:/v2)?" + one + "/logs", self.logs),
            ("PUT", one + "/network", self.network),
            ("GET", r"/snapshots", self.snapshots),
            *templates.routes,
        )
        self._table = [(method, re.compile(pattern), handle) for method, pattern, handle in table]

    async def handle(self, key: ApiKey, request: web.Request, body: bytes) -> web.Response:
        """Answer one request. Raises `ApiError`."""
        path, known = request.rel_url.raw_path.rstrip("/"), False
        for method, pattern, handle in self._table:
            found = pattern.fullmatch(path)
            if found is not None:
                known = True
                if method == request.method:
                    return await handle(
                        ControlCall(key, tuple(unquote(part) for part in found.groups()), request, body)
                    )
        if known:
            raise ApiError(405, f"{request.method} is not possible on {path[:100]}")
        if path.startswith(("/volumes", "/secrets")):
            raise ApiError(501, f"{path.split('/')[1]} are not supported by this server")
        raise ApiError(404, f"{path[:100]} is not a path of this API")

    # Sandboxes

    async def create(self, call: ControlCall) -> web.Response:
        idempotency = call.request.headers.get("Idempotency-Key", "")
        if idempotency and not _IDEMPOTENCY.fullmatch(idempotency):
            raise ApiError(400, "Idempotency-Key must have 1 to 255 lower-case letters, digits or hyphens")
        sandbox = await self._sandboxes.create(call.key, read_body(call.body, NewSandbox), idempotency)
        return web.json_response(self._created(sandbox), status=201)

    async def list(self, call: ControlCall) -> web.Response:
        query = call.request.query
        found = self._sandboxes.of_key(call.key)
        states = set(query.get("state", "running,paused" if "/v2/" in call.request.path else "running").split(","))
        wanted = [(unquote(name), unquote(value)) for name, value in parse_qsl(query.get("metadata", ""))]
        template, after = query.get("template"), _time_of(query.get("startedAfter"))
        rows = [
            each for each in found
            if each.state.value in states
            and all(each.request.metadata.get(name) == value for name, value in wanted)
            and (template is None or template in (each.template.template_id, *each.template.names))
            and _time_of(moment(each.started_at)) >= after  # as the client has seen it
        ]  # fmt: skip
        page, headers = _page(rows, call, lambda each: f"{each.started_at:.6f}-{each.sandbox_id}", query.get("order"))
        return web.json_response([self._listed(each) for each in page], headers=headers)

    async def detail(self, call: ControlCall) -> web.Response:
        sandbox = self._sandboxes.get(call.key, call.parts[0])
        lifecycle = {
            "autoResume": sandbox.request.auto_resume.enabled,
            "onTimeout": "pause" if sandbox.request.auto_pause else "kill",
        }
        body = self._listed(sandbox) | {"envdAccessToken": sandbox.token, "lifecycle": lifecycle}
        body |= {"allowInternetAccess": sandbox.network is not Network.OFF, "domain": self._domain}
        if isinstance(sandbox.network, AllowList):
            body["network"] = {"allowOut": list(sandbox.network.hosts), "denyOut": ["0.0.0.0/0"]}
        return web.json_response(body)

    async def kill(self, call: ControlCall) -> web.Response:
        await self._sandboxes.kill(call.key, call.parts[0])
        return web.Response(status=204)

    async def set_timeout(self, call: ControlCall) -> web.Response:
        sandbox = self._sandboxes.get(call.key, call.parts[0])
        sandbox.set_timeout(read_body(call.body, TimeoutBody).timeout_s)
        return web.Response(status=204)

    async def refresh(self, call: ControlCall) -> web.Response:
        sandbox = self._sandboxes.get(call.key, call.parts[0])
        sandbox.set_timeout(read_body(call.body, RefreshBody).duration_s, only_longer=True)
        return web.Response(status=204)

    async def connect(self, call: ControlCall) -> web.Response:
        sandbox, body = self._sandboxes.get(call.key, call.parts[0]), read_body(call.body, ConnectBody)
        was_paused = await self._sandboxes.resume(sandbox, body.timeout_s, memory=body.memory)
        return web.json_response(self._created(sandbox), status=201 if was_paused else 200)

    async def resume(self, call: ControlCall) -> web.Response:
        sandbox, body = self._sandboxes.get(call.key, call.parts[0]), read_body(call.body, ConnectBody)
        if not await self._sandboxes.resume(sandbox, body.timeout_s, memory=body.memory):
            raise ApiError(409, f"the sandbox {sandbox.sandbox_id} is running already")
        return web.json_response(self._created(sandbox), status=201)

    async def pause(self, call: ControlCall) -> web.Response:
        sandbox, body = self._sandboxes.get(call.key, call.parts[0]), read_body(call.body, PauseBody)
        await self._sandboxes.pause(sandbox, memory=body.memory is not False)
        return web.Response(status=204)

    async def fork(self, call: ControlCall) -> web.Response:
        sandbox, body = self._sandboxes.get(call.key, call.parts[0]), read_body(call.body, ForkBody)
        results: list[JSON] = []
        for each in await self._sandboxes.fork(sandbox, body.count, body.timeout_s):
            if isinstance(each, ApiError):
                results.append({"error": {"code": each.status, "message": str(each)}})
            else:
                results.append({"sandbox": self._created(each)})
        return web.json_response(results, status=201)

    async def network(self, call: ControlCall) -> web.Response:
        self._sandboxes.get(call.key, call.parts[0])
        raise ApiError(400, "the network of a running sandbox cannot be changed on this server; set it in create")

    async def logs(self, call: ControlCall) -> web.Response:
        self._sandboxes.get(call.key, call.parts[0])
        return web.json_response({"logs": [], "logEntries": []})

    async def metrics(self, call: ControlCall) -> web.Response:
        sandbox = self._sandboxes.get(call.key, call.parts[0])
        found, query = await self._metrics.of(sandbox, self._sandboxes.limits), call.request.query
        start, end = query.get("start", "0"), query.get("end", "")
        early = start.isdigit() and found["timestampUnix"] < int(start)  # only the present is known
        return web.json_response([] if early or (end.isdigit() and found["timestampUnix"] > int(end)) else [found])

    async def metrics_of_several(self, call: ControlCall) -> web.Response:
        names = call.request.query.get("sandbox_ids", "").split(",")[:_MOST_ON_PAGE]
        own = {each.sandbox_id: each for each in self._sandboxes.of_key(call.key)}
        found = {name: await self._metrics.of(own[name], self._sandboxes.limits) for name in names if name in own}
        return web.json_response({"sandboxes": found})

    # Snapshots

    async def save(self, call: ControlCall) -> web.Response:
        sandbox, body = self._sandboxes.get(call.key, call.parts[0]), read_body(call.body, SnapshotBody)
        if body.memory:
            raise ApiError(
                400, "snapshots of this server hold files and no memory; use mode='filesystem', or leave mode out"
            )
        return web.json_response(_snapshot(await self._sandboxes.save(sandbox, body.name)), status=201)

    async def snapshots(self, call: ControlCall) -> web.Response:
        sandbox_id, name = call.request.query.get("sandboxID"), call.request.query.get("name")
        rows = [
            each for each in self._sandboxes.templates.of_key(call.key)
            if each.source and sandbox_id in (None, each.source)
            and (name is None or any(name in (full, full.partition(":")[0]) for full in each.names))
        ]  # fmt: skip
        page, headers = _page(rows, call, lambda each: f"{each.created_at:.6f}-{each.template_id}")
        return web.json_response([_snapshot(each) for each in page], headers=headers)

    # Answers

    def _created(self, sandbox: HostedSandbox) -> dict[str, JSON]:
        return {
            "templateID": sandbox.template.template_id, "alias": sandbox.template.name, "clientID": _CLIENT,
            "sandboxID": sandbox.sandbox_id, "envdVersion": ENVD_VERSION, "envdAccessToken": sandbox.token,
            "trafficAccessToken": sandbox.traffic_token, "domain": self._domain,
        }  # fmt: skip

    def _listed(self, sandbox: HostedSandbox) -> dict[str, JSON]:
        limits = self._sandboxes.limits
        return {
            "templateID": sandbox.template.template_id, "alias": sandbox.template.name, "clientID": _CLIENT,
            "sandboxID": sandbox.sandbox_id, "startedAt": moment(sandbox.started_at), "endAt": moment(sandbox.ends_at),
            "cpuCount": cpu_count(limits.cpus), "memoryMB": (limits.memory_bytes or 0) >> 20,
            "diskSizeMB": (limits.disk_bytes or 0) >> 20, "metadata": sandbox.request.metadata,
            "state": sandbox.state.value, "envdVersion": ENVD_VERSION,
        }  # fmt: skip


def _snapshot(template: Template) -> dict[str, JSON]:
    return {"snapshotID": f"{template.template_id}:default", "names": list(template.names)}


def _time_of(text: str | None) -> float:
    if not text:
        return 0.0
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except ValueError:
        raise ApiError(400, f"startedAfter is not a time: {text[:50]!r}") from None


def _page(
    rows: Sequence[T], call: ControlCall, position: Callable[[T], str], order: str | None = None
) -> tuple[list[T], dict[str, str]]:
    """Return one page of the rows, newest first unless `order` is "asc", and the header that names the next."""
    query, ascending = call.request.query, order == "asc"
    try:
        limit = min(_MOST_ON_PAGE, int(query.get("limit", _MOST_ON_PAGE)))
    except ValueError:
        limit = 0
    if limit < 1:
        raise ApiError(400, "limit must be a whole number of at least 1")
    found = sorted(rows, key=position, reverse=not ascending)
    if token := query.get("nextToken"):
        found = [row for row in found if (position(row) > token if ascending else position(row) < token)]
    page = found[:limit]
    return page, {"X-Next-Token": position(page[-1])} if len(found) > limit else {}


class SandboxMetrics:
    """The metrics of all sandboxes. The share of the processors is that since the last question about a sandbox."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, float]] = {}

    async def of(self, sandbox: HostedSandbox, limits: Limits) -> dict[str, JSON]:
        """Return the metrics of a sandbox; a paused one uses no processor and is not asked. Raises `ApiError`."""
        pages = ticks = used = 0
        if sandbox.state is SandboxState.RUNNING:
            done = await sandbox.running_slot.execute(["/bin/sh", "-c", _MEASURE], cwd="/", timeout_s=10.0)
            try:
                first, second, third = done.output.strip().splitlines()[-3:]
                pages, ticks, used = int(first), int(second), int(third.split()[2])
            except (ValueError, IndexError):
                raise ApiError(500, "the sandbox's image lacks the programs that its metrics need") from None
        now, spent = time.time(), ticks / os.sysconf("SC_CLK_TCK")
        before, since = self._last.get(sandbox.sandbox_id, (0.0, sandbox.started_at))
        self._last = {sandbox.sandbox_id: (spent, now), **dict(list(self._last.items())[:1000])}
        return {
            "timestamp": moment(now), "timestampUnix": int(now),
            "cpuCount": cpu_count(limits.cpus),
            "cpuUsedPct": round(max(0.0, spent - before) / max(now - since, 0.001) * 100, 2),
            "memUsed": pages * os.sysconf("SC_PAGE_SIZE"), "memTotal": limits.memory_bytes or 0, "memCache": 0,
            "diskUsed": used << 10, "diskTotal": limits.disk_bytes or 0,
        }  # fmt: skip
