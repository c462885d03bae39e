"""The files of a conversation: its slot, the shared folder, and a checkpoint of both before each turn.

A checkpoint of a slot costs about as much as the changes since the previous one, because layers are shared. Undoing a
turn ends the slot and starts another one from the checkpoint. Changes that were written to the shared folder are taken
back, except in files that the person has changed since. Checkpoints live as long as the conversation is open: a slot
does not outlive its process either.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from palaestra.agent.seat import Seat
from palaestra_chat.folder_changes import FolderChange
from palaestra_chat.host_git import without_history
from palaestra_chat.model_servers import some
from palaestra_chat.service import ChatService
from palaestra_chat.turn import WatchedSlot
from palaestra_chat.turn_events import Event
from palaestra_chat.unwritten_changes import UnwrittenChanges
from palaestra_chat.workdir import WorkFolder
from palaestra_slots.core.errors import DiskError, SandboxError
from palaestra_slots.core.exits import plural
from palaestra_slots.core.printable import escaped
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import WORKSPACE, Slot, SlotSpec, Snapshot

MANY_LAYERS = 32
"""The number of layers from which on a restored slot copies its topmost layer, so that undoing for hours adds none."""

COPIED_SANDBOX = "The sandbox is a copy: it has the files after the last turn of this history, but no processes."
CURRENT_FILES = (
    "The sandbox is a copy: it has the current files, although this history ends earlier, because no checkpoint of "
    "that time was kept. It has no processes."
)

LEAN_COPY = (
    "The whole folder is too large to copy, so the sandbox has no folders of installed packages and caches (such as "
    "node_modules and .venv)."
)

_COPIED_AGAIN = "The user changed files on their machine, and the sandbox has the new versions. Read them again: "
_BOTH = "The user changed files on their machine that you changed, too. The sandbox has only your version: "
_COMMITS = "The user changed commits or branches of the repository on their machine, and the sandbox has them now."
_NO_COMMITS = "The user's repository has commits or branches that the sandbox does not have. Ask before you commit."

_NO_CHECKPOINT = "no checkpoint of the files was kept"
_NOT_HERE = "this isolation level cannot copy files"


class ConversationSlots:
    """The place of a conversation's seat: slots of the service, whose output `emit` gets. New slots get a copy of the
    folder `workdir`. `leased` is called when the conversation has a slot."""

    def __init__(
        self,
        service: ChatService,
        conversation: str,
        workdir: Path | None,
        emit: Callable[[Event], None],
        leased: Callable[[], None],
    ) -> None:
        self._service = service
        self._id = conversation
        self._emit = emit
        self._leased = leased
        self._snapshot: Snapshot | None = None
        store = service.store.path
        self.unwritten = UnwrittenChanges(store.with_name(f"{store.name}.unwritten") / conversation)
        """What was not written back to the folder, of this sandbox and earlier ones."""
        self.folder = None if workdir is None else WorkFolder(workdir)
        """The folder of this machine that new slots get a copy of."""
        self.about: Sequence[str] = ()
        """What the person and the model should know about the copy in the present slot."""

    def share_folder(self, folder: WorkFolder | None) -> None:
        """Copy this folder into each new slot, or none."""
        self.folder = folder

    def start_from(self, snapshot: Snapshot | None) -> None:
        """Make the next slot from this snapshot, or an empty one."""
        self._snapshot = snapshot

    async def lease(self) -> Slot:
        """Lease a slot, or take over the one that the conversation had in an earlier service."""
        place = "" if self.folder is None or self.folder.place == WORKSPACE else self.folder.place
        copies = None if self.folder is None else self.folder.uncopied
        slot, kept = await self._service.lease(self._id, self._snapshot, place, copies)
        fresh, self._snapshot = self._snapshot is None and not kept, None
        prepare = self.folder.fill if self.folder is not None else self._service.settings.prepare
        if fresh and prepare is not None:
            await self._prepared(slot, prepare)
        self.about = () if self.folder is None else _about_copy(self.folder, slot)
        self._leased()
        return cast("Slot", WatchedSlot(slot, self._emit))

    async def _prepared(self, slot: Slot, prepare: Callable[[Slot], Awaitable[None]]) -> None:
        try:
            await prepare(slot)
        except BaseException:
            await self._service.release(slot)
            raise

    async def refresh(self, slot: Slot) -> list[tuple[str, str]]:
        """Copy what changed in the folder on this machine into the slot. Returns what the person and the model read
        about it: a text for each of them, for each kind of change."""
        if self.folder is None:
            return []
        try:
            found = await self.folder.refresh(slot)
        except SandboxError as error:
            return [(str(error), "")]
        told = []
        if found.copied:
            files, names = plural(len(found.copied), "file"), some(found.copied, 10)
            them = "it" if len(found.copied) == 1 else "them"
            told.append((f"{files} changed here since; the agent has {them} now: {names}", _COPIED_AGAIN + names))
        if found.both:
            names = some(found.both, 10)
            told.append((f"changed here and in the sandbox, where the agent's version stays: {names}", _BOTH + names))
        if found.commits:
            told.append((f"new commits or branches here in {some(found.commits, 3)}; the agent has them now", _COMMITS))
        if found.history:
            text = f"new commits or branches here in {some(found.history, 3)}, which the sandbox does not have"
            told.append((f"{text}; /sandbox new copies the folder again", _NO_COMMITS))
        return told

    async def keep_unwritten(self, slot: Slot) -> str:
        """Keep the changes that are not written back, before the slot ends. Returns where they are, for the person. If
        the sandbox does not answer, what was kept before stays."""
        if self.folder is None:
            return ""
        try:
            return self.unwritten.save(self.folder.root, await self.folder.changes(slot))
        except (SandboxError, DiskError) as error:
            return f"The unwritten changes could not be read again: {error}. {' '.join(self.unwritten.saved())}".strip()
        finally:
            self.unwritten.new_sandbox()

    async def release(self, slot: Slot) -> None:
        """End the slot and its processes."""
        await self._service.release(_unwatched(slot))

    async def copy(self, slot: Slot) -> Snapshot:
        """Return a snapshot of the files in the slot. Raises `SandboxError` if it cannot be copied."""
        return await self._service.pool.checkpoint(_unwatched(slot))


def _about_copy(folder: WorkFolder, slot: Slot) -> list[str]:
    """Return what is not in the copy of a folder, or not as on the person's machine."""
    found = []
    if slot.workspace_dir != str(folder.root):
        where = f"In the sandbox, {escaped(str(folder.root))} is at {slot.workspace_dir}"
        why = "that path belongs to its system" if folder.place == WORKSPACE else "it cannot have other paths"
        found.append(f"{where}, because {why}; programs that name the folder's own path do not work there.")
    spec: SlotSpec | None = getattr(slot, "spec", None)
    if folder.lean and (spec is None or not spec.copies):
        found.append(LEAN_COPY)
    if git := without_history(folder.root):
        found.append(f"{git}.")
    return found


def _unwatched(slot: Slot) -> Slot:
    return cast("WatchedSlot", slot).slot


@dataclass(slots=True)
class Checkpoint:
    """The files before a turn. `snapshot` is None if there was no slot, and `written` the number of files that had been
    written to the shared folder, and `refreshed` the number of those copied from it again. `problem` is the reason why
    there is no copy, or empty. `users` counts the conversations that may restore it: a fork has those of its parent."""

    snapshot: Snapshot | None
    written: int = 0
    refreshed: int = 0
    problem: str = ""
    users: int = 1


@dataclass(frozen=True, slots=True)
class Undone:
    """What `Conversation.rewind` has undone: the number of turns, and the message of the first of them. `files` tells
    the person what happened to the files, and `left` has the files of the shared folder that were not restored."""

    turns: int
    content: JSON
    files: str
    left: Sequence[FolderChange] = ()


class Checkpoints:
    """The checkpoints of one conversation, by the number of the turn that they precede. The oldest are dropped when
    there are more than `ChatSettings.checkpoints`."""

    def __init__(self, service: ChatService, seat: Seat, slots: ConversationSlots) -> None:
        self._service = service
        self._seat = seat
        self._slots = slots
        self._points: dict[int, Checkpoint] = {}

    async def take(self, turn: int) -> None:
        """Copy the files before this turn, unless that has been done. A failure is kept as the reason why the turn's
        files cannot be restored."""
        if turn in self._points or not self._service.settings.checkpoints:
            return
        folder = self._slots.folder
        point = Checkpoint(None) if folder is None else Checkpoint(None, folder.written, folder.refreshed)
        if self._seat.slot is not None:
            try:
                point.snapshot = await self._slots.copy(self._seat.slot)
            except SandboxError as error:
                point.problem = f"{_NOT_HERE} ({error})"
        self._points[turn] = point
        while len(self._points) > self._service.settings.checkpoints:
            await self._drop_checkpoint(min(self._points))

    def before(self, turn: int) -> Checkpoint | None:
        """Return the checkpoint before this turn, or None if none was kept."""
        return self._points.get(turn)

    def inherit(self, other: Checkpoints, turns: Mapping[int, int]) -> None:
        """Share checkpoints of another conversation. `turns` maps the numbers of its turns to those of this
        conversation."""
        for number, own in turns.items():
            point = other._points.get(number)
            if point is not None:
                point.users += 1
                self._points[own] = point

    async def copy_to(self, other: Checkpoints, point: Checkpoint | None, lost: str, *, behind: bool) -> str:
        """Give another conversation a slot with the files of this checkpoint or, without one, with the current files,
        although its history may be `behind` them. Returns a note about its sandbox: `lost` if nothing can be copied,
        and nothing if there was no sandbox at that time."""
        slot = self._seat.slot
        try:
            if point is not None and point.snapshot is not None:
                await other._begin_with(point.snapshot)
                return COPIED_SANDBOX
            if point is not None and not point.problem:
                return ""
            if slot is not None:
                snapshot = await self._slots.copy(slot)
                await other._begin_with(snapshot)
                await self._service.pool.snapshots.forget(snapshot)
                return CURRENT_FILES if behind else COPIED_SANDBOX
        except SandboxError:
            other._slots.start_from(None)
        return lost

    async def restore(self, turn: int) -> tuple[str, list[FolderChange]]:
        """Let the files be as they were before this turn, and drop the later checkpoints. Returns a sentence about the
        files for the person, and the files of the shared folder that were not restored. Raises `SandboxError` if no
        slot can be started."""
        point = self._points.get(turn)
        problem = _NO_CHECKPOINT if point is None else point.problem
        snapshots = self._service.pool.snapshots
        if point is not None and point.snapshot is not None and not await snapshots.holds(point.snapshot):
            problem = "the checkpoint was lost with its sandbox"
        if self._seat.slot is None and point is None:
            problem = "the sandbox of that time is gone"
        if problem or point is None:
            return f"the files stay as they are: {problem}", []
        had_slot = self._seat.slot is not None
        folder, left = self._slots.folder, list[FolderChange]()
        before = 0 if folder is None else folder.written
        if folder is not None:
            left = folder.take_back(point.written, point.refreshed)
        await self._replace_slot(point.snapshot)
        for later in [number for number in self._points if number >= turn]:
            await self._drop_checkpoint(later)
        if not had_slot and point.snapshot is None and before == point.written:
            return "", []
        restored = "the files are as they were before it"
        if folder is not None and before > point.written:
            count = before - point.written - len(left)
            restored += f", also {plural(count, 'change')} in {folder.root}"
        return restored, left

    async def _replace_slot(self, snapshot: Snapshot | None) -> None:
        """Replace the slot with one that starts from this snapshot, or with none."""
        await self._seat.aclose()
        if snapshot is not None:
            await self._begin_with(snapshot)

    async def _begin_with(self, snapshot: Snapshot) -> None:
        deep = len(snapshot.layers) > MANY_LAYERS
        self._slots.start_from(self._service.pool.snapshots.continued(snapshot) if deep else snapshot)
        await self._seat.sandbox()

    async def clear(self) -> None:
        """Drop all checkpoints."""
        for turn in list(self._points):
            await self._drop_checkpoint(turn)

    async def _drop_checkpoint(self, turn: int) -> None:
        point = self._points.pop(turn)
        point.users -= 1
        if point.snapshot is not None and not point.users:
            await self._service.pool.snapshots.forget(point.snapshot)
