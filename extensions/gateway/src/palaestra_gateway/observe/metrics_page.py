"""The endpoints `GET /metrics` (Prometheus) and `GET /status` (JSON) of a gateway, on the loopback only."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict

from aiohttp import web

from palaestra.rollouts.observe.prometheus import CONTENT_TYPE, Metric, by, exposition_text, one
from palaestra_gateway.mailbox import Mailbox
from palaestra_gateway.observe.gateway_status import GatewayStatus, read_status
from palaestra_slots.core.clock import Clock
from palaestra_slots.core.io.http_server import guard, listening


def gateway_metrics(status: GatewayStatus) -> Iterator[Metric]:
    """Yield the metrics of a running gateway."""
    of = status.platforms
    connected = {name: float(each.connected) for name, each in of.items()}
    waits = {name: status.at - each.oldest_unsent_at for name, each in of.items() if each.unsent}
    errors = {name: each.error_at for name, each in of.items() if each.error}
    yield "gateway_start_time_seconds", "gauge", "Start of the gateway.", one(status.started_at)
    yield "gateway_sessions", "gauge", "Chats that have a conversation.", one(status.sessions)
    yield "gateway_jobs", "gauge", "Scheduled jobs.", one(status.jobs)
    yield "gateway_connected", "gauge", "Whether the platform has been connected to.", by("platform", connected)
    yield (
        "gateway_waiting_messages",
        "gauge",
        "Messages that wait for an answer.",
        by("platform", {name: each.waiting for name, each in of.items()}),
    )
    yield (
        "gateway_unsent_messages",
        "gauge",
        "Answers that the platform has not accepted yet.",
        by("platform", {name: each.unsent for name, each in of.items()}),
    )
    yield "gateway_oldest_unsent_seconds", "gauge", "Age of the oldest unsent answer.", by("platform", waits)
    yield (
        "gateway_refused_messages",
        "gauge",
        "Answers of the last 30 days that the platform refused.",
        by("platform", {name: each.refused for name, each in of.items()}),
    )
    yield "gateway_last_error_time_seconds", "gauge", "Time of the last error.", by("platform", errors)


@asynccontextmanager
async def serving_status(mailbox: Mailbox, clock: Clock, port: int) -> AsyncIterator[str]:
    """Serve the endpoints while the block runs; yields the address. Raises `ConfigError` if the port is in use."""

    async def metrics(request: web.Request) -> web.Response:
        text = exposition_text(gateway_metrics(await read_status(mailbox, clock.wall())))
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})

    async def status(request: web.Request) -> web.Response:
        return web.json_response(asdict(await read_status(mailbox, clock.wall())))

    app = web.Application(middlewares=[guard(None)])
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/status", status)
    async with listening(app, "127.0.0.1", port) as url:
        yield url
