"""Programs that a test starts, and commands that it finds again among all processes."""

from __future__ import annotations

import contextlib
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any


def nap() -> str:
    """A command that runs for long. No other process has the same, in this test or in one beside it."""
    return f"sleep 999.{uuid.uuid4().int}"


@contextlib.contextmanager
def killed_after(command: Sequence[str], **settings: Any) -> Iterator[subprocess.Popen[Any]]:
    """A program that is killed when the block ends. Popen's own block would wait for it, also after a failure."""
    with subprocess.Popen(command, **settings) as process:
        try:
            yield process
        finally:
            process.kill()


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait until it holds, for at most a minute."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.01)
