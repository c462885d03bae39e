"""Verifies the work on one part of a task: the official verdict by the benchmark's protocol, the reward in the guarded
view, and the round with falsified tests."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from posixpath import basename

from palaestra.rollouts.grading.blame import blame
from palaestra.rollouts.grading.grader import LIVE, NOT_EXAMINED, Grading, enough_time, restore_directory
from palaestra.rollouts.grading.tampering import (
    CARRIED,
    HOME_SETTINGS,
    REPLACED,
    SCRATCH,
    SHADOWED,
    SITE,
    changes_in,
    is_below,
    paths_in,
    program_of,
    programs_of,
)
from palaestra.rollouts.rollout import Rollout
from palaestra_slots.core.errors import GraderError, SandboxError, SlotEnded
from palaestra_slots.core.io.temporary_folder import TemporaryFolder
from palaestra_slots.core.types import JSON, AllowList, Label, Network, Score, Task, ToolStep, numeric_values
from palaestra_slots.images.as_user import acting_as, home_of
from palaestra_slots.images.slot_build import build_in_slot, limits_of_build
from palaestra_slots.images.task_root import TaskRoot
from palaestra_slots.sandbox.slot import Change, Slot, SlotSpec, Snapshot, View
from palaestra_suites.grading.harness import TestsTimedOut, reads_of_tests
from palaestra_suites.images.agent_user import start_in
from palaestra_suites.images.pytest_toolchain import (
    TestTools,
    image_command,
    working_command,
)
from palaestra_suites.task_paths import TaskScope
from palaestra_suites.terminal_bench.offline_script import GradedPart
from palaestra_suites.terminal_bench.separate_verifier import copy_artifacts, join_artifacts, put, run_hooks
from palaestra_suites.terminal_bench.service import MAIN
from palaestra_suites.terminal_bench.service_group import (
    ServiceGroup,
    ServicePlan,
    ServicesEnded,
    sealed_after,
)
from palaestra_suites.terminal_bench.terminal_task import (
    AGENT_LOGS,
    ARTIFACT_LOGS,
    TESTS_DIR,
    VERIFIER_LOGS,
    CollectHook,
    TerminalTask,
)
from palaestra_suites.terminal_bench.terminalbench_2_config import TerminalBench2EvalConfig
from palaestra_suites.terminal_bench.verifier import (
    SYSTEM_PATH,
    GradedViews,
    VerifierSetup,
    VerifierVerdict,
    falsified,
    run_verifier,
    test_files,
)
from palaestra_suites.terminal_bench.verifier_files import (
    ALWAYS_HIDDEN,
    COPIES_TESTS,
    HARNESS_DIR,
    INLINE_PYTHON,
    OUTSIDE_FILES,
    changed_conftests,
    hidden_paths,
    ignored_settings,
    runs,
)

_MOST_KEPT = 1000
"""The most paths that a view shows one by one."""


@dataclass(frozen=True, slots=True)
class ResolvedTask:
    """A task with its root file system, its parts in order, the tools of its tests, and the paths and words that its
    texts name. `roots` has the root file system of each separate verifier, by step, and `plan` the services of its
    compose file."""

    task: TerminalTask
    root: TaskRoot
    roots: Mapping[str, TaskRoot]
    parts: tuple[GradedPart, ...]
    tools: TestTools
    scope: TaskScope
    plan: ServicePlan | None = None

    @property
    def workdir(self) -> str:
        """The directory in which commands start."""
        return self.task.workdir or self.root.config.workdir

    @property
    def user(self) -> str:
        """The user of the agent's commands."""
        return self.task.agent.user or self.root.config.user

    @property
    def env(self) -> dict[str, str]:
        """The variables of every command."""
        return {**self.root.config.env, **self.task.env}


@dataclass(frozen=True, slots=True)
class PreparedSlot:
    """The result of preparing a workspace: the command for pytest, the directories of its packages, and the agent's
    home."""

    command: tuple[str, ...]
    dependencies: tuple[str, ...]
    home: str


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of a verifier's run and the round with falsified tests. `verdict` is None if the run gave none.

    `hidden` are the agent's changes that the view lacks, and `processes` the number that ran at the end.
    """

    verdict: VerifierVerdict | None
    labels: Sequence[Label] = ()
    uncontrolled: Sequence[str] = ()
    hidden: Sequence[str] = ()
    processes: int = 0

    @property
    def reward(self) -> float:
        """The reward; infinite without a verdict, because the other verdict then decides."""
        return math.inf if self.verdict is None else self.verdict.reward


@dataclass(frozen=True, slots=True)
class VerifierContext:
    """What all verifications of an environment share: its settings, what preparing each workspace has found, by task,
    and the network while a verifier's root is built. `needs_processes` has the verifiers that the reference solution
    has shown to be able to give a verdict, by task and step: whether the solution is paid only where the processes run
    that it leaves. `playing` has a lock for each, and `solved` the paths that the solution changes."""

    settings: TerminalBench2EvalConfig
    prepared: dict[str, PreparedSlot]
    build_network: Network | AllowList
    needs_processes: dict[str, bool]
    playing: dict[str, asyncio.Lock]
    solved: dict[str, frozenset[str]]


class Verification:
    """The verification of one part of a rollout's task."""

    def __init__(self, rollout: Rollout, grading: Grading, part: GradedPart, context: VerifierContext) -> None:
        self._rollout, self._grading, self._part = rollout, grading, part
        self._work: ResolvedTask = rollout.task.data
        self._context, self._settings = context, context.settings
        self._doubts = ""
        """Why the output of a verifier suggests that it could not judge the work; only the reference can show it."""

    async def score(self) -> Score:
        """Return the score from a part's verifier: its official verdict, and the reward in the guarded view."""
        score = await self._verdicts()
        if not self._doubts or self._key in self._context.needs_processes:
            return score
        failure = GraderError(self._doubts)
        has_next = self._grading.live and self._part.step is not None  # a next step, which needs the slot
        if self._rollout.spec.replays or has_next:
            raise failure
        await (self._rollout.release() if self._grading.live else self._grading.restart())
        await self._reference(failure)
        return score

    async def _verdicts(self) -> Score:
        group: ServiceGroup | None = self._rollout.meta.get("services")
        if group is not None and self._rollout.seat.slot is None and not self._grading.begun:
            raise ServicesEnded("work of several services cannot be graded again, because the services have ended")
        if self._part.task.verifier.environment is not None:
            return await self._verified_apart(await self._run_hooks())
        if self._grading.live:
            await self._run_hooks()
            if group is not None:
                await group.collect(self._part.step_name, self._part.task.verifier.collect, ())
            slot = await self._grading.slot()
            setup = self._setup()
            # the solution cannot run without the services
            before = None if self._work.plan is None else self._grading.prepared
            checked = await self._checked(setup, lambda: nullcontext(slot), alone=False, prepared=before)
            checked = replace(checked, processes=self._grading.processes_at_end)
            score = self._score(checked, checked)
            return score if group is None else replace(score, detail={**score.detail, "services": await group.report()})
        official, step = await self.official(), self._part.step_name
        if official is not None and official.reward <= 0:
            return self._score(official, official)
        if official is None or not official.processes:
            return self._score(await self._guarded(), official)
        needs = self._context.needs_processes.get(self._key)
        if needs:
            await self._view()
            if not await self._lacks_programs():
                return self._score(official, official)
        guarded = await self._guarded()
        if needs or official.reward <= guarded.reward:
            return self._score(guarded, official)
        self._rollout.meta.setdefault("needs_processes", {})[step] = True
        unsolved = self._rollout.task.solution is None
        if needs is None and not self._rollout.spec.replays and (self._part.asks_for_service or not unsolved):
            await self._grading.restart()
            failure = GraderError(f"the verifier of {self._part.task.name} fails")
            if (unsolved or await self._reference(failure)) and not await self._lacks_programs():
                return self._score(official, official)
        return self._score(guarded, official)

    async def _lacks_programs(self) -> bool:
        """Return whether the guarded view lacks something that programs use, so that work which is a running service
        must not be judged in the agent's own slot."""
        changes = await self._grading.changes()
        changed = [each.path.removeprefix(CARRIED) for each in changes if each.kind != "dir"]  # the folders may be old
        unsafe = {REPLACED, SHADOWED, HOME_SETTINGS, "checkers_changed"}
        return not unsafe.isdisjoint(label.name for label in self._grading.labels) or any(
            is_below(path, (TESTS_DIR, VERIFIER_LOGS)) for path in changed
        )

    async def _reference(self, failure: GraderError) -> bool:
        """Play the reference solution, and return whether this verifier needs the processes that it leaves. Raises
        `failure` if it gets no verdict. The rollout must hold no slot."""
        known = self._context.needs_processes
        async with self._context.playing.setdefault(self._key, asyncio.Lock()):  # once for all rollouts of a group
            if self._key not in known:
                played = await blame(self._rollout, failure)
                known[self._key] = bool(played.meta.get("needs_processes", {}).get(self._part.step_name))
        return known[self._key]

    @property
    def _key(self) -> str:
        return f"{self._rollout.task.id}:{self._part.step_name}"

    async def official(self) -> Checked | None:
        """Return the verdict by the benchmark's protocol, which is computed once; None if it is that of the guarded
        view. If another step follows, the agent's slot runs on with all that the verifier left."""
        known, step = self._known, self._part.step_name
        if step not in known:  # a repeated check has no running slot any more
            await self._run_hooks()
            self.leave_out_official("it timed out")  # stays if it does, and the check is repeated
            known[step] = await self._official()
        return known[step]

    def leave_out_official(self, why: str) -> None:
        """Let the guarded view decide, because the official verdict cannot be had."""
        self._known[self._part.step_name] = _no_verdict(why)

    @property
    def _known(self) -> dict[str, Checked | None]:
        """The official verdicts of the rollout, by step."""
        found: dict[str, Checked | None] = self._rollout.meta.setdefault("official", {})
        return found

    @property
    def _is_last(self) -> bool:
        """Whether the part ends the task, so that nothing depends on the agent's slot any more."""
        return self._part.step in (None, *self._work.task.steps[-1:])

    async def _run_hooks(self) -> list[str]:
        """Run the collect hooks of a part in the agent's slot, and return their problems."""
        hooks = [each for each in self._part.task.verifier.collect if each.service == MAIN]
        if not hooks or self._grading.begun or self._rollout.seat.slot is None:
            return []

        async def place_of(hook: CollectHook) -> tuple[Slot, str]:
            slot, user = await self._rollout.sandbox(), hook.user or self._work.root.config.user
            return await acting_as(slot, user), self._work.workdir

        with suppress(SlotEnded):  # the agent's own commands ended it; what it wrote is still graded
            return await run_hooks(hooks, place_of)
        return ["the agent's commands ended the sandbox"]

    async def _verified_apart(self, problems: Sequence[str]) -> Score:
        """Return the score of a verifier that has a root file system of its own. If the task is graded live, which
        happens between steps with services, the agent's slot runs on."""
        environment = self._part.task.verifier.environment
        assert environment is not None
        group: ServiceGroup | None = self._rollout.meta.get("services")
        with TemporaryFolder("artifacts") as folder:
            hooks, beside = self._part.task.verifier.collect, None
            if group is not None:
                beside = await group.collect(self._part.step_name, hooks, environment.artifacts)
            slot = await self._grading.slot(View())
            own = [each for each in environment.artifacts if each.service == MAIN]
            collected = await copy_artifacts(slot, own, folder.path)
            collected = collected if beside is None else join_artifacts(collected, beside.collected)
            self._grading.note(NOT_EXAMINED, collected.late)
            await self._grading.restart()  # a rollout that holds one slot must not wait for a second

            turn = asyncio.Lock()  # for the same reason

            @asynccontextmanager
            async def views() -> AsyncIterator[Slot]:
                async with turn, self._verifier_slot() as slot:
                    await put(slot, collected)
                    yield slot

            setup = await self._setup_apart()
            checked = await self._checked(setup, views, alone=True, prepared=self._verifier_slot)
        score = self._score(checked, checked)
        problems = [*problems, *(() if beside is None else beside.problems)]
        left: dict[str, JSON] = {"artifacts_left_out": list(collected.left_out), "collect_failed": problems}
        left |= {} if beside is None else {"services": dict(beside.report)}
        return replace(score, detail={**score.detail, **{name: value for name, value in left.items() if value}})

    @asynccontextmanager
    async def _verifier_slot(self) -> AsyncIterator[Slot]:
        """Yield a fresh slot over the root file system of a separate verifier."""
        environment, root = self._part.task.verifier.environment, self._work.roots[self._part.step_name]
        assert environment is not None
        spec, built = await verifier_files(self._rollout, self._part, self._grading.spec, self._context.build_network)
        try:
            slot = await self._rollout.workspace.lease_slot(f"{self._rollout.rollout_id}:verifier", spec, built)
        except SandboxError:
            if root.build_key is not None:
                await self._rollout.run_context.workspaces.drop_lost(root.build_key)
            raise
        try:
            await start_in(slot, environment.workdir or root.config.workdir, VERIFIER_LOGS, AGENT_LOGS, ARTIFACT_LOGS)
            yield slot
        finally:
            await asyncio.shield(self._grading.pool.release(slot))

    async def _setup_apart(self) -> VerifierSetup:
        """Return how a separate verifier runs. What its image has for pytest is looked up once per task."""
        environment, root = self._part.task.verifier.environment, self._work.roots[self._part.step_name]
        assert environment is not None
        key = f"{self._rollout.task.id}:{self._part.step_name}:verifier"
        prepared = self._context.prepared
        if key not in prepared:
            async with self._verifier_slot() as slot:
                prepared[key] = await prepared_for(slot, self._work.tools, root.config.user, own=True)
        env = {**root.config.env, **environment.env}
        workdir = environment.workdir or root.config.workdir
        return self._setup_in(root, prepared[key], env, workdir, keeps=environment.has_tests)

    async def _official(self) -> Checked | None:
        own = await self._grading.checkpoint()
        if own is None and await self._grading.seal() is None:
            return None  # the agent never had a slot, so nothing differs
        made = [each.path.removeprefix(CARRIED) for each in await self._grading.changes() if each.kind == "file"]
        try:
            slot = await self._grading.slot(View()) if own is None else own
            await restore_directory(slot, self._work.workdir)
            setup = replace(self._setup(), made=made)
            serves = own is not None and self._grading.processes_at_end > 0
            checked = await self._checked(setup, lambda: nullcontext(slot), alone=False, watched=serves)
        except TestsTimedOut:  # work that hangs costs one time limit, not two
            raise
        except GraderError as error:
            return _no_verdict(str(error))
        finally:
            if own is None:
                await self._grading.restart()
            elif self._is_last:
                await self._rollout.seat.aclose()
        if own is None:
            evidence = "the agent's own sandbox has ended or cannot be copied, so its files were verified in a copy"
            label = Label("official_on_copy", evidence)
            return replace(checked, labels=(*checked.labels, label))
        return replace(checked, processes=self._grading.processes_at_end)

    async def _guarded(self) -> Checked:
        """Return the verdict in the guarded view."""
        view = await self._view()
        slot = await self._grading.slot(view, scratch=False)
        changes = await self._grading.changes()
        shown = changes_in(view, changes)
        ignored = await ignored_settings(slot, shown, self._work.scope.words, self._grading.prepared)
        self._grading.note("test_settings_ignored", ignored)
        made = [change.path for change in shown if change.kind == "file"]
        setup = replace(self._setup(), made=made, ignored=ignored)
        views = partial(self._grading_copy, slot, shown)
        checked = await self._checked(setup, views, alone=True)
        if checked.reward > 0:
            await self._grading.restart()
            self._grading.note(OUTSIDE_FILES, await self._deciding(setup, view, checked.reward))
        changed = {change.path for change in changes}
        return replace(checked, hidden=tuple(path for path in (*view.without, *ignored) if path in changed))

    @asynccontextmanager
    async def _grading_copy(self, slot: Slot, shown: Sequence[Change]) -> AsyncIterator[Slot]:
        """Yield a copy of the grading slot, which shows these changes."""
        about = replace(self._rollout.task, prompt=self._part.task.instruction)
        async with slot.fork() as fork:
            await self._grading.restore_scratch(fork)
            await self._grading.disarm(fork, about, shown, ALWAYS_HIDDEN)
            await restore_directory(fork, self._work.workdir)
            yield fork

    async def _checked(
        self,
        setup: VerifierSetup,
        views: GradedViews,
        *,
        alone: bool,
        watched: bool = True,
        prepared: GradedViews | None = None,
    ) -> Checked:
        """Run the verifier in one of the views and, if it is `watched` and pays, once more with falsified tests.
        `prepared` opens the slot of a separate verifier without work; the reference solution cannot run there. Between
        steps, the agent's slot is left as a single run of the verifier leaves it."""
        setup = replace(setup, timeout_s=self._grading.limit_s(setup.timeout_s))
        async with views() as slot:
            started = time.monotonic()
            verdict = await run_verifier(slot, setup, alone=alone, watched=watched)
            self._grading.took(time.monotonic() - started)
        found = Checked(verdict, verdict.labels)
        solved = self._part.step is None and prepared is None and self._rollout.task.solution
        reference = partial(_solved, self._rollout.task, self._grading) if solved else None
        if watched and verdict.reward > 0 and not verdict.is_usual and reference is not None:
            with suppress(GraderError):
                async with reference() as slot:
                    patient = replace(setup, timeout_s=enough_time(setup.timeout_s))  # load must not decide
                    shown = await run_verifier(slot, patient, alone=alone)
                labels = verdict.labels_beside(shown) if shown.reward > 0 else list(verdict.labels)
                if reads_of_tests(verdict.opened, shown.opened):  # tracebacks of the work show lines of its callers
                    async with views() as slot:
                        blank = await run_verifier(slot, replace(patient, blank=True), alone=alone)
                    if blank.reward > 0 and not reads_of_tests(blank.opened, shown.opened):
                        labels = [label for label in labels if label.name != "tests_read"]
                found = replace(found, labels=labels)
        certain = any(label.certain for label in found.labels)
        controlled = self._settings.controls and watched and (alone or self._is_last)
        if verdict.reward > 0 and verdict.run is not None and controlled and not certain:
            before = prepared or self._grading.prepared
            controls = await falsified(views, setup, verdict, before, reference, fresh=alone)
            return replace(found, labels=(*found.labels, *controls.labels), uncontrolled=controls.uncontrolled)
        return found

    def _score(self, guarded: Checked, official: Checked | None) -> Score:
        """Return the score of two verdicts, which may be the same."""
        verdict = guarded.verdict
        assert verdict is not None
        labels = list(guarded.labels)
        detail = verdict.detail() | {
            "category": self._part.task.metadata.category,
            "hidden": list(guarded.hidden),
            "replaced": list(self._part.script.replaced),
            "grading": self._rollout.task.grading,
            "uncontrolled": list(guarded.uncontrolled[:50]),
        }
        own = verdict if official is None or official.verdict is None else official.verdict
        rewards, reward, self._doubts = verdict.rewards, verdict.reward, verdict.doubts or own.doubts
        if guarded is official and guarded.processes and guarded.reward > 0:
            evidence = f"{guarded.processes} processes of the agent ran during the check"
            labels.append(Label("graded_where_it_runs", evidence))
        if official is not None and official is not guarded:
            labels += official.labels
        if own is not verdict:
            detail["official_output"] = own.output[-2000:]
            if own.reward == reward:
                self._grading.made_no_difference(guarded.hidden)
            if own.reward < reward:
                rewards, reward = own.rewards, own.reward
            elif reward < own.reward and official is not None and official.processes:
                evidence = f"{official.processes} processes ran when the agent ended, and the guarded view has none"
                labels.append(Label("live_processes", evidence))
            if verdict.reward < own.reward and not labels and not self._grading.labels:
                hidden = f", without {', '.join(guarded.hidden[:5])}" if guarded.hidden else ""
                shown = verdict.output.strip()[-200:]
                labels.append(
                    Label("guarded_view_fails", f"the verifier pays less in a fresh sandbox{hidden}: {shown}")
                )
        detail |= {"rewards": dict(rewards), "official_rewards": dict(own.rewards)}
        return Score(reward, {**numeric_values(detail), **rewards}, detail, official=own.reward, labels=labels)

    async def _view(self) -> View:
        """Return the guarded view of the work."""
        env = {**self._work.env, **self._part.task.verifier.env}
        script = self._part.script.whole
        if INLINE_PYTHON.search(script):
            env["PYTHONPATH"] = ":".join(filter(None, [self._work.workdir, env.get("PYTHONPATH", "")]))
        changes = await self._grading.changes()
        files = [name for name, path in self._part.task.verifier.files().items() if path.is_file()]
        texts = [script, *test_files(self._part.task).values()]
        about, changed = self._part.task.instruction, [each.path for each in changes if each.kind != "dir"]
        checkers = await asyncio.to_thread(  # the agent decides how many paths there are
            lambda: [path for path in changed if basename(path) not in about and runs(texts, path, self._work.workdir)]
        )
        if checkers:  # a new file is work
            async with self._grading.prepared() as before:
                checkers = [path for path in checkers if await before.stat(path) is not None]
        solved = await self._solved_paths() if checkers else None

        async def solved_too(paths: Sequence[str]) -> Collection[str]:
            return (await self._solved_paths() or ()) if paths else ()

        table = await self._grading.view(
            (*self._work.scope.paths, *self._settings.graded_paths),
            workspace=self._work.workdir,
            programs=(*self._settings.keep_programs, *self._settings.graded_programs),
            text=self._part.task.instruction,
            env=env,
            solved=solved_too,
        )

        def without(paths: Collection[str]) -> View:
            hidden = hidden_paths(
                changes,
                (*table.without, *paths),
                script=script,
                declared=self._work.scope.paths,
                about=about,
                env=env,
                files=files,
                workdir=self._work.workdir,
            )
            return View(table.only, hidden)

        if checkers and solved is not None:
            unsolved = [path for path in checkers if path not in solved]
            checkers = await self._checkers_in(unsolved, solved.union(changed), without)
        same = {change.path for change in changes if not change.content}
        self._grading.note("checkers_changed", [path for path in checkers if path not in same])
        kept = [path for path in checkers if solved is not None and not is_below(path, paths_in(about))]
        hidden = without(kept).without
        if COPIES_TESTS.search(script):
            hidden = (*hidden, *await changed_conftests(changes, self._work.scope.words, self._grading.prepared))
        shown = {change.path for change in changes if change.content and "/__pycache__/" not in change.path}
        shown -= {*table.without, *kept, *ALWAYS_HIDDEN}
        self._grading.note("test_settings_ignored", [path for path in hidden if path in shown])
        return View(table.only, hidden)

    async def _checkers_in(
        self, paths: Sequence[str], changed: Collection[str], without: Callable[[Collection[str]], View]
    ) -> list[str]:
        """Return the checkers among programs of the work that the verifier runs, by replays."""
        from palaestra_suites.terminal_bench.checkers import checkers_in  # most work changes no such program

        solved = partial(_solved, self._rollout.task, self._grading)
        work = lambda prepared: partial(self._view_slot, without(prepared))  # noqa: E731
        return await checkers_in(paths, self._setup(), solved, work, changed)

    @asynccontextmanager
    async def _view_slot(self, view: View) -> AsyncIterator[Slot]:
        """Yield a copy of a grading slot with this view. The rollout must hold no grading slot."""
        slot = await self._grading.slot(view, scratch=False)
        try:
            async with self._grading_copy(slot, changes_in(view, await self._grading.changes())) as copy:
                yield copy
        finally:
            await asyncio.shield(self._grading.restart())

    async def _deciding(self, setup: VerifierSetup, view: View, reward: float) -> Sequence[str]:
        """Return the files outside of the working directory that decide: the verifier pays less if they are as
        prepared. Files that the instruction names do not count, nor do those of which the reference solution changes
        one of the same name or program. Without a solution that can be played here, any text of the task may name
        them."""
        about, settings, scope = self._part.task.instruction, self._settings, self._work.scope
        named = (self._work.workdir, *paths_in(about), *settings.graded_paths, *ALWAYS_HIDDEN)
        changes = [each for each in await self._grading.changes() if each.kind != "dir" and each.content]
        found = [each.path for each in changes_in(view, changes) if not is_below(each.path, named)]
        sites = sorted({match[1] for path in found if (match := SITE.fullmatch(path))})
        kept = (*named, *sites[:_MOST_KEPT])
        found = [path for path in found if not SITE.fullmatch(path)]  # other rules cover Python's
        if not found or not await self._pays_less(setup, view, reward, kept):
            return ()
        solved = await self._solved_paths()
        if solved is None:
            own = [path for path in found if not is_below(path, scope.paths) and basename(path) not in scope.words]
        else:
            names, configured = set(map(basename, solved)), programs_of(solved)
            own = [path for path in found if basename(path) not in names and program_of(path) not in configured]
        others = set(found).difference(own)
        if not own or not others or len(others) > _MOST_KEPT:
            return own
        return own if await self._pays_less(setup, view, reward, (*kept, *others)) else ()

    async def _pays_less(self, setup: VerifierSetup, view: View, reward: float, only: Sequence[str]) -> bool:
        """Return whether the verifier pays less than `reward` if the view shows only changes below these paths."""
        scratch = [f"{CARRIED}{path}" for path in only if is_below(path, SCRATCH)]
        async with self._view_slot(View((*only, *scratch), view.without)) as slot:
            try:
                return (await run_verifier(slot, setup, alone=True, watched=False)).reward < reward
            except TestsTimedOut:  # a busy machine must not decide
                return False
            except GraderError:
                return True

    async def _solved_paths(self) -> frozenset[str] | None:
        """Return the paths that the reference solution changes; None if it cannot be played here."""
        task, grading, key = self._rollout.task, self._grading, self._key
        if self._part.step is not None or self._work.plan is not None or task.solution is None:
            return None
        if key not in self._context.solved:
            async with _solved(task, grading) as slot:
                made = await grading.pool.checkpoint(slot)
            self._context.solved[key] = frozenset(change.path for change in await grading.pool.changes(made))
            await grading.pool.snapshots.forget(made)
        return self._context.solved[key]

    def _setup(self) -> VerifierSetup:
        keeps = self._part.step is None and self._rollout.task.grading != LIVE
        found = self._context.prepared[self._rollout.task.id]
        if (self._part.task.verifier.user or self._work.root.config.user) != self._work.user:
            found = replace(found, home="/root")
        return self._setup_in(self._work.root, found, self._work.env, self._work.workdir, keeps=keeps)

    def _setup_in(
        self, root: TaskRoot, prepared: PreparedSlot, variables: Mapping[str, str], workdir: str, *, keeps: bool
    ) -> VerifierSetup:
        """Return how a part's verifier runs in a slot over `root`."""
        verifier = self._part.task.verifier
        path = variables.get("PATH", SYSTEM_PATH)
        env = {**variables, "PYTEST_ADDOPTS": "", "PYTHONDONTWRITEBYTECODE": "1", **verifier.env}
        return VerifierSetup(
            part=self._part,
            command=prepared.command,
            dependencies=prepared.dependencies,
            env={"HOME": prepared.home, **env, "PATH": f"{HARNESS_DIR}/bin:{path}"},
            workdir=workdir,
            user=verifier.user or root.config.user,
            timeout_s=verifier.timeout_s or self._settings.test_timeout,
            keeps=keeps,
        )


async def verifier_files(
    rollout: Rollout, part: GradedPart, spec: SlotSpec, network: Network | AllowList
) -> tuple[SlotSpec, Snapshot | None]:
    """Return the settings and the files of a separate verifier's slot, which are built once per run. `spec` has the
    settings of a slot for grading, and `network` is that of the build."""
    work: ResolvedTask = rollout.task.data
    environment, root = part.task.verifier.environment, work.roots[part.step_name]
    assert environment is not None
    env = tuple(sorted({**root.config.env, **environment.env}.items()))
    spec = replace(spec, image=root.image, limits=environment.limits, env=env)
    if root.build_key is None:
        return spec, None
    build = partial(build_in_slot, recipe=environment.recipe, base=root.base)
    building = replace(spec, network=network, limits=limits_of_build(spec.limits))
    made = partial(sealed_after, rollout, building, None, build)
    return spec, await rollout.run_context.workspaces.shared(root.build_key, made)


async def prepared_for(slot: Slot, tools: TestTools, user: str, *, own: bool) -> PreparedSlot:
    """Look up how pytest starts in a slot, and the home of `user`. With `own`, the image's own pytest counts first."""
    found = await image_command(slot, tools) if own else None
    command, packages = found or (await working_command(slot, tools), ())
    return PreparedSlot(command, (*tools.dependencies, *packages), await home_of(slot, user))


def _no_verdict(why: str) -> Checked:
    label = Label("official_failed", f"the verifier gave no verdict in the agent's own sandbox: {why:.300}")
    return Checked(None, (label,))


@asynccontextmanager
async def _solved(task: Task, grading: Grading) -> AsyncIterator[Slot]:
    """Yield a slot in which the reference solution has run."""
    async with grading.prepared() as slot:
        for step in task.solution or ():
            if isinstance(step, ToolStep):
                arguments = step.arguments
                await slot.execute(
                    arguments["command"], cwd=task.data.workdir, timeout_s=arguments["timeout"], spill=False
                )
        yield slot
