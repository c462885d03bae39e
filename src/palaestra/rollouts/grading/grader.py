"""The view of the agent's work on which a score is computed.

Sealed work (invariant R2): all processes of the agent are dead, its changes are an immutable layer, and the check runs
in a fresh slot over a part of that layer: the workspace, the temporary directories and the paths that the task
declares, without those changes that would decide the result of any check (`tampering.py`). Everything else is as
prepared. A task with `grading="live"` is checked in the agent's own slot: work that is a running service, and the
reward hooks of class environments.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace

from palaestra.core.errors import GraderError, InfraError, SandboxError, SlotEnded
from palaestra.core.types import Task
from palaestra.rollouts.grading.tampering import (
    CACHE,
    SCRATCH,
    Rule,
    batches,
    is_below,
    library_directories,
    link,
    names_in,
    text_of_task,
)
from palaestra.rollouts.rollout import Rollout
from palaestra.sandbox.slot import WORKSPACE, Change, Slot, SlotSpec, Snapshot, View
from palaestra.tools.registry.build import unrestricted
from palaestra.tools.runtime.runtime import ToolRuntime

SEALED, LIVE = "sealed", "live"
FILES = "files"
"""The grading of recorded work of a live task: all files that the agent left, in a fresh slot without its processes."""

CARRIED = "/.palaestra-carried"
"""The directory of a sealed workspace with copies of the files in `SCRATCH`, which layers do not contain."""

GRADED = (WORKSPACE, "/var/tmp", CARRIED)  # noqa: S108  in the slot
"""The paths whose changes a check sees even if the task does not declare them."""

MOST_LEFT_OUT = 20
"""The maximum number of left-out paths that the report names."""
_COPY_S = 300.0
_MAYBE_GIT = re.compile(
    r"/(?:\.?config(?:\.worktree|/git)?|\.gitconfig|commondir|[^/]*\.git|hooks(?:/[^/]+)?|[a-z]+(?:-[a-z]+)+)$"
)
"""Paths that may be those of git settings and hooks (`git_settings.py`)."""

_DEEPEST, _LONGEST_BYTES = 400, 4000
"""Beyond these limits, a list of changes lacks the entries of a directory, or a program cannot open a path."""


class Grading:
    """Leases the grading slot when the check first needs it. The rollout closes this object when the rollout ends.

    If `untouched`, the check sees the prepared workspace in place of the agent's work.
    """

    def __init__(self, rollout: Rollout, spec: SlotSpec, *, untouched: bool = False) -> None:
        self.untouched = untouched
        self.rollout = rollout
        self.pool = rollout.run_context.workspaces.pool
        self.spec = spec
        self.live = rollout.task.grading == LIVE and not untouched
        self._slot: Slot | None = None
        self._shown: Slot | None = None
        self._trouble: InfraError | None = None
        self._leasing, self._sealing = asyncio.Lock(), asyncio.Lock()  # a check may make concurrent calls
        self._sealed: Snapshot | None = None
        self._made: list[Snapshot] = []
        self._seal_done = self._carried = self._kept = False
        self._lost: tuple[str, ...] = ()
        self.processes_at_end = 0
        self._libraries: Sequence[str] | None = None
        self._seen: list[Change] = []
        """The changes that a default view shows."""
        self.left_out: tuple[str, ...] = ()
        """Changed paths that the check does not see, at most `MOST_LEFT_OUT`."""
        self._tools: list[ToolRuntime] = []
        rollout.closers.append(self.aclose)

    async def seal(self, view: View | None = None) -> Snapshot | None:
        """Return the agent's sealed work; None if the agent never had a slot, or if `untouched`. Only the first call's
        `view` counts. Raises `GraderError` if the check is live."""
        if self.live:
            raise GraderError(f"task {self.rollout.task.id} is graded live, so its work is not sealed")
        async with self._sealing:
            if self.untouched:
                return None
            if not self._seal_done:
                if self._declares_scratch and not self._carried:
                    await self.carry_scratch()
                self._seal_done = True  # set on failure too, because the agent's work is then lost
                try:
                    with self._troubled():
                        self._sealed = await self.rollout.seal(view)
                except asyncio.CancelledError:  # a time limit in the check may cancel this; the check may call again
                    self._trouble = SandboxError(f"sealing the work of {self.rollout.rollout_id} was interrupted")
                    raise
                if self._sealed is not None:
                    self._made.append(self._sealed)
            elif self._trouble is not None:
                raise self._trouble
            return self._sealed

    @contextmanager
    def _troubled(self) -> Iterator[None]:
        """Store the block's infrastructure failure if it is the first, since the check's code may catch and ignore
        it."""
        try:
            yield
        except InfraError as error:
            self._trouble = self._trouble or error
            raise

    async def carry_scratch(self) -> None:
        """Keep the files of the agent's `/tmp` and `/dev/shm` for the grading slot, and count the agent's live
        processes.

        Does nothing if the check is live or `untouched`, if the agent never had a slot, or once the slot is sealed. In
        a kept workspace that is graded again, the files are already there.
        """
        if self.live or self.begun:
            return
        self._carried = True
        if not self.rollout.has_slot:
            return
        copies = "".join(
            f'if [ -n "$(ls -A {place} 2>/dev/null)" ]; then mkdir -p {CARRIED}{place} && '
            f"cp -a {place}/. {CARRIED}{place}/ || failed=1; fi; "
            for place in SCRATCH
        )
        copy = f"rm -rf {CARRIED}; failed=0; {copies} exit $failed"
        with self._troubled():
            slot = await self.rollout.sandbox()
            self._lost = SCRATCH
            with suppress(SlotEnded):  # by the agent's own commands
                result = await slot.execute(["/bin/sh", "-c", copy], cwd="/", timeout_s=_COPY_S)
                # the cause may be a full disk, or programs that the agent replaced
                self._lost = () if result.success else SCRATCH
                self.processes_at_end = await slot.freeze()

    @property
    def _declares_scratch(self) -> bool:
        """Whether the task declares a path of `SCRATCH`."""
        paths = self.rollout.task.paths
        return any(is_below(place, paths) or any(is_below(path, [place]) for path in paths) for place in SCRATCH)

    async def _restore_scratch(self, slot: Slot) -> None:
        entry = await slot.stat(CARRIED)
        if entry is None or entry.kind != "dir":
            return
        copies = "".join(
            f"if [ -d {CARRIED}{place} ] && [ ! -h {CARRIED}{place} ]; then "
            f"cp -a --no-preserve=links {CARRIED}{place}/. {place}/ || cp -a {CARRIED}{place}/. {place}/; fi; "
            for place in SCRATCH
        )  # a hard link could join a file of the check to a file of the work; BusyBox's cp does not copy hard links
        await slot.execute(["/bin/sh", "-c", f"{copies} rm -rf {CARRIED}"], cwd="/", timeout_s=_COPY_S)

    @property
    def begun(self) -> bool:
        """Whether the agent's slot is sealed, or is not used because of `untouched`."""
        return self._seal_done or self.untouched

    async def restart(self) -> None:
        """Release the grading slot and clear any failure that was kept. The next slot shows the same work again."""
        slot, self._slot, self._shown, self._trouble = self._slot, None, None, None
        if slot is not None:
            await self.pool.release(slot)

    def settle(self) -> None:
        """End the live part of a check. From now on the agent's slot may end, and the check sees the sealed work."""
        self.live, self._shown = False, None

    async def changes(self) -> Sequence[Change]:
        """Return the agent's changes, from the sealed layer; none if there is no such layer."""
        sealed = await self.seal()
        return [] if sealed is None else await self.pool.changes(sealed)

    async def slot(self, view: View | None = None) -> Slot:
        """Return the grading slot, which always has a workspace directory; if the check is live, this is the agent's
        own slot. `view` selects the agent's changes to show, by default those that the task declares; only the first
        call's `view` counts."""
        with self._troubled():
            if self.live:
                async with self._leasing:
                    return await self._live_slot()
            async with self._leasing:
                if self._slot is None:
                    base = await self._base(view)
                    self._slot = self._shown = await self.rollout.lease(
                        f"{self.rollout.rollout_id}:grade", self.spec, base
                    )
                    if self._libraries is not None:
                        await link(self._slot, self._libraries)
                    if self._carried:
                        await self._restore_scratch(self._slot)
                    gone = await disarm(self._slot, self.rollout.task, self._seen)
                    self.left_out = (*self.left_out, *gone)[:MOST_LEFT_OUT]
                    await _start_somewhere(self._slot)
                return self._slot

    async def _live_slot(self) -> Slot:
        """Return the agent's own slot. Before the check first uses it, its files are kept if the run keeps them, and
        its processes are counted."""
        self._shown = await self.rollout.sandbox()
        if not self._kept:
            self._kept = True
            self.processes_at_end = await self._shown.freeze()
            await self.rollout.keep_files()
        await _start_somewhere(self._shown)
        return self._shown

    async def check_sound(self) -> None:
        """Raise the `InfraError` that was kept during the check, in case the hook caught and ignored it. Also raise if
        the slot that the check used is lost."""
        if self._trouble is not None:
            raise self._trouble
        if self._shown is not None:
            await self._shown.stat("/")

    async def view(
        self,
        paths: Collection[str] = (),
        *,
        workspace: str = WORKSPACE,
        programs: Collection[str] = (),
        new_programs: Collection[str] = (),
        homes: Collection[str] = (),
    ) -> View:
        """Return a view of the changes that a check sees: those in the workspace, in `GRADED`, and below `paths`,
        without those that would decide the result of any check.

        `programs` names programs and settings that the agent may add or replace; `new_programs` names programs that it
        may only add. `homes` are the home directories of users other than the slot's own.
        """
        only = tuple(dict.fromkeys([*GRADED, workspace, *paths]))
        changes = await self.changes()
        outside = [change.path for change in changes if not _is_seen(change, only)]
        if {*only} <= {*GRADED, WORKSPACE}:
            changes = [change for change in changes if is_below(change.path, only)]
        # A declared path may contain a symbolic link of the root (/bin to /usr/bin), and a change to a directory above
        # may remove the declared path, so the rule judges every change, whatever its own path.
        without = await self._planted(changes, only, workspace, programs, new_programs, homes)
        self.left_out = (*self._lost, *without, *outside)[:MOST_LEFT_OUT]
        return View(only if outside else ("/",), without)  # a view that shows everything costs nothing

    async def _planted(
        self,
        changes: Sequence[Change],
        only: Sequence[str],
        workspace: str,
        programs: Collection[str],
        new_programs: Collection[str],
        homes: Collection[str],
    ) -> tuple[str, ...]:
        """Return the paths of the changes that would decide the result of any check."""
        environment = dict(self.spec.env)
        rule = Rule(
            workspace=workspace,
            programs=frozenset(programs),
            new_programs=frozenset(new_programs),
            declared=tuple(path for path in only if path != "/"),
            directories=frozenset(filter(None, environment.get("PATH", "").split(":"))),
            homes=frozenset({environment.get("HOME", "/root"), *homes}),
            text=text_of_task(self.rollout.task),
        )
        if not any(map(rule.is_suspect, changes)):
            return ()
        async with self.prepared() as before:
            names = names_in(before)
            found = await rule.planted(changes, names)
            self._libraries = await library_directories(names) if CACHE in found else None
        return found

    @asynccontextmanager
    async def prepared(self) -> AsyncIterator[Slot]:
        """Yield a slot with the prepared workspace."""
        slot = await self.rollout.lease(f"{self.rollout.rollout_id}:prepared", self.spec, self.rollout.spec.snapshot)
        try:
            yield slot
        finally:
            await self.pool.release(slot)

    async def _base(self, view: View | None) -> Snapshot | None:
        sealed = await self.seal()
        if sealed is None:
            return self.rollout.spec.snapshot if self.untouched else self.rollout.snapshot
        if view is None and self.rollout.task.grading == FILES:
            return sealed
        if view is None:
            task = self.rollout.task
            view = await self.view(task.paths, programs=task.programs)
            self._seen = [
                replace(each, path=each.path.removeprefix(CARRIED))
                for each in await self.changes()
                if _is_seen(each, view.only) and not is_below(each.path, view.without)
            ]
        if view == View():
            return sealed
        narrowed = await self.pool.view(sealed, view)
        self._made.append(narrowed)
        return narrowed

    def tools(self, timeout_s: float) -> ToolRuntime:
        """Return a new runtime with all tools for `exec_tool` and `ToolContext`. The tools run in the grading slot."""
        made = ToolRuntime(
            unrestricted(self.rollout.kit.registry),
            self.slot,
            task_id=f"{self.rollout.rollout_id}:grade",
            timeout_s=timeout_s,
            middleware=(self.rollout.recorded_call,),
            conversation="grade",
        )
        self._tools.append(made)
        return made

    async def hand_back(self) -> None:
        """Release the grading slot and let the rollout continue from the graded view. After a live check, it continues
        in its own slot. The layers of the view stay until `aclose`."""
        slot, self._slot, self._shown = self._slot, None, None
        if slot is not None:
            await self.pool.release(slot)
        if not self.live and self._made:
            self.rollout.continue_from(self._made[-1])

    async def aclose(self) -> None:
        """Close the check's tools, release the grading slot and drop its layers. Idempotent."""
        while self._tools:
            await self._tools.pop().aclose()
        slot, self._slot = self._slot, None
        if slot is not None:
            await self.pool.release(slot)
        while self._made:
            await self.pool.forget(self._made.pop())


def _is_seen(change: Change, only: Sequence[str]) -> bool:
    """Return whether a change is below one of these paths, or is a directory above one of them that the change does not
    replace."""
    above = change.kind == "dir" and not change.opaque and any(is_below(path, [change.path]) for path in only)
    return above or is_below(change.path, only)


async def disarm(slot: Slot, task: Task, changes: Sequence[Change]) -> tuple[str, ...]:
    """Replace links between the work and files of the check, and remove git settings that start programs. Also remove
    directories that are too deep to be examined.

    `changes` are the changes that the slot shows. Returns the paths of those directories and of the files with such
    settings.
    """
    gone = tuple(sorted({each.path[: 2 * _DEEPEST].rpartition("/")[0] for each in changes if _is_too_deep(each.path)}))
    for some in batches(gone):
        await slot.execute(["rm", "-rf", "--", *some], cwd="/", timeout_s=_COPY_S, spill=False)
    if gone:
        changes = [each for each in changes if not is_below(each.path, gone)]
    # most work has neither, and then the modules are not imported
    if any(_MAYBE_GIT.search(each.path) for each in changes):
        from palaestra.rollouts.grading.git_settings import remove_git_settings

        # before the links, whose copies are not in `changes`
        gone += await remove_git_settings(slot, task, changes)
    if any(each.kind == "symlink" for each in changes) or sum(each.kind == "file" for each in changes) > 1:
        from palaestra.rollouts.grading.links import detach_links

        await detach_links(slot, task, changes)
    return gone


def _is_too_deep(path: str) -> bool:
    return path.count("/") >= _DEEPEST or len(path.encode("utf-8", "surrogateescape")) > _LONGEST_BYTES


async def _start_somewhere(slot: Slot) -> None:
    """Create an empty workspace if the agent removed it, since deleted work must not look like a broken check."""
    try:
        found = await slot.stat(f"{WORKSPACE}/.")
    except InfraError:
        raise
    except OSError:
        found = None
    if found is None:
        await slot.remove(WORKSPACE)
        await slot.make_dir(WORKSPACE)
