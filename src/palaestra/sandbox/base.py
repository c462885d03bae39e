"""Slots and what provides them: the types and Protocols of the sandbox layer. No I/O.

A *backend* creates slots; a *slot* is one isolated workspace; a *snapshot* is a sealed workspace from which any number
of slots start. `pool.py` leases slots; everything above this layer sees only `Slot`, `Snapshot` and the pool.

Paths are paths inside the slot. Relative ones start at `WORKSPACE`, which is also the directory where commands start.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Protocol, overload

from palaestra.core.types import JSON, Limits, Network

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
    """One directory entry. `kind` is file, dir, symlink or other; `size` in bytes; `mode` the permission bits."""

    path: str
    kind: str
    size: int
    mode: int
    mtime: float


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

    `image` is a root file system directory on the host; None is the allow-list of the host's system directories.
    `env` is the whole environment of commands besides PATH, HOME, LANG, TERM, which the backend sets.
    """

    image: str | None = None
    network: Network = Network.OFF
    limits: Limits = Limits()
    mounts: tuple[Mount, ...] = ()
    env: tuple[tuple[str, str], ...] = ()


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
    ) -> ExecutionResult:
        """Run `bash -c command`, or an argv as it is, to its end or its timeout, which kills the whole process tree.

        `verdict` opens descriptor 3 of the command as a channel of its own: what is written there is returned apart
        from the output (at most 16 MiB). Cancelling the call kills the command.
        """
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
        """The file as UTF-8, undecodable bytes replaced. Where there is none: `missing`, if that is given."""
        ...

    async def write_text(self, path: str, text: str, *, mode: int | None = None) -> None: ...

    async def list_dir(self, path: str = ".") -> list[FileInfo]: ...

    async def stat(self, path: str) -> FileInfo | None:
        """None when nothing is there. Symlinks are not followed."""
        ...

    async def remove(self, path: str) -> None:
        """Remove a file or a whole directory. Nothing there is not an error."""
        ...

    async def changes(self) -> list[Change]:
        """What differs from the snapshot (or image) this slot started from. Cost grows with the change alone."""
        ...


@dataclass(frozen=True, slots=True)
class View:
    """Which part of a sealed workspace's change a new slot sees: everything under `only`, without `without`.

    Paths left out show the snapshot that the sealed slot had started from. This is how grading drops an agent's plants.
    """

    only: tuple[str, ...] = ("/",)
    without: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
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

    async def create(self, spec: SlotSpec, trajectory_id: str, snapshot: Snapshot | None = None) -> Slot: ...

    async def seal(self, slot: Slot, view: View | None = None) -> Snapshot:
        """End the slot and its processes (proved by pidfd); its change becomes an immutable layer."""
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


Ladder = Sequence[Step]
OutputStream = AsyncIterator[bytes]
