"""`--metrics-port`: how the run stands, as Prometheus text over HTTP.

Not for steering a run: it only answers GET /metrics. It listens on this host alone unless told otherwise, since the
names of tasks and models are in what it says. Source of the format: Prometheus, text exposition format 0.0.4.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from palaestra.core.io.http_server import listening
from palaestra.rollouts.observe.prometheus import exposition
from palaestra.rollouts.observe.status import RunReader
from palaestra.rollouts.observe.status_file import StatusFile

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@asynccontextmanager
async def serving_metrics(reader: RunReader, inflight: StatusFile, host: str, port: int) -> AsyncIterator[str]:
    """Serve for as long as the block runs; gives the URL. Raises `ConfigError` where it cannot listen."""
    reading = asyncio.Lock()

    async def metrics(request: web.Request) -> web.Response:
        async with reading:
            status = await asyncio.to_thread(reader.read)
        now = inflight.now()
        status.in_flight, status.oldest = now.stages, now.idle
        return web.Response(body=exposition(status, now.at).encode(), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    async with listening(app, host, port) as url:
        yield f"{url}/metrics"
