"""Slots and what provides them: the types and Protocols of the sandbox layer. No I/O.

A *backend* creates slots; a *slot* is one isolated workspace; a *snapshot* is a sealed workspace from which any number
of slots start. `pool.py` leases slots; code above this layer uses only `Slot`, `Snapshot` and the pool.

Paths are paths inside the slot. Relative ones start at `WORKSPACE`, which is also the directory where commands start.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Protocol, overload, runtime_checkable

from palaestra.core.types import JSON, AllowList, Limits, Network, network

WORKSPACE = "/workspace"
"""Where commands start, in every backend."""

DEFAULT_OUTPUT_BYTES = 50_000
"""How much of a command's output is kept by default, head and tail together."""

MAX_FILE_BYTES = 64 << 20
"""How much one file call reads by default; larger files are refused, and the message names the limit."""


class Rung(IntEnum):
    """The isolation level of a slot; higher is better."""

    NONE = 0
    CONFINED = 1
    USERNS = 2
    FULL = 3

    @property
    def label(self) -> str:
        """The name in flags, metadata and messages."""
        return self.name.lower()


class Fork(StrEnum):
    """How a backend starts many slots from one prepared workspace."""

    NATIVE = "native"
    COPY = "copy"
    REPREPARE = "reprepare"


@dataclass(frozen=True, slots=True)
class ExecutionResult:
    """The result of one command.

    `output` is stdout and stderr as they were interleaved, decoded as UTF-8 with replacement; if it exceeded the bound
    it holds head and tail, with a line between them that counts the missing bytes. `metadata` always holds `exit_code`
    and `returncode` (equal; 124 after a timeout, 128+n after signal n), `timeout` (bool), `rung`, `output_total_bytes`,
    `truncated` (bool), `duration_s`; if the backend knows them, `cpu_s`, `max_rss_bytes`, `oom`. If output was left out
    and the slot has it in a file, `full_output_path` is that file and `full_output_bytes` how much it holds (the first
    4 MiB). Commands of a stateful shell have `shell_restarted` (bool). `verdict` holds the bytes that the command wrote
    to descriptor 3, if the call asked for that channel.

    `success` is `exit_code == 0`. `error` is empty on success, otherwise one line ("Exit code: 2", "Command timed out
    after 5s"). A slot that dies raises `SlotLost` and never looks like a failed command.
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
    """One directory entry. `kind` is file, dir, symlink or other; `size` in bytes; `mode` the permission bits.

    `target` is the text of a symlink.
    """

    path: str
    kind: str
    size: int
    mode: int
    mtime: float
    target: str = ""


@dataclass(frozen=True, slots=True)
class Change:
    """One path that differs from the snapshot a workspace started from. `kind`: file, dir, symlink, other, deleted.

    A directory that replaced what was below it is one Change with `opaque` set, in addition to the Changes of its
    entries.
    """

    path: str
    kind: str
    opaque: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A sealed workspace. `layers` name its immutable layers, topmost first, in the backend that made them."""

    snapshot_id: str
    layers: tuple[str, ...]
    spec: SlotSpec


@dataclass(frozen=True, slots=True)
class Mount:
    """A host directory that a slot can read, but not write, at `target`: interpreters, wheels, test tools."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class SlotSpec:
    """What a slot is made from. Slots of equal specs are interchangeable.

    `image` is a root file system on the host: a directory, a tar file (`docker export`, `docker save`) or an OCI
    layout; None is the allow-list of the host's system directories. `env` is the whole environment of commands besides
    PATH, HOME, LANG, TERM, which the backend sets. Raises ValueError if `network` is not a Network or AllowList.
    """

    image: str | None = None
    network: Network | AllowList = Network.OFF
    limits: Limits = Limits()
    mounts: tuple[Mount, ...] = ()
    env: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "network", network(self.network))


@dataclass(frozen=True, slots=True)
class TerminalSize:
    """The window of a terminal, in character cells."""

    rows: int = 24
    columns: int = 80


@dataclass(frozen=True, slots=True)
class OutputPiece:
    """A piece of a process's output, from the cursor `start` on.

    `lost` is how many bytes after the requested cursor are no longer kept.
    """

    data: bytes
    start: int
    lost: int = 0

    @property
    def end(self) -> int:
        """The cursor after the piece."""
        return self.start + len(self.data)


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """The status of a background process. `exit_code` is None while it runs, 128+n after signal n.

    `pid` is its number in the slot, `started_s` its start in seconds since the host's boot: together with `process_id`
    they identify it, even if the slot's server was started again. `full_output_path` is a file in the slot with its
    output from the start, once that exceeds what is kept for readers.
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
    """A process of a slot that outlives the call that started it; it ends with the slot at the latest.

    Methods raise `StaleLease` and `SlotLost` as the slot's do, and ProcessLookupError if the process was forgotten.
    """

    @property
    def process_id(self) -> int: ...

    @property
    def pid(self) -> int:
        """Its number in the slot."""
        ...

    async def status(self) -> ProcessStatus: ...

    async def read(self, cursor: int = 0, *, max_bytes: int = 1 << 16, wait_s: float = 0.0) -> OutputPiece:
        """Output from `cursor` on (negative: so many bytes before the end); other readers still get it.

        If there is none yet, wait at most `wait_s` for some, or for the end. At least the last 256 KiB are kept.
        """
        ...

    def output(self, cursor: int = 0) -> AsyncIterator[OutputPiece]:
        """Follow the output from `cursor` on until the process has ended."""
        ...

    async def write(self, data: bytes) -> None:
        """Write to its input, at the pace at which it reads. BrokenPipeError if it has closed its input or has
        ended."""
        ...

    async def close_input(self) -> None:
        """End its input; on a terminal, send the end-of-input character."""
        ...

    async def signal(self, number: int) -> None:
        """Send a signal to its process group."""
        ...

    async def resize(self, size: TerminalSize) -> None:
        """Resize its terminal; the foreground processes get SIGWINCH. OSError (ENOTTY) without a terminal."""
        ...

    async def wait(self, timeout_s: float | None = None) -> ProcessStatus:
        """Its status when it has ended, or after `timeout_s`: check `running`."""
        ...

    async def kill(self, grace_s: float = 0.0) -> ProcessStatus:
        """Kill it and everything it has started: SIGTERM, up to `grace_s` for that, then SIGKILL until nothing
        lives."""
        ...

    async def forget(self) -> None:
        """Kill it, if it runs, and drop its output."""
        ...


class Shell(Protocol):
    """A stateful shell: directory, variables and functions of one command are there for the next."""

    async def run(
        self,
        command: str,
        *,
        stdin: bytes = b"",
        timeout_s: float = 60.0,
        max_output_bytes: int = DEFAULT_OUTPUT_BYTES,
        on_output: Callable[[bytes], None] | None = None,
    ) -> ExecutionResult:
        """Run a command; calls wait for each other.

        A timeout interrupts the command and kills what it has started. If the shell had to die for that, ended itself
        (`exit`, `exec`, `set -e`) or had died before, `metadata["shell_restarted"]` is true: from then on directory,
        variables and functions are those of a new shell.
        """
        ...

    async def state(self) -> bytes:
        """Directory, variables, functions, aliases and options, for the `state` of another shell. Bash only."""
        ...

    async def aclose(self) -> None:
        """End the shell; its background jobs stay. Idempotent."""
        ...


class Slot(Protocol):
    """One leased workspace. Every method raises `StaleLease` after release and `SlotLost` if the slot has died."""

    @property
    def slot_id(self) -> str: ...

    @property
    def epoch(self) -> int: ...

    @property
    def trajectory_id(self) -> str: ...

    @property
    def rung(self) -> Rung: ...

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
        spill: bool = True,
    ) -> ExecutionResult:
        """Run `bash -c command`, or an argv, to its end or its timeout, which kills the whole process tree.

        `spill` keeps output that exceeds `max_output_bytes` in a file of the slot. `verdict` opens descriptor 3 of the
        command as a channel of its own, returned apart from the output (at most 16 MiB). Cancelling the call kills the
        command.
        """
        ...

    async def shell(self, *, cwd: str = WORKSPACE, env: Mapping[str, str] | None = None, state: bytes = b"") -> Shell:
        """A stateful shell, which starts with its first command; `state` comes from `Shell.state` of another one."""
        ...

    async def spawn(
        self,
        command: str | Sequence[str],
        *,
        cwd: str = WORKSPACE,
        env: Mapping[str, str] | None = None,
        stdin: bool = True,
        terminal: TerminalSize | None = None,
    ) -> Process:
        """Start a background process; with `terminal` it has one of its own, otherwise a pipe for input if `stdin` is
        set.

        Raises FileNotFoundError for a missing program, PermissionError for one that cannot be run.
        """
        ...

    async def processes(self) -> Sequence[Process]:
        """The background processes of this slot, including ended ones, oldest first."""
        ...

    async def read_bytes(self, path: str, *, max_bytes: int = MAX_FILE_BYTES, offset: int = 0) -> bytes: ...

    async def write_bytes(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        """Write atomically, creating parent directories. `mode` None keeps an existing file's mode, otherwise 0o644."""
        ...

    @overload
    async def read_text(self, path: str) -> str: ...
    @overload
    async def read_text(self, path: str, *, missing: str) -> str: ...
    async def read_text(self, path: str, *, missing: str | None = None) -> str:
        """The file as UTF-8, undecodable bytes replaced. `missing`, if given, is returned for whatever cannot be
        read as a file: nothing, a directory, a fifo, a circular link, more than one call may read."""
        ...

    async def write_text(self, path: str, text: str, *, mode: int | None = None) -> None: ...

    async def list_dir(self, path: str = ".") -> list[FileInfo]: ...

    async def stat(self, path: str) -> FileInfo | None:
        """The entry at a path, symlinks not followed; None if nothing is there."""
        ...

    async def make_dir(self, path: str) -> None:
        """Make a directory with its parents, if it does not exist."""
        ...

    async def make_link(self, path: str, target: str) -> None:
        """Make a symlink, in place of an existing file or symlink. Its target need not exist."""
        ...

    async def upload(self, local: Path, path: str) -> int:
        """Write a file of this machine, of any size, with its permission bits, atomically; its bytes.

        For whole directories: `transfer.upload_dir`.
        """
        ...

    async def download(self, path: str, local: Path) -> int:
        """Write a file of the slot, of any size, to one of this machine, which appears whole; its bytes."""
        ...

    async def remove(self, path: str) -> None:
        """Remove a file or a whole directory, if it exists."""
        ...

    async def arguments(self, pid: int) -> Sequence[str] | None:
        """The arguments of a process by its number in the slot, as the kernel reports them; None if no such process
        lives.

        A process that is just being started has none yet. This and `ask` use no program or file of the slot.
        """
        ...

    async def ask(self, port: int, request: bytes, *, timeout_s: float = 10.0, max_bytes: int = 1 << 20) -> bytes:
        """What a service at 127.0.0.1 in the slot answers to these bytes until it closes the connection.

        Raises OSError if nothing listens, or the answer does not end in time; an answer longer than `max_bytes` is cut.
        """
        ...

    async def changes(self) -> list[Change]:
        """What differs from the snapshot (or image) this slot started from. The cost grows with the change alone."""
        ...

    async def freeze(self) -> int:
        """Stop every process of the slot until the next call to it, for example while no agent acts; how many."""
        ...

    def fork(self) -> AbstractAsyncContextManager[Slot]:
        """Another slot with this one's present files, for as long as the block lasts; this one continues.

        For trying the next step at any time. The fork does not count as one of the pool's slots: a holder of a slot
        must not wait for another. Processes, `/tmp` and `/dev/shm` are not in it. Raises `SandboxError` on a rung
        without layers.
        """
        ...


@dataclass(frozen=True, slots=True)
class View:
    """Which part of a sealed workspace's change a new slot sees: everything under `only`, without `without`.

    Paths that are left out show the snapshot that the sealed slot had started from. Grading uses this to drop files
    that an agent has planted.
    """

    only: tuple[str, ...] = ("/",)
    without: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RungStatus:
    """Whether an isolation level is available here; if not, why, and what would change that."""

    rung: Rung
    available: bool
    reason: str
    covers: tuple[str, ...] = ()


class Backend(Protocol):
    """What provides slots. Implementations document what they isolate and what they do not."""

    @property
    def name(self) -> str: ...

    @property
    def fork(self) -> Fork: ...

    async def start(self) -> None:
        """Raises `IsolationUnavailable`, before any slot exists, if the requested rung is not available."""
        ...

    async def aclose(self) -> None:
        """End every slot and leave nothing behind. Idempotent."""
        ...

    @property
    def rung(self) -> Rung: ...

    @property
    def capacity(self) -> int | None:
        """How many slots there can be at a time, after `start`; None if the backend has no limit."""
        ...

    async def create(self, spec: SlotSpec, trajectory_id: str, snapshot: Snapshot | None = None) -> Slot: ...

    async def seal(self, slot: Slot, view: View | None = None) -> Snapshot:
        """End the slot and its processes (proved by pidfd); its change becomes an immutable layer."""
        ...

    async def checkpoint(self, slot: Slot) -> Snapshot:
        """The slot's present files as a snapshot; the slot continues. The cost grows with the change since the last
        one.

        Processes are not in a snapshot. Raises `SandboxError` if a backend cannot do it.
        """
        ...

    async def view(self, snapshot: Snapshot, view: View) -> Snapshot:
        """A snapshot that shows only a part of the topmost layer's change."""
        ...

    async def changes(self, snapshot: Snapshot) -> list[Change]:
        """What the topmost layer of a snapshot changed."""
        ...

    async def destroy(self, slot: Slot) -> None: ...

    async def forget(self, snapshot: Snapshot) -> None:
        """Drop the snapshot's topmost layer. Slots that started from it keep it until they end."""
        ...

    def stats(self) -> Mapping[str, JSON]: ...


@runtime_checkable
class Lasting(Protocol):
    """What a backend has in addition if its slots can outlive the process that leased them."""

    @property
    def stays(self) -> bool:
        """Whether they do: then closing the backend leaves them."""
        ...

    def leases(self) -> Sequence[Slot]:
        """The slots that existed when it was started, under new leases."""
        ...


class SlotSource(Protocol):
    """Hands out slots to the layers above: the pool."""

    async def acquire(
        self,
        trajectory_id: str,
        *,
        spec: SlotSpec | None = None,
        snapshot: Snapshot | None = None,
        timeout_s: float | None = None,
        admitted: Callable[[], None] | None = None,
    ) -> Slot: ...

    async def release(self, slot: Slot) -> None: ...

    async def seal(self, slot: Slot, view: View | None = None) -> Snapshot: ...

    async def view(self, snapshot: Snapshot, view: View) -> Snapshot: ...

    async def changes(self, snapshot: Snapshot) -> list[Change]: ...

    async def holds(self, snapshot: Snapshot) -> bool: ...

    async def forget(self, snapshot: Snapshot) -> None: ...


def encode_lease(trajectory_id: str, spec: SlotSpec) -> dict[str, JSON]:
    """What a slot was made from as plain JSON: a service keeps it for the next client."""
    network = spec.network.value if isinstance(spec.network, Network) else list(spec.network.hosts)
    mounts = [[mount.source, mount.target] for mount in spec.mounts]
    about: dict[str, JSON] = {"trajectory_id": trajectory_id, "image": spec.image, "network": network}
    return about | {"limits": asdict(spec.limits), "mounts": mounts, "env": [list(pair) for pair in spec.env]}


def decode_lease(about: dict[str, JSON]) -> tuple[str, SlotSpec]:
    """The inverse of `encode_lease`."""
    network = about["network"]
    spec = SlotSpec(
        image=about["image"],
        network=Network(network) if isinstance(network, str) else AllowList(tuple(network)),
        limits=Limits(**about["limits"]),
        mounts=tuple(Mount(*mount) for mount in about["mounts"]),
        env=tuple((name, value) for name, value in about["env"]),
    )
    return about["trajectory_id"], spec
