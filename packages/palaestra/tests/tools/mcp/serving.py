"""The real MCP server of the tests, over both transports."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from palaestra_slots.core.types import JSON

SERVER = str(Path(__file__).with_name("mcp_server.py"))


def command(*words: str, **settings: JSON) -> dict[str, JSON]:
    return {"command": sys.executable, "args": [SERVER, "stdio", *words], **settings}


def living(*pids: int) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@contextmanager
def http_server(token: str) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, SERVER, "http", token], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
