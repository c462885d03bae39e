"""The `terminal` tool: runs one shell command in the rollout's slot until it ends or reaches its time limit, or starts
it in the background for the `process` tool.

Invariant (S5): the reply is bounded whatever a command prints, and reports the full size. If the middle was cut out, a
file in the slot has all output, or its first `full_output_bytes` bytes if it is very long; the file is missing only if
it could not be written. A command is never run twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from palaestra.tools import parameters
from palaestra.tools.human.approval import Approvals
from palaestra.tools.tool import FunctionTool, ToolMistake, ToolReply, ToolRun, ToolSchema
from palaestra_slots.core.errors import InfraError
from palaestra_slots.core.printable import reason
from palaestra_slots.core.reply_size import head_within, sent_chars, tail_within
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import WORKSPACE, ExecutionResult, Slot

MIN_TIMEOUT_S, MAX_TIMEOUT_S = 1.0, 600.0
MAX_OUTPUT_CHARS = 50_000
"""The maximum number of characters of output in a reply, head and tail together."""
HEAD_CHARS = 20_000
MAX_KEPT_BYTES = 2 << 20
"""The maximum number of bytes of output that are captured; output beyond the reply is written to a file in the slot."""
MAX_COMMAND_BYTES = (128 << 10) - 1
"""The maximum length of one program argument on Linux, in bytes."""
SPILL_DIR = "/tmp/terminal-output"  # noqa: S108 - a path inside the slot, which is not shared

MIN_CHECK_INTERVAL_S = 30.0


class ContractReplies:
    """Makes the terminal tools reply like the sandbox server of the project's interface contract, if a task's tools
    share an object of this class. In `output`, standard error follows standard output after a line `[stderr]`. Both
    streams are also separate keys, and further keys describe the sandbox."""


_FACTS = ("returncode", "timeout", "sandboxed", "network_isolated", "stateful")

_BACKGROUND: Mapping[str, JSON] = {
    "background": parameters.flag(
        "Run in the background and return immediately with a session_id for the process tool. Use for servers, "
        "watchers and long jobs. The process runs until it exits, is killed, or the task ends; timeout does "
        "not apply."
    ),
    "pty": parameters.flag("With background: allocate a 30x120 pseudo-terminal, for programs that require one."),
    "check_interval": parameters.integer(
        "With background: report new output every N seconds (minimum 30).", {"minimum": 1}
    ),
    "notify_on_complete": parameters.flag("With background: report when the process exits."),
    "watch_patterns": {
        "type": "array",
        "items": {"type": "string", "minLength": 1},
        "maxItems": 16,
        "description": "With background: report output lines that contain one of these strings. Use for rare events.",
    },
}
"""Parameters of background commands. The reports on such a command go to the registry's `Notifications`."""

SCHEMA = ToolSchema(
    name="terminal",
    description=(
        "Run a bash command in the sandbox. Returns stdout and stderr combined, and the exit code. Each call starts "
        f"a new shell in {WORKSPACE}: files persist, but cd, variables and activated environments do not. There is "
        "no TTY and no stdin, so use non-interactive flags and do not open editors or pagers. Long output is "
        "truncated in the middle; full_output_path names a file with the complete output. For servers and "
        "long-running jobs, set background and use the process tool. Prefer read_file, patch and search_files for "
        "reading, editing and searching files, if you have them."
    ),
    parameters={
        "command": parameters.text("The command, passed to bash -c."),
        "timeout": parameters.integer(
            "Timeout in seconds, 1 to 600. On timeout, the command and all its child processes are killed, and "
            "the output so far is returned with exit code 124. Omit for the default."
        ),
        "workdir": parameters.text(f"Working directory, absolute or relative to {WORKSPACE} (the default)."),
        **_BACKGROUND,
    },
    required=("command",),
)


def clamp_timeout(timeout_s: float) -> float:
    """Return the time limit in seconds, clamped to `MIN_TIMEOUT_S` and `MAX_TIMEOUT_S`."""
    return float(min(max(timeout_s, MIN_TIMEOUT_S), MAX_TIMEOUT_S))


def check_command(command: str, most_bytes: int | None = None) -> None:
    """Raise `ToolMistake` for a command line that cannot be passed to a program, or that has more than `most_bytes`
    bytes."""
    try:
        size = len(command.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        raise ToolMistake(
            "The command contains half of a surrogate pair; nothing was run", output="", exit_code=-1
        ) from None
    if "\0" in command:
        raise ToolMistake(
            "The command contains a NUL character; nothing was run. Write such bytes with printf '\\0'",
            output="",
            exit_code=-1,
        )
    if most_bytes is not None and size > most_bytes:
        raise ToolMistake(
            f"The command has {size} bytes, but at most {most_bytes} can be run; nothing was run. Write the long part "
            "to a file with write_file, and use the file",
            output="",
            exit_code=-1,
        )


async def run_terminal(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    """Run `command`; the reply has `output`, `exit_code` and `error`. `error` is null unless the command was stopped,
    did not run or lost a process to the memory limit."""
    check_command(arguments["command"], MAX_COMMAND_BYTES)
    approvals = run.found_state(Approvals)
    if approvals is not None and (refusal := await approvals.refusal(arguments["command"], run.task_id)) is not None:
        return {**_reply("", -1, refusal), "status": "blocked"}
    if arguments.get("background"):
        return await _start_in_background(arguments, run)
    misplaced = [
        name for name in ("pty", "check_interval", "notify_on_complete", "watch_patterns") if arguments.get(name)
    ]
    if misplaced:
        raise ToolMistake(f"{misplaced[0]} needs background=true; nothing was run", output="", exit_code=-1)
    timeout_s = clamp_timeout(arguments.get("timeout", run.timeout_s))
    slot = await run.slot()
    workdir = await _folder(slot, arguments.get("workdir"))
    apart = run.found_state(ContractReplies) is not None
    try:
        result = await slot.execute(
            arguments["command"], cwd=workdir, timeout_s=timeout_s, max_output_bytes=MAX_KEPT_BYTES, stderr=apart
        )
    except (FileNotFoundError, NotADirectoryError):
        return _reply("", 1, f"workdir {workdir} is not a directory; nothing was run. Use a directory such as /")
    except InfraError:
        # A lost slot is also an OSError, but not about the directory.
        raise
    except OSError as error:
        return _reply("", 1, f"workdir {workdir} cannot be used: {reason(error)}; nothing was run")
    reply = await reply_to(slot, result, timeout_s)
    return reply | contract_facts(result) if apart else reply


async def _folder(slot: Slot, workdir: str | None) -> str:
    """Return the folder in which a command starts."""
    if not workdir:
        return WORKSPACE
    from palaestra.tools.files.text_files import in_full  # imported here, because most calls name no folder

    return await in_full(slot, workdir)


async def _start_in_background(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    """Start `command` as a session of the task. The reply has its `session_id`, or the reason why it was not
    started."""
    # imported here, because most rollouts start nothing in the background
    from palaestra_slots.processes.registry import ProcessRegistry
    from palaestra_slots.processes.session import Watch

    slot = await run.slot()
    workdir = await _folder(slot, arguments.get("workdir"))
    interval_s = arguments.get("check_interval")
    watch = Watch(
        patterns=tuple(arguments.get("watch_patterns", ())),
        interval_s=None if interval_s is None else max(float(interval_s), MIN_CHECK_INTERVAL_S),
        on_exit=bool(arguments.get("notify_on_complete")),
    )
    try:
        session = await run.state(ProcessRegistry).spawn(
            slot,
            arguments["command"],
            task_id=run.process_task,
            cwd=workdir,
            session_key=run.session_key,
            use_pty=bool(arguments.get("pty")),
            watch=watch,
        )
    except InfraError:
        raise
    # The task has as many background processes as it may have, or the kernel allows no further one (EAGAIN).
    except BlockingIOError as error:
        return _reply("", -1, f"Nothing was started: {error.strerror}.")
    except (FileNotFoundError, NotADirectoryError):
        return _reply("", 1, f"workdir {workdir} is not a directory; nothing was started. Use a directory such as /")
    except OSError as error:
        return _reply("", 1, f"Nothing was started in {workdir}: {reason(error)}")
    extra: dict[str, JSON] = {"session_id": session.id, "pid": session.status.pid}
    if interval_s is not None and interval_s < MIN_CHECK_INTERVAL_S:
        extra["check_interval_note"] = f"check_interval was raised to {MIN_CHECK_INTERVAL_S:g}s."
    return {**_reply("Background process started", 0, None), **extra}


async def reply_to(slot: Slot, result: ExecutionResult, timeout_s: float) -> dict[str, JSON]:
    """Return the tool's reply for a finished command. Long output is truncated; the reply then states its full size."""
    kept = None
    if result.metadata.get("truncated"):
        names = ("output_total_bytes", "full_output_path", "full_output_bytes")
        kept = {name: result.metadata[name] for name in names if name in result.metadata}
    output, extra = await bounded(slot, result.output, kept)
    return {**_reply(output, result.exit_code, stopped(result, timeout_s)), **extra}


async def bounded(slot: Slot, text: str, kept: Mapping[str, JSON] | None) -> tuple[str, dict[str, JSON]]:
    """Return the output for a reply, and the keys that describe the cut if the output is not complete.

    `kept` is given if `text` is incomplete: it has `output_total_bytes` and the path of the saved output, if any.
    """
    if kept is not None:
        return cut_output(text, f"{kept['output_total_bytes']} bytes"), dict(kept)
    if _fits(text):
        return text, {}
    totals: dict[str, JSON] = {"output_total_chars": len(text)}
    path = await _spill(slot, text)
    if path is not None:
        totals["full_output_path"] = path
    return cut_output(text, f"{len(text)} characters"), totals


def contract_facts(result: ExecutionResult) -> dict[str, JSON]:
    """Return the keys that `ContractReplies` adds to a reply."""
    facts = {name: result.metadata[name] for name in _FACTS}
    streams = {name: str(result.metadata[name]) for name in ("stdout", "stderr") if name in result.metadata}
    return facts | {
        name: text if _fits(text) else cut_output(text, f"{len(text)} characters") for name, text in streams.items()
    }


def cut_output(text: str, total: str) -> str:
    """Return the head and the tail of an output, with a line between them that marks the cut: `MAX_OUTPUT_CHARS`
    characters in all, and at most twice as many as they are sent."""
    note = f"\n... [OUTPUT CUT HERE: this is the beginning and the end of {total}] ...\n"
    tail = MAX_OUTPUT_CHARS - HEAD_CHARS - len(note)
    head = head_within(text[:HEAD_CHARS], 2 * HEAD_CHARS)
    return head + note + tail_within(text[len(head) :][-tail:], 2 * tail)


def _fits(text: str) -> bool:
    if len(text) <= MAX_OUTPUT_CHARS // 3:  # no character is sent as more than six, so most outputs need no count
        return True
    return len(text) <= MAX_OUTPUT_CHARS and sent_chars(text) <= 2 * MAX_OUTPUT_CHARS


async def _spill(slot: Slot, text: str) -> str | None:
    """Write the whole output into the slot, under a name derived from its content (D2). Returns its path, or None if
    that fails."""
    data = text.encode("utf-8", "replace")
    path = f"{SPILL_DIR}/{hashlib.sha256(data).hexdigest()[:12]}.txt"
    try:
        await slot.write_bytes(path, data)
    except InfraError:
        raise
    except OSError:  # the file system may be full or read-only
        return None
    return path


def stopped(result: ExecutionResult, timeout_s: float) -> str | None:
    """Return why the sandbox ended a command, as the model reads it; None if it did not."""
    if result.metadata.get("timeout"):
        return (
            f"Command timed out after {timeout_s:g}s and was killed with everything it had started. The output up to "
            "then is shown. Pass a larger timeout (at most 600), or split the work."
        )
    if result.metadata.get("oom"):
        return "A process of this command was killed because it used more memory than the sandbox allows."
    return None


def _reply(output: str, exit_code: int, error: str | None) -> dict[str, JSON]:
    return {"output": output, "exit_code": exit_code, "error": error}


TERMINAL = FunctionTool(schema=SCHEMA, run=run_terminal, toolset="terminal")
