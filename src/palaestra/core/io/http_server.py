"""HTTP servers that run for the length of a block. Every server of the project listens through this."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from palaestra.core.errors import ConfigError


@asynccontextmanager
async def listening(
    app: web.Application, host: str, port: int, *, shutdown_s: float = 2.0, handler_cancellation: bool = False
) -> AsyncIterator[str]:
    """Serve while the block runs; yields the URL, without a path. Port 0 takes a free one.

    At the end, requests in progress have `shutdown_s` seconds. `handler_cancellation` cancels the handler of a client
    that disconnects. Raises `ConfigError` if the port cannot be opened.
    """
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=shutdown_s, handler_cancellation=handler_cancellation)
    try:
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            problem = error.strerror or error
            raise ConfigError(f"cannot listen on {host}:{port}: {problem}; choose another port") from None
        yield f"http://{f'[{host}]' if ':' in host else host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
