"""`exec_tool`: how the contract's set-up and verification hooks run things in a rollout's workspace.

Both call shapes in use are taken: `exec_tool("bash", {"command": ...}, timeout=600)` and `exec_tool(ToolCall(...))`.
The answer is an `ExecutionResult` whose metadata holds both `exit_code` and `returncode`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import msgspec

from palaestra.core.errors import InfraError
from palaestra.core.types import JSON
from palaestra.sandbox.slot import WORKSPACE, ExecutionResult, Slot
from palaestra.tools.builtin.terminal_stateful import StatefulShell
from palaestra.tools.runtime.runtime import ToolRuntime
from palaestra.tools.tool import ToolCall

HOOK_OUTPUT_BYTES = 4 << 20
"""How much output a hook gets back; it is the environment's own code, not the model, that reads it."""

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
        """Run one call. Raises `InfraError` when the world failed; everything else is in the result."""
        if isinstance(tool, ToolCall) and tool.error:
            return _failure(tool.error)
        name, arguments = (tool.name, tool.arguments) if isinstance(tool, ToolCall) else (tool, args or {})
        try:
            return await self._run(name, arguments, float(timeout))
        except InfraError:
            raise
        except (OSError, ValueError, KeyError) as error:
            return _failure(f"{type(error).__name__}: {error}")

    async def _run(self, name: str, args: Mapping[str, JSON], timeout_s: float) -> ExecutionResult:
        if name in SHELL_NAMES:
            slot = await self._slot()
            return await slot.execute(
                str(args["command"]),
                cwd=str(args.get("workdir") or WORKSPACE),
                timeout_s=float(args.get("timeout") or timeout_s),
                max_output_bytes=HOOK_OUTPUT_BYTES,
            )
        if name in STATEFUL_NAMES:
            shell = await self._tools().state(StatefulShell).of(await self._slot())
            timeout_s = float(args.get("timeout") or timeout_s)
            return await shell.run(str(args["command"]), timeout_s=timeout_s, max_output_bytes=HOOK_OUTPUT_BYTES)
        if name == "read_file":
            return _success(await (await self._slot()).read_text(str(args["path"])))
        if name == "write_file":
            await (await self._slot()).write_text(str(args["path"]), str(args["content"]))
            return _success(f"wrote {args['path']}")
        return _from_reply(await self._tools().handle(name, args))


def _success(output: str) -> ExecutionResult:
    return ExecutionResult(True, output, metadata={"exit_code": 0, "returncode": 0})


def _failure(error: str, output: str = "") -> ExecutionResult:
    return ExecutionResult(False, output, error, metadata={"exit_code": 1, "returncode": 1})


def _from_reply(reply: str) -> ExecutionResult:
    try:
        answer = msgspec.json.decode(reply)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return _success(reply)
    error = answer.get("error") if isinstance(answer, dict) else None
    return _failure(str(error), reply) if error else _success(reply)
