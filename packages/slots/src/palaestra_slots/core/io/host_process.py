"""Runs trusted commands on the host: git, the installer, container tools. It never runs commands that a task or an
agent wrote."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from palaestra_slots.core.errors import PalaestraError, PrepareError

_TIMED_OUT = 124


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """The exit status (124 after a timeout), standard output and standard error of a command."""

    returncode: int
    stdout: bytes
    stderr: bytes

    @property
    def text(self) -> str:
        """Both streams, decoded, for error messages."""
        return (self.stdout + self.stderr).decode(errors="replace")


async def run_process(
    argv: Sequence[str],
    *,
    cwd: Path | None = None,
    stdin: bytes = b"",
    timeout_s: float,
    env: Mapping[str, str] | None = None,
) -> ProcessResult:
    """Run a command in a session of its own, without a terminal, and return its result. A timeout or cancellation kills
    the whole session. `env` replaces the environment variables; None means those of this process."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        cwd=cwd,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=env,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(timeout_s):
            stdout, stderr = await process.communicate(stdin)
    except TimeoutError:
        return ProcessResult(_TIMED_OUT, b"", f"timed out after {timeout_s:g} s".encode())
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            # Reaped even if this task is cancelled again meanwhile.
            await asyncio.shield(process.wait())
    return ProcessResult(process.returncode or 0, stdout, stderr)


async def check_process(
    argv: Sequence[str],
    problem: str,
    *,
    stdin: bytes = b"",
    timeout_s: float,
    error: type[PalaestraError] = PrepareError,
    shown: int = 1500,
) -> ProcessResult:
    """Run a command with `run_process`. If its status is not 0, raise `error` with `problem` and the last `shown`
    characters of the output."""
    result = await run_process(argv, stdin=stdin, timeout_s=timeout_s)
    if result.returncode:
        raise error(f"{problem}: {result.text[-shown:].strip()}")
    return result
