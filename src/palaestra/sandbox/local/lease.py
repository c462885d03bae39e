"""What the parts of a local slot share: the lease that every request carries, the environment, results."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from palaestra.core.errors import StaleLease
from palaestra.core.types import JSON
from palaestra.sandbox.local.client import SlotServer
from palaestra.sandbox.local.requests import CommandNotStarted
from palaestra.sandbox.slot import ExecutionResult, Rung
from palaestra.sandbox.slotd.protocol import command_result
from palaestra.sandbox.slotd.protocol.frames import USUAL_OUTPUT_BYTES, USUAL_TIMEOUT_S

MAX_OUTPUT_BYTES = 16 << 20
MAX_STDIN_BYTES = 32 << 20

_SHELLS: Mapping[int, str | None] = {0: None, command_result.BASH: "bash", command_result.SH: "sh"}
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
_ENOENT = 2


@dataclass
class Lease:
    """One lease of one slot at its server."""

    server: SlotServer
    slot_id: str
    epoch: int
    rung: Rung
    released: bool = False
    names: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self._rung = self.rung.label

    def fields(self) -> dict[str, JSON]:
        """What names this lease in a request. Raises `StaleLease` after release."""
        if self.released:
            raise StaleLease(f"the lease of {self.slot_id} (epoch {self.epoch}) has ended")
        return {"slot": self.slot_id, "epoch": self.epoch}

    def result(self, fields: Mapping[str, JSON], data: bytes, timeout_s: float) -> ExecutionResult:
        """What a command did, from its RESULT, under the next id: `fields` say where all of a long output is."""
        code, flags, head, tail, total, duration_s, cpu_s, max_rss_bytes = command_result.decode(data)
        data = data[command_result.SIZE :]
        metadata: dict[str, JSON] = {
            "exit_code": code, "returncode": code, "rung": self._rung, "duration_s": duration_s, "cpu_s": cpu_s,
            "max_rss_bytes": max_rss_bytes, "shell": _SHELLS[flags & (command_result.BASH | command_result.SH)],
            "timeout": flags & command_result.TIMEOUT != 0, "cancelled": flags & command_result.CANCELLED != 0,
            "swept": flags & command_result.SWEPT != 0, "oom": flags & command_result.OOM != 0,
            "output_total_bytes": total, "truncated": total > head + tail, **fields,
        }  # fmt: skip
        if flags & command_result.STATEFUL:
            metadata["shell_restarted"] = flags & command_result.RESTARTED != 0
        if total > head + tail:
            gap = f"\n… {total - head - tail} of {total} bytes left out{_where(metadata)} …\n"
            output = data[:head].decode(errors="replace") + gap + data[head : head + tail].decode(errors="replace")
        else:
            output = data[: head + tail].decode(errors="replace")
        error = ""
        if code:
            error = (
                f"Command timed out after {timeout_s:g}s" if flags & command_result.TIMEOUT else f"Exit code: {code}"
            )
        name = f"{self.slot_id}.{next(self.names)}"
        return ExecutionResult(code == 0, output, error, name, self.slot_id, metadata, data[head + tail :])

    def not_started(self, command: str | Sequence[str], error: CommandNotStarted) -> ExecutionResult:
        """The result of a program that could not be run, as a shell would tell it."""
        code = _NOT_FOUND if error.errno == _ENOENT else _NOT_EXECUTABLE
        program = command if isinstance(command, str) else command[0]
        text = f"{program[:200]}: {error}\n".encode(errors="backslashreplace")
        return self.result({}, command_result.encode(code, 0, len(text), 0, len(text), 0.0, 0.0, 0) + text, 0)


def limit(fields: dict[str, JSON], timeout_s: float, max_output_bytes: int, stdin: bytes) -> None:
    """Add the bounds of a command that are not the usual ones. Raises ValueError for those that are none."""
    if not 0 < timeout_s < math.inf:  # also false for what is no number
        raise ValueError(f"timeout_s must be positive, not {timeout_s}")
    if not 0 <= max_output_bytes <= MAX_OUTPUT_BYTES:
        raise ValueError(f"max_output_bytes must be within 0 and {MAX_OUTPUT_BYTES}")
    if len(stdin) > MAX_STDIN_BYTES:
        raise ValueError(f"stdin is limited to {MAX_STDIN_BYTES} bytes; write a file instead")
    if timeout_s != USUAL_TIMEOUT_S:
        fields["timeout_s"] = timeout_s
    if max_output_bytes != USUAL_OUTPUT_BYTES:
        fields["max_output_bytes"] = max_output_bytes


def program(command: str | Sequence[str]) -> dict[str, JSON]:
    """A command line for the shell, or an argv, as a field."""
    if isinstance(command, str):
        return {"command": command}
    arguments = [str(argument) for argument in command]
    require(bool(arguments), "an argv needs at least the program")
    return {"argv": arguments}


def require(condition: bool, message: str) -> None:
    """Raise ValueError unless it holds."""
    if not condition:
        raise ValueError(message)


def _where(fields: Mapping[str, JSON]) -> str:
    path = fields.get("full_output_path")
    if path is None:
        return ""
    part = "all of it is" if fields["full_output_bytes"] >= fields["output_total_bytes"] else "its beginning is"
    return f"; {part} in {path}"
