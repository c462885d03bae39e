"""Commands on the host: git and the installer. Never anything that a task or an agent wrote."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """What a command left: its status, standard output, and standard error. `returncode` 124 is a timeout."""

    returncode: int
    stdout: bytes
    stderr: bytes

    @property
    def text(self) -> str:
        """Both streams as text, for messages."""
        return (self.stdout + self.stderr).decode(errors="replace")


async def run_process(
    argv: Sequence[str], *, cwd: Path | None = None, stdin: bytes = b"", timeout_s: float
) -> ProcessResult:
    """Run a command without a terminal, so that nothing can ask questions. Cancelling kills its whole session."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        cwd=cwd,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(timeout_s):
            stdout, stderr = await process.communicate(stdin)
    except TimeoutError:
        return ProcessResult(124, b"", f"timed out after {timeout_s:g} s".encode())
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await asyncio.shield(process.wait())
    return ProcessResult(process.returncode or 0, stdout, stderr)
