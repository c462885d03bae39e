"""`SandboxExecutor`: runs tools in slots by name, as programs import it from `atropos.slots`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Self

from palaestra_slots.core.errors import InfraError
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.pool import USUAL_TIMEOUT_S
from palaestra_slots.sandbox.slot import ExecutionResult, Shell, Slot
from palaestra_slots.sandbox.slot_tools import run_slot_tool, tool_result


class SandboxExecutor:
    """Runs `bash`, `bash_stateful`, `read_file` and `write_file` in leased slots of any pool. `timeout` is in seconds.
    Other options, which configure the connection elsewhere, have no effect. An async context manager."""

    def __init__(self, timeout: float = USUAL_TIMEOUT_S, **options: JSON) -> None:
        self.timeout = timeout
        self._shells: dict[int, Shell] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Forget the stateful shells, which end with their slots."""
        self._shells.clear()

    async def execute(
        self, slot: Slot, tool_name: str, args: Mapping[str, JSON], timeout: float | None = None
    ) -> ExecutionResult:
        """Run one tool. Every failure is reported in the result."""

        async def open_shell() -> Shell:
            if slot.epoch not in self._shells:
                self._shells[slot.epoch] = await slot.shell()
            return self._shells[slot.epoch]

        try:
            return await run_slot_tool(slot, open_shell, tool_name, args, timeout or self.timeout)
        except InfraError as error:
            return tool_result(error=f"{type(error).__name__}: {error}")

    async def execute_batch(
        self, requests: Sequence[tuple[Slot, str, Mapping[str, JSON]]], timeout: float | None = None
    ) -> list[ExecutionResult]:
        """Run several tools concurrently and return their results in the order of `requests`."""
        return list(await asyncio.gather(*(self.execute(*request, timeout) for request in requests)))
