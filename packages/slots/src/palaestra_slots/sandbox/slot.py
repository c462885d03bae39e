"""The types and Protocols of the sandbox layer. This module performs no I/O.

A *slot* is one isolated workspace; a *snapshot* is a sealed workspace from which any number of slots start. `pool.py`
leases slots. Code above this layer works with these types and the pool, and uses a backend only to configure a pool.

Unless stated otherwise, paths are paths inside the slot. Relative paths start at `WORKSPACE`, the directory where
commands start.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Protocol, overload

from palaestra_slots.core.errors import ConfigError, InfraError
from palaestra_slots.core.types import JSON, AllowList, Limits, Network, parse_network

WORKSPACE = "/workspace"  # where commands start, in every backend
DEFAULT_OUTPUT_BYTES = 50_000  # the most bytes of a command's output that are kept by default, head and tail together
MAX_FILE_BYTES = 64 << 20  # the most bytes that one file call reads by default; larger files are refused
_MOST_MEMBERS = 250  # of a group
# Top-level directories of every slot: those in which a workspace cannot be, and those in which only a subdirectory can.
_CLOSED = frozenset({"bin", "boot", "dev", "etc", "proc", "sbin", "sys", "workspace"})
_SHARED = frozenset({"home", "media", "mnt", "opt", "root", "run", "srv", "tmp", "var"})
_SHARED_BELOW = [["run", "lock"], *(["var", name] for name in ("cache", "lib", "lock", "log", "run", "spool", "tmp"))]


class Rung(IntEnum):
    """The isolation level of a slot; higher is better."""

    NONE = 0
    CONFINED = 1
    USERNS = 2
    FULL = 3

    @property
    def label(self) -> str:
        """The level's name in flags, metadata and messages."""
        return self.name.lower()


class SlotState(StrEnum):
    """The state of a slot."""

    AVAILABLE = "available"
    """The slot's lease has ended."""
    ACQUIRED = "acquired"
    EXECUTING = "executing"
    """At least one command is running."""


@dataclass(frozen=True, slots=True)
class ExecutionResult:
    """The result of one command.

    `output` is the interleaved stdout and stderr, decoded as UTF-8 with replacement. Output that exceeds the limit is
    cut to its head and tail, with a line between them that counts the missing bytes. If the call kept the two streams
    apart, `output` is stdout, a line `[stderr]` and stderr, and `metadata` also holds them as `stdout` and `stderr`.

    `metadata` also holds `exit_code` and `returncode` (equal; 124 after a timeout, 128+n after signal n), `timeout`,
    `signal` (only if a signal ended the main process), `rung`, `sandboxed` (the isolation level is not none),
    `network_isolated` (the slot has no network), `stateful`,
    `output_total_bytes`, `truncated`, `duration_s`, `cpu_s`, `max_rss_bytes` and `oom`. If output was truncated,
    `full_output_path` is a file in the slot with the first 4 MiB of the output, and `full_output_bytes` is that file's
    size. Both are missing if no such file could be made or `spill` was false. `opened` has, for each file that the call
    watched, how often it was opened. Results of a stateful shell also have
    `shell_restarted`. `verdict` holds the bytes written to descriptor 3, if the call requested that channel.

    `oom` is set if the exit code is 137 and the kernel has killed a process of the slot because memory ran out. This is
    known only at the level `full`. If a shell survives the death of its child and ends with another exit code, `oom` is
    not set.

    `error` is empty on success, otherwise one line ("Exit code: 2", "Command timed out after 5s"). If the slot dies,
    the call raises `SlotLost`, so a dead slot never looks like a failed command.
    """

    success: bool
    output: str = ""
    error: str = ""
    execution_id: str = ""
    slot_id: str = ""
    metadata: Mapping[str, JSON] = field(default_factory=dict)
    verdict: bytes = b""

    @property
    def exit_code(self) -> int:
        """The command's exit status."""
        return int(self.metadata.get("exit_code", 0 if self.success else 1))


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One directory entry. `kind` is file, dir, symlink or other; `size` is in bytes; `mode` holds the permission bits.

    `target` is the path that a symlink contains. `uid` and `gid` are the owner's numbers in the slot.
    """

    path: str
    kind: str
    size: int
    mode: int
    mtime: float
    target: str = ""
    uid: int = 0
    gid: int = 0


@dataclass(frozen=True, slots=True)
class Change:
    """One path that differs from the snapshot or image that a workspace started from.

    `kind` is file, dir, symlink, other or deleted. A file or link with the same content is not a change, whatever its
    owner, times and permissions to read and write are. `content` is False for a file with the same content that may
    run differently or has further names (hard links). `opaque` marks a directory that replaced an entry of another
    kind; each entry of the new directory is a Change too. `single` is True for a file that is known to have no further
    name, which is not part of the change: two changes that differ in it alone are equal.
    """

    path: str
    kind: str
    opaque: bool = False
    content: bool = True
    single: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A sealed workspace. `layers` are the names of its immutable layers in the backend that made them, topmost first.

    `spec` is that of the slot, without its place in a group. A slot that starts from a `continued` snapshot treats the
    topmost layer as its own changes: the list of the slot's changes, and the snapshot to which the slot is sealed,
    include the whole layer.
    """

    snapshot_id: str
    layers: tuple[str, ...]
    spec: SlotSpec
    continued: bool = False


@dataclass(frozen=True, slots=True)
class Mount:
    """A host directory, for example with interpreters or wheels, that is mounted read-only at `target` in a slot. If it
    is a Python installation, its packages are hidden unless it is mounted `whole`."""

    source: str
    target: str
    whole: bool = False

    @property
    def fields(self) -> list[str | bool]:
        """The mount in a request: the source, the target, and True if it is `whole`."""
        return [self.source, self.target, *([True] if self.whole else [])]


@dataclass(frozen=True, slots=True)
class GroupAddress:
    """A slot's place in a group: slots with the same `group` reach each other at the addresses 198.19.0.`number`, and
    no other group reaches them. `group` must be unique among the groups of a backend, and `number` in its group. A pool
    gives a new name to a group whose name is empty.

    `members` is the number of places of the group. The pool leases them together: one slot is acquired, the others are
    added to its lease. Raises ValueError for a number that is not from 1 to `members` + 1, and for more than 250
    members.
    """

    group: str
    number: int
    members: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.members <= _MOST_MEMBERS or not 0 < self.number <= self.members + 1:
            raise ConfigError(
                f"a slot's number in its group of {self.members} must be from 1 to {self.members + 1}, not "
                f"{self.number}; a group has at most {_MOST_MEMBERS} slots"
            )

    @property
    def address(self) -> str:
        """The slot's address in the network of its group."""
        return f"198.19.0.{self.number}"


def is_variable(name: str, value: str) -> bool:
    """Return whether a process can have this environment variable."""
    return bool(name) and "=" not in name and "\0" not in name + value


def read_variables(words: Iterable[str]) -> dict[str, str]:
    """Return the environment variables in words of the form `NAME=VALUE`, such as the `Env` of an image's
    configuration. Words of which no process can have a variable are left out."""
    pairs = (word.partition("=") for word in words)
    return {name: value for name, _, value in pairs if is_variable(name, value)}


@dataclass(frozen=True, slots=True)
class SlotSpec:
    """The settings of a slot. Slots with equal specs are interchangeable.

    `image` is a root file system on the host: a directory, a tar file (`docker export`, `docker save`) or an OCI
    layout. Some backends accept an image's name instead. None selects the backend's own image or, without one, the
    host's system directories. `env` holds variables for commands; they are added to PATH, HOME, LANG and TERM, which
    the backend sets, and may override these four. `group` joins the slot to others by a network of their own, at the
    levels `userns` and `full` of the backend `local`. With `on_demand`, a backend may make the slot only once a request
    does more than read files below these absolute paths. `workspace` is a second path of the workspace, at which
    commands start, at the levels `userns` and `full`. `copies` are directories of this machine that a slot has as its
    own from the beginning, without the time for a copy: its changes are layers over them. They should not change
    meanwhile, and need the backend `local` at these levels. Raises ValueError for an unknown `network`, for an `image`
    that is neither a path nor the name of an image, for variables that no process can have, and for a `workspace` that
    would hide a part of the system.
    """

    image: str | None = None
    network: Network | AllowList = Network.OFF
    limits: Limits = Limits()
    mounts: tuple[Mount, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    group: GroupAddress | None = None
    on_demand: tuple[str, ...] = ()
    workspace: str = ""
    copies: tuple[Mount, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "network", parse_network(self.network))
        if self.image:
            from palaestra_slots.sandbox.images.reference import check_image  # imported here, as most slots have none

            check_image(self.image)
        for name, value in self.env:
            if not is_variable(name, value):
                raise ConfigError(
                    f"{name[:200]!r} cannot be an environment variable: a name needs a character and no `=`, and "
                    "neither name nor value can hold a null byte"
                )
        if self.workspace and hides_system(self.workspace):
            raise ConfigError(f"a slot's workspace cannot be at {self.workspace!r}, which is a part of the system")


def hides_system(path: str) -> bool:
    """Return whether a workspace at this path would hide a part of a slot's system, or is below `WORKSPACE`."""
    parts = path.split("/")[1:]
    if not path.startswith("/") or any(part in ("", ".", "..") for part in parts) or "\0" in path:
        return True
    if parts[0] in _CLOSED or parts[0].startswith("lib"):
        return True
    if parts[0] == "usr":
        return parts[1:2] not in (["local"], ["src"]) or len(parts) < 4
    return parts[0] in _SHARED and (len(parts) < 2 or parts[:2] in _SHARED_BELOW)


@dataclass(frozen=True, slots=True)
class TerminalSize:
    """The window size of a terminal, in character cells."""

    rows: int = 24
    columns: int = 80


@dataclass(frozen=True, slots=True)
class OutputPiece:
    """A piece of a process's output that begins at the cursor `start`. `lost` counts the bytes just before the piece
    that are no longer kept."""

    data: bytes
    start: int
    lost: int = 0

    @property
    def end(self) -> int:
        """The cursor at the end of the piece."""
        return self.start + len(self.data)


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """The status of a background process. `exit_code` is None while the process runs, and 128+n after signal n.

    `pid` is the process's number in the slot, and `started_s` is its start time in seconds since the host booted.
    Together with `process_id`, they identify the process even after a restart of the server. If the output is longer
    than 256 KiB, `full_output_path` is a file in the slot with its first 4 MiB, unless no such file could be made.
    """

    process_id: int
    pid: int
    running: bool
    exit_code: int | None
    started_s: float
    duration_s: float
    output_total_bytes: int
    terminal: bool = False
    cpu_s: float | None = None
    max_rss_bytes: int | None = None
    full_output_path: str | None = None
    full_output_bytes: int = 0


class Process(Protocol):
    """A background process of a slot. It outlives the call that started it, and ends with the slot at the latest.

    Methods raise `StaleLease` and `SlotLost` as the slot's methods do, and ProcessLookupError after `forget`.
    """

    @property
    def process_id(self) -> int: ...

    @property
    def pid(self) -> int:
        """The process's number in the slot."""

    @property
    def exit_code(self) -> int | None:
        """The exit code, if a read has found that the process has ended."""

    async def status(self) -> ProcessStatus: ...

    async def read(
        self, cursor: int = 0, *, max_bytes: int = 1 << 16, wait_s: float = 0.0, stderr: bool = False
    ) -> OutputPiece:
        """Return output from `cursor`; a negative cursor counts back from the end. At least the last 256 KiB are kept.

        If there is no new output, wait up to `wait_s` seconds for output or for the end of the process. `stderr` reads
        standard error, of a process that keeps it apart.
        """

    def output(self, cursor: int = 0, *, stderr: bool = False) -> AsyncIterator[OutputPiece]:
        """Follow the output from `cursor` until the process has ended."""

    async def write(self, data: bytes) -> None:
        """Write to the process's input as fast as it reads. Raises BrokenPipeError if the process has closed its input
        or has ended."""

    async def close_input(self) -> None:
        """End the process's input; on a terminal, send the end-of-input character."""

    async def signal(self, number: int) -> None:
        """Send a signal to the process group."""

    async def resize(self, size: TerminalSize) -> None:
        """Resize the process's terminal; the foreground processes get SIGWINCH. Raises OSError (ENOTTY) if the process
        has no terminal."""

    async def wait(self, timeout_s: float | None = None) -> ProcessStatus:
        """Wait until the process has ended or `timeout_s` seconds have passed; None means no limit. Returns the
        process's status, whose `running` is true if the process still runs."""

    async def kill(self, grace_s: float = 0.0) -> ProcessStatus:
        """Kill the whole process tree: send SIGTERM to the process group, and SIGKILL to the rest of the tree after
        `grace_s` seconds or when the main process has ended. If `grace_s` is 0, send only SIGKILL."""

    async def forget(self) -> None:
        """Kill the process if it still runs, and drop its output."""


def encoded_text(text: str) -> bytes:
    """Return text as UTF-8. Surrogates, which UTF-8 cannot encode, become the bytes they stand for."""
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:  # lone surrogates, as models write them in JSON
        return text.encode(errors="surrogatepass")


class Shell(Protocol):
    """A stateful shell: the next command keeps the directory, variables and functions of the last one."""

    async def run(
        self,
        command: str,
        *,
        stdin: bytes | str = b"",
        timeout_s: float = 60.0,
        max_output_bytes: int = DEFAULT_OUTPUT_BYTES,
        on_output: Callable[[bytes], None] | None = None,
    ) -> ExecutionResult:
        """Run a command. Concurrent calls run one after the other.

        A timeout interrupts the command and kills the processes it has started. `metadata["shell_restarted"]` is true
        if the shell was killed because of the timeout, ended itself (`exit`, `exec`, `set -e`) or had already died; the
        next command gets a new shell.
        """

    async def state(self) -> bytes:
        """Return the shell's directory, variables, functions, aliases and options, for the `state` argument of
        `Slot.shell`. Works only in bash."""

    async def aclose(self) -> None:
        """End the shell; its background jobs keep running. Idempotent."""


class Slot(Protocol):
    """One leased workspace. Every method raises `StaleLease` after release and `SlotLost` if the slot has died.

    `metadata` is for the holder's own use; the sandbox does not read it.
    """

    slot_id: str
    epoch: int
    trajectory_id: str
    rung: Rung
    metadata: dict[str, JSON]

    @property
    def workspace_dir(self) -> str:
        """The directory where commands start, as a path inside the slot."""
        return WORKSPACE

    @property
    def state(self) -> SlotState: ...

    @property
    def alloc_id(self) -> str:
        """The first part of the key `alloc_id:slot_id`. It is empty, because a slot's id is unique by itself."""
        return ""

    @property
    def container_addr(self) -> str:
        """The address of the server that existing programs call to use a slot. Raises AttributeError, because a slot is
        only reached through its methods and its pool."""
        raise AttributeError("slots have no address: call slot.execute(COMMAND) or SlotPool.execute(slot, TOOL, ARGS)")

    def to_dict(self) -> dict[str, JSON]:
        """Return the slot's description as JSON."""
        return {
            "slot_id": self.slot_id,
            "alloc_id": self.alloc_id,
            "workspace_dir": self.workspace_dir,
            "state": self.state.value,
            "trajectory_id": self.trajectory_id,
            "metadata": dict(self.metadata),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, JSON]) -> Slot:
        """Raise `ConfigError`, because a description holds no lease."""
        raise ConfigError("a slot cannot be made from a dict: lease one with SlotPool.acquire(TRAJECTORY)")

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
        """Run a command line with `bash -c` (with `sh -c` if the slot has no bash), or an argv. At the timeout, the
        whole process tree is killed. Text in `stdin` is sent as UTF-8.

        `on_output` is called with each piece of output as it arrives. `stderr` keeps standard error apart from standard
        output, each up to `max_output_bytes`; the order between them is then lost, and `on_output` gets standard output
        alone. `spill` keeps output that exceeds `max_output_bytes` in a file of the slot. `verdict` opens descriptor 3
        of the command as a channel whose content is returned separately from the output (at most 16 MiB). Cancelling
        the call kills the command. `watched` are files whose openings are counted until the command has ended.
        """

    async def call(
        self,
        function: str,
        args: Sequence[JSON] = (),
        kwargs: Mapping[str, JSON] | None = None,
        *,
        cwd: str = WORKSPACE,
        python_path: Sequence[str] = (".",),
        timeout_s: float = 60.0,
    ) -> JSON:
        """Call a Python function of the work, such as `package.module:function`, and return its value as plain JSON.

        The function runs in a process of its own, so a score can check its value without running the work's code
        itself. `python_path` lists directories to import from, relative to `cwd`. Raises `WorkError` if the function is
        missing, raises, ends its process, or returns anything but JSON (NaN and infinity are not JSON); a score that
        does not catch this error is 0. Raises FileNotFoundError if the slot has no `python3`.
        """
        from palaestra_slots.sandbox import python_call  # imported here, because few checks call a function

        command, stdin = python_call.request(function, args, kwargs or {}, python_path)
        result = await self.execute(command, cwd=cwd, stdin=stdin, timeout_s=timeout_s, verdict=True, spill=False)
        return python_call.value(
            function, result.verdict, exit_code=result.exit_code, output=result.output, error=result.error
        )

    async def shell(self, *, cwd: str = WORKSPACE, env: Mapping[str, str] | None = None, state: bytes = b"") -> Shell:
        """Return a stateful shell. If `state`, the result of another shell's `Shell.state`, is given, the shell starts
        in that state."""

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
    ) -> Process:
        """Start a background process. If `terminal` is given, the process runs in its own terminal. Otherwise, it gets
        a pipe for input if `stdin` is true.

        `stderr` keeps standard error apart from standard output; a process with a terminal has one stream. `hold` lets
        the process wait, as at a full pipe, while 128 KiB of a stream come after the cursor of the last read, so that
        a reader who follows the stream misses nothing.

        If the program of an argv cannot be run, raises OSError, for example FileNotFoundError or PermissionError.
        """

    async def processes(self) -> Sequence[Process]:
        """Return the background processes of this slot, oldest first. Ended processes are included until newer ones
        take their place."""

    async def read_bytes(self, path: str, *, max_bytes: int = MAX_FILE_BYTES, offset: int = 0) -> bytes: ...

    async def write_bytes(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        """Write a file atomically, creating parent directories. If `mode` is None, an existing file keeps its mode and
        a new file gets 0o644."""

    @overload
    async def read_text(self, path: str) -> str: ...
    @overload
    async def read_text(self, path: str, *, missing: str) -> str: ...
    async def read_text(self, path: str, *, missing: str | None = None) -> str:
        """Return the file's text, decoded as UTF-8 with undecodable bytes replaced. If `missing` is given, it is
        returned for a file that cannot be read, for example because it does not exist or is too large."""
        try:
            return (await self.read_bytes(path)).decode(errors="replace")
        except OSError as error:
            if missing is None or isinstance(error, InfraError):
                raise
            return missing

    async def write_text(self, path: str, text: str, *, mode: int | None = None) -> None:
        """Write text as UTF-8. Surrogates, which UTF-8 cannot encode, are written as the bytes they stand for."""
        await self.write_bytes(path, encoded_text(text), mode=mode)

    async def list_dir(self, path: str = ".") -> list[FileInfo]: ...

    async def stat(self, path: str) -> FileInfo | None:
        """Return the entry at a path; None if it does not exist. If the entry is a symlink, it is not followed."""

    async def make_dir(self, path: str) -> None:
        """Make a directory and its parents if they do not exist."""

    async def make_link(self, path: str, target: str) -> None:
        """Make a symlink, replacing a file or symlink at `path`. `target` need not exist."""

    async def upload(self, local: Path, path: str) -> int:
        """Copy a file of any size from this machine to the slot, atomically and with its permission bits. Returns the
        file's size in bytes."""

    async def download(self, path: str, local: Path) -> int:
        """Copy a file of any size from the slot to this machine, atomically. Returns the file's size in bytes."""

    async def remove(self, path: str) -> None:
        """Remove a file or a whole directory if it exists."""

    async def arguments(self, pid: int) -> Sequence[str] | None:
        """Return the arguments of the live process whose number in the slot is `pid`, read from the kernel; None if
        there is no such process.

        A process that is just being started has no arguments yet. `arguments` and `ask` do not use any program or file
        in the slot.
        """

    async def ask(self, port: int, request: bytes, *, timeout_s: float = 10.0, max_bytes: int = 1 << 20) -> bytes:
        """Send bytes to a port of 127.0.0.1 in the slot and return the answer, up to the end of the connection or
        `max_bytes` (at most 4 MiB).

        Raises OSError if nothing listens on the port, or if the answer does not end in time.
        """

    async def changes(self) -> list[Change]:
        """Return the changes since this slot's snapshot or image. At `userns` and `full`, the cost grows only with the
        number of changes; at lower levels, all files are compared."""

    async def freeze(self) -> int:
        """Suspend every process of the slot until the slot's next call, and return their number. A command that is
        already running counts as the next call."""

    def fork(self, *, network: Network | AllowList | None = None) -> AbstractAsyncContextManager[Slot]:
        """Yield a second slot that starts with this slot's current files and ends with the block; this slot continues.
        `network` is that of the fork, by default that of this slot.

        The pool does not count the fork, because a caller that holds a slot must not wait for another slot. Processes
        and the contents of `/tmp` and `/dev/shm` are not copied. Raises `SandboxError` at levels below `userns`.
        """


@dataclass(frozen=True, slots=True)
class View:
    """A part of a sealed workspace's changes: everything under `only` except `without`.

    All other paths are as in the snapshot that the sealed slot started from. Grading uses a view to drop planted files.
    """

    only: tuple[str, ...] = ("/",)
    without: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RungStatus:
    """Whether an isolation level is available here. `reason` explains why, or why not and what to do about it. `covers`
    lists what the level isolates and limits."""

    rung: Rung
    available: bool
    reason: str
    covers: tuple[str, ...] = ()


class Backend(Protocol):
    """Makes slots for the pool that owns it; `palaestra_slots.testing.backend_conformance` tests an implementation.

    Its methods raise `ConfigError` for anything that the backend does not offer, and `SandboxError` if the machine or
    container that runs the slots fails. Tracking a slot's changes costs nothing until they are requested. After
    `start`, `rung` is the level that was proved.
    """

    name: str

    @property
    def rung(self) -> Rung:
        """The isolation level in force. Before `start`, this is the requested level, or `full` if none is requested."""

    @property
    def capacity(self) -> int | None:
        """The maximum number of slots; None if the backend sets no limit."""

    async def start(self) -> None:
        """Prove the isolation in a throw-away slot. Idempotent. Raises `ConfigError`, `IsolationUnavailable` or another
        `SandboxError`."""

    async def aclose(self) -> None:
        """End every slot and snapshot, except slots that belong to a service. Idempotent."""

    async def create(self, spec: SlotSpec, trajectory_id: str, snapshot: Snapshot | None = None) -> Slot:
        """Return a new slot. If `snapshot` is given, the slot starts from it, and `spec.image` must be its image."""

    async def destroy(self, slot: Slot) -> None:
        """End the slot with its processes and files. Does nothing if the slot is already gone."""

    async def seal(self, slot: Slot, view: View | None = None) -> Snapshot:
        """End the slot and return a snapshot whose topmost layer is the slot's changes, limited to `view`."""

    async def checkpoint(self, slot: Slot) -> Snapshot:
        """Return a snapshot of the slot's current files; the slot continues. Raises `SandboxError` at levels below
        `userns`."""

    async def view(self, snapshot: Snapshot, view: View) -> Snapshot:
        """Return a second snapshot of the same files, limited to `view`."""

    async def changes(self, snapshot: Snapshot) -> list[Change]:
        """Return the changes in the topmost layer, sorted by path."""

    async def forget(self, snapshot: Snapshot) -> None:
        """Drop the snapshot's topmost layer as soon as no slot uses that layer. Does nothing if the layer is already
        gone."""

    def stats(self) -> Mapping[str, JSON]:
        """Return the current counts: `backend`, `rung`, `slots`, `lost`, and `containers` if the backend has any."""


class SlotSource(Protocol):
    """Hands out slots to the layers above; the pool implements it."""

    async def acquire(
        self,
        trajectory_id: str,
        *,
        spec: SlotSpec | None = None,
        snapshot: Snapshot | None = None,
        timeout_s: float | None = None,
        admitted: Callable[[], None] | None = None,
    ) -> Slot: ...

    async def add(
        self, slot: Slot, number: int | None, spec: SlotSpec, name: str, snapshot: Snapshot | None = None
    ) -> Slot: ...

    async def release(self, slot: Slot) -> None: ...

    async def seal(self, slot: Slot, view: View | None = None) -> Snapshot: ...

    async def checkpoint(self, slot: Slot, *, continued: bool = False) -> Snapshot: ...

    async def changes(self, snapshot: Snapshot) -> list[Change]: ...

    @property
    def snapshots(self) -> SnapshotSource: ...


class SnapshotSource(Protocol):
    """The snapshots that the slots of a source start from; `Snapshots` of the pool implements it."""

    async def compose(self, spec: SlotSpec, files: Mapping[str, bytes]) -> Snapshot | None: ...

    def continued(self, snapshot: Snapshot) -> Snapshot: ...

    async def save(self, snapshot: Snapshot, folder: Path) -> int: ...

    async def load(self, folder: Path, spec: SlotSpec) -> Snapshot: ...

    async def view(self, snapshot: Snapshot, view: View) -> Snapshot: ...

    async def holds(self, snapshot: Snapshot) -> bool: ...

    async def forget(self, snapshot: Snapshot) -> None: ...


def encode_lease(trajectory_id: str, spec: SlotSpec) -> dict[str, JSON]:
    """Return a slot's trajectory ID and settings as JSON, which a service keeps for the next client."""
    network = spec.network.value if isinstance(spec.network, Network) else list(spec.network.hosts)
    mounts = [mount.fields for mount in spec.mounts]
    about: dict[str, JSON] = {"trajectory_id": trajectory_id, "image": spec.image, "network": network}
    about |= {"limits": asdict(spec.limits), "mounts": mounts, "env": [list(pair) for pair in spec.env]}
    about |= {"workspace": spec.workspace} if spec.workspace else {}
    return about | ({"copies": [mount.fields for mount in spec.copies]} if spec.copies else {})


def decode_lease(about: dict[str, JSON]) -> tuple[str, SlotSpec]:
    """Return the trajectory ID and the slot's settings from the JSON that `encode_lease` made."""
    network = about["network"]
    spec = SlotSpec(
        image=about["image"],
        network=Network(network) if isinstance(network, str) else AllowList(tuple(network)),
        limits=Limits(**about["limits"]),
        mounts=tuple(Mount(*mount) for mount in about["mounts"]),
        env=tuple((name, value) for name, value in about["env"]),
        workspace=about.get("workspace", ""),
        copies=tuple(Mount(*mount) for mount in about.get("copies", ())),
    )
    return about["trajectory_id"], spec
