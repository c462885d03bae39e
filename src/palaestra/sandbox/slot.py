"""Slots and what provides them: the types and Protocols of the sandbox layer. No I/O.

A *backend* creates slots; a *slot* is one isolated workspace; a *snapshot* is a sealed workspace from which any number
of slots start. `pool.py` leases slots; everything above this layer sees only `Slot`, `Snapshot` and the pool.

Paths are paths inside the slot. Relative ones start at `WORKSPACE`, which is also the directory where commands start.

What a slot was made from, as JSON and back: a service keeps it beside each lease for whoever attaches next.
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
"""Where an agent's commands start, in every backend."""

DEFAULT_OUTPUT_BYTES = 50_000
"""How much of a command's output is kept by default, head and tail together."""

MAX_FILE_BYTES = 64 << 20
"""How much one file call carries by default; larger files are refused with the limit in the message."""


class Rung(IntEnum):
    """How well a slot is isolated; higher is better. DESIGN: the ladder."""

    NONE = 0
    CONFINED = 1
    USERNS = 2
    FULL = 3

    @property
    def label(self) -> str:
        """The name that flags, metadata and messages use."""
        return self.name.lower()


class Fork(StrEnum):
    """How a backend starts many slots from one prepared workspace."""

    NATIVE = "native"
    COPY = "copy"
    REPREPARE = "reprepare"


@dataclass(frozen=True, slots=True)
class ExecutionResult:
    """What one command did.

    `output` is stdout and stderr as they were interleaved, decoded as UTF-8 with replacement; when it was longer than
    the bound it holds head and tail with a line between that says how much is missing. `metadata` always holds
    `exit_code` and `returncode` (equal; 124 after a timeout, 128+n after signal n), `timeout` (bool), `rung`,
    `output_total_bytes`, `truncated` (bool), `duration_s`; where the backend knows, `cpu_s`, `max_rss_bytes`, `oom`.
    `full_output_path` is there when output was left out and the slot has it (its first 4 MiB) in a file;
    `full_output_bytes` says how much that is. `shell_restarted` (bool) is there after a command of a stateful shell.
    `verdict` holds the bytes that the command wrote to descriptor 3 when the call asked for that channel.

    `success` is `exit_code == 0`. `error` is empty on success, else one line ("Exit code: 2", "Command timed out
    after 5s").
    A slot that dies raises `SlotLost` and never looks like a failed command.
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

    `target` is where a symlink leads, as it is written in it.
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

    A directory that replaced what was below it is one Change with `opaque` set, besides the Changes of its entries.
    """

    path: str
    kind: str
    opaque: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A sealed workspace. `layers` name the immutable layers, topmost first, inside the backend that made them."""

    snapshot_id: str
    layers: tuple[str, ...]
    spec: SlotSpec


@dataclass(frozen=True, slots=True)
class Mount:
    """A host directory that a slot can read, never write, at `target`: interpreters, wheels, test tools."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class SlotSpec:
    """What a slot is made from. Slots of equal specs are interchangeable.

    `image` is a root file system on the host: a directory, a tar file (`docker export`, `docker save`) or an OCI
    layout; None is the allow-list of the host's system directories.
    `env` is the whole environment of commands besides PATH, HOME, LANG, TERM, which the backend sets.
    Raises ValueError for a network that is none.
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

    `lost` is how many bytes after the cursor that was asked for are no longer kept.
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
    """What there is to say of a background process. `exit_code` is None while it runs, 128+n after signal n.

    `pid` is the slot's number for it, `started_s` when it was started, in seconds since the host's boot: together with
    `process_id` they tell it from every other one, also after the slot's server was started anew. `full_output_path`
    is a file in the slot with its output from the start, once that is more than what is kept for readers.
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

    Methods raise `StaleLease` and `SlotLost` as the slot's do, and ProcessLookupError when the process was forgotten.
    """

    @property
    def process_id(self) -> int: ...

    @property
    def pid(self) -> int:
        """The process as the slot sees it."""
        ...

    async def status(self) -> ProcessStatus: ...

    async def read(self, cursor: int = 0, *, max_bytes: int = 1 << 16, wait_s: float = 0.0) -> OutputPiece:
        """Output from `cursor` on (negative: so many bytes before the end), without taking it away from others.

        Where there is none yet, waits `wait_s` at most for some, or for the end. The last 256 KiB at least are kept.
        """
        ...

    def output(self, cursor: int = 0) -> AsyncIterator[OutputPiece]:
        """Follow the output from `cursor` on until the process has ended."""
        ...

    async def write(self, data: bytes) -> None:
        """Write to its input, at the pace at which it reads. BrokenPipeError when it has closed it or has ended."""
        ...

    async def close_input(self) -> None:
        """End its input; on a terminal, send the end-of-input character."""
        ...

    async def signal(self, number: int) -> None:
        """Send a signal to its process group."""
        ...

    async def resize(self, size: TerminalSize) -> None:
        """Another window size; its foreground processes are told. OSError (ENOTTY) without a terminal."""
        ...

    async def wait(self, timeout_s: float | None = None) -> ProcessStatus:
        """Its status when it has ended, or after `timeout_s`: look at `running`."""
        ...

    async def kill(self, grace_s: float = 0.0) -> ProcessStatus:
        """End it and everything it has started: SIGTERM, up to `grace_s` for that, then SIGKILL until nothing lives."""
        ...

    async def forget(self) -> None:
        """Kill it, if it runs, and drop its output."""
        ...


class Shell(Protocol):
    """A shell that goes on: directory, variables and functions of one command are there for the next."""

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

        A timeout interrupts the command and kills what it has started. When the shell had to die for that, ended itself
        (`exit`, `exec`, `set -e`) or had died before, `metadata["shell_restarted"]` is true: directory, variables and
        functions are those of a new shell from then on.
        """
        ...

    async def state(self) -> bytes:
        """Directory, variables, functions, aliases and options, for the `state` of another shell. Bash only."""
        ...

    async def aclose(self) -> None:
        """End the shell; its background jobs stay. Idempotent."""
        ...


class Slot(Protocol):
    """One leased workspace. Every method raises `StaleLease` after release and `SlotLost` when the slot died."""

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
        """Run `bash -c command`, or an argv as it is, to its end or its timeout, which kills the whole process tree.

        `spill` keeps output that is longer than `max_output_bytes` in a file of the slot. `verdict` opens descriptor 3
        of the command as a channel of its own: what is written there is returned apart from the output (at most
        16 MiB). Cancelling the call kills the command.
        """
        ...

    async def shell(self, *, cwd: str = WORKSPACE, env: Mapping[str, str] | None = None, state: bytes = b"") -> Shell:
        """A stateful shell, which starts with its first command; `state` is what `Shell.state` of another one gave."""
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
        """Start a background process; with `terminal` it has one of its own, else a pipe for input if `stdin` is set.

        A program that is not there raises FileNotFoundError, one that cannot run PermissionError.
        """
        ...

    async def processes(self) -> Sequence[Process]:
        """The background processes of this slot, those that have ended included, oldest first."""
        ...

    async def read_bytes(self, path: str, *, max_bytes: int = MAX_FILE_BYTES, offset: int = 0) -> bytes: ...

    async def write_bytes(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        """Write atomically, creating parent directories. `mode` None keeps an existing file's, else 0o644."""
        ...

    @overload
    async def read_text(self, path: str) -> str: ...
    @overload
    async def read_text(self, path: str, *, missing: str) -> str: ...
    async def read_text(self, path: str, *, missing: str | None = None) -> str:
        """The file as UTF-8, undecodable bytes replaced. `missing`, if given, stands for whatever cannot be read as
        one: nothing, a directory, a fifo, a link in a circle, more than a call may read."""
        ...

    async def write_text(self, path: str, text: str, *, mode: int | None = None) -> None: ...

    async def list_dir(self, path: str = ".") -> list[FileInfo]: ...

    async def stat(self, path: str) -> FileInfo | None:
        """None when nothing is there. Symlinks are not followed."""
        ...

    async def make_dir(self, path: str) -> None:
        """A directory with its parents. One that is there already is fine."""
        ...

    async def make_link(self, path: str, target: str) -> None:
        """A symlink, in place of a file or symlink that is there. Its target need not be."""
        ...

    async def upload(self, local: Path, path: str) -> int:
        """Write a file of this machine, of any size, with its permission bits: the bytes of it. Atomic, as writing is.

        For whole directories: `transfer.upload_dir`.
        """
        ...

    async def download(self, path: str, local: Path) -> int:
        """Write a file of the slot, of any size, to one of this machine, which appears whole: the bytes of it."""
        ...

    async def remove(self, path: str) -> None:
        """Remove a file or a whole directory. Nothing there is not an error."""
        ...

    async def arguments(self, pid: int) -> Sequence[str] | None:
        """The arguments of a process by the number that the slot gives it, as the kernel says; None where none lives.

        A process that is just being started has none yet. No program or file of the slot has a part in this, nor in
        `ask`.
        """
        ...

    async def ask(self, port: int, request: bytes, *, timeout_s: float = 10.0, max_bytes: int = 1 << 20) -> bytes:
        """What a service at 127.0.0.1 in the slot answers to these bytes until it closes the connection.

        OSError where nobody listens, or the answer has no end in time; what is longer than `max_bytes` is cut off.
        """
        ...

    async def changes(self) -> list[Change]:
        """What differs from the snapshot (or image) this slot started from. Cost grows with the change alone."""
        ...

    async def freeze(self) -> int:
        """Stop every process of the slot until the next call to it, and say how many: while nobody acts, say."""
        ...

    def fork(self) -> AbstractAsyncContextManager[Slot]:
        """Another slot with the files of this one as they are now, for as long as the block lasts; this one goes on.

        So what may be done next can be tried at any step. It is not counted as one of the pool's: who holds a slot must
        not wait for another. Processes, `/tmp` and `/dev/shm` are not in it. Raises `SandboxError` on a rung without
        layers.
        """
        ...


@dataclass(frozen=True, slots=True)
class View:
    """Which part of a sealed workspace's change a new slot sees: everything under `only`, without `without`.

    Paths left out show the snapshot that the sealed slot had started from. This is how grading drops an agent's plants.
    """

    only: tuple[str, ...] = ("/",)
    without: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RungStatus:
    """One line of the ladder: whether `rung` can be had here, and if not, why and what would change that."""

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
        """Raises `IsolationUnavailable`, before any slot exists, when the rung asked for cannot be had."""
        ...

    async def aclose(self) -> None:
        """End every slot and leave nothing behind. Idempotent."""
        ...

    @property
    def rung(self) -> Rung: ...

    @property
    def capacity(self) -> int | None:
        """How many slots there can be at a time, once it is started; None is no limit of the backend's."""
        ...

    async def create(self, spec: SlotSpec, trajectory_id: str, snapshot: Snapshot | None = None) -> Slot: ...

    async def seal(self, slot: Slot, view: View | None = None) -> Snapshot:
        """End the slot and its processes (proved by pidfd); its change becomes an immutable layer."""
        ...

    async def checkpoint(self, slot: Slot) -> Snapshot:
        """What the slot's files are now; the slot goes on. Cost grows with the change since the last checkpoint.

        Processes are not in a snapshot. Raises `SandboxError` where a backend cannot do it.
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
    """What a backend has besides whose slots can outlive the process that leased them."""

    @property
    def stays(self) -> bool:
        """Whether they do: then closing the backend leaves them."""
        ...

    def leases(self) -> Sequence[Slot]:
        """The slots that were there when it was started, under new leases."""
        ...


class SlotSource(Protocol):
    """What hands out slots to the layers above: the pool."""

    async def acquire(
        self,
        trajectory_id: str,
        *,
        spec: SlotSpec | None = None,
        snapshot: Snapshot | None = None,
        timeout_s: float | None = None,
    ) -> Slot: ...

    async def release(self, slot: Slot) -> None: ...

    async def seal(self, slot: Slot, view: View | None = None) -> Snapshot: ...

    async def view(self, snapshot: Snapshot, view: View) -> Snapshot: ...

    async def changes(self, snapshot: Snapshot) -> list[Change]: ...

    async def forget(self, snapshot: Snapshot) -> None: ...


Ladder = Sequence[RungStatus]
OutputStream = AsyncIterator[bytes]


def encode_lease(trajectory_id: str, spec: SlotSpec) -> dict[str, JSON]:
    """As plain JSON."""
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
