"""`palaestra serve api` as a process: its address on stdout, a clean end, nothing lost when it is killed."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from talking import Talk, group


@contextmanager
def server(*argv: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The running command and its address; killed in the end."""
    command = [sys.executable, "-m", "palaestra", "serve", "api", "--port", "0", *argv]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_it_ends_cleanly_when_told_to() -> None:
    with server() as (process, url):
        assert url.startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_a_kill_loses_nothing_that_was_answered(tmp_path: Path) -> None:
    async def before(url: str) -> None:
        async with Talk(url) as api:
            await api.both()
            for number in range(3):
                await api.post("/scored_data", group(first=number, env_id=0))
            assert (await api.get("/batch"))["batch"]

    async def after(url: str) -> None:
        async with Talk(url) as api:
            assert await api.get("/status") == {"current_step": 4, "queue_size": 1}

    store = str(tmp_path / "groups")
    with server("--store", store) as (_, url):
        asyncio.run(before(url))
    with server("--store", store) as (_, url):
        asyncio.run(after(url))
