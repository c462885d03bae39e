"""`exec_tool`, with which the set-up and verification hooks of existing environments run tools in a rollout's
workspace.

Both call shapes in use are accepted: `exec_tool("bash", {"command": ...}, timeout=600)` and `exec_tool(ToolCall(...))`.
The answer is a `ToolResult` whose metadata holds both `exit_code` and `returncode`. As these hooks expect, its output
is standard output, then standard error after a line `[stderr]`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from palaestra.tools.call_text import ToolCall, ToolResult
from palaestra.tools.runtime.runtime import ToolRuntime
from palaestra_contract.tools.terminal_stateful import StatefulShell
from palaestra_slots.core.errors import PalaestraError
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import ExecutionResult, Shell, Slot
from palaestra_slots.sandbox.slot_tools import SLOT_TOOLS, run_slot_tool, tool_result


class ExecTool:
    """Runs tool calls of an environment's hooks in one slot."""

    def __init__(self, slot: Callable[[], Awaitable[Slot]], tools: Callable[[], ToolRuntime]) -> None:
        self._slot = slot
        self._tools = tools

    async def __call__(
        self, tool: str | ToolCall, args: Mapping[str, JSON] | None = None, timeout: float = 300
    ) -> ToolResult:
        """Run one call. The result has the call's `uniq_id`. Raises `PalaestraError`; other expected failures are
        returned in the result."""
        call = tool if isinstance(tool, ToolCall) else ToolCall(tool, dict(args or {}))
        done = await self._done(call, float(timeout))
        return ToolResult(done.success, done.output, done.error, done.metadata, call.uniq_id)

    async def _done(self, call: ToolCall, timeout_s: float) -> ExecutionResult:
        if call.error:
            return tool_result(error=call.error)
        try:
            if call.name in SLOT_TOOLS:
                return await run_slot_tool(await self._slot(), self._shell, call.name, call.arguments, timeout_s)
            outcome = await self._tools().call(call.name, call.arguments)
        except PalaestraError:
            raise
        except (OSError, ValueError, KeyError) as error:
            return tool_result(error=f"{type(error).__name__}: {error}")
        failure = outcome.error if isinstance(outcome.reply, str) else outcome.reply.get("error")
        return tool_result(outcome.text, str(failure or ""))

    async def _shell(self) -> Shell:
        return await self._tools().state(StatefulShell).of(await self._slot())
