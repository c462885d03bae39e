"""The `execute_code` tool: a Python program in the rollout's slot that calls the agent's other tools as functions.

It suits work with many calls and few decisions: the program loops, filters and counts, and the model reads only what
the program prints. Variables do not persist between programs. A program's calls are checked, run and limited like the
model's calls, and recorded with the turn. Apart from these calls, the program reaches only what its slot can reach.

Invariant: output, calls and time are bounded whatever the program does, and everything that it sends is checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files

from palaestra.tools import parameters
from palaestra.tools.builtin.terminal import MAX_KEPT_BYTES, bounded, clamp_timeout
from palaestra.tools.files.text_files import as_mistake
from palaestra.tools.inner_calls import InnerCalls
from palaestra.tools.programs.host_channel import (
    MAX_REQUEST_BYTES,
    MODULE,
    BrokenChannel,
    ProgramChannel,
    module_text,
)
from palaestra.tools.tool import FunctionTool, ToolMistake, ToolOutcome, ToolReply, ToolRun, ToolSchema
from palaestra_slots.core.errors import SandboxError
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import WORKSPACE, Process, Slot

MAX_CALLS = 50
"""The maximum number of calls that one program may make."""

FOLDER = "/tmp/execute_code"  # noqa: S108 - a path inside the slot, which is not shared
NOT_FROM_PROGRAMS = frozenset({"execute_code", "delegate_task", "clarify"})
"""Tools that a program cannot call, because they start another program or agent, or wait for a person."""

_CLEAN_UP_S = 10.0
_CUT_OFF = "The program was ended together with its call channel."
_NOT_FOUND = 127
# `-I -S`: the supervisor must not import the agent's files, such as a json.py in the workspace or a sitecustomize.
_START = """\
folder="$TMPDIR/{name}"
[ -d "$folder" ] || folder=/tmp/{name}
command -v python3 > /dev/null || exit 127
exec python3 -I -S "$folder/supervisor.py" "$folder"
"""
"""Starts the supervisor. If a slot has no file system of its own, commands find the /tmp of the file channel in
$TMPDIR."""

SCHEMA = ToolSchema(
    name="execute_code",
    description=(
        "Run a Python program in the sandbox that can call your other tools as functions. Returns the program's "
        "output and exit code. Use it when a task needs many tool calls or produces much intermediate output: loop, "
        f"filter and count in the program, and print only what you need. `from {MODULE} import terminal, read_file` "
        "imports functions with the parameters of your tools; each returns the tool's reply, a dict with the same "
        f"keys (`error` on failure) or text. At most {MAX_CALLS} tool calls. Each program starts in a new process in "
        f"{WORKSPACE}, without stdin; files persist, variables do not."
    ),
    parameters={
        "code": parameters.text("The Python code to run."),
        "timeout": parameters.integer(
            "Timeout in seconds, 1 to 600, for the program with all its tool calls. On timeout, the program is "
            "killed, and its output so far is returned with exit code 124. Omit for the default."
        ),
    },
    required=("code",),
)


@dataclass(slots=True)
class Programs:
    """Numbers the folders of a conversation's programs, so that identical rollouts see identical paths.

    `prefix` separates conversations that share a slot.
    """

    prefix: str = ""
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def folder(self) -> str:
        """Return the folder of the next program."""
        return f"{FOLDER}/{self.prefix}{next(self.numbers)}"


@dataclass(slots=True)
class _Calls:
    """The calls of one program."""

    run: ToolRun
    made: int = 0

    async def answer(self, request: bytes | None) -> bytes:
        """Run one call and return the payload of the answer. Raises `PalaestraError` as the tool does."""
        if request is None:
            return _refusal_reply(f"the arguments of a call may have at most {MAX_REQUEST_BYTES} bytes")
        try:
            asked = json.loads(request)
            name, arguments = str(asked["tool"]), asked["arguments"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return _refusal_reply("this is not a call")
        if self.made >= MAX_CALLS:
            return _refusal_reply(f"a program may make at most {MAX_CALLS} calls; nothing was run")
        self.made += 1
        outcome = await self._outcome(name, arguments)
        self.run.state(InnerCalls).called(name, arguments, outcome.text)
        reply = outcome.reply
        return json.dumps({"reply": reply if isinstance(reply, str) else dict(reply)}).encode()

    async def _outcome(self, name: str, arguments: JSON) -> ToolOutcome:
        if name in NOT_FROM_PROGRAMS:
            return ToolOutcome.refused(f"{name} cannot be called by a program; call it yourself.")
        if not isinstance(arguments, dict):
            return ToolOutcome.refused("Invalid arguments: expected a JSON object.")
        return await self.run.call(name, arguments)


async def run_execute_code(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    """Run `code`; the reply has `output`, `exit_code`, `error` and `tool_calls_made`."""
    timeout_s = clamp_timeout(arguments.get("timeout", run.timeout_s))
    slot, calls = await run.slot(), _Calls(run)
    folder = run.state(Programs).folder()
    process: Process | None = None
    channel: ProgramChannel | None = None
    try:
        async with asyncio.timeout(timeout_s) as limit:
            await _write_program(slot, folder, str(arguments["code"]), run)
            process = await _spawn_program(slot, folder)
            channel = ProgramChannel(process, MAX_KEPT_BYTES)
            status = await channel.serve(calls.answer)
            code, error = (status, None) if status is not None else (await _own_end(process), _CUT_OFF)
    except TimeoutError:
        # `ToolStuck`, the infrastructure failure of a call, is a TimeoutError too.
        if not limit.expired():
            raise
        code, error = 124, f"The program took longer than {timeout_s:g}s and was killed with everything it had started."
    except BrokenChannel as problem:
        code, error = -1, f"The program was ended: its call channel received {problem}."
    finally:
        await _clean_up(slot, folder, process)
    output, kept = _program_output(channel)
    output, more = await bounded(slot, output, kept)
    return {"output": output, "exit_code": code, "error": error, "tool_calls_made": calls.made, **more}


async def _write_program(slot: Slot, folder: str, code: str, run: ToolRun) -> None:
    """Write the program, its module and its supervisor into the slot. Raises `ToolMistake` if that fails."""
    callable_ones = [schema for schema in run.schemas() if schema.name not in NOT_FROM_PROGRAMS]
    supervisor = files("palaestra.tools.programs").joinpath("program_supervisor.py").read_text(encoding="utf-8")
    module = module_text(callable_ones)
    with as_mistake("Nothing was run: the program could not be written into the sandbox"):
        for name, text in (("program.py", code), (f"{MODULE}.py", module), ("supervisor.py", supervisor)):
            await slot.write_bytes(f"{folder}/{name}", text.encode("utf-8", "replace"))


async def _spawn_program(slot: Slot, folder: str) -> Process:
    with as_mistake("Nothing was run: the program could not be started"):
        return await slot.spawn(_START.format(name=folder.removeprefix("/tmp/")), cwd=WORKSPACE)  # noqa: S108


async def _own_end(process: Process) -> int:
    """Return the exit code of a supervisor that ended without reporting its program's exit code. Raises `ToolMistake`
    if the slot has no Python."""
    status = await process.wait()
    if status.exit_code == _NOT_FOUND and not status.output_total_bytes:
        raise ToolMistake("There is no python3 in this sandbox; nothing was run. Use the terminal")
    return -1 if status.exit_code is None else status.exit_code


def _program_output(channel: ProgramChannel | None) -> tuple[str, dict[str, JSON] | None]:
    """Return the output, and a mapping with its full size if a part was dropped."""
    if channel is None:
        return "", None
    head, tail = channel.output.parts()
    missing = channel.output.total - len(head) - len(tail)
    gap = f"\n… {missing} bytes left out …\n" if missing > 0 else ""
    total = {"output_total_bytes": channel.output.total} if channel.output.truncated else None
    return (head + gap.encode() + tail).decode(errors="replace"), total


async def _clean_up(slot: Slot, folder: str, process: Process | None) -> None:
    """Kill the program and remove its files, even if the call is cancelled. Errors are ignored, because the slot may be
    gone.

    A background process that the program left on purpose stays, as with a shell command.
    """

    async def both() -> None:
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                await process.forget()
        await slot.remove(folder)

    with contextlib.suppress(SandboxError, OSError, TimeoutError):
        async with asyncio.timeout(_CLEAN_UP_S):
            await asyncio.shield(both())


def _refusal_reply(why: str) -> bytes:
    return json.dumps({"refused": why}).encode()


EXECUTE_CODE = FunctionTool(schema=SCHEMA, run=run_execute_code, toolset="code_execution")
