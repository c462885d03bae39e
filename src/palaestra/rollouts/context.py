"""`ToolContext`: what a reward function written to the contract uses to look at a rollout's workspace.

The synchronous methods may be called inside an `async def compute_reward` without blocking the event loop (see
`core/bridge.py`), and from other threads. Each has an async twin, `<name>_async`. All of them work on the grading
view of the rollout, so nothing a reward function does can be answered by a process that the agent left behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import TypeVar

from palaestra.core.bridge import wait_for_sync
from palaestra.core.errors import InfraError
from palaestra.core.types import JSON
from palaestra.sandbox.base import Slot
from palaestra.tools.binding import SlotTools

T = TypeVar("T")

CONTEXT_OUTPUT_BYTES = 4 << 20
"""How much output `terminal` returns; a reward function may have to parse a whole test log."""


class ToolContext:
    """Open access to one rollout's workspace and tools, for scoring. `task_id` names the rollout."""

    def __init__(self, task_id: str, *, slot: Callable[[], Awaitable[Slot]], tools: SlotTools) -> None:
        self.task_id = task_id
        self._slot = slot
        self._tools = tools
        self._loop = asyncio.get_running_loop()

    def terminal(self, command: str, timeout: float = 180) -> dict[str, JSON]:
        """Run a shell command in the workspace: `{"exit_code", "output"}`; 124 after `timeout` seconds."""
        return self._wait(self.terminal_async(command, timeout), "terminal_async")

    async def terminal_async(self, command: str, timeout: float = 180) -> dict[str, JSON]:
        """`terminal`, to be awaited."""
        slot = await self._slot()
        done = await slot.execute(command, timeout_s=timeout, max_output_bytes=CONTEXT_OUTPUT_BYTES)
        return {"exit_code": done.exit_code, "output": done.output}

    def read_file(self, path: str) -> dict[str, JSON]:
        """The whole text of a file: `{"content", "path"}`, or `{"error", "path"}` when it cannot be read."""
        return self._wait(self.read_file_async(path), "read_file_async")

    async def read_file_async(self, path: str) -> dict[str, JSON]:
        """`read_file`, to be awaited."""
        slot = await self._slot()
        try:
            return {"content": await slot.read_text(path), "path": path}
        except InfraError:
            raise
        except (OSError, ValueError) as error:
            return {"error": str(error), "path": path}

    def write_file(self, path: str, content: str) -> dict[str, JSON]:
        """Write a text file: `{"bytes_written", "path"}`, or `{"error", "path"}`."""
        return self._wait(self.write_file_async(path, content), "write_file_async")

    async def write_file_async(self, path: str, content: str) -> dict[str, JSON]:
        """`write_file`, to be awaited."""
        slot = await self._slot()
        data = content.encode()
        try:
            await slot.write_bytes(path, data)
        except InfraError:
            raise
        except (OSError, ValueError) as error:
            return {"error": str(error), "path": path}
        return {"bytes_written": len(data), "path": path}

    def call_tool(self, tool_name: str, arguments: Mapping[str, JSON]) -> str:
        """Call any tool of the group by name; the reply is the JSON text that a model would get."""
        return self._wait(self.call_tool_async(tool_name, arguments), "call_tool_async")

    async def call_tool_async(self, tool_name: str, arguments: Mapping[str, JSON]) -> str:
        """`call_tool`, to be awaited."""
        return await self._tools.handle(tool_name, arguments)

    def cleanup(self) -> None:
        """Nothing is left to do: the grading view ends with the score. Kept for scripts that call it."""

    def _wait(self, call: Coroutine[object, object, T], twin: str) -> T:
        return wait_for_sync(call, loop=self._loop, twin=f"ToolContext.{twin}")
