"""Runs `true` through an agent package, once for each line of standard input, and prints the seconds.

Runs in a separate interpreter that has swe-rex or mini-swe-agent; imports nothing from Palaestra.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
import time
from collections.abc import Callable


def mini_swe_agent() -> Callable[[], object]:
    """Return a call of the local environment: `bash -c` on the host."""
    from minisweagent.environments.local import LocalEnvironment

    environment = LocalEnvironment()
    return lambda: environment.execute({"command": "true"})


def swe_rex(session: bool) -> Callable[[], object]:
    """Return a call of the local runtime in this process, without its HTTP server, which would take additional time."""
    from swerex.runtime.abstract import BashAction, Command, CreateBashSessionRequest
    from swerex.runtime.local import LocalRuntime

    loop = asyncio.new_event_loop()
    runtime = LocalRuntime()
    if session:
        loop.run_until_complete(runtime.create_session(CreateBashSessionRequest()))
        return lambda: loop.run_until_complete(runtime.run_in_session(BashAction(command="true")))
    return lambda: loop.run_until_complete(runtime.execute(Command(command=["bash", "-c", "true"])))


def main(name: str) -> None:
    """Print `ready`, then answer every line."""
    with contextlib.redirect_stdout(io.StringIO()):
        once = mini_swe_agent() if name == "mini-swe-agent" else swe_rex(name == "swe-rex-session")
        once()
    print("ready", flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        once()
        print(time.perf_counter() - started, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
