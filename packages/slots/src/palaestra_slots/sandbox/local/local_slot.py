"""A leased slot of a slot server, with its shells and processes.

Each method sends its requests to the server or, for commands, shells and small files of a slot at the level `full`, to
`direct/`. `SlotClient.create`, which `DirectClient` overrides, makes that choice.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import posixpath
import secrets
import signal
import stat
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from palaestra_slots.core.errors import SandboxError, SlotLost, StaleLease, TaskError
from palaestra_slots.core.types import JSON, AllowList, Network
from palaestra_slots.sandbox.local.client import CommandNotStarted, Requests
from palaestra_slots.sandbox.slot import (
    DEFAULT_OUTPUT_BYTES,
    MAX_FILE_BYTES,
    WORKSPACE,
    Change,
    ExecutionResult,
    FileInfo,
    OutputPiece,
    ProcessStatus,
    Rung,
    Slot,
    SlotSpec,
    SlotState,
    TerminalSize,
    encoded_text,
)
from palaestra_slots.sandbox.slotd.protocol import frames
from palaestra_slots.sandbox.slotd.protocol.frames import Frame

MAX_OUTPUT_BYTES = 16 << 20
MAX_STDIN_BYTES = 32 << 20

SHELL_FILES = 107  # the descriptors that a shell needs to start: 0 to 99, and a copy of each of the seven that it uses
_SHELLS: Mapping[int, str | None] = {0: None, frames.BASH: "bash", frames.SH: "sh"}
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
_ENOENT = 2
_PIECE_BYTES = 128 << 10
_LONGEST_WAIT_S = 30.0  # the longest wait of one request; a longer wait takes several requests


class LocalSlot(Slot):
    """Implements `Slot` for one lease. Made by `ServerBackend.create`, which passes the function `fork`."""

    def __init__(
        self, requests: Requests, slot_id: str, epoch: int, rung: Rung, spec: SlotSpec, trajectory_id: str,
        fork: Callable[[LocalSlot, Network | AllowList], AbstractAsyncContextManager[Slot]],
        loop: asyncio.AbstractEventLoop,
    ) -> None:  # fmt: skip
        self.requests, self.slot_id, self.epoch, self.rung = requests, slot_id, epoch, rung
        self.spec, self.trajectory_id, self.loop, self._fork = spec, trajectory_id, loop, fork
        self.released = False  # whether the lease has ended; from then on, no request is sent
        self.metadata: dict[str, JSON] = {}
        self.running = 0  # commands whose results have not arrived yet, and background processes that are being started
        self._facts: dict[str, JSON] = {
            "rung": rung.label, "sandboxed": rung is not Rung.NONE, "network_isolated": spec.network is Network.OFF
        }  # fmt: skip
        self._results = itertools.count(1)

    def lease(self) -> dict[str, JSON]:
        """Return the fields that name this lease in a request. Raises `StaleLease` after release."""
        if self.released:
            raise StaleLease(f"the lease of {self.slot_id} (epoch {self.epoch}) has ended")
        return {"slot": self.slot_id, "epoch": self.epoch}

    def release(self) -> None:
        """End the lease in this process, without a request to the server."""
        self.released = True
        self.requests.slot_ended()

    @property
    def state(self) -> SlotState:
        if self.released:
            return SlotState.AVAILABLE
        return SlotState.EXECUTING if self.running else SlotState.ACQUIRED

    def __repr__(self) -> str:
        return f"<LocalSlot {self.slot_id} of {self.trajectory_id!r}{' (released)' if self.released else ''}>"

    async def execute(
        self,
        command: str | Sequence[str],
        *,
        cwd: str = WORKSPACE,
        env: Mapping[str, str] | None = None,
        stdin: bytes | str = b"",
        timeout_s: float = 60.0,
        max_output_bytes: int = DEFAULT_OUTPUT_BYTES,
        on_output: Callable[[bytes], None] | None = None,
        verdict: bool = False,
        spill: bool = True,
        stderr: bool = False,
        watched: Sequence[str] = (),
    ) -> ExecutionResult:
        """Run a command. A missing `cwd` raises FileNotFoundError; a missing program gives exit code 127."""
        fields = self.lease()
        _add_command(fields, command)
        data = _add_bounds(fields, timeout_s, max_output_bytes, stdin)
        # Only what differs from the defaults goes into the frame, which is encoded and read for every command.
        if (cwd := self._start_of(cwd)) != WORKSPACE:
            fields["cwd"] = cwd
        if env:
            fields["env"] = dict(env)
        if on_output is not None:
            fields["stream"] = True
        if verdict:
            fields["verdict"] = True
        if not spill:
            fields["no_spill"] = True
        if stderr:
            fields["stderr"] = True
        if watched:
            fields["watched"] = list(watched)
        self.running += 1
        try:
            reply = await self.requests.call("exec", fields, data, on_output)
        except CommandNotStarted as error:
            return self.not_started(command, error, stderr)
        finally:
            self.running -= 1
        return self.result(reply, timeout_s)

    @property
    def workspace_dir(self) -> str:
        return self.spec.workspace or WORKSPACE

    def _start_of(self, cwd: str) -> str:
        """Return the directory in which a command starts: the workspace has a second path in some slots."""
        return self.workspace_dir if cwd == WORKSPACE else cwd

    async def shell(
        self, *, cwd: str = WORKSPACE, env: Mapping[str, str] | None = None, state: bytes = b""
    ) -> LocalShell:
        """Return a stateful shell. Raises `TaskError` if the task's limits allow too few open files."""
        files = self.spec.limits.open_files
        if files is not None and files < SHELL_FILES:
            raise TaskError(
                f"{self!r} may have {files} open files, but a stateful shell needs {SHELL_FILES} to start: "
                f"set the task's limits.open_files to at least that number"
            )
        reply = await self.requests.call("shell", {**self.lease(), "cwd": self._start_of(cwd), "env": dict(env or {})})
        return LocalShell(self, reply.fields["shell"], state)

    async def spawn(
        self,
        command: str | Sequence[str],
        *,
        cwd: str = WORKSPACE,
        env: Mapping[str, str] | None = None,
        stdin: bool = True,
        terminal: TerminalSize | None = None,
        stderr: bool = False,
        hold: bool = False,
    ) -> LocalProcess:
        size = None if terminal is None else [terminal.rows, terminal.columns]
        extra = {} if terminal is None else {"TERM": "xterm-256color"}
        start = self._start_of(cwd)
        fields = {**self.lease(), "cwd": start, "stdin": stdin, "terminal": size, "env": {**extra, **(env or {})}}
        _require(terminal is None or not stderr, "a process with a terminal has one stream of output")
        if stderr:
            fields["apart"] = True
        if hold:
            fields["hold"] = True
        _add_command(fields, command)
        # Counted before the call, so that the slot counts as executing while its process starts.
        self.running += 1
        try:
            reply = await self.requests.call("spawn", fields)
        except CommandNotStarted as error:
            name = command if isinstance(command, str) else command[0]
            raise OSError(error.errno, str(error), name[:200]) from None
        finally:
            self.running -= 1
        return LocalProcess(self, reply.fields)

    async def processes(self) -> list[LocalProcess]:
        reply = await self.requests.call("processes", self.lease())
        return [LocalProcess(self, fields) for fields in reply.fields["processes"]]

    async def read_bytes(self, path: str, *, max_bytes: int = MAX_FILE_BYTES, offset: int = 0) -> bytes:
        """Return the file's content, starting at `offset`. Raises OSError (EFBIG) if that is more than `max_bytes`."""
        _require(offset >= 0 and max_bytes >= 0, "offset and max_bytes cannot be negative")
        fields = {**self.lease(), "path": path, "offset": offset, "max_bytes": max_bytes}
        return await self.requests.read("read", fields)

    async def write_bytes(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        """Write a file atomically, creating parent directories. Links are followed inside the slot."""
        fields = {**self.lease(), "path": path}
        if mode is not None:
            fields["mode"] = mode
        await self.requests.upload(fields, data)

    async def list_dir(self, path: str = ".") -> list[FileInfo]:
        """Return the entries of a directory with absolute paths, sorted by name."""
        listed = await self.requests.listing("list", {**self.lease(), "path": path})
        found = [FileInfo(**entry) for entry in listed]
        parents = {posixpath.dirname(entry.path) for entry in found}
        for entry in found:  # a compromised server could redirect a download out of its directory
            plain = posixpath.isabs(entry.path) and posixpath.normpath(entry.path) == entry.path
            if len(parents) > 1 or not plain or entry.path == "/" or "\0" in entry.path:
                raise SandboxError(f"the slot server lists {entry.path!r:.200}, which is not an entry of {path!r:.200}")
        return found

    async def stat(self, path: str) -> FileInfo | None:
        entry = (await self.requests.call("stat", {**self.lease(), "path": path})).fields["entry"]
        return None if entry is None else FileInfo(**entry)

    async def make_dir(self, path: str) -> None:
        await self.requests.call("mkdir", {**self.lease(), "path": path})

    async def make_link(self, path: str, target: str) -> None:
        await self.requests.call("link", {**self.lease(), "path": path, "target": target})

    async def upload(self, local: Path, path: str) -> int:
        with await asyncio.to_thread(local.open, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            return await self.requests.upload_file({**self.lease(), "path": path, "mode": mode}, file)

    async def download(self, path: str, local: Path) -> int:
        # the temporary name does not contain the file's name, which may already have the maximum length
        part = local.with_name(f".{secrets.token_hex(12)}")
        fields = {**self.lease(), "path": path, "offset": 0, "max_bytes": sys.maxsize}
        try:
            with await asyncio.to_thread(part.open, "xb") as file:
                await self.requests.download(fields, file)
                size = file.tell()
            part.rename(local)
        finally:
            part.unlink(missing_ok=True)
        return size

    async def remove(self, path: str) -> None:
        await self.requests.call("remove", {**self.lease(), "path": path})

    async def freeze(self) -> int:
        reply = await self.requests.call("freeze", self.lease())
        if self.running:  # these commands would otherwise stand still until their time limits
            await self.stat("/")
        return int(reply.fields["processes"])

    async def arguments(self, pid: int) -> list[str] | None:
        reply = await self.requests.call("arguments", {**self.lease(), "pid": pid})
        found: list[str] | None = reply.fields["arguments"]
        return found

    async def ask(self, port: int, request: bytes, *, timeout_s: float = 10.0, max_bytes: int = 1 << 20) -> bytes:
        _require(0 < port < 1 << 16, "port must be from 1 to 65535")
        fields = {**self.lease(), "port": port, "timeout_s": timeout_s, "max_bytes": max_bytes}
        return (await self.requests.call("ask", fields, request)).data

    async def changes(self) -> list[Change]:
        """Return the changes since the slot's start; commands may run while the changes are collected."""
        return [Change(**change) for change in await self.requests.listing("changes", self.lease())]

    def fork(self, *, network: Network | AllowList | None = None) -> AbstractAsyncContextManager[Slot]:
        return self._fork(self, self.spec.network if network is None else network)

    def result(self, reply: Frame, timeout_s: float) -> ExecutionResult:
        """Return the result of a command from its RESULT frame, with the next execution ID."""
        data = reply.data
        code, flags, head, tail, total, duration_s, cpu_s, max_rss_bytes = frames.decode_result(data)
        data = data[frames.RESULT_SIZE :]
        metadata: dict[str, JSON] = {
            **self._facts, "exit_code": code, "returncode": code, "duration_s": duration_s, "cpu_s": cpu_s,
            "max_rss_bytes": max_rss_bytes, "shell": _SHELLS[flags & (frames.BASH | frames.SH)],
            "timeout": flags & frames.TIMEOUT != 0, "cancelled": flags & frames.CANCELLED != 0,
            "swept": flags & frames.SWEPT != 0, "oom": flags & frames.OOM != 0,
            "stateful": flags & frames.STATEFUL != 0, "output_total_bytes": total, "truncated": total > head + tail,
            **reply.fields,
        }  # fmt: skip
        if flags & frames.STATEFUL:
            metadata["shell_restarted"] = flags & frames.RESTARTED != 0
        output, data = _captured_text(data, head, tail, total, _where(metadata)), data[head + tail :]
        if "stderr" in metadata:
            head, tail, total = metadata["stderr"]
            errors, data = _captured_text(data, head, tail, total), data[head + tail :]
            metadata |= {"stdout": output, "stderr": errors}
            output = f"{output}\n[stderr]\n{errors}" if output and errors else output or errors
        error = ""
        if code:
            error = f"Command timed out after {timeout_s:g}s" if flags & frames.TIMEOUT else f"Exit code: {code}"
        name = f"{self.slot_id}.{next(self._results)}"
        return ExecutionResult(code == 0, output, error, name, self.slot_id, metadata, data)

    def not_started(
        self, command: str | Sequence[str], error: CommandNotStarted, stderr: bool = False
    ) -> ExecutionResult:
        """Return the result for a program that could not be run, as a shell would report it."""
        code = _NOT_FOUND if error.errno == _ENOENT else _NOT_EXECUTABLE
        program = command if isinstance(command, str) else command[0]
        text = f"{program[:200]}: {error}\n".encode(errors="backslashreplace")
        fields = {"stderr": [len(text), 0, len(text)]} if stderr else {}
        size = 0 if stderr else len(text)
        result = frames.encode_result(code, 0, size, 0, size, 0.0, 0.0, 0)
        return self.result(Frame(frames.FrameKind.RESULT, 0, fields, result + text), 0)


# Prints commands that restore the state of a shell. Options are restored last, because some of them would abort the
# rest. Variables of bash itself and read-only variables cannot be set. The command runs in a subshell, so that the
# shell itself does not change.
_SAVE = r"""(printf '__slot_options() {\n'; set +o; shopt -p; umask -p; printf '}\n'; set +eux
for __slot_name in $(compgen -v); do
  case $__slot_name in
    BASH*|COMP_*|DIRSTACK|EPOCH*|FUNCNAME|GROUPS|HISTCMD|LINENO|PIPESTATUS|*RANDOM|SECONDS|_|__slot_name) continue
  esac
  case ${!__slot_name@a} in *r*) continue; esac
  declare -p "$__slot_name"
done
declare -f; alias -p; printf 'builtin cd -- %q\n__slot_options; unset -f __slot_options\n' "$PWD") 2>/dev/null
"""
_STATE_TIMEOUT_S = 30.0


class LocalShell:
    """A stateful shell: each command keeps the directory, variables and functions of the previous one. Made by
    `Slot.shell`."""

    def __init__(self, slot: LocalSlot, name: int, state: bytes) -> None:
        self._slot, self._name, self._state = slot, name, state
        self._turn = asyncio.Lock()
        self._closed = False

    async def run(
        self,
        command: str,
        *,
        stdin: bytes | str = b"",
        timeout_s: float = 60.0,
        max_output_bytes: int = DEFAULT_OUTPUT_BYTES,
        on_output: Callable[[bytes], None] | None = None,
    ) -> ExecutionResult:
        """Run a command. Concurrent calls run one after the other, and the timeout of a call starts with its command.

        A timeout interrupts the command and kills the processes it has started. `metadata["shell_restarted"]` is true
        if the shell was killed because of the timeout, ended itself (`exit`, `exec`, `set -e`) or had already died; the
        next command gets a new shell.
        """
        fields = {**self._slot.lease(), "shell": self._name, "command": command}
        data = _add_bounds(fields, timeout_s, max_output_bytes, stdin)
        if on_output is not None:
            fields["stream"] = True
        await self._turn.acquire()  # not `async with`, which costs two more coroutines for each command
        self._slot.running += 1
        try:
            if self._state:
                await self._restore()
            reply = await self._slot.requests.call("run", fields, data, on_output)
        except CommandNotStarted as error:
            return self._slot.not_started(command, error)
        finally:
            self._slot.running -= 1
            self._turn.release()
        return self._slot.result(reply, timeout_s)

    async def _restore(self) -> None:
        # Cleared first, so that a state which ends the shell is not restored again and again.
        state, self._state = self._state.decode(errors="surrogateescape"), b""
        fields = {**self._slot.lease(), "shell": self._name, "command": state}
        _add_bounds(fields, _STATE_TIMEOUT_S, 0, b"")
        with contextlib.suppress(CommandNotStarted):
            await self._slot.requests.call("run", fields)

    async def state(self) -> bytes:
        """Return the shell's directory, variables, functions, aliases and options, for the `state` argument of
        `Slot.shell`. Works only in bash. Raises `SandboxError` if the state is too large or cannot be read in time."""
        result = await self.run(_SAVE, timeout_s=_STATE_TIMEOUT_S, max_output_bytes=MAX_OUTPUT_BYTES)
        if result.metadata["truncated"] or result.metadata["timeout"]:
            raise SandboxError(f"the shell's state in {self._slot.slot_id} is too large, or takes too long to save")
        return result.output.encode(errors="surrogateescape")

    async def aclose(self) -> None:
        """End the shell; its background jobs keep running. Idempotent."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(StaleLease, SlotLost):  # in this case, the shell has ended with its slot
                await self._slot.requests.call("close_shell", {**self._slot.lease(), "shell": self._name})

    async def __aenter__(self) -> LocalShell:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


class LocalProcess:
    """A background process of a slot. It ends with the slot at the latest, and several readers may follow its output.
    Made by `Slot.spawn`.

    Methods raise `StaleLease` and `SlotLost` as the slot's methods do, and ProcessLookupError after `forget`. `pid` is
    the process's number in the slot.
    """

    def __init__(self, slot: LocalSlot, fields: Mapping[str, JSON]) -> None:
        self._slot, self.process_id, self.pid = slot, int(fields["process"]), int(fields["pid"])
        self.exit_code: int | None = None

    def __repr__(self) -> str:
        return f"<LocalProcess {self.process_id} (pid {self.pid}) of {self._slot.slot_id}>"

    async def status(self) -> ProcessStatus:
        return _process_status(await self._call_process("wait", wait_s=0))

    async def read(
        self, cursor: int = 0, *, max_bytes: int = 1 << 16, wait_s: float = 0.0, stderr: bool = False
    ) -> OutputPiece:
        """Return output from `cursor`; a negative cursor counts back from the end. At least the last 256 KiB are kept.

        If there is no new output, wait up to `wait_s` seconds for output or for the end of the process. `stderr` reads
        standard error, of a process that keeps it apart.
        """
        _require(max_bytes > 0, "max_bytes must be positive")
        return (await self._read_piece(cursor, max_bytes, wait_s, stderr))[0]

    async def output(self, cursor: int = 0, *, stderr: bool = False) -> AsyncIterator[OutputPiece]:
        """Follow the output from `cursor` until the process has ended."""
        while True:
            piece, running = await self._read_piece(cursor, _PIECE_BYTES, _LONGEST_WAIT_S, stderr)
            # A process that has ended can have output that was not read yet, so only an empty read is the end.
            if piece.data:
                yield piece
            elif not running:
                return
            cursor = piece.end

    async def write(self, data: bytes) -> None:
        """Write to the process's input as fast as it reads. Raises BrokenPipeError if the process has closed its input
        or has ended. A cancelled call may have written a part."""
        for start in range(0, len(data), _PIECE_BYTES):
            await self._call_process("input", data[start : start + _PIECE_BYTES], close=False)

    async def close_input(self) -> None:
        """End the process's input if it is open; on a terminal, send the end-of-input character."""
        with contextlib.suppress(BrokenPipeError):
            await self._call_process("input", close=True)

    async def signal(self, number: int) -> None:
        """Send a signal to the process group if the process is running."""
        await self._call_process("signal", signal=int(signal.Signals(number)))

    async def resize(self, size: TerminalSize) -> None:
        """Resize the process's terminal; the foreground processes get SIGWINCH. Raises OSError (ENOTTY) if the process
        has no terminal."""
        await self._call_process("resize", rows=size.rows, columns=size.columns)

    async def wait(self, timeout_s: float | None = None) -> ProcessStatus:
        """Wait until the process has ended or `timeout_s` seconds have passed; None means no limit. Returns the
        process's status, whose `running` is true if the process still runs."""
        left = math.inf if timeout_s is None else timeout_s
        while True:
            step = min(left, _LONGEST_WAIT_S)
            status = _process_status(await self._call_process("wait", wait_s=step))
            left -= step
            if not status.running or left <= 0:
                return status

    async def kill(self, grace_s: float = 0.0) -> ProcessStatus:
        """Kill the whole process tree: send SIGTERM to the process group, and SIGKILL to the rest of the tree after
        `grace_s` seconds or when the main process has ended. If `grace_s` is 0, send only SIGKILL."""
        return _process_status(await self._call_process("kill", grace_s=grace_s))

    async def forget(self) -> None:
        """Kill the process if it still runs, and drop its output."""
        await self._call_process("dismiss")

    async def _read_piece(self, cursor: int, max_bytes: int, wait_s: float, stderr: bool) -> tuple[OutputPiece, bool]:
        extra: dict[str, JSON] = {"stderr": True} if stderr else {}
        reply = await self._call_process("output", cursor=cursor, max_bytes=max_bytes, wait_s=wait_s, **extra)
        self.exit_code = reply.fields["exit_code"]
        start = int(reply.fields["start"])
        lost = max(0, start - cursor) if cursor >= 0 else 0
        return OutputPiece(reply.data, start, lost), bool(reply.fields["running"])

    async def _call_process(self, op: str, data: bytes = b"", **fields: JSON) -> Frame:
        return await self._slot.requests.call(op, {**self._slot.lease(), "process": self.process_id, **fields}, data)


def _process_status(reply: Frame) -> ProcessStatus:
    known = ("pid", "running", "exit_code", "started_s", "duration_s", "output_total_bytes", "terminal", "cpu_s",
             "max_rss_bytes", "full_output_path", "full_output_bytes")  # fmt: skip
    fields = {name: reply.fields[name] for name in known if name in reply.fields}
    return ProcessStatus(process_id=reply.fields["process"], **fields)


def _add_command(fields: dict[str, JSON], command: str | Sequence[str]) -> None:
    """Add a command line for the shell, or an argv. Raises ValueError for an empty argv."""
    if isinstance(command, str):
        fields["command"] = command
    else:
        fields["argv"] = [str(argument) for argument in command]
        _require(bool(fields["argv"]), "an argv must contain at least the program")


def _add_bounds(fields: dict[str, JSON], timeout_s: float, max_output_bytes: int, stdin: bytes | str) -> bytes:
    """Add the limits of a command that differ from the defaults, and return its input as bytes. Raises ValueError for
    invalid limits."""
    if not 0 < timeout_s < math.inf:  # also false for NaN
        raise ValueError(f"timeout_s must be positive and finite, not {timeout_s}")
    if not 0 <= max_output_bytes <= MAX_OUTPUT_BYTES:
        raise ValueError(f"max_output_bytes must be from 0 to {MAX_OUTPUT_BYTES}")
    data = encoded_text(stdin) if isinstance(stdin, str) else stdin
    if len(data) > MAX_STDIN_BYTES:
        raise ValueError(f"stdin is limited to {MAX_STDIN_BYTES} bytes; write a file instead")
    if timeout_s != frames.USUAL_TIMEOUT_S:
        fields["timeout_s"] = timeout_s
    if max_output_bytes != frames.USUAL_OUTPUT_BYTES:
        fields["max_output_bytes"] = max_output_bytes
    return data


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _captured_text(data: bytes, head: int, tail: int, total: int, where: str = "") -> str:
    """Return a captured stream as text: head and tail, with a line between them if bytes are missing."""
    if total <= head + tail:
        return data[: head + tail].decode(errors="replace")
    gap = f"\n… {total - head - tail} of {total} bytes left out{where} …\n"
    return data[:head].decode(errors="replace") + gap + data[head : head + tail].decode(errors="replace")


def _where(fields: Mapping[str, JSON]) -> str:
    path = fields.get("full_output_path")
    if path is None:
        return ""
    part = "the whole output is" if fields["full_output_bytes"] >= fields["output_total_bytes"] else "its beginning is"
    return f"; {part} in {path}"
