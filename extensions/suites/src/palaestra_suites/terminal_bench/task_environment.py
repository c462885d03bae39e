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

A task with several steps is one conversation in one slot, with an official verdict after every step. The order is that
of Harbor's `MultiStepTrial` (0.25): a step's files are copied into the task's directory and its `setup.sh` runs, then
the agent gets the instruction, then the verifier runs. An official reward below `min_reward` ends the rollout. The next
step begins with the files and processes that the verifier left; only the folders of verifiers and logs are emptied. The
guarded views follow after the last step, over copies that were made before each verifier ran. A verifier with an
environment of its own ends the agent's slot, which then continues without its processes. The conversation continues
from step to step, which Harbor calls resuming; each step has the turns and the time of a rollout.
"""

from __future__ import annotations

import asyncio
import base64
import math
import shlex
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from palaestra.agent.result import AgentResult
from palaestra.envs.api.listed_environment import ListedEnvironment
from palaestra.rollouts.environment import broken
from palaestra.rollouts.grading.blame import blame
from palaestra.rollouts.grading.grader import LIVE, SEALED, Grading
from palaestra.rollouts.rollout import Rollout
from palaestra.rollouts.spec import Phase
from palaestra.tools.tool import Tool
from palaestra_slots.core.config import local_path
from palaestra_slots.core.errors import GraderError, PrepareError, SandboxError, SlotEnded, SlotLost
from palaestra_slots.core.types import Label, Network, NetworkPolicy, Outcome, Say, Score, Task, ToolStep
from palaestra_slots.core.user_code import run_hook
from palaestra_slots.images.as_user import UserSlot, is_root
from palaestra_slots.images.image_builder import ImageBuilder
from palaestra_slots.images.slot_build import build_in_slot, limits_of_build
from palaestra_slots.images.slot_commands import check_execute
from palaestra_slots.images.task_files import read_task_bytes, read_task_text
from palaestra_slots.images.task_images import TaskImages
from palaestra_slots.images.task_root import TaskRoot, TaskRoots
from palaestra_slots.sandbox.slot import Slot, SlotSpec
from palaestra_slots.sandbox.transfer import upload_dir
from palaestra_suites.images.agent_user import start_in, tools_of_user
from palaestra_suites.images.pytest_toolchain import (
    TestTools,
    find_test_tools,
)
from palaestra_suites.task_paths import scope_of
from palaestra_suites.terminal_bench import terminal_bench_1
from palaestra_suites.terminal_bench.harbor_task import read_cheat
from palaestra_suites.terminal_bench.offline_script import GradedPart, parts_of
from palaestra_suites.terminal_bench.rewards import combine_scores, falls_short, official_rewards
from palaestra_suites.terminal_bench.service import MAIN, Service
from palaestra_suites.terminal_bench.service_group import (
    GroupLead,
    ResolvedService,
    ServiceGroup,
    ServicePlan,
    drop_lost,
    prepared_files,
    set_up_service,
    started_by_image,
    wait_healthy,
)
from palaestra_suites.terminal_bench.task_tools import task_tools
from palaestra_suites.terminal_bench.terminal_task import (
    AGENT_LOGS,
    TESTS_DIR,
    VERIFIER_LOGS,
    SolutionScript,
    TaskStep,
    TerminalTask,
)
from palaestra_suites.terminal_bench.terminalbench_2_config import TerminalBench2EvalConfig
from palaestra_suites.terminal_bench.verification import (
    PreparedSlot,
    ResolvedTask,
    Verification,
    VerifierContext,
    prepared_for,
    verifier_files,
)
from palaestra_suites.terminal_bench.verifier_files import (
    HARNESS_DIR,
    script_name,
)
from palaestra_suites.toolchain.toolchain import DependencyCache

_MOST_TEXT_BYTES = 1 << 20
_SETUP_S = 600.0
LONGEST_COMMAND_S = 600
"""The longest time limit, in seconds, of a command in the terminal tool."""

_PIECE = 60_000
"""The maximum number of base64 characters per command; the kernel allows 128 KiB per argument."""


class TaskEnvironment(ListedEnvironment):
    """Prepares and grades the tasks."""

    config: TerminalBench2EvalConfig

    def __init__(self, config: TerminalBench2EvalConfig, packages: DependencyCache | None = None) -> None:
        super().__init__(config)
        cache = local_path(config.cache_dir)
        self.packages = packages or DependencyCache(cache / "dependencies")
        builder = ImageBuilder(
            cache / "roots", tool=config.builder, network=config.build_network, force=config.force_build
        )
        self.roots = TaskRoots(
            builder,
            config.images,
            local_path(config.image_dir) if config.image_dir else None,
            config.base_image,
            TaskImages(config.pull),
        )
        self._prepared: dict[str, PreparedSlot] = {}
        self._needs_processes: dict[str, bool] = {}
        self._playing: dict[str, asyncio.Lock] = {}
        self._solved: dict[str, frozenset[str]] = {}

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
        services = terminal.services or started_by_image(terminal.recipe, root, terminal.limits)
        plan = await self._plan(terminal, services, root) if services else None
        work = ResolvedTask(terminal, root, roots, parts, tools, scope_of(_task_texts(parts), home), plan)
        serves = terminal.live or terminal.is_named(self.config.live_tasks) or (plan is not None and plan.is_group)
        live = serves and (not roots or _runs_on(terminal, plan))
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

    async def _plan(self, task: TerminalTask, services: Sequence[Service], own: TaskRoot) -> ServicePlan:
        """Return the services of a task with their root file systems; `own` is that of `main`. Those of the other
        services have the names `NAME.SERVICE`."""
        roots = {MAIN: own}
        for each in services:
            if each.name != MAIN:
                same = each.recipe == task.recipe
                roots[each.name] = own if same else await self.roots.of(f"{task.name}.{each.name}", each.recipe)
        return ServicePlan({each.name: ResolvedService(each, roots[each.name]) for each in services})

    def _solution(self, work: ResolvedTask) -> Sequence[ToolStep | Say] | None:
        """Return the calls of the reference solutions of all parts in order, or None if a part has no solution."""
        steps: list[ToolStep | Say] = []
        for part in work.parts:
            own = solution_steps(part.task, work.user, self._agent_s(part.task), fresh=bool(steps))
            if own is None:
                return None
            steps += [*own, *([Say(f"The step {part.step.name} is done.")] if part.step else [])]
        return steps

    async def cheat_steps(self, task: Task) -> Sequence[ToolStep] | None:
        """Return the calls of the cheat that the author of a task shows, or None without one. Raises `TaskError`."""
        cheat = read_cheat(task.data, self.config.task_env_vars)
        if cheat is None:
            return None
        work: ResolvedTask = (await self.resolve(task)).data
        return solution_steps(replace(work.task, solution=cheat), work.user, self._agent_s(work.task))

    def _network(self, task: TerminalTask) -> NetworkPolicy:
        agent = task.agent.network if self.config.allow_network else Network.OFF
        return NetworkPolicy(prepare=Network.ON if self.config.build_network else Network.OFF, agent=agent)

    def own_tools(self, task: Task) -> Sequence[Tool]:
        """Return the tools for the task's own servers and skills, also before the task is resolved."""
        work: TerminalTask | ResolvedTask = task.data
        return task_tools(work.agent if isinstance(work, TerminalTask) else work.task.agent)

    def slot_spec(self, task: Task, phase: Phase) -> SlotSpec:
        work: ResolvedTask = task.data
        spec = replace(super().slot_spec(task, phase), env=tuple(sorted(work.env.items())))
        spec = replace(spec, mounts=work.tools.mounts)  # the official verdict is computed in the agent's slot
        if phase is Phase.PREPARE:
            return replace(spec, limits=limits_of_build(spec.limits))
        if work.plan is None or phase is not Phase.AGENT:
            return spec
        return work.plan.leading(spec, spare=1 if task.grading == LIVE else 0)

    def hidden_files(self, task: Task) -> Mapping[str, bytes]:
        parts = [part.task for part in task.data.parts]
        files = [(name, path) for part in parts for name, path in part.verifier.files().items() if path.is_file()]
        found = {f"{name} of the check": path.read_bytes() for name, path in files if _is_short(path)}
        for solution in (each.solution for each in parts if each.solution is not None):
            name = _script_name(solution)  # its other files may be what the agent is given
            found[f"{name} of the solution"] = _script_contents(solution)[name]
        return found

    def shared_setup(self, task: Task) -> str | None:
        key: str | None = task.data.root.build_key
        return key

    async def prepare_shared(self, task: Task, sandbox: Slot) -> None:
        await build_in_slot(sandbox, task.data.task.recipe, task.data.root.base)

    def prepares(self, task: Task) -> bool:
        return True

    async def prepare(self, task: Task, sandbox: Slot) -> None:
        work: ResolvedTask = task.data
        found = await self._look_up(task, sandbox)
        await start_in(sandbox, work.workdir, AGENT_LOGS, VERIFIER_LOGS)
        if work.plan is not None:
            await set_up_service(sandbox, work.plan, MAIN)
        self._prepared[task.id] = found

    async def _look_up(self, task: Task, sandbox: Slot) -> PreparedSlot:
        work: ResolvedTask = task.data
        return await prepared_for(sandbox, work.tools, work.user, own=task.grading == SEALED)

    async def begin(self, rollout: Rollout) -> None:
        work: ResolvedTask = rollout.task.data
        if work.plan is None or not work.plan.starts:
            return
        spec, plan = self.slot_spec(rollout.task, Phase.AGENT), work.plan
        spec = replace(spec, group=None)
        building = replace(spec, network=self.slot_spec(rollout.task, Phase.PREPARE).network)
        if _runs_on(work.task, plan):  # while no slot is held
            grading = self.slot_spec(rollout.task, Phase.GRADE)
            for part in work.parts:
                if part.task.verifier.environment is not None:
                    await verifier_files(rollout, part, grading, building.network)
        group = ServiceGroup(plan, GroupLead.of_rollout(rollout))
        if plan.is_group:
            rollout.meta["services"] = group
        try:
            await group.start(spec, lambda name: prepared_files(rollout, plan, name, building))
        except SandboxError:
            await drop_lost(rollout, plan)
            raise
        if plan.is_group and rollout.task.grading == LIVE:
            rollout.workspace.lender = group.slots[MAIN]

    def _agent_s(self, task: TerminalTask) -> float:
        return task.agent.timeout_s or self.config.task_timeout

    async def act(self, rollout: Rollout) -> AgentResult:
        work: ResolvedTask = rollout.task.data
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
        return await rollout.run_agent(tool_handler=handler)

    async def agent_slot(self, rollout: Rollout) -> Slot:
        """Return the rollout's slot, in which commands and file accesses have the rights of the agent's user."""
        work: ResolvedTask = rollout.task.data
        slot = await rollout.sandbox()
        return slot if is_root(work.user) else UserSlot(slot, work.user, self._prepared[rollout.task.id].home)

    async def score(self, rollout: Rollout, grading: Grading) -> Score:
        work, task = rollout.task.data, rollout.task
        if work.task.steps:
            if "steps" not in rollout.meta:
                raise SandboxError(
                    "recorded work of several steps cannot be graded again, because only its end was kept"
                )
            return combine_scores(work.task, rollout.meta["steps"])
        if task.id not in self._prepared:  # recorded work is graded over a stored workspace, without a preparation
            async with grading.prepared() as slot:
                self._prepared[task.id] = await self._look_up(task, slot)
        return await self.verification(rollout, grading, work.parts[0]).score()

    def verification(self, rollout: Rollout, grading: Grading, part: GradedPart) -> Verification:
        """Return the verification of a part of the rollout's task."""
        network = self.slot_spec(rollout.task, Phase.PREPARE).network
        context = VerifierContext(
            self.config, self._prepared, network, self._needs_processes, self._playing, self._solved
        )
        return Verification(rollout, grading, part, context)


def _task_texts(parts: Sequence[GradedPart]) -> Iterator[str]:
    """Yield the texts that show what a task is about, without the verifier's bootstrap."""
    for part in parts:
        task = part.task
        yield task.instruction
        for name, path in task.verifier.files().items():
            if path.is_file() and name != script_name(task) and _is_short(path):
                yield read_task_text(path, "replace")
        yield part.script.text
        if task.solution is not None:
            yield read_task_text(task.solution.folder / task.solution.script, "replace")


def _is_short(path: Path) -> bool:
    return path.stat().st_size <= _MOST_TEXT_BYTES


class _Steps:
    """Plays one rollout through the steps of its task. `scores` are the scores of the verified steps.

    A verifier that shares the agent's environment gives its official verdict when its step ends. The next step begins
    in the same slot, as the verifier left it. What the verdict pays is checked in the guarded view after the last step,
    because a rollout that holds one slot must not wait for a second.
    """

    def __init__(self, environment: TaskEnvironment, rollout: Rollout) -> None:
        self._environment = environment
        self._rollout = rollout
        self._parts = rollout.task.data.parts
        self._gradings: list[Grading] = []
        self._checks: list[Callable[[], Awaitable[Score]]] = []
        self._fell_short = False
        self.scores: list[Score] = []

    async def run(self) -> AgentResult:
        """Let the agent work step by step, and score each step. A step that ended at a limit is verified too, and so is
        one whose sandbox the agent ended. The next step follows unless the step failed in a way that gives no score,
        the context is full, the verifier gave no verdict, or a reward is too low. If earlier work makes a step's set-up
        fail, that step scores 0. So does each step that does not begin, except after a reward that is too low, because
        work must not gain by ending the steps. For Harbor these have no reward."""
        try:
            result = await self._play()
        except SlotEnded:
            await self._score()
            raise
        if result.outcome.scored:
            await self._score()
        return result

    async def _play(self) -> AgentResult:
        rollout = self._rollout
        for number, part in enumerate(self._parts):
            try:
                await run_hook(PrepareError, self._begin_step(part.step), "beginning a step")
            except (PrepareError, SlotEnded) as error:
                if not number:
                    raise
                self._checks.append(partial(self._broken_set_up, error))
                break
            try:
                result = await self._environment.converse(rollout, part, later=number > 0)
            except SlotEnded:
                await self._verify(number, ended=True)
                raise
            if not result.outcome.scored or not await self._verify(number) or result.outcome is Outcome.LENGTH:
                break
        return result

    async def _score(self) -> None:
        """Compute the scores of the steps, in order."""
        if self._gradings and not self._gradings[-1].live:
            if not self._gradings[-1].begun:  # the slot has ended, but what the agent wrote is still there
                await self._gradings[-1].seal()
            await self._rollout.seat.aclose()
        with self._rollout.stages.stage("grade"):
            for check in self._checks:
                self.scores.append(await check())
        if not self._fell_short:
            for part in self._parts[len(self.scores) :]:
                label = Label("step_not_begun", f"step {part.step_name} could not begin after the steps before it")
                self.scores.append(Score(0.0, {}, {"official_rewards": {}}, labels=[label]))

    async def _begin_step(self, step: TaskStep) -> None:
        """Copy the files of a step into the agent's slot and run its set-up. Between steps, the folders are emptied
        that Harbor's `MultiStepTrial` empties."""
        slot = await self._rollout.sandbox()
        if self._gradings:
            await self._gradings[-1].restore_scratch(slot)
            if self._parts[len(self._gradings) - 1].task.verifier.environment is None:
                await _remove_verifier(slot)
            await _empty(slot, AGENT_LOGS)
        await self._set_up(step, await self._environment.agent_slot(self._rollout))

    async def _set_up(self, step: TaskStep, slot: Slot) -> None:
        """Copy the files of a step into a slot, run its set-up and wait for its health check. Raises `PrepareError`,
        and OSError if the files cannot be copied."""
        workdir = self._rollout.task.data.workdir
        if step.workdir is not None:
            await upload_dir(slot, step.workdir, workdir)
            if (step.workdir / "setup.sh").is_file():
                argv, problem = ["bash", f"{workdir}/setup.sh"], f"the setup.sh of step {step.name} failed"
                await check_execute(slot, argv, problem, cwd=workdir, timeout_s=_SETUP_S, shown=2000)
        if step.health is None:
            return
        longest_s = min(step.health.longest_s, _SETUP_S)
        try:
            said = await wait_healthy(slot, step.health, workdir, longest_s)
        except SlotLost:
            raise
        except (SandboxError, OSError) as error:  # the agent may have removed the directory or replaced a program
            said = str(error)
        if said is not None:
            raise PrepareError(f"the health check of step {step.name} fails for {longest_s:g} s: {said}")

    async def _broken_set_up(self, error: PrepareError | SlotEnded) -> Score:
        """Return the score of a step that could not begin. Raises the error if the reference solution cannot begin it
        either."""
        await self._rollout.release()
        reference = await blame(self._rollout, error)
        score, label = broken(error, reference), Label("set_up_failed", str(error)[-300:])
        return replace(score, detail={**score.detail, "official_rewards": {}}, labels=[label])

    async def _verify(self, number: int, *, ended: bool = False) -> bool:
        """Verify a step, and return whether the next one follows. If the agent has `ended` its slot, only the guarded
        view of what it wrote is left."""
        rollout, environment, part = self._rollout, self._environment, self._parts[number]
        grading = Grading(rollout, environment.slot_spec(rollout.task, Phase.GRADE))
        self._gradings.append(grading)
        failure: GraderError | None = None

        async def score(shown: Grading) -> Score:
            nonlocal failure
            if failure is not None:
                error, failure = failure, None
                raise error  # the check repeats it as any other
            return await environment.verification(rollout, shown, part).score()

        async def check() -> Score:
            return await environment.check(rollout, grading, score)

        with rollout.stages.stage("grade"):
            if not ended and (grading.live or part.task.verifier.environment is not None):
                found = await check()
                await grading.hand_back()
                self._checks.append(partial(_given_score, found))
                self._fell_short = falls_short(part.step, official_rewards(found))
                return not self._fell_short
            self._checks.append(check)
            verification = environment.verification(rollout, grading, part)
            try:
                if ended:
                    raise SlotEnded
                await rollout.sandbox()  # an agent without one leaves nothing, but the verifier may
                doing = f"verifying {rollout.rollout_id}"
                official = await run_hook(GraderError, verification.official(), doing)
            except GraderError as error:
                failure = error
                return False
            except SlotEnded:
                verification.leave_out_official("the agent's commands ended the sandbox")
                await grading.restart()
                return False
            if rollout.seat.slot is None:  # it could not be copied while it ran
                await grading.hand_back()
            if official is None or official.verdict is None:
                return False
            self._fell_short = falls_short(part.step, official.verdict.rewards)
            return not self._fell_short


async def _given_score(score: Score) -> Score:
    return score


async def _remove_verifier(slot: Slot) -> None:
    """Remove the files of a verifier from the agent's own slot, and leave its folders empty."""
    await slot.remove(HARNESS_DIR)
    for folder in (TESTS_DIR, VERIFIER_LOGS):
        await _empty(slot, folder)


async def _empty(slot: Slot, folder: str) -> None:
    """Empty a directory, which keeps its mode, or make one in place of anything else."""
    entry = await slot.stat(folder)
    if entry is None or entry.kind != "dir":
        await slot.remove(folder)
        await slot.make_dir(folder)
    for each in await slot.list_dir(folder):
        await slot.remove(each.path)


def _runs_on(task: TerminalTask, plan: ServicePlan | None) -> bool:
    """Return whether a task's services, and so the agent's slot, run from step to step."""
    return bool(task.steps) and plan is not None and plan.is_group


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
        for name, data in _script_contents(solution).items()
        for line in _writing(f"{place}/{name}", data, runs=_runs(solution.folder / name))
    ]  # fmt: skip
    variables = [f"{name}={value}" for name, value in solution.env.items()]
    script = f"{place}/{_script_name(solution)}"
    return (*steps, *_command_steps(shlex.join(["env", *variables, "bash", script]), f"{place}/ended", seconds))


def _script_name(solution: SolutionScript) -> str:
    return solution.script.replace(".yaml", ".sh")


def _script_contents(solution: SolutionScript) -> dict[str, bytes]:
    found = {name: read_task_bytes(solution.folder / name) for name in (solution.script, *solution.files)}
    if solution.script.endswith(".yaml"):
        lines = terminal_bench_1.commands(solution.folder / solution.script)
        found = {_script_name(solution): "".join(f"{line}\n" for line in lines).encode()}
    return found


def _runs(path: Path) -> bool:
    """Return whether a file is a program; a script that is made from another file is started by its path."""
    return path.is_file() and bool(path.stat().st_mode & 0o111)


def _writing(path: str, data: bytes, *, runs: bool) -> list[str]:
    """Return commands that write a file, with permission to run if it `runs`."""
    text, quoted = base64.b64encode(data).decode(), shlex.quote(path)
    pieces = [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)] or [""]
    folder = shlex.quote(path.rpartition("/")[0])
    first = f"mkdir -p {folder} && printf %s {pieces[0]} | base64 -d > {quoted}"
    lines = [first, *(f"printf %s {piece} | base64 -d >> {quoted}" for piece in pieces[1:])]
    return [*lines[:-1], f"{lines[-1]} && chmod +x {quoted}"] if runs else lines


def _command_steps(command: str, ended: str, seconds: float) -> list[ToolStep]:
    if seconds <= LONGEST_COMMAND_S:
        return [_terminal(command, math.ceil(seconds))]
    # Only shell builtins: the image may lack nohup and setsid.
    started = f"({command}; echo $? > {ended}) > {ended}.log 2>&1 < /dev/null & echo $! > {ended}.pid"
    wait_s = LONGEST_COMMAND_S - 10
    running = f"[ ! -f {ended} ] && kill -0 $(cat {ended}.pid) 2> /dev/null"
    waiting = f"for ((i = 0; i < {wait_s}; i++)); do {running} || break; sleep 1; done; tail -c 8000 {ended}.log"
    waiting += f"; (exit $(cat {ended} 2> /dev/null || echo 124))"  # in a shell of its own, because this one is kept
    waits = [_terminal(waiting, LONGEST_COMMAND_S)] * math.ceil(seconds / wait_s)
    return [_terminal(started), *waits]


def _terminal(command: str, timeout_s: int = 60) -> ToolStep:
    return ToolStep("terminal", {"command": command, "timeout": timeout_s})
