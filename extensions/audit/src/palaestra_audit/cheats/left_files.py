"""Reads the files that a rollout leaves behind, when its work is sealed or first graded."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from palaestra.envs.policy_runs import PolicyRuns
from palaestra.rollouts.grading.tampering import CARRIED, is_below
from palaestra.rollouts.records import Group
from palaestra.rollouts.workspaces import Workspaces
from palaestra_audit.cheats.hollow_work import MOST_BYTES
from palaestra_slots.core.errors import InfraError
from palaestra_slots.core.types import Task
from palaestra_slots.sandbox.slot import WORKSPACE, Change, Rung, Slot, SlotSource, SlotSpec, Snapshot
from palaestra_tokens.engines.scripted import Policy

_MOST_FILES = 200
"""The maximum number of files that are read. Files in the workspace come first."""
_WAIT_S = 60.0
_INSTALLED = {"site-packages", "dist-packages", "node_modules", "__pycache__", ".git"}
"""Directories whose files a solution installs or caches, but does not write."""
_SCRIPTS = ("/solution", "/oracle", "/tmp/palaestra-solution")  # noqa: S108  in the sandbox
"""The directories in which sets of terminal tasks put the scripts of their solutions, which are not their work."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What is at a path: its kind, and whether it is a file or directory without content of its own."""

    kind: str
    bare: bool


@dataclass(slots=True)
class LeftFiles:
    """What to read from the rollouts that are played while `READING` has this object, and what was read. `spec` is the
    slot's. If `paths` is None, the files that the agent changed are read."""

    spec: SlotSpec
    paths: Collection[str] | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    others: dict[str, Entry | None] = field(default_factory=dict)
    """What is at the other paths that the agent changed, such as those of removed files and of directories; None if
    nothing is. If it has paths from the start, these are read. It is empty if there are more than `_MOST_FILES`."""
    python: bool | None = None
    """Whether there is a Python file in the workspace; None if nothing was read."""
    failure: InfraError | None = None
    """Why the files could not be read."""

    @property
    def is_bare(self) -> bool:
        """Whether the agent changed something and left no content: it removed files, or made directories or empty
        files."""
        return bool(self.others) and not self.files and all(each is None or each.bare for each in self.others.values())

    def includes(self, bare: LeftFiles) -> bool:
        """Return whether the agent left what another agent left, which left no content. A link or device in place of a
        removed file counts as removed, because the grader may take it away."""
        return self.python is not None and all(
            found == wanted or (wanted is None and found is not None and found.kind not in ("file", "dir"))
            for path, wanted in bare.others.items()
            for found in [self.others.get(path)]
        )

    async def read(self, pool: SlotSource, snapshot: Snapshot | None) -> None:
        """Read the files of a snapshot. If that fails, there are no files, and `failure` has the reason."""
        try:
            changed = [] if self.paths is not None or snapshot is None else await pool.changes(snapshot)
            slot = await pool.acquire("left-files", spec=self.spec, snapshot=snapshot, timeout_s=_WAIT_S)
        except InfraError as error:
            self.failure = error
            return
        try:
            paths = self.paths or _written(changed)
            read = {path: data for path in paths if (data := await _read_or_empty(slot, path))}
            self.files |= {path.removeprefix(CARRIED): data for path, data in read.items()}
            others = [*self.others] or [each.path for each in changed if each.path not in read]
            if len(others) <= _MOST_FILES:
                self.others = {path: await _entry(slot, path) for path in others}
            find = f"find {WORKSPACE} -name .git -prune -o -name '*.py' -print | head -1"
            found = await slot.execute(find, cwd="/", timeout_s=_WAIT_S)  # the agent may have removed the workspace
            self.python = bool(found.output.strip())
        except InfraError as error:
            self.failure = error
        finally:
            await pool.release(slot)


# A context variable, because plays run concurrently and each has files of its own.
READING: ContextVar[LeftFiles | None] = ContextVar("reading", default=None)


async def play_and_read(runs: PolicyRuns, policy: Policy, task: Task, number: int, reads: LeftFiles | None) -> Group:
    """Play one group. `reads` is filled with the files that its rollouts leave."""
    reading = READING.set(reads)
    try:
        return await runs.play(policy, task, number)
    finally:
        READING.reset(reading)


class ReadWorkspaces(Workspaces):
    """The workspaces of a check, which fills the `LeftFiles` in `READING`."""

    def read_live(self, rung: Rung) -> None:
        """Let `keep` also see work that is graded in its own slot, if slots can be copied at this level."""
        self.kept = Path() if rung >= Rung.USERNS else None

    def read_nothing(self) -> None:
        """Spare the copies of work that is graded in its own slot."""
        self.kept = None

    async def keep(self, group_id: str, index: int, snapshot: Snapshot | None, *, sealed: bool) -> Path | None:
        """Read the files of a rollout's work. Stores nothing. A check that fails is played over the reference solution
        afterwards, whose files are not those of the rollout."""
        if (reading := READING.get()) is not None and reading.python is None and reading.failure is None:
            await reading.read(self.pool, snapshot)
        return None


def _written(changes: Sequence[Change]) -> list[str]:
    """Return the paths of the files that the agent wrote, at most `_MOST_FILES`."""
    paths = [each.path for each in changes if each.kind == "file"]
    written = [
        path for path in paths if _INSTALLED.isdisjoint(PurePosixPath(path).parts) and not is_below(path, _SCRIPTS)
    ]
    return sorted(written, key=lambda path: not is_below(path, [WORKSPACE]))[:_MOST_FILES]


async def _read_or_empty(slot: Slot, path: str) -> bytes:
    """Return a file's content; nothing if it cannot be read or is too large."""
    try:
        return await slot.read_bytes(path, max_bytes=MOST_BYTES)
    except InfraError:
        raise
    except OSError:
        return b""


async def _entry(slot: Slot, path: str) -> Entry | None:
    """Return what is at a path; None if nothing is, or if it cannot be read."""
    try:
        found = await slot.stat(path)
    except InfraError:
        raise
    except OSError:
        return None
    if found is None:
        return None
    return Entry(found.kind, found.kind == "dir" or (found.kind == "file" and found.size == 0))
