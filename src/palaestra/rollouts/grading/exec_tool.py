"""`exec_tool`: how the contract's set-up and verification hooks run things in a rollout's workspace.

Both call shapes in use are accepted: `exec_tool("bash", {"command": ...}, timeout=600)` and `exec_tool(ToolCall(...))`.
The answer is an `ExecutionResult` whose metadata holds both `exit_code` and `returncode`. As in the contract, output is
standard output, then standard error after a line `[stderr]`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from palaestra.core.errors import InfraError
from palaestra.core.types import JSON
from palaestra.sandbox.slot import WORKSPACE, ExecutionResult, Slot
from palaestra.tools.builtin.terminal_stateful import StatefulShell
from palaestra.tools.call_text import ToolCall
from palaestra.tools.runtime.runtime import ToolRuntime

HOOK_OUTPUT_BYTES = 4 << 20
"""How much output a hook gets; the environment's own code reads it, not the model."""

SHELL_NAMES = frozenset({"bash", "terminal"})
STATEFUL_NAMES = frozenset({"bash_stateful", "terminal_stateful"})


class ExecTool:
    """Runs tool calls of an environment's hooks in one slot."""

    def __init__(self, slot: Callable[[], Awaitable[Slot]], tools: Callable[[], ToolRuntime]) -> None:
        self._slot = slot
        self._tools = tools

    async def __call__(
        self, tool: str | ToolCall, args: Mapping[str, JSON] | None = None, timeout: float = 300
    ) -> ExecutionResult:
        """Run one call. Raises `InfraError`; every other failure is in the result."""
        if isinstance(tool, ToolCall) and tool.error:
            return _result(error=tool.error)
        name, arguments = (tool.name, tool.arguments) if isinstance(tool, ToolCall) else (tool, args or {})
        try:
            return await self._run(name, arguments, float(timeout))
        except InfraError:
            raise
        except (OSError, ValueError, KeyError) as error:
            return _result(error=f"{type(error).__name__}: {error}")

    async def _run(self, name: str, args: Mapping[str, JSON], timeout_s: float) -> ExecutionResult:
        """Commands and files go to the slot directly: a hook gets more output than a model, and whole files."""
        if name in SHELL_NAMES or name in STATEFUL_NAMES:
            slot, command, limit_s = await self._slot(), str(args["command"]), float(args.get("timeout") or timeout_s)
            if name in STATEFUL_NAMES:
                shell = await self._tools().state(StatefulShell).of(slot)
                return await shell.run(command, timeout_s=limit_s, max_output_bytes=HOOK_OUTPUT_BYTES)
            cwd = str(args.get("workdir") or WORKSPACE)
            return await slot.execute(
                command, cwd=cwd, timeout_s=limit_s, max_output_bytes=HOOK_OUTPUT_BYTES, stderr=True
            )
        if name == "read_file":
            return _result(await (await self._slot()).read_text(str(args["path"])))
        if name == "write_file":
            await (await self._slot()).write_text(str(args["path"]), str(args["content"]))
            return _result(f"wrote {args['path']}")
        outcome = await self._tools().call(name, args)
        error = outcome.error if isinstance(outcome.reply, str) else outcome.reply.get("error")
        return _result(outcome.text, str(error or ""))


def _result(output: str = "", error: str = "") -> ExecutionResult:
    code = 1 if error else 0
    return ExecutionResult(not error, output, error, metadata={"exit_code": code, "returncode": code})
