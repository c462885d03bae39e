"""When a server that runs at the command line is asked to end."""

from __future__ import annotations

import asyncio
import signal


def told_to_stop() -> asyncio.Event:
    """Set when the process gets SIGINT or SIGTERM."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    return stop
