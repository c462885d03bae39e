"""The `terminal_stateful` tool: runs commands in the rollout's shell, which keeps its directory, variables and
functions.

A command has no terminal and no input, as in `terminal`. Invariant: there is one such shell per rollout, and its
commands run one after the other. The reply reports a restart of the shell, which loses its state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from palaestra.tools import parameters
from palaestra.tools.builtin.terminal import (
    MAX_KEPT_BYTES,
    ContractReplies,
    check_command,
    clamp_timeout,
    contract_facts,
    reply_to,
)
from palaestra.tools.human.approval import Approvals
from palaestra.tools.tool import FunctionTool, ToolMistake, ToolReply, ToolRun, ToolSchema
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import WORKSPACE, Shell, Slot

SCHEMA = ToolSchema(
    name="terminal_stateful",
    description=(
        f"Run a command in a persistent bash shell that starts in {WORKSPACE}: the directory, variables, functions "
        "and activated environments persist between calls. Returns stdout and stderr combined, and the exit code. "
        "There is no TTY and no stdin. Long output is truncated in the middle; full_output_path names a file with "
        "the complete output. If the shell ends (exit, exec, or a command that had to be killed together with the "
        "shell), the reply contains shell_restarted, and the next command runs in a new shell."
    ),
    parameters={
        "command": parameters.text("The command."),
        "timeout": parameters.integer(
            "Timeout in seconds, 1 to 600. On timeout, the command is stopped, and the output so far is "
            "returned with exit code 124; the shell survives if possible. Omit for the default."
        ),
    },
    required=("command",),
)


class StatefulShell:
    """A rollout's one shell, opened on first use."""

    def __init__(self) -> None:
        self._opening = asyncio.Lock()
        self._shell: Shell | None = None

    async def of(self, slot: Slot) -> Shell:
        """Return the rollout's shell, opened in its slot if necessary."""
        async with self._opening:
            if self._shell is None:
                self._shell = await slot.shell()
            return self._shell


async def run_terminal_stateful(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    """Run `command`; the reply is like that of `terminal`, with `shell_restarted` if the shell was restarted."""
    check_command(arguments["command"])
    timeout_s = clamp_timeout(arguments.get("timeout", run.timeout_s))
    approvals = run.found_state(Approvals)
    if approvals is not None and (refusal := await approvals.refusal(arguments["command"], run.task_id)) is not None:
        return {"output": "", "exit_code": -1, "error": refusal, "status": "blocked"}
    slot = await run.slot()
    shell = await run.state(StatefulShell).of(slot)
    try:
        result = await shell.run(arguments["command"], timeout_s=timeout_s, max_output_bytes=MAX_KEPT_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise ToolMistake(
            f"The shell has ended, and a new one cannot start: {WORKSPACE} is not a directory; nothing was run. "
            "Create it again, by writing a file into it or with a different terminal tool"
        ) from None
    restarted = {"shell_restarted": True} if result.metadata.get("shell_restarted") else {}
    facts = contract_facts(result) if run.found_state(ContractReplies) is not None else {}
    return {**await reply_to(slot, result, timeout_s), **restarted, **facts}


TERMINAL_STATEFUL = FunctionTool(schema=SCHEMA, run=run_terminal_stateful, toolset="terminal_stateful")
