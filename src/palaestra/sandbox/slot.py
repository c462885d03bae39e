"""A leased slot of the local backend: the `Slot` that everything above this layer works with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import overload

from palaestra.core.errors import StaleLease
from palaestra.core.types import JSON
from palaestra.sandbox.base import (
    DEFAULT_OUTPUT_BYTES,
    MAX_FILE_BYTES,
    WORKSPACE,
    Change,
    ExecutionResult,
    FileInfo,
    Rung,
    SlotSpec,
)
from palaestra.sandbox.client import CommandNotStarted, SlotServer

MAX_OUTPUT_BYTES = 16 << 20
MAX_STDIN_BYTES = 32 << 20

_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
_ENOENT = 2


class LocalSlot:
    """One slot of one server, for as long as its lease lasts. Made by `LocalBackend.create`."""

    def __init__(
        self, server: SlotServer, spec: SlotSpec, trajectory_id: str, rung: Rung, lease: tuple[str, int], bin_dir: str
    ) -> None:
        self.server, self.spec, self._trajectory_id, self._rung = server, spec, trajectory_id, rung
        self._slot_id, self._epoch = lease
        path = f"{bin_dir}:{_SYSTEM_PATH}" if bin_dir and bin_dir not in _SYSTEM_PATH.split(":") else _SYSTEM_PATH
        self._env = {"PATH": path, "HOME": "/root", "LANG": "C.UTF-8", "TERM": "dumb", **dict(spec.env)}
        self._executions = 0
        self.released = False

    @property
    def slot_id(self) -> str:
        return self._slot_id

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def trajectory_id(self) -> str:
        return self._trajectory_id

    @property
    def rung(self) -> Rung:
        return self._rung

    def __repr__(self) -> str:
        return f"<LocalSlot {self._slot_id} of {self._trajectory_id!r}{' (released)' if self.released else ''}>"

    def lease(self) -> dict[str, JSON]:
        """What names this lease in a request. Raises `StaleLease` after release."""
        if self.released:
            raise StaleLease(f"the lease of {self._slot_id} (epoch {self._epoch}) has ended")
        return {"slot": self._slot_id, "epoch": self._epoch}

    async def execute(
        self,
        command: str | Sequence[str],
        *,
        cwd: str = WORKSPACE,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float = 60.0,
        max_output_bytes: int = DEFAULT_OUTPUT_BYTES,
        on_output: Callable[[bytes], None] | None = None,
        verdict: bool = False,
    ) -> ExecutionResult:
        """Run a command; see `Slot.execute`. A missing `cwd` raises FileNotFoundError; no such program is exit 127."""
        program: dict[str, JSON] = {"command": command} if isinstance(command, str) else {"argv": _argv(command)}
        _require(math.isfinite(timeout_s) and timeout_s > 0, f"timeout_s must be positive, not {timeout_s}")
        _require(0 <= max_output_bytes <= MAX_OUTPUT_BYTES, f"max_output_bytes must be within 0 and {MAX_OUTPUT_BYTES}")
        _require(len(stdin) <= MAX_STDIN_BYTES, f"stdin is limited to {MAX_STDIN_BYTES} bytes; write a file instead")
        self._executions += 1
        fields: dict[str, JSON] = {
            **self.lease(),
            **program,
            "cwd": cwd,
            "env": {**self._env, **(env or {})},
            "timeout_s": timeout_s,
            "max_output_bytes": max_output_bytes,
            "stream": on_output is not None,
            "verdict": verdict,
        }
        name = f"{self._slot_id}.{self._executions}"
        try:
            reply = await self.server.call("exec", fields, stdin, on_output)
        except CommandNotStarted as error:
            return self._not_started(name, command, error)
        return self._result(name, reply.fields, reply.data, timeout_s)

    def _result(self, name: str, fields: dict[str, JSON], data: bytes, timeout_s: float) -> ExecutionResult:
        head, tail = fields.pop("head"), fields.pop("tail")
        missing = fields["output_total_bytes"] - head - tail
        gap = f"\n… {missing} of {fields['output_total_bytes']} bytes left out …\n" if missing > 0 else ""
        output = data[:head].decode(errors="replace") + gap + data[head : head + tail].decode(errors="replace")
        if not gap:
            output = data[: head + tail].decode(errors="replace")
        code = fields["exit_code"]
        error = f"Command timed out after {timeout_s:g}s" if fields["timeout"] else f"Exit code: {code}"
        return ExecutionResult(
            success=code == 0,
            output=output,
            error="" if code == 0 else error,
            execution_id=name,
            slot_id=self._slot_id,
            metadata={**fields, "returncode": code, "rung": self._rung.label},
            verdict=data[head + tail :],
        )

    def _not_started(self, name: str, command: str | Sequence[str], error: CommandNotStarted) -> ExecutionResult:
        code = _NOT_FOUND if error.errno == _ENOENT else _NOT_EXECUTABLE
        program = command if isinstance(command, str) else command[0]
        fields: dict[str, JSON] = {
            "exit_code": code, "timeout": False, "cancelled": False, "swept": False, "duration_s": 0.0, "oom": False,
            "truncated": False, "shell": None, "cpu_s": 0.0, "max_rss_bytes": 0, "tail": 0,
        }  # fmt: skip
        text = f"{program[:200]}: {error}\n".encode(errors="backslashreplace")
        return self._result(name, {**fields, "head": len(text), "output_total_bytes": len(text)}, text, 0)

    async def read_bytes(self, path: str, *, max_bytes: int = MAX_FILE_BYTES, offset: int = 0) -> bytes:
        """The file from `offset` to its end; OSError (EFBIG) where that is more than `max_bytes`."""
        _require(offset >= 0 and max_bytes >= 0, "offset and max_bytes cannot be negative")
        pieces: list[bytes] = []
        fields = {**self.lease(), "path": path, "offset": offset, "max_bytes": max_bytes}
        await self.server.call("read", fields, on_data=pieces.append)
        return b"".join(pieces)

    async def write_bytes(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        """Write atomically, creating parent directories. A link is followed, inside the slot."""
        await self.server.upload({**self.lease(), "path": path, "mode": mode}, data)

    @overload
    async def read_text(self, path: str) -> str: ...
    @overload
    async def read_text(self, path: str, *, missing: str) -> str: ...
    async def read_text(self, path: str, *, missing: str | None = None) -> str:
        """The file as UTF-8, undecodable bytes replaced; `missing`, if given, where there is no file."""
        try:
            return (await self.read_bytes(path)).decode(errors="replace")
        except FileNotFoundError:
            if missing is None:
                raise
            return missing

    async def write_text(self, path: str, text: str, *, mode: int | None = None) -> None:
        """Write as UTF-8; surrogates, which have no place in it, are written as the bytes they stand for."""
        try:
            data = text.encode(errors="surrogateescape")
        except UnicodeEncodeError:  # lone surrogates, as models write them in JSON
            data = text.encode(errors="surrogatepass")
        await self.write_bytes(path, data, mode=mode)

    async def list_dir(self, path: str = ".") -> list[FileInfo]:
        """The entries of a directory, sorted by name; their paths are absolute."""
        reply = await self.server.call("list", {**self.lease(), "path": path})
        return [FileInfo(**entry) for entry in reply.fields["entries"]]

    async def stat(self, path: str) -> FileInfo | None:
        """What is at a path, links not followed; None when there is nothing."""
        reply = await self.server.call("stat", {**self.lease(), "path": path})
        entry = reply.fields["entry"]
        return None if entry is None else FileInfo(**entry)

    async def remove(self, path: str) -> None:
        """Remove a file or a whole directory. Nothing there is not an error."""
        await self.server.call("remove", {**self.lease(), "path": path})

    async def changes(self) -> list[Change]:
        """What differs from where this slot started, as seen while looking: commands may be running."""
        reply = await self.server.call("changes", self.lease())
        return [Change(**change) for change in reply.fields["changes"]]


def _argv(command: Sequence[str]) -> list[str]:
    arguments = [str(argument) for argument in command]
    _require(bool(arguments), "an argv needs at least the program")
    return arguments


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


__all__ = ["MAX_OUTPUT_BYTES", "LocalSlot"]
