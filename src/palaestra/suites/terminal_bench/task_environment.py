"""Prepare and grade terminal tasks.

When the agent stops, its work is copied as it is, and then the verifier runs in the agent's own slot: all files and
processes as the agent left them, and the verifier's files put in only now. That is the protocol of Terminal-Bench and
Harbor for a verifier that shares the agent's container, and its reward is the `official` one. For work that it pays,
the verifier runs once more in the guarded view: a fresh slot over the copy, in which what the image brought to run
programs is as prepared (`rollouts/grading/tampering.py`), links to the verifier's files are removed, and pytest loads
no settings of the agent for the verifier's tests. The reward is the lower one of both, and labels name what differs.
Then a round with falsified tests follows (`verifier.py`).

Work that is a running service has no processes in the guarded view. A task that is graded live is verified only in the
agent's own slot. So is work with live processes if the task's texts are about a service and the agent changed nothing
that the image brought to run programs.

A verifier with an environment of its own runs once, in a fresh slot over that root, and gets only the artifacts that
the task declares (`separate_verifier.py`). Its verdict is the official one and the reward.

A task with several steps is one conversation in one workspace, with a verdict after every step. The order is that of
Harbor's `MultiStepTrial` (0.25): a step's files are copied into the task's directory and its `setup.sh` runs, then the
agent gets the instruction, then the verifier runs. An official reward below `min_reward` ends the rollout. After each
step, the agent continues in a fork of the work as it was before the verifier ran. A task that is graded live, in the
agent's slot, keeps a single slot, and the verifier's files are removed from it between steps. The conversation
continues from step to step, which Harbor calls resuming; each step has the turns and the time of a rollout.
"""

from __future__ import annotations

import asyncio
import base64
import math
import re
import shlex
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

from palaestra.agent.result import AgentResult
from palaestra.contract.contract_environment import ContractEnvironment
from palaestra.contract.hermes_env import HermesAgentBaseEnv
from palaestra.core.config import local_path
from palaestra.core.errors import GraderError, InfraError, PrepareError, SandboxError, SlotEnded
from palaestra.core.io.temporary_folder import TemporaryFolder
from palaestra.core.types import JSON, Label, Network, NetworkPolicy, Outcome, Say, Score, Task, ToolStep, numbers
from palaestra.rollouts.grading.grader import LIVE, SEALED, Grading
from palaestra.rollouts.grading.tampering import CARRIED, REPLACED, SHADOWED, changes_in, is_below
from palaestra.rollouts.rollout import Rollout
from palaestra.rollouts.spec import Phase
from palaestra.sandbox.slot import Slot, SlotSpec, View
from palaestra.sandbox.transfer import upload_dir
from palaestra.suites.grading.harness import TestsTimedOut, enough_time
from palaestra.suites.images.agent_user import start_in, tools_of_user
from palaestra.suites.images.as_user import UserSlot, acting_as, home_of, is_root
from palaestra.suites.images.image_builder import ImageBuilder
from palaestra.suites.images.pytest_toolchain import (
    TestTools,
    find_test_tools,
    image_command,
    image_modules,
    working_command,
)
from palaestra.suites.images.slot_build import build_in_slot
from palaestra.suites.images.task_root import TaskRoot, TaskRoots
from palaestra.suites.slot_commands import check_execute
from palaestra.suites.task_files import read_bytes, read_text
from palaestra.suites.task_paths import TaskScope, scope_of
from palaestra.suites.terminal_bench import terminal_bench_1
from palaestra.suites.terminal_bench.offline_script import GradedPart, parts_of
from palaestra.suites.terminal_bench.rewards import combine_scores, falls_short
from palaestra.suites.terminal_bench.separate_verifier import collect, joined, put, run_hooks
from palaestra.suites.terminal_bench.service import MAIN
from palaestra.suites.terminal_bench.service_group import (
    ResolvedService,
    ServiceGroup,
    ServicePlan,
    ServicesEnded,
    drop_lost,
    prepared_files,
    sealed_after,
    set_up,
)
from palaestra.suites.terminal_bench.terminal_task import (
    AGENT_LOGS,
    ARTIFACT_LOGS,
    TESTS_DIR,
    VERIFIER_LOGS,
    CollectHook,
    SolutionScript,
    TaskStep,
    TerminalTask,
)
from palaestra.suites.terminal_bench.terminalbench_2_config import TerminalBench2EvalConfig
from palaestra.suites.terminal_bench.verifier import (
    SYSTEM_PATH,
    GradedViews,
    VerifierSetup,
    VerifierVerdict,
    falsified,
    test_files,
    verify,
)
from palaestra.suites.terminal_bench.verifier_files import (
    ALWAYS_HIDDEN,
    HARNESS_DIR,
    changed_conftests,
    copies_tests,
    hidden_paths,
    ignored_settings,
    script_name,
    starts_inline_python,
)
from palaestra.suites.toolchain.toolchain import DependencyCache

_ABOUT_SERVICES = re.compile(
    r"\b(?:servers?|services?|daemons?|ports?|localhost|127\.0\.0\.1|listen\w*|sockets?|https?://|nohup|setsid)\b",
    re.IGNORECASE,
)
"""Signs that a task is about a running service."""

_MOST_TEXT_BYTES = 1 << 20
_SETUP_S = 600.0
_LEAST_REPEATED_S = 10.0
"""The least time limit, in seconds, of a verifier that is run again because it failed."""

LONGEST_COMMAND_S = 600
"""The longest time limit, in seconds, of a command in the terminal tool."""

_PIECE = 60_000
"""The maximum number of base64 characters per command; the kernel allows 128 KiB per argument."""


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
        return self.task.agent_user or self.root.config.user

    @property
    def env(self) -> dict[str, str]:
        """The variables of every command."""
        return {**self.root.config.env, **self.task.env}


@dataclass(frozen=True, slots=True)
class PreparedSlot:
    """The result of preparing a workspace: the command for pytest, the directories of its packages, the modules of the
    image that this command cannot import, and the agent's home."""

    command: tuple[str, ...]
    dependencies: tuple[str, ...]
    out_of_reach: frozenset[str]
    home: str


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of a verifier's run and the round with falsified tests. `verdict` is None if the run gave none.

    If `decides`, the verdict of the agent's own slot is also the guarded one, unless the guarded view lacks something
    that programs use. `hidden` are the agent's changes that the view lacks, and `processes` the number that ran at the
    end.
    """

    verdict: VerifierVerdict | None
    labels: Sequence[Label]
    uncontrolled: Sequence[str]
    decides: bool
    hidden: Sequence[str] = ()
    processes: int = 0

    @property
    def reward(self) -> float:
        """The reward; infinite without a verdict, because the other verdict then decides."""
        return math.inf if self.verdict is None else self.verdict.reward


class TerminalBenchEnvironment(ContractEnvironment):
    """Prepares and grades the tasks."""

    default_grading = SEALED

    def __init__(
        self, inner: HermesAgentBaseEnv, settings: TerminalBench2EvalConfig, packages: DependencyCache | None = None
    ) -> None:
        super().__init__(inner)
        self.settings = settings
        cache = local_path(settings.cache_dir)
        self.packages = packages or DependencyCache(cache / "dependencies")
        builder = ImageBuilder(
            cache / "roots", tool=settings.builder, network=settings.build_network, force=settings.force_build
        )
        self.roots = TaskRoots(
            builder,
            settings.images,
            local_path(settings.image_dir) if settings.image_dir else None,
            settings.base_image,
        )
        self._prepared: dict[str, PreparedSlot] = {}

    async def open(self) -> None:
        self.roots.check()  # before the run's folder is made
        await super().open()

    async def resolve(self, task: Task) -> Task:
        terminal: TerminalTask = task.data
        root = await self.roots.of(terminal.name, terminal.recipe)
        parts = parts_of(terminal)
        wanted = sorted({name for part in parts if part.script.pytest for name in part.script.requirements})
        started = any(part.script.pytest for part in parts)
        tools = await find_test_tools(self.packages, wanted) if started else TestTools()
        home = terminal.env.get("HOME", "/root")
        roots = {part.step_name: await self._root_of(part, root) for part in parts if part.task.verifier.environment}
        plan = await self._plan(terminal, root) if terminal.services else None
        work = ResolvedTask(terminal, root, roots, parts, tools, scope_of(_texts(parts), home), plan)
        serves = terminal.live or terminal.is_named(self.settings.live_tasks) or (plan is not None and plan.is_group)
        live = not roots and serves
        return replace(
            task,
            data=work,
            image=root.image,
            limits=terminal.limits,
            network=self._network(terminal),
            grading=LIVE if live else SEALED,
            solution=self._solution(work),
        )

    async def _root_of(self, part: GradedPart, own: TaskRoot) -> TaskRoot:
        """Return the root file system of a part's separate verifier; `own` is the task's."""
        environment = part.task.verifier.environment
        assert environment is not None
        if not environment.has_tests:
            return own
        name = ".".join(filter(None, [part.task.name, part.step_name, "verifier"]))
        return await self.roots.of(name, environment.recipe)

    async def _plan(self, task: TerminalTask, own: TaskRoot) -> ServicePlan:
        """Return the services of a task with their root file systems; `own` is that of `main`. Those of the other
        services have the names `NAME.SERVICE`."""
        roots = {MAIN: own}
        for each in task.services:
            if each.name != MAIN:
                same = each.recipe == task.recipe
                roots[each.name] = own if same else await self.roots.of(f"{task.name}.{each.name}", each.recipe)
        return ServicePlan({each.name: ResolvedService(each, roots[each.name]) for each in task.services})

    def _solution(self, work: ResolvedTask) -> Sequence[ToolStep | Say] | None:
        """Return the calls of the reference solutions of all parts in order, or None if a part has no solution."""
        steps: list[ToolStep | Say] = []
        for part in work.parts:
            own = solution_steps(part.task, work.user, self._agent_s(part.task), fresh=bool(steps))
            if own is None:
                return None
            steps += [*own, *([Say(f"The step {part.step.name} is done.")] if part.step else [])]
        return steps

    def _network(self, task: TerminalTask) -> NetworkPolicy:
        agent = task.network if self.settings.allow_network else Network.OFF
        return NetworkPolicy(prepare=Network.ON if self.settings.build_network else Network.OFF, agent=agent)

    def slot_spec(self, task: Task, phase: Phase) -> SlotSpec:
        work: ResolvedTask = task.data
        spec = replace(super().slot_spec(task, phase), env=tuple(sorted(work.env.items())))
        spec = replace(spec, mounts=work.tools.mounts)  # the official verdict is computed in the agent's slot
        return spec if work.plan is None or phase is not Phase.AGENT else work.plan.leading(spec)

    def shared_setup(self, task: Task) -> str | None:
        key: str | None = task.data.root.build_key
        return key

    async def prepare_shared(self, task: Task, sandbox: Slot) -> None:
        await build_in_slot(sandbox, task.data.task.recipe, task.data.root.base)

    def prepares(self, task: Task) -> bool:
        return True

    async def prepare(self, task: Task, sandbox: Slot) -> None:
        work: ResolvedTask = task.data
        found = await _prepared_for(sandbox, work.tools, work.user, own=task.grading == SEALED)
        await start_in(sandbox, work.workdir, AGENT_LOGS, VERIFIER_LOGS)
        if work.plan is not None:
            await set_up(sandbox, work.plan, MAIN)
        self._prepared[task.id] = found

    async def begin(self, rollout: Rollout) -> None:
        await super().begin(rollout)
        work: ResolvedTask = rollout.task.data
        if work.plan is None or not work.plan.starts:
            return
        spec, plan = self.slot_spec(rollout.task, Phase.AGENT), work.plan
        spec = replace(spec, group=None)
        building = replace(spec, network=self.slot_spec(rollout.task, Phase.PREPARE).network)
        group = ServiceGroup(plan, rollout)
        if plan.is_group:
            rollout.meta["services"] = group
        try:
            await group.start(spec, lambda name: prepared_files(rollout, plan, name, building))
        except SandboxError:
            await drop_lost(rollout, plan)
            raise

    def _agent_s(self, task: TerminalTask) -> float:
        return task.agent_timeout_s or self.settings.task_timeout

    async def act(self, rollout: Rollout) -> AgentResult:
        work: ResolvedTask = rollout.task.data
        self._choose_server(rollout)
        if not work.task.steps:
            return await self.converse(rollout, work.parts[0])
        steps = _Steps(self, rollout)
        rollout.meta["steps"] = steps.scores
        return await steps.run()

    async def converse(self, rollout: Rollout, part: GradedPart, *, later: bool = False) -> AgentResult:
        """Let the agent work on a part of its task as the user that the task or its image sets. `later` is true for
        every part after the first."""
        work: ResolvedTask = rollout.task.data
        budget = replace(rollout.settings.budget, wall_s=self._agent_s(part.task))
        rollout.settings = replace(rollout.settings, budget=budget)
        about = part.task.instruction
        handler = tools_of_user(rollout, work.user, lambda: self.agent_slot(rollout), about)
        if later:
            return await rollout.continue_agent({"role": "user", "content": about.strip()}, tool_handler=handler)
        if handler is None:
            return await self._converse(rollout, rollout.opening())
        return await rollout.run_agent(tool_handler=handler)

    async def agent_slot(self, rollout: Rollout) -> Slot:
        """Return the rollout's slot, in which commands and file accesses have the rights of the agent's user."""
        work: ResolvedTask = rollout.task.data
        slot = await rollout.sandbox()
        return slot if is_root(work.user) else UserSlot(slot, work.user, self._prepared[rollout.task.id].home)

    async def score(self, rollout: Rollout, grading: Grading) -> Score:
        work: ResolvedTask = rollout.task.data
        if work.task.steps:
            return combine_scores(work.task, rollout.meta["steps"])
        return await self.verified(rollout, grading, work.parts[0])

    async def verified(self, rollout: Rollout, grading: Grading, part: GradedPart) -> Score:
        """Return the score from a part's verifier: its official verdict, and the reward in the guarded view."""
        work: ResolvedTask = rollout.task.data
        group: ServiceGroup | None = rollout.meta.get("services")
        if group is not None and rollout.seat.slot is None and not (grading.begun or grading.untouched):
            raise ServicesEnded("work of several services cannot be graded again, because the services have ended")
        problems = await self._run_hooks(rollout, grading, part)
        if part.task.verifier.environment is not None:
            return await self._verified_apart(rollout, grading, part, problems)
        if group is not None and not grading.untouched:
            await group.collect(part.task.verifier.collect, ())
        if grading.live:
            slot = await grading.slot()
            setup = self._setup(rollout.task, part)
            before = None if work.plan is None else grading.prepared  # the solution cannot run without the services
            checked = await self._checked(
                rollout, grading, part, setup, lambda: _same(slot), alone=False, prepared=before
            )
            score = self._score(rollout, grading, part, checked, checked)
            return score if group is None else replace(score, detail={**score.detail, "services": await group.report()})
        known: dict[str, Checked | None] = rollout.meta.setdefault("official", {})
        step = part.step_name
        if step not in known and not grading.untouched:  # a repeated check has no running slot any more
            known[step] = _no_verdict("it timed out")  # stays if it does, and the check is repeated
            known[step] = await self._official(rollout, grading, part)
        official = None if grading.untouched else known[step]
        if official is not None and official.reward <= 0:
            return self._score(rollout, grading, part, official, official)
        if official is not None and official.decides:
            await self._view(rollout, grading, part)
            if {REPLACED, SHADOWED}.isdisjoint(label.name for label in grading.labels):
                return self._score(rollout, grading, part, official, official)
        guarded = await self._guarded(rollout, grading, part)
        return self._score(rollout, grading, part, guarded, official)

    async def _run_hooks(self, rollout: Rollout, grading: Grading, part: GradedPart) -> list[str]:
        """Run the collect hooks of a part in the agent's slot, and return their problems."""
        work: ResolvedTask = rollout.task.data
        hooks = [each for each in part.task.verifier.collect if each.service == MAIN]
        if not hooks or grading.begun or rollout.seat.slot is None:
            return []

        async def slot_of(hook: CollectHook) -> Slot:
            slot, user = await rollout.sandbox(), hook.user or work.root.config.user
            return await acting_as(slot, user)

        with suppress(SlotEnded):  # the agent's own commands ended it; what it wrote is still graded
            return await run_hooks(hooks, slot_of)
        return ["the agent's commands ended the sandbox"]

    async def _verified_apart(
        self, rollout: Rollout, grading: Grading, part: GradedPart, problems: Sequence[str]
    ) -> Score:
        """Return the score of a verifier that has a root file system of its own."""
        environment = part.task.verifier.environment
        assert environment is not None
        group: ServiceGroup | None = None if grading.untouched else rollout.meta.get("services")
        with TemporaryFolder("artifacts") as folder:
            beside = await group.collect(part.task.verifier.collect, environment.artifacts) if group else None
            slot = await grading.slot(View())
            own = [each for each in environment.artifacts if each.service == MAIN]
            collected = await collect(slot, own, folder.path)
            collected = collected if beside is None else joined(collected, beside.collected)
            await grading.restart()  # a rollout that holds one slot must not wait for a second

            @asynccontextmanager
            async def views() -> AsyncIterator[Slot]:
                async with self._verifier_slot(rollout, grading, part) as slot:
                    await put(slot, collected)
                    yield slot

            untouched = partial(self._verifier_slot, rollout, grading, part)
            setup = await self._setup_apart(rollout.task, part, untouched)
            checked = await self._checked(rollout, grading, part, setup, views, alone=True, prepared=untouched)
        score = self._score(rollout, grading, part, checked, checked)
        problems = [*problems, *(() if beside is None else beside.problems)]
        left: dict[str, JSON] = {"artifacts_left_out": list(collected.left_out), "collect_failed": problems}
        left |= {} if beside is None else {"services": dict(beside.report)}
        return replace(score, detail={**score.detail, **{name: value for name, value in left.items() if value}})

    @asynccontextmanager
    async def _verifier_slot(self, rollout: Rollout, grading: Grading, part: GradedPart) -> AsyncIterator[Slot]:
        """Yield a fresh slot over the root file system of a separate verifier."""
        work: ResolvedTask = rollout.task.data
        environment, root = part.task.verifier.environment, work.roots[part.step_name]
        assert environment is not None
        env = tuple(sorted({**root.config.env, **environment.env}.items()))
        spec = replace(grading.spec, image=root.image, limits=environment.limits, env=env)
        built = None
        if root.build_key is not None:
            building = replace(spec, network=self.slot_spec(rollout.task, Phase.PREPARE).network)
            build = partial(build_in_slot, recipe=environment.recipe, base=root.base)
            made = partial(sealed_after, rollout, building, None, build)
            built = await rollout.run_context.workspaces.shared(root.build_key, made)
        try:
            slot = await rollout.workspace.lease_slot(f"{rollout.rollout_id}:verifier", spec, built)
        except SandboxError:
            if root.build_key is not None:
                await rollout.run_context.workspaces.drop_lost(root.build_key)
            raise
        try:
            await start_in(slot, environment.workdir or root.config.workdir, VERIFIER_LOGS, AGENT_LOGS, ARTIFACT_LOGS)
            yield slot
        finally:
            await asyncio.shield(grading.pool.release(slot))

    async def _setup_apart(self, task: Task, part: GradedPart, untouched: GradedViews) -> VerifierSetup:
        """Return how a separate verifier runs. What its image has for pytest is looked up once per task."""
        work: ResolvedTask = task.data
        environment, root = part.task.verifier.environment, work.roots[part.step_name]
        assert environment is not None
        key = f"{task.id}:{part.step_name}:verifier"
        if key not in self._prepared:
            async with untouched() as slot:
                self._prepared[key] = await _prepared_for(slot, work.tools, root.config.user, own=True)
        env = {**root.config.env, **environment.env}
        workdir = environment.workdir or root.config.workdir
        return self._setup_in(part, root, self._prepared[key], env, workdir, keeps=environment.has_tests)

    async def _official(self, rollout: Rollout, grading: Grading, part: GradedPart) -> Checked | None:
        """Return the verdict by the benchmark's protocol; None if it is that of the guarded view or cannot be had. The
        agent's own slot ends with it."""
        work: ResolvedTask = rollout.task.data
        own = await grading.checkpoint()
        if own is None and await grading.seal() is None:
            return None  # the agent never had a slot, so nothing differs
        changed = [(change.path.removeprefix(CARRIED), change.kind) for change in await grading.changes()]
        made = [path for path, kind in changed if kind == "file"]
        serves = own is not None and grading.processes_at_end > 0 and _is_about_service(part)
        serves = serves and not any(is_below(path, (TESTS_DIR, VERIFIER_LOGS)) for path, _ in changed)
        try:
            slot = await grading.slot(View()) if own is None else own
            await _restore_workdir(slot, work.workdir)
            setup = replace(self._setup(rollout.task, part), made=made)
            checked = await self._checked(
                rollout, grading, part, setup, lambda: _same(slot), alone=False, watched=serves
            )
        except GraderError as error:
            if error.certain or isinstance(error, TestsTimedOut):  # work that hangs costs one time limit, not two
                raise
            return _no_verdict(str(error))
        finally:
            await (grading.restart() if own is None else rollout.seat.aclose())
        if own is None:
            evidence = "the agent's own sandbox has ended or cannot be copied, so its files were verified in a copy"
            label = Label("official_on_copy", evidence)
            return replace(checked, labels=(*checked.labels, label))
        return replace(checked, decides=serves, processes=grading.processes_at_end)

    async def _guarded(self, rollout: Rollout, grading: Grading, part: GradedPart) -> Checked:
        """Return the verdict in the guarded view."""
        work: ResolvedTask = rollout.task.data
        view = await self._view(rollout, grading, part)
        slot = await grading.slot(view, scratch=False)
        changes = await grading.changes()
        shown = changes_in(view, changes)
        ignored = await ignored_settings(slot, shown, work.scope.words, grading.prepared)
        grading.note("test_settings_ignored", ignored)
        about = replace(rollout.task, prompt=part.task.instruction)

        @asynccontextmanager
        async def views() -> AsyncIterator[Slot]:
            async with slot.fork() as fork:
                await grading.restore_scratch(fork)
                await grading.disarm(fork, about, shown, ALWAYS_HIDDEN)
                await _restore_workdir(fork, work.workdir)
                yield fork

        made = [change.path for change in shown if change.kind == "file"]
        setup = replace(self._setup(rollout.task, part, ignored), made=made)
        checked = await self._checked(rollout, grading, part, setup, views, alone=True)
        changed = {change.path for change in changes}
        return replace(checked, hidden=tuple(path for path in (*view.without, *ignored) if path in changed))

    async def _checked(
        self,
        rollout: Rollout,
        grading: Grading,
        part: GradedPart,
        setup: VerifierSetup,
        views: GradedViews,
        *,
        alone: bool,
        watched: bool = True,
        prepared: GradedViews | None = None,
    ) -> Checked:
        """Run the verifier in one of the views and, if it is `watched` and pays, once more with falsified tests.
        `prepared` opens the slot of a separate verifier without work; the reference solution cannot run there."""
        limits_s: dict[str, float] = rollout.meta.setdefault("limits_s", {})  # of repeated checks, by step
        step = part.step_name
        setup = replace(setup, timeout_s=min(setup.timeout_s, limits_s.get(step, setup.timeout_s)))
        async with views() as slot:
            started = time.monotonic()
            verdict = await verify(slot, part.task, part.script, setup, alone=alone, watched=watched)
            if grading.untouched:
                limits_s[step] = enough_time(time.monotonic() - started, _LEAST_REPEATED_S)
        labels: Sequence[Label] = verdict.labels
        uncontrolled: Sequence[str] = ()
        certain = any(label.certain for label in labels)
        if verdict.reward > 0 and verdict.run is not None and watched and self.settings.controls and not certain:
            solved = part.step is None and prepared is None and rollout.task.solution
            reference = partial(_solved, rollout.task, grading) if solved else None
            before = prepared or grading.prepared
            shown = await falsified(views, part.task, part.script, setup, verdict, before, reference)
            labels, uncontrolled = (*labels, *shown.labels), shown.uncontrolled
        return Checked(verdict, labels, uncontrolled, False)

    def _score(
        self, rollout: Rollout, grading: Grading, part: GradedPart, guarded: Checked, official: Checked | None
    ) -> Score:
        """Return the score of two verdicts, which may be the same."""
        verdict = guarded.verdict
        assert verdict is not None
        labels = list(guarded.labels)
        detail = verdict.detail() | {
            "category": part.task.category,
            "hidden": list(guarded.hidden),
            "replaced": list(part.script.replaced),
            "grading": rollout.task.grading,
            "uncontrolled": list(guarded.uncontrolled[:50]),
        }
        rewards, reward, own = verdict.rewards, verdict.reward, None if official is None else official.verdict
        if official is not None and official is not guarded:
            labels += official.labels
        if own is not None and own is not verdict:
            detail["official_output"] = own.output[-2000:]
            if own.reward < reward:
                rewards, reward = own.rewards, own.reward
            elif reward < own.reward and official is not None and official.processes:
                evidence = f"{official.processes} processes ran when the agent ended, and the guarded view has none"
                labels.append(Label("live_processes", evidence))
            if verdict.reward < own.reward and not labels and not grading.labels:
                hidden = f", without {', '.join(guarded.hidden[:5])}" if guarded.hidden else ""
                shown = verdict.output.strip()[-200:]
                labels.append(
                    Label("guarded_view_fails", f"the verifier pays less in a fresh sandbox{hidden}: {shown}")
                )
        detail |= {"rewards": dict(rewards), "official_rewards": dict((own or verdict).rewards)}
        official_reward = (own or verdict).reward
        return Score(reward, {**numbers(detail), **rewards}, detail, official=official_reward, labels=labels)

    @property
    def _programs(self) -> tuple[str, ...]:
        """The programs that a verifier uses as the agent left them."""
        return (*self.settings.keep_programs, *self.settings.graded_programs)

    async def _view(self, rollout: Rollout, grading: Grading, part: GradedPart) -> View:
        """Return the guarded view of the work."""
        work: ResolvedTask = rollout.task.data
        env = {**work.env, **part.task.verifier.env}
        script = "\n".join([part.script.text, *part.script.others.values()])
        if starts_inline_python(script):
            env["PYTHONPATH"] = ":".join(filter(None, [work.workdir, env.get("PYTHONPATH", "")]))
        table = await grading.view(
            (*work.scope.paths, *self.settings.graded_paths),
            workspace=work.workdir,
            programs=self._programs,
            text=part.task.instruction,
            env=env,
        )
        files = [name for name, path in part.task.verifier.files().items() if path.is_file()]
        changes = await grading.changes()
        without = hidden_paths(
            changes,
            table.without,
            script=script,
            declared=work.scope.paths,
            about=part.task.instruction,
            env=env,
            files=files,
            workdir=work.workdir,
        )
        if copies_tests(script):
            without = (*without, *await changed_conftests(changes, work.scope.words, grading.prepared))
        shown = {change.path for change in changes if "/__pycache__/" not in change.path} - {*table.without}
        grading.note("test_settings_ignored", [path for path in without if path in shown - {*ALWAYS_HIDDEN}])
        return View(table.only, without)

    def _setup(self, task: Task, part: GradedPart, ignored: Collection[str] = ()) -> VerifierSetup:
        work: ResolvedTask = task.data
        keeps = part.step is None and task.grading != LIVE
        found = self._prepared[task.id]
        if (part.task.verifier.user or work.root.config.user) != work.user:
            found = replace(found, home="/root")
        return self._setup_in(part, work.root, found, work.env, work.workdir, ignored, keeps=keeps)

    def _setup_in(
        self,
        part: GradedPart,
        root: TaskRoot,
        prepared: PreparedSlot,
        variables: Mapping[str, str],
        workdir: str,
        ignored: Collection[str] = (),
        *,
        keeps: bool,
    ) -> VerifierSetup:
        """Return how a part's verifier runs in a slot over `root`."""
        verifier = part.task.verifier
        path = variables.get("PATH", SYSTEM_PATH)
        env = {**variables, "PYTEST_ADDOPTS": "", "PYTHONDONTWRITEBYTECODE": "1", **verifier.env}
        return VerifierSetup(
            command=prepared.command,
            dependencies=prepared.dependencies,
            out_of_reach=prepared.out_of_reach,
            env={"HOME": prepared.home, **env, "PATH": f"{HARNESS_DIR}/bin:{path}"},
            workdir=workdir,
            user=verifier.user or root.config.user,
            timeout_s=verifier.timeout_s or self.settings.test_timeout,
            ignored=ignored,
            keeps=keeps,
        )


async def _prepared_for(slot: Slot, tools: TestTools, user: str, *, own: bool) -> PreparedSlot:
    """Look up how pytest starts in a slot, and the home of `user`. With `own`, the image's own pytest counts first."""
    found = await image_command(slot, tools) if own else None
    command, packages = found or (await working_command(slot, tools), ())
    out_of_reach = await image_modules(slot) if found is None and command else frozenset()
    return PreparedSlot(command, (*tools.dependencies, *packages), out_of_reach, await home_of(slot, user))


def _no_verdict(why: str) -> Checked:
    label = Label("official_failed", f"the verifier gave no verdict in the agent's own sandbox: {why:.300}")
    return Checked(None, (label,), (), False)


def _texts(parts: Sequence[GradedPart]) -> Iterator[str]:
    """Yield the texts that show what a task is about, without the verifier's bootstrap."""
    for part in parts:
        task = part.task
        yield task.instruction
        for name, path in task.verifier.files().items():
            if path.is_file() and name != script_name(task) and path.stat().st_size <= _MOST_TEXT_BYTES:
                yield read_text(path, "replace")
        yield part.script.text
        if task.solution is not None:
            yield read_text(task.solution.folder / task.solution.script, "replace")


async def _restore_workdir(slot: Slot, workdir: str) -> None:
    """Make the task's directory if the agent removed or replaced it, so that the verifier can start."""
    if not (await slot.execute(["/bin/sh", "-c", f"cd {shlex.quote(workdir)}"], cwd="/")).success:
        await slot.remove(workdir)
        await slot.make_dir(workdir)


@asynccontextmanager
async def _same(slot: Slot) -> AsyncIterator[Slot]:
    yield slot


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


def _is_about_service(part: GradedPart) -> bool:
    task = part.task
    texts = [task.instruction, *test_files(task).values()]
    if task.solution is not None:
        texts.append(read_text(task.solution.folder / task.solution.script, "replace"))
    return any(map(_ABOUT_SERVICES.search, texts))


class _Steps:
    """Runs one rollout through the steps of its task. `scores` are the scores of the verified steps."""

    def __init__(self, environment: TerminalBenchEnvironment, rollout: Rollout) -> None:
        self._environment = environment
        self._rollout = rollout
        self._gradings: list[Grading] = []
        self.scores: list[Score] = []

    async def run(self) -> AgentResult:
        """Let the agent work step by step, and verify each step. A step that ended at a limit is verified too. The next
        step follows unless the step failed in a way that gives no score, the context is full, or a reward is too low.
        If earlier work makes a step's set-up fail, that step scores 0 and is the last; for Harbor it has no reward."""
        rollout, work = self._rollout, self._rollout.task.data
        try:
            for number, part in enumerate(work.parts):
                if number and (problem := await self._work_breaks_set_up(part.step)):
                    detail = {"work_breaks_check": problem, "official_rewards": {}}
                    label = Label("set_up_failed", problem[-300:])
                    self.scores.append(Score(0.0, {"work_breaks_check": 1.0}, detail, labels=[label]))
                    break
                if not number:
                    await self._begin(part.step)
                result = await self._environment.converse(rollout, part, later=number > 0)
                if not result.outcome.scored:
                    return result
                self.scores.append(await self._verify(part))
                if result.outcome is Outcome.LENGTH or falls_short(part.step, self.scores[-1]):
                    break
            return result
        finally:
            await asyncio.shield(self._close())

    async def _begin(self, step: TaskStep) -> None:
        """Copy the files of a step into the agent's slot and run its set-up."""
        if self._gradings:
            slot = await self._rollout.sandbox()
            if self._gradings[-1].live:
                await _remove_verifier(slot)
            else:
                await self._gradings[-1].restore_scratch(slot)
        if step.workdir is not None:
            await self._set_up(step, await self._environment.agent_slot(self._rollout))

    async def _set_up(self, step: TaskStep, slot: Slot) -> None:
        """Copy the files of a step into a slot and run its set-up. Raises `PrepareError`."""
        assert step.workdir is not None
        workdir = self._rollout.task.data.workdir
        try:
            await upload_dir(slot, step.workdir, workdir)
        except InfraError:
            raise
        except OSError as error:
            raise PrepareError(f"the files of step {step.name} cannot be copied: {error}") from error
        if (step.workdir / "setup.sh").is_file():
            argv, problem = ["bash", f"{workdir}/setup.sh"], f"the setup.sh of step {step.name} failed"
            await check_execute(slot, argv, problem, cwd=workdir, timeout_s=_SETUP_S, shown=2000)

    async def _work_breaks_set_up(self, step: TaskStep) -> str:
        """Begin a later step. Return the error if the set-up fails over the agent's work but not over the prepared
        workspace, otherwise an empty string."""
        try:
            await self._begin(step)
        except PrepareError as error:
            async with self._gradings[-1].prepared() as slot:
                await self._set_up(step, slot)
            return str(error)[:2000]
        return ""

    async def _verify(self, part: GradedPart) -> Score:
        rollout = self._rollout
        grading = Grading(rollout, self._environment.slot_spec(rollout.task, Phase.GRADE))
        self._gradings.append(grading)
        with rollout.stages.stage("grade"):
            verified = self._environment.verified
            score = await self._environment.check(rollout, grading, lambda shown: verified(rollout, shown, part))
            await grading.hand_back()
        return score

    async def _close(self) -> None:
        """Close the agent's slot first and then the gradings, because the slot uses the snapshots of the gradings."""
        if self._gradings and not self._gradings[-1].live:
            await self._rollout.seat.aclose()
        for grading in reversed(self._gradings):
            await grading.aclose()


async def _remove_verifier(slot: Slot) -> None:
    """Remove the files of a verifier from the agent's own slot."""
    command = f"rm -rf {HARNESS_DIR} {TESTS_DIR} && find {VERIFIER_LOGS} -mindepth 1 -delete"
    await slot.execute(["/bin/sh", "-c", command], cwd="/", timeout_s=60)


def solution_steps(
    task: TerminalTask, user: str, seconds: float, *, fresh: bool = False
) -> tuple[ToolStep, ...] | None:
    """Return the calls that solve a task in at most `seconds`, or None for a task without a solution. Raises
    `TaskError`.

    If `fresh` is true, the files of an earlier solution are removed first.
    """
    solution = task.solution
    if solution is None:
        return None
    place = "/solution" if is_root(user) else "/tmp/palaestra-solution"  # noqa: S108  in the slot
    steps = [_terminal(f"rm -rf {place}")] if fresh else []
    steps += [
        _terminal(line)
        for name, data in _files(solution).items()
        for line in _writing(f"{place}/{name}", data)
    ]  # fmt: skip
    variables = [f"{name}={value}" for name, value in solution.env.items()]
    script = f"{place}/{_script_name(solution)}"
    return (*steps, *_running(shlex.join(["env", *variables, "bash", script]), f"{place}/ended", seconds))


def _script_name(solution: SolutionScript) -> str:
    return solution.script.replace(".yaml", ".sh")


def _files(solution: SolutionScript) -> dict[str, bytes]:
    found = {name: read_bytes(solution.folder / name) for name in (solution.script, *solution.files)}
    if solution.script.endswith(".yaml"):
        lines = terminal_bench_1.commands(solution.folder / solution.script)
        found = {_script_name(solution): "".join(f"{line}\n" for line in lines).encode()}
    return found


def _writing(path: str, data: bytes) -> list[str]:
    """Return commands that write a file."""
    text, quoted = base64.b64encode(data).decode(), shlex.quote(path)
    pieces = [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)] or [""]
    folder = shlex.quote(path.rpartition("/")[0])
    first = f"mkdir -p {folder} && printf %s {pieces[0]} | base64 -d > {quoted}"
    return [first, *(f"printf %s {piece} | base64 -d >> {quoted}" for piece in pieces[1:])]


def _running(command: str, ended: str, seconds: float) -> list[ToolStep]:
    if seconds <= LONGEST_COMMAND_S:
        return [_terminal(command, math.ceil(seconds))]
    # Only shell builtins: the image may lack nohup and setsid.
    started = f"({command}; echo $? > {ended}) > {ended}.log 2>&1 < /dev/null & echo $! > {ended}.pid"
    wait_s = LONGEST_COMMAND_S - 10
    running = f"[ ! -f {ended} ] && kill -0 $(cat {ended}.pid) 2> /dev/null"
    waiting = f"for ((i = 0; i < {wait_s}; i++)); do {running} || break; sleep 1; done; tail -c 2000 {ended}.log"
    waits = [_terminal(waiting, LONGEST_COMMAND_S)] * math.ceil(seconds / wait_s)
    return [_terminal(started), *waits]


def _terminal(command: str, timeout_s: int = 60) -> ToolStep:
    return ToolStep("terminal", {"command": command, "timeout": timeout_s})
