"""Runs the sandbox tools of Atropos and Hermes in a slot by name: `bash`, `bash_stateful`, `read_file` and
`write_file`. The names `terminal` and `terminal_stateful` mean the same as the first two.

These tools are meant for code: their results hold whole files, and more output than a model should read. The tools for
models are in `palaestra.tools`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from palaestra_slots.core.errors import InfraError
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import WORKSPACE, ExecutionResult, Shell, Slot

MAX_OUTPUT_BYTES = 4 << 20
SHELL_NAMES = frozenset({"bash", "terminal"})
STATEFUL_NAMES = frozenset({"bash_stateful", "terminal_stateful"})
SLOT_TOOLS = SHELL_NAMES | STATEFUL_NAMES | {"read_file", "write_file"}


async def run_slot_tool(
    slot: Slot,
    shell: Callable[[], Awaitable[Shell]],
    name: str,
    args: Mapping[str, JSON],
    timeout_s: float,
    *,
    max_output_bytes: int = MAX_OUTPUT_BYTES,
) -> ExecutionResult:
    """Run one of `SLOT_TOOLS`; `args["timeout"]` replaces `timeout_s`. `shell` opens the slot's stateful shell.

    Every failure is reported in the result, except `InfraError`, which is raised.
    """
    try:
        limit_s = float(args.get("timeout") or timeout_s)
        if name in STATEFUL_NAMES:
            command = str(args["command"])
            return await (await shell()).run(command, timeout_s=limit_s, max_output_bytes=max_output_bytes)
        if name in SHELL_NAMES:
            cwd = str(args.get("workdir") or WORKSPACE)
            return await slot.execute(
                str(args["command"]), cwd=cwd, timeout_s=limit_s, max_output_bytes=max_output_bytes, stderr=True
            )
        if name == "read_file":
            return tool_result(await slot.read_text(str(args["path"])))
        if name == "write_file":
            await slot.write_text(str(args["path"]), str(args["content"]))
            return tool_result(f"wrote {args['path']}")
    # First, because such errors are OSErrors too, and a lost slot is not the mistake of the model.
    except InfraError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        return tool_result(error=f"{type(error).__name__}: {error}")
    return tool_result(error=f"Unknown tool: {name}. A slot runs {', '.join(sorted(SLOT_TOOLS))}")


def tool_result(output: str = "", error: str = "") -> ExecutionResult:
    """Return the result of a call that ran no command."""
    code = 1 if error else 0
    return ExecutionResult(not error, output, error, metadata={"exit_code": code, "returncode": code})
