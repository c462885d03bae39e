"""The view of the agent's work on which a score is computed.

Sealed work (invariant R2): all processes of the agent are dead, its changes are an immutable layer, and the check runs
in a fresh slot over that layer. It sees everything that the agent left, also in `/tmp` and `/dev/shm`, without the
changes of the table in `tampering.py`, which become labels. A task with `grading="live"` is checked in the agent's own
slot: work that is a running service, and the reward hooks of class environments.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from enum import StrEnum

from palaestra.rollouts.grading.tampering import (
    CACHE,
    CARRIED,
    HOME_SETTINGS,
    REPLACED,
    SCRATCH,
    SHADOWED,
    STARTUP,
    Rule,
    batches,
    changes_in,
    is_below,
    library_directories,
    link,
    names_in,
    program_of,
    programs_of,
    text_of_task,
)
from palaestra.rollouts.rollout import Rollout
from palaestra.tools.registry.build import unrestricted
from palaestra.tools.runtime.runtime import ToolRuntime
from palaestra_slots.core.errors import ConfigError, GraderError, InfraError, SandboxError, SlotEnded
from palaestra_slots.core.printable import one_line
from palaestra_slots.core.types import Label, Task
from palaestra_slots.sandbox.slot import WORKSPACE, Change, Rung, Slot, SlotSource, SlotSpec, Snapshot, View

logger = logging.getLogger(__name__)

SEALED, LIVE = "sealed", "live"
FILES = "files"
"""The grading of recorded work of a live task: all files that the agent left, in a fresh slot without its processes."""

SCRATCH_LOST = "scratch_lost"
"""The label of work whose files in `SCRATCH` a check does not see, because they could not be copied."""

NOT_EXAMINED = "not_examined"
"""The label of work that a check does not see, because the work has too much of it to examine in time."""

MOST_LEFT_OUT = 20
"""The maximum number of left-out paths that the report names."""


class Way(StrEnum):
    """How a check judges the agent's work."""

    OUTSIDE = "outside"
    """It compares values outside of the slot: what it read from files, or what `sandbox.call` returned."""
    RUN_TESTS = "run_tests"
    """Tests run in the slot, and their verdicts arrive on the verdict channel."""
    EXIT_CODE = "exit code"
    """It uses the exit status or the output of commands that ran in the slot."""


WAYS: ContextVar[dict[Way, str] | None] = ContextVar("ways", default=None)
"""The ways that checks use while this is set, each with an example of a command or a function."""


def note_way(way: Way, example: str = "") -> None:
    """Record in `WAYS`, if it is set, that a check judges work in this way."""
    if (ways := WAYS.get()) is not None:
        ways.setdefault(way, example)


_SESSION_S = "session_s"
"""The key of a rollout's `meta` with the seconds of the longest session of tests in its check."""
_LEAST_AGAIN_S = 10.0
_MOST_IN_LABEL = 5
_COPY_S = 300.0
_PLACES_S = 15.0
_MOST_PTH, _MOST_PTH_BYTES = 200, 1 << 16
_DEEPEST, _LONGEST_BYTES = 400, 4000
"""Beyond these limits, a list of changes lacks the entries of a directory, or a program cannot open a path."""


class Grading:
    """Leases the grading slot when the check first needs it. The rollout closes this object when the rollout ends."""

    def __init__(self, rollout: Rollout, spec: SlotSpec) -> None:
        self.rollout = rollout
        self.spec = spec
        self.live = rollout.task.grading == LIVE
        self._repeats = rollout.spec.replays
        self._usual_s: float | None = None
        self._slot: Slot | None = None
        self._shown: Slot | None = None
        self._trouble: InfraError | None = None
        self._leasing, self._sealing = asyncio.Lock(), asyncio.Lock()  # a check may make concurrent calls
        self._sealed: Snapshot | None = None
        self._made: list[Snapshot] = []
        self.begun = False
        """Whether the agent's slot is sealed."""
        self._carried = self._kept = False
        self._lost: tuple[str, ...] = ()
        self.processes_at_end = 0
        self._libraries: Sequence[str] | None = None
        self._changes: Sequence[Change] | None = None
        """The changes in the sealed layer, once a check has asked for them."""
        self._seen: list[Change] = []
        """The changes that a default view shows."""
        self.left_out: tuple[str, ...] = ()
        """Changed paths that the check does not see, at most `MOST_LEFT_OUT`."""
        self._labels: dict[str, dict[str, None]] = {}
        self._tools: list[ToolRuntime] = []
        rollout.workspace.closers.append(self.aclose)

    @property
    def pool(self) -> SlotSource:
        """The pool of the run's slots."""
        return self.rollout.run_context.workspaces.pool

    async def seal(self, view: View | None = None) -> Snapshot | None:
        """Return the agent's sealed work; None if the agent never had a slot. Only the first call's `view` counts.
        Raises `GraderError` if the check is live."""
        if self.live:
            raise GraderError(f"task {self.rollout.task.id} is graded live, so its work is not sealed")
        async with self._sealing:
            if not self.begun:
                # Before the slot ends: its scratch directories are in no layer.
                await self.carry_scratch()
                self.begun = True  # set on failure too, because the agent's work is then lost
                try:
                    with self._troubled():
                        self._sealed = await self.rollout.workspace.seal(self.rollout.seat, view)
                except asyncio.CancelledError:  # a time limit in the check may cancel this; the check may call again
                    self._trouble = SandboxError(f"sealing the work of {self.rollout.rollout_id} was interrupted")
                    raise
                if self._sealed is not None:
                    self._made.append(self._sealed)
            elif self._trouble is not None:
                raise self._trouble
            return self._sealed

    async def checkpoint(self) -> Slot | None:
        """Fix the work as it is now, and return the agent's own slot, in which its processes run on, for a check of the
        benchmark's own protocol. Sealed checks later see only the fixed work. Close the slot before with
        `Rollout.aclose`, because a rollout that holds one slot must not wait for a second.

        Returns None if there is no such slot: the check is live, the agent never had a slot, the work is sealed or
        recorded, or the backend cannot copy a running slot.
        """
        if self.live or self.begun or self.rollout.seat.slot is None:
            return None
        async with self._sealing:
            with self._troubled():
                await self.carry_scratch()
                slot = await self.rollout.seat.sandbox()
                self._sealed = await self.rollout.workspace.checkpoint(self.rollout.seat)
                if self._sealed is None:
                    return None
                self.begun = True
                self._made.append(self._sealed)
                # The copies belong to the snapshot. The running slot has the originals.
                if _has_own_root(slot):
                    await slot.remove(CARRIED)
                return slot

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

        Does nothing if the check is live, if the agent never had a slot, or once the slot is sealed. In a kept
        workspace that is graded again, the files are already there.
        """
        if self.live or self.begun or self._carried:
            return
        self._carried = True
        if self.rollout.seat.slot is None:
            return
        with self._troubled():
            slot = await self.rollout.seat.sandbox()
            self._lost, why = SCRATCH, "the agent's commands ended the sandbox"
            with suppress(SlotEnded):
                why = "" if await _has_no_scratch(slot) else await self._copy_scratch(slot)
                self._lost = SCRATCH if why else ()
                self.processes_at_end = await slot.freeze()
            if self._lost:
                self.note(SCRATCH_LOST, [f"the files of {' and '.join(SCRATCH)} could not be kept: {why}"])

    @staticmethod
    async def _copy_scratch(slot: Slot) -> str:
        """Copy the files of `SCRATCH` to `CARRIED`. Returns why this failed; empty if it did not."""
        copies = "".join(
            f'if [ -n "$(ls -A {place} 2>/dev/null)" ]; then mkdir -p {CARRIED}{place} && '
            f"cp -a {place}/. {CARRIED}{place}/ || failed=1; fi; "
            for place in SCRATCH
        )
        copy = f"rm -rf {CARRIED}; failed=0; {copies} exit $failed"
        result = await slot.execute(["/bin/sh", "-c", copy], cwd="/", timeout_s=_COPY_S)
        # the cause may be a full disk, or programs that the agent replaced
        return "" if result.success else one_line(result.output or result.error, 200) or "the copy failed"

    @staticmethod
    async def restore_scratch(slot: Slot) -> None:
        """Move the kept files back to `/tmp` and `/dev/shm`."""
        entry = await slot.stat(CARRIED) if _has_own_root(slot) else None
        if entry is None or entry.kind != "dir":
            return
        copies = "".join(
            f"if [ -d {CARRIED}{place} ] && [ ! -h {CARRIED}{place} ]; then "
            f"cp -a --no-preserve=links {CARRIED}{place}/. {place}/ || cp -a {CARRIED}{place}/. {place}/; fi; "
            for place in SCRATCH
        )  # a hard link could join a file of the check to a file of the work; BusyBox's cp does not copy hard links
        await slot.execute(["/bin/sh", "-c", f"{copies} rm -rf {CARRIED}"], cwd="/", timeout_s=_COPY_S)

    async def keep_unscored(self, failure: Exception) -> None:
        """Keep the sealed work of a rollout whose check has failed, if the run has room for it, and note in the failure
        how to score it."""
        workspace = self.rollout.workspace
        if self.live or not workspace.run.keeps_unscored:
            return
        try:
            kept = workspace.kept or await workspace.keep_unscored(await self.seal())
        except (InfraError, ConfigError, OSError) as error:  # the check's failure is the one to report
            logger.warning("the work of %s could not be kept: %s", self.rollout.rollout_id, error)
            return
        if kept is not None:
            run = kept.resolve().parents[2].name
            failure.add_note(f"the work is kept: correct the score and run `palaestra grade {run}`")

    def repeat_after(self, reference: Rollout) -> None:
        """Note that the check is repeated now, after this rollout of the reference has got through it."""
        self._repeats = True
        self._usual_s = None if reference.task.solution is None else reference.meta.get(_SESSION_S)

    def limit_s(self, limit_s: float) -> float:
        """Return the time limit of a session of tests, usually `limit_s`. A reference solution and a repetition may
        take a few times as long, since a busy machine must not decide. If the time that the reference solution took at
        this load is known, a repetition may take a few times that."""
        if not self._repeats:
            return limit_s
        return enough_time(limit_s if self._usual_s is None else self._usual_s, _LEAST_AGAIN_S)

    def took(self, seconds: float) -> None:
        """Record how long a session of tests took."""
        self.rollout.meta[_SESSION_S] = max(seconds, self.rollout.meta.get(_SESSION_S, 0.0))

    async def restart(self) -> None:
        """Release the grading slot and clear any failure that was kept. The next slot shows the same work again."""
        self._trouble = None
        await self._release()

    async def _release(self) -> None:
        slot, self._slot, self._shown = self._slot, None, None
        if slot is not None:
            await self.pool.release(slot)

    def settle(self) -> None:
        """End the live part of a check. From now on the agent's slot may end, and the check sees the sealed work."""
        self.live, self._shown = False, None

    async def changes(self) -> Sequence[Change]:
        """Return the agent's changes, from the sealed layer; none if there is no such layer."""
        sealed = await self.seal()
        if self._changes is None:
            self._changes = [] if sealed is None else await self.pool.changes(sealed)
        return self._changes

    async def slot(self, view: View | None = None, *, scratch: bool = True) -> Slot:
        """Return the grading slot, which always has a workspace directory; if the check is live, this is the agent's
        own slot. `view` selects the agent's changes to show, by default those that `view()` selects; only the first
        call's `view` counts. Without `scratch`, the files of `/tmp` are left to `restore_scratch`."""
        with self._troubled():
            async with self._leasing:
                if self.live:
                    return await self._live_slot()
                if self._slot is None:
                    base = await self._base(view)
                    spec = replace(self.spec, on_demand=(WORKSPACE, CARRIED))  # many scores read only a file
                    self._slot = self._shown = await self.rollout.workspace.lease_slot(
                        f"{self.rollout.rollout_id}:grade", spec, base
                    )
                    if self._libraries is not None:
                        await link(self._slot, self._libraries)
                    if scratch:
                        await self.restore_scratch(self._slot)
                        await self.disarm(self._slot, self.rollout.task, self._seen)
                    await restore_directory(self._slot)
                return self._slot

    async def _live_slot(self) -> Slot:
        """Return the agent's own slot. Before the check first uses it, its files are kept if the run keeps them, and
        its processes are counted."""
        self._shown = await self.rollout.seat.sandbox()
        if not self._kept:
            self._kept = True
            self.processes_at_end = await self._shown.freeze()
            await self.rollout.workspace.keep_files(self.rollout.seat)
        await restore_directory(self._shown)
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
        text: str | None = None,
        env: Mapping[str, str] | None = None,
        solved: Callable[[Sequence[str]], Awaitable[Collection[str]]] | None = None,
    ) -> View:
        """Return a view of all changes without those of the table in `tampering.py`, which become labels.

        Changes below `paths`, and to `programs`, are always seen. `text` is what the task tells the agent, by default
        its messages; `env` are variables that the check sets. `solved` gets the other paths and returns those that the
        reference solution changes. They are seen, as are all settings of a program of which the solution changes some.
        """
        changes = await self.changes()
        async with AsyncExitStack() as opened:
            names = names_in(lambda: opened.enter_async_context(self.prepared()))
            rule = Rule(
                names,
                workspace,
                named=paths,
                programs=programs,
                text=text_of_task(self.rollout.task) if text is None else text,
                env={**dict(self.spec.env), **(env or {})},
            )
            found = await rule.left_out(changes)
            self._libraries = await library_directories(names) if CACHE in found else None
        if REPLACED in found.values():  # a file may have been changed through a link that the task names
            async with self.prepared() as root:
                targets = await _targets(root, rule.named)
            found = {path: label for path, label in found.items() if path not in targets}
        # What the reference solution changes is what the task asks for, so it cannot be held against the agent.
        usual = await solved([path for path, label in found.items() if label]) if solved else ()
        configured = programs_of(usual)
        for path, label in list(found.items()):
            if path in usual or (label == HOME_SETTINGS and program_of(path) in configured):
                del found[path]
        for label in (REPLACED, SHADOWED, STARTUP, HOME_SETTINGS):
            self.note(label, [path for path, its in found.items() if its == label])
        self.left_out = (*self._lost, *sorted(path for path, label in found.items() if label))[:MOST_LEFT_OUT]
        return View(("/",), tuple(sorted(found)))

    def note(self, label: str, paths: Sequence[str]) -> None:
        """Add paths to the evidence of a label."""
        if paths:
            self._labels.setdefault(label, {}).update(dict.fromkeys(paths))

    def made_no_difference(self, hidden: Collection[str]) -> None:
        """Drop the labels of what the check saw differently, because the verdict with all of it is the same. Of the
        checkers, it saw those differently that were `hidden`."""
        for label in (HOME_SETTINGS, "links_to_checks", "test_settings_ignored"):
            self._labels.pop(label, None)
        shown = [path for path in self._labels.pop("checkers_changed", ()) if path not in hidden]
        self.note("checkers_changed", shown)

    @property
    def labels(self) -> list[Label]:
        """What was left out or replaced, as labels."""
        found = []
        for name, paths in self._labels.items():
            shown = ", ".join([*paths][:_MOST_IN_LABEL])
            more = len(paths) - _MOST_IN_LABEL
            found.append(Label(name, f"{shown} and {more} more" if more > 0 else shown))
        return found

    @asynccontextmanager
    async def prepared(self) -> AsyncIterator[Slot]:
        """Yield a slot with the prepared workspace."""
        rollout = self.rollout
        slot = await rollout.workspace.lease_slot(f"{rollout.rollout_id}:prepared", self.spec, rollout.spec.snapshot)
        try:
            yield slot
        finally:
            await self.pool.release(slot)

    async def _base(self, view: View | None) -> Snapshot | None:
        sealed = await self.seal()
        if sealed is None:
            return self.rollout.workspace.snapshot
        if view is None:
            task = self.rollout.task
            if task.grading == FILES:
                return sealed
            view = await self.view(task.paths, programs=task.programs)
            self._seen = changes_in(view, await self.changes())
        if view == View():
            return sealed
        narrowed = await self.pool.snapshots.view(sealed, view)
        self._made.append(narrowed)
        return narrowed

    async def disarm(
        self, slot: Slot, task: Task, changes: Sequence[Change], private: Collection[str] = ()
    ) -> tuple[str, ...]:
        """Replace links between the work and files of the check, remove `.pth` files with code or, for an editable
        installation, put its directories in place of the code, and remove directories that are too deep to be examined.

        `changes` are the changes that the slot shows, and `private` the directories of the check. Returns the paths of
        what was removed or replaced, which become labels too.
        """
        # The beginning of such a path, which is short enough to be opened by its name. From there, `rm` descends.
        deep = {each.path[: 2 * _DEEPEST].rpartition("/")[0] for each in changes if _is_too_deep(each.path)}
        gone = tuple(sorted(deep))
        for some in batches(gone):
            await slot.execute(["rm", "-rf", "--", *some], cwd="/", timeout_s=_COPY_S, spill=False)
        if gone:
            changes = [each for each in changes if not is_below(each.path, gone)]
        starting, unseen = await _disarm_pth(slot, changes)
        self.note(SHADOWED, starting)
        links: tuple[str, ...] = ()
        # most work has no links, and then the module is not imported
        if any(each.kind == "symlink" for each in changes) or sum(each.kind == "file" for each in changes) > 1:
            from palaestra.rollouts.grading.links import detach_links

            links, late = await detach_links(slot, task, changes, private)
            unseen += late
        self.note("links_to_checks", links)
        self.note("too_deep", gone)
        self.note(NOT_EXAMINED, unseen)
        self.left_out = (*starting, *gone, *unseen, *self.left_out)[:MOST_LEFT_OUT]
        return (*gone, *starting, *unseen, *links)

    def tools(self, timeout_s: float, slot: Callable[[], Awaitable[Slot]] | None = None) -> ToolRuntime:
        """Return a new runtime with all tools for `exec_tool` and `ToolContext`. The tools run in the grading slot, or
        in what `slot` returns. In a live check, they reach the background processes of the agent."""
        rollout = self.rollout
        made = ToolRuntime(
            unrestricted(rollout.seat.kit.registry),
            slot or self.slot,
            task_id=f"{rollout.rollout_id}:grade",
            timeout_s=timeout_s,
            middleware=(rollout.calls.recorded,),
            conversation="grade",
            process_task=rollout.rollout_id if self.live else None,
        )
        if self.live:
            from palaestra_slots.processes.registry import ProcessRegistry  # imported here, as most work is sealed

            made.share(rollout.tools.state(ProcessRegistry))
        self._tools.append(made)
        return made

    async def hand_back(self) -> None:
        """Release the grading slot and let the rollout continue from its sealed work, with all of it as its changes
        where the backend can do that. After a live check, it continues in its own slot. The layers stay until
        `aclose`."""
        await self._release()
        if not self.live and self._sealed is not None:
            self.rollout.workspace.continue_from(self.pool.snapshots.continued(self._sealed), self.rollout.seat)

    async def aclose(self) -> None:
        """Close the check's tools, release the grading slot and drop its layers. Idempotent."""
        while self._tools:
            await self._tools.pop().aclose()
        await self._release()
        while self._made:
            await self.pool.snapshots.forget(self._made.pop())


async def _targets(root: Slot, links: Sequence[str]) -> set[str]:
    """Return where those of these paths that are links lead in a root."""
    command = ("/bin/sh", "-c", 'for each; do [ ! -L "$each" ] || readlink -f -- "$each"; done', "sh")
    return {
        line for some in batches(links) for line in (await root.execute([*command, *some], cwd="/")).output.split("\n")
    }


_EMPTY_BYTES = 40
"""The size of an empty directory in a tmpfs. Each entry adds 20. Source: BOGO_DIRENT_SIZE in the kernel's
`mm/shmem.c`."""


def enough_time(usual_s: float, least_s: float = 1.0) -> float:
    """Return the time limit of a repeated session whose tests usually take `usual_s` seconds."""
    return least_s + 3 * usual_s


def _has_own_root(slot: Slot) -> bool:
    """Return whether the root directory, `/tmp` and `/dev/shm` are the slot's own. Below these levels they belong to
    the machine, where other programs have their files, and a snapshot does not contain them."""
    return slot.rung >= Rung.USERNS


async def _has_no_scratch(slot: Slot) -> bool:
    """Return whether the slot has no files in the directories of `SCRATCH`, and no earlier copy of them exists, so that
    the copy, which takes five processes, has nothing to do.

    The directories are in a tmpfs, where the size of a directory counts its entries.
    """
    if not _has_own_root(slot):
        return True
    for place in SCRATCH:
        found = await slot.stat(place)
        if found is None or found.kind != "dir" or found.size != _EMPTY_BYTES:
            return False
    return await slot.stat(CARRIED) is None


async def _disarm_pth(slot: Slot, changes: Sequence[Change]) -> tuple[list[str], tuple[str, ...]]:
    """Replace the code in `.pth` files by the directories that it adds, or remove the files. Returns those that were
    removed because of their code, and those that were too many to be examined."""
    files = [each for each in changes if each.kind in ("file", "symlink") and _PTH.fullmatch(each.path)]
    starting = [each.path for each in files[:_MOST_PTH] if await _has_code(slot, each)]
    places = await _editable(slot, starting) if starting else {}
    for path, text in places.items():
        await slot.write_text(path, text)
    starting = [path for path in starting if path not in places]
    for path in starting:
        await slot.remove(path)
    unseen = tuple(each.path for each in files[_MOST_PTH:])
    for some in batches(unseen):  # a call for each would take as long as the agent likes
        from palaestra_slots.images.slot_commands import check_execute

        await check_execute(slot, ["rm", "-f", "--", *some], "`.pth` files cannot be removed", error=GraderError)
    return starting, unseen


_PTH = re.compile(r"(?:/usr|.*/\.local)/(?:.*/)?(?:site-packages|dist-packages)/[^/]+\.pth")


async def _has_code(slot: Slot, change: Change) -> bool:
    """Return whether Python would run a line of this `.pth` file on start-up. Lines with directories are harmless,
    because these are searched after all others."""
    if change.kind != "file":
        return change.kind == "symlink"
    text = (await slot.read_bytes(change.path, max_bytes=_MOST_PTH_BYTES)).decode("utf-8", "replace")
    # The same test as in Python's `site`, which runs exactly these lines.
    return any(line.startswith(("import ", "import\t")) for line in text.splitlines())


_PLACES = """\
import importlib.util, os, re, sys
def show(number, path):
    folder, text = os.path.dirname(path), open(path).read()
    sys.path.append(folder)
    names = {*re.findall(r"\\w+", text)}
    own = [path for each in names if os.path.isfile(path := f"{folder}/{each}.py")]
    names |= {name for path in own for name in re.findall(r"\\w+", open(path).read())}
    before = [*sys.path]
    for line in text.splitlines():
        if line.startswith("import"):
            exec(line)
    for name in sorted(names):
        try:
            spec = importlib.util.find_spec(name)
            place = spec.submodule_search_locations[0] if spec.submodule_search_locations else spec.origin
            place = os.path.dirname(place)
        except Exception:
            continue
        if place not in before and os.path.isdir(place):
            print(number, place, flush=True)
for number, path in enumerate(sys.argv[1:]):
    child = os.fork()
    if not child:
        try:
            show(number, path)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
"""
"""Runs the code of `.pth` files, each in a process of its own, and prints the directories of modules that only it makes
importable, after the number of the file. Only names in the file and in the modules that it imports are tried."""


async def _editable(slot: Slot, paths: Sequence[str]) -> dict[str, str]:
    """Return lines with the directories of an editable installation, which the code of a `.pth` file adds, by path. The
    code of a file that is left out does something else, or its turn did not come within the time limit of all files.
    The code runs in a fork."""
    async with slot.fork() as fork:
        found = await fork.execute(["python3", "-I", "-c", _PLACES, *paths], cwd="/", timeout_s=_PLACES_S, spill=False)
    places: dict[str, str] = {}
    for line in dict.fromkeys(found.output.splitlines()):
        match = re.fullmatch(r"(\d{1,3}) (/[^\n]*)", line)
        if match and int(match[1]) < len(paths):
            path = paths[int(match[1])]
            places[path] = f"{places.get(path, '')}{match[2]}\n"
    return places


def _is_too_deep(path: str) -> bool:
    return path.count("/") >= _DEEPEST or len(path.encode("utf-8", "surrogateescape")) > _LONGEST_BYTES


async def restore_directory(slot: Slot, path: str = WORKSPACE) -> None:
    """Create an empty directory if the agent removed it or put something else in its place, since deleted work must not
    look like a broken check."""
    try:
        # With `/.`, a file or a broken link in place of the directory is an error, and a link to a directory is none.
        found = await slot.stat(f"{path}/.")
    except InfraError:
        raise
    except OSError:
        found = None
    if found is None:
        await slot.remove(path)
        await slot.make_dir(path)
