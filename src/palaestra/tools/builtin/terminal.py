"""The `terminal` tool: one shell command in the rollout's slot, run to its end or its time limit.

Not for background processes: they come with the process registry; until then `background` is answered with an error.

Invariant (S5): the reply is bounded whatever a command prints, tells the true total, and where the middle was cut out
and the whole was small enough to keep, names a file in the slot that holds all of it. A command is never run twice.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Mapping

from palaestra.core.errors import InfraError
from palaestra.core.types import JSON
from palaestra.sandbox.base import DEFAULT_OUTPUT_BYTES, WORKSPACE, ExecutionResult, Slot
from palaestra.tools.schema import Tool, ToolReply, ToolRun, ToolSchema

MIN_TIMEOUT_S, MAX_TIMEOUT_S = 1.0, 600.0
MAX_SPILL_BYTES = 8 << 20
"""How much output is kept on the way, to be written into the slot when the reply cannot hold it."""
SPILL_DIR = "/tmp/terminal-output"  # noqa: S108 - a path inside the slot, which nobody else shares

_NO_BACKGROUND = (
    "background=true is not supported yet and the command was not run. Run it in the foreground with a timeout, "
    "or start it with nohup and & and look at its log file in a later call."
)

SCHEMA = ToolSchema(
    name="terminal",
    description=(
        "Run a shell command (bash) in the sandbox and return its combined stdout and stderr with its exit code. "
        f"Every call starts a fresh shell in {WORKSPACE}: cd, variables and activated environments do not carry over, "
        "files do. There is no terminal and no stdin, so use non-interactive flags and avoid editors and pagers. "
        "Long output keeps its beginning and end. To read, edit or search files prefer read_file, patch and "
        "search_files where you have them."
    ),
    parameters={
        "command": {"type": "string", "description": "The command line, passed to bash -c as it is."},
        "timeout": {
            "type": "integer",
            "description": (
                "Time limit in seconds, 1 to 600. At the limit the command and everything it started is killed and the "
                "output up to then is returned with exit code 124. Leave it out for the usual limit."
            ),
        },
        "workdir": {
            "type": "string",
            "description": f"Directory to run in, absolute or relative to {WORKSPACE}, which is the default.",
        },
        "background": {"type": "boolean", "description": "Not supported yet; leave it out.", "default": False},
    },
    required=("command",),
)


def clamp_timeout(timeout_s: float) -> float:
    """A time limit in seconds within what any call may ask for."""
    return min(max(float(timeout_s), MIN_TIMEOUT_S), MAX_TIMEOUT_S)


async def run_terminal(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    """Run `command`; the reply has `output`, `exit_code` and `error` (null unless something stopped the command)."""
    if arguments.get("background"):
        return _reply("", -1, _NO_BACKGROUND)
    timeout_s = clamp_timeout(arguments.get("timeout", run.timeout_s))
    slot, seen = await run.slot(), OutputRecord()
    try:
        result = await slot.execute(
            arguments["command"],
            cwd=arguments.get("workdir", WORKSPACE),
            timeout_s=timeout_s,
            max_output_bytes=DEFAULT_OUTPUT_BYTES,
            on_output=seen.add,
        )
    except (FileNotFoundError, NotADirectoryError):
        return _reply("", 1, f"workdir {arguments.get('workdir', WORKSPACE)} is not a directory; nothing was run")
    reply = _reply(result.output, result.exit_code, _stopped(result, timeout_s))
    if result.metadata.get("truncated"):
        reply |= await _totals(slot, seen)
    return reply


class OutputRecord:
    """Counts a command's output as it streams and keeps it while it is small enough to be kept whole."""

    def __init__(self) -> None:
        self.total_chars = 0
        self._kept: bytearray | None = bytearray()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, chunk: bytes) -> None:
        """Take the next piece of output."""
        self.total_chars += len(self._decoder.decode(chunk))
        if self._kept is not None:
            self._kept += chunk
            if len(self._kept) > MAX_SPILL_BYTES:
                self._kept = None

    def whole(self) -> bytes | None:
        """All of the output, or None when it was more than `MAX_SPILL_BYTES`."""
        return None if self._kept is None else bytes(self._kept)


async def _totals(slot: Slot, seen: OutputRecord) -> dict[str, JSON]:
    """What the model needs to know about cut output. The file's name derives from its content, for exact replays."""
    totals: dict[str, JSON] = {"output_total_chars": seen.total_chars}
    whole = seen.whole()
    if whole is not None:
        path = f"{SPILL_DIR}/{hashlib.sha256(whole).hexdigest()[:12]}.txt"
        try:
            await slot.write_bytes(path, whole)
        except InfraError:
            raise
        except OSError:  # a full or read-only file system: the key is only there when the file is
            return totals
        totals["full_output_path"] = path
    return totals


def _stopped(result: ExecutionResult, timeout_s: float) -> str | None:
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


TERMINAL = Tool(schema=SCHEMA, run=run_terminal, toolset="terminal")
