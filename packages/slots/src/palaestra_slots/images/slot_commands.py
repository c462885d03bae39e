"""Run a set-up command in a slot; a failure becomes a typed error that shows the end of its output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from palaestra_slots.core.errors import InfraError, PalaestraError, PrepareError
from palaestra_slots.sandbox.slot import ExecutionResult, Slot


async def check_execute(
    slot: Slot,
    command: str | Sequence[str],
    problem: str,
    *,
    cwd: str = "/",
    env: Mapping[str, str] | None = None,
    stdin: bytes = b"",
    timeout_s: float = 120.0,
    error: type[PalaestraError] = PrepareError,
    shown: int = 500,
) -> ExecutionResult:
    """Run `slot.execute`; a command that fails or cannot start raises `error` with `problem`, the reason and the last
    `shown` characters of the output."""
    try:
        result = await slot.execute(command, cwd=cwd, env=env, stdin=stdin, timeout_s=timeout_s)
    except InfraError:
        raise
    except OSError as failure:  # the work may have removed the directory
        raise error(f"{problem}: {failure}") from failure
    if not result.success:
        raise error(f"{problem}: {result.error}\n{result.output[-shown:].strip()}")
    return result
