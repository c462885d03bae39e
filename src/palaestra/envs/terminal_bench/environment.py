"""How terminal tasks are prepared and graded: one root per task, one verifier, and what lies between them.

When an agent stops, everything it runs is killed, and the verifier runs in a fresh slot over its work: tests and
verdict were never within its reach, and what could speak for the verifier is shown as the image had it (`guard.py`). A
task about a running service says so and is graded in the agent's own slot. Files in `/tmp` are carried over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from palaestra.agent.result import AgentResult
from palaestra.core.errors import InfraError, PrepareError, TaskError
from palaestra.core.types import Network, NetworkPolicy, Score, Task
from palaestra.envs.class_environment import numbers
from palaestra.envs.contract import ContractEnvironment
from palaestra.envs.hermes_base_env import HermesAgentBaseEnv
from palaestra.envs.images.builder import Builder
from palaestra.envs.images.roots import Root, Roots
from palaestra.envs.images.slot_build import build_in_slot
from palaestra.envs.images.users import UserSlot, home_of, is_root
from palaestra.envs.swe.install import DependencyCache
from palaestra.envs.terminal_bench import guard
from palaestra.envs.terminal_bench.config import TerminalBench2EvalConfig
from palaestra.envs.terminal_bench.harness import HARNESS_DIR
from palaestra.envs.terminal_bench.scripts import Script, offline, with_others
from palaestra.envs.terminal_bench.solution import solution_steps
from palaestra.envs.terminal_bench.tasks import TerminalTask
from palaestra.envs.terminal_bench.toolchain import TestTools, find_test_tools, working_command
from palaestra.envs.terminal_bench.verifier import SYSTEM_PATH, Setting, tampering, verify
from palaestra.rollouts.base import Phase
from palaestra.rollouts.grading import LIVE, SEALED, Grading
from palaestra.rollouts.plants import PROGRAM_DIRECTORIES
from palaestra.rollouts.rollout import Rollout
from palaestra.sandbox.base import WORKSPACE, Slot, SlotSpec, View
from palaestra.tools.binding import SlotTools

CARRIED = "/.palaestra-tmp"
"""Where `/tmp`, which no layer holds, lies in a sealed workspace."""

_MOVES_S = 300.0


@dataclass(frozen=True, slots=True)
class Work:
    """A task with what its group has found out about it: its root, its test script, and what the tests run with."""

    task: TerminalTask
    root: Root
    script: Script
    tools: TestTools

    @property
    def workdir(self) -> str:
        """Where commands start."""
        return self.task.workdir or self.root.config.workdir

    @property
    def user(self) -> str:
        """Whose commands are an agent's."""
        return self.task.agent_user or self.root.config.user

    @property
    def env(self) -> dict[str, str]:
        """The variables of every command."""
        return {**self.root.config.env, **self.task.env}


@dataclass(frozen=True, slots=True)
class Prepared:
    """What preparing a workspace has found in it."""

    command: tuple[str, ...]
    programs: frozenset[str]
    home: str


class TerminalBenchEnvironment(ContractEnvironment):
    """How the tasks are prepared and graded."""

    def __init__(
        self, inner: HermesAgentBaseEnv, settings: TerminalBench2EvalConfig, packages: DependencyCache | None = None
    ) -> None:
        super().__init__(inner)
        self.settings = settings
        cache = Path(settings.cache_dir).expanduser()
        self.packages = packages or DependencyCache(cache / "dependencies")
        builder = Builder(
            cache / "roots", tool=settings.builder, network=settings.build_network, force=settings.force_build
        )
        self.roots = Roots(
            builder,
            settings.images,
            Path(settings.image_dir).expanduser() if settings.image_dir else None,
            settings.base_image,
        )
        self._prepared: dict[str, Prepared] = {}

    async def resolve(self, task: Task) -> Task:
        terminal: TerminalTask = task.data
        root = await self.roots.of(terminal.name, terminal.recipe)
        script = _script(terminal)
        tools = await find_test_tools(self.packages, script.requirements) if script.pytest else TestTools()
        work = Work(terminal, root, script, tools)
        return replace(
            task,
            data=work,
            image=root.image,
            limits=terminal.limits,
            network=self._network(terminal),
            grading=LIVE if terminal.live or terminal.is_named(self.settings.live_tasks) else SEALED,
            solution=solution_steps(terminal, work.user, self._agent_s(terminal)),
        )

    def _network(self, task: TerminalTask) -> NetworkPolicy:
        agent = task.network if self.settings.allow_network else Network.OFF
        return NetworkPolicy(prepare=Network.ON if self.settings.build_network else Network.OFF, agent=agent)

    def slot_spec(self, task: Task, phase: Phase) -> SlotSpec:
        work: Work = task.data
        spec = replace(super().slot_spec(task, phase), env=tuple(sorted(work.env.items())))
        if phase is Phase.AGENT and task.grading == SEALED:
            return spec
        return replace(spec, mounts=work.tools.mounts)

    def foundation(self, task: Task) -> str | None:
        key: str | None = task.data.root.build_key
        return key

    async def lay(self, task: Task, sandbox: Slot) -> None:
        await build_in_slot(sandbox, task.data.task.recipe)

    def prepares(self, task: Task) -> bool:
        return True

    async def prepare(self, task: Task, sandbox: Slot) -> None:
        work: Work = task.data
        command = await working_command(sandbox, work.tools)
        # An agent's commands and relative paths start in WORKSPACE, which here is another name of the task's directory.
        start = f'mkdir -p "$0" /logs/agent /logs/verifier && {{ [ "$0" -ef {WORKSPACE} ] || '
        start += f'{{ rm -rf {WORKSPACE} && ln -s "$0" {WORKSPACE}; }}; }}'
        done = await sandbox.execute(["/bin/sh", "-c", start, work.workdir], cwd="/", timeout_s=60)
        if not done.success:
            raise PrepareError(f"{task.id}: its directory {work.workdir} cannot be made: {done.output[-500:]}")
        programs: set[str] = set()
        for directory in sorted(PROGRAM_DIRECTORIES):
            try:
                programs |= {entry.path.rpartition("/")[2] for entry in await sandbox.list_dir(directory)}
            except InfraError:
                raise
            except OSError:
                continue
        self._prepared[task.id] = Prepared(command, frozenset(programs), await home_of(sandbox, work.user))

    async def begin(self, rollout: Rollout) -> None:
        seconds = self._agent_s(rollout.task.data.task)
        rollout.settings = replace(rollout.settings, budget=replace(rollout.settings.budget, wall_s=seconds))

    def _agent_s(self, task: TerminalTask) -> float:
        return task.agent_timeout_s or self.settings.task_timeout

    async def act(self, rollout: Rollout) -> AgentResult:
        work: Work = rollout.task.data
        if is_root(work.user):
            return await super().act(rollout)
        prepared = self._prepared[rollout.task.id]

        async def slot() -> Slot:
            return UserSlot(await rollout.sandbox(), work.user, prepared.home)

        tools = SlotTools(
            rollout.kit.registry,
            slot,
            task_id=rollout.rollout_id,
            user_task=work.task.instruction[:500],
            timeout_s=rollout.settings.tool_timeout_s,
            world=rollout.world,
        )
        self._choose_server(rollout)
        return await rollout.run_agent(tool_handler=tools.handle)

    async def score(self, rollout: Rollout, grading: Grading) -> Score:
        work: Work = rollout.task.data
        slot, hidden, made = await self._graded(rollout, grading)
        setting = self._setting(rollout.task)
        verdict = await verify(slot, work.task, work.script, setting, alone=not grading.live, made=made)
        detail = verdict.detail() | {
            "category": work.task.category,
            "hidden": list(hidden),
            "replaced": list(work.script.replaced),
            "grading": rollout.task.grading,
        }
        reward = verdict.reward
        if reward > 0 and self.settings.controls:
            detail["tampering"] = await tampering(slot, work.task, work.script, setting, verdict)
            reward = 0.0 if detail["tampering"] else reward
        return Score(reward, {**numbers(detail), **verdict.rewards}, detail)

    async def _graded(self, rollout: Rollout, grading: Grading) -> tuple[Slot, Sequence[str], Sequence[str]]:
        """The slot to verify in, what of the agent's change it leaves out, and what the agent made or changed."""
        work: Work = rollout.task.data
        if grading.live:
            return await grading.slot(), (), ()
        await _carry(await rollout.sandbox())
        changes = await grading.changes()
        without = guard.left_out(
            changes,
            programs=self._prepared[rollout.task.id].programs,
            script=work.script.text,
            workspace=work.workdir,
            kept=self.settings.keep_programs,
        )
        slot = await grading.slot(View(without=without))
        await _bring_back(slot)
        hidden = [change.path for change in changes if change.path in without]
        made = [change.path for change in changes if change.kind == "file" and change.path not in without]
        return slot, hidden, made

    def _setting(self, task: Task) -> Setting:
        work: Work = task.data
        prepared = self._prepared[task.id]
        user = work.task.verifier.user or work.root.config.user
        path = work.env.get("PATH", SYSTEM_PATH)
        env = {**work.env, "PYTEST_ADDOPTS": "", "PYTHONDONTWRITEBYTECODE": "1", **work.task.verifier.env}
        home = prepared.home if user == work.user else "/root"
        return Setting(
            command=prepared.command,
            dependencies=work.tools.dependencies,
            env={"HOME": home, **env, "PATH": f"{HARNESS_DIR}/bin:{path}"},
            workdir=work.workdir,
            user=user,
            timeout_s=work.task.verifier.timeout_s or self.settings.test_timeout,
        )


async def _carry(slot: Slot) -> None:
    """Put what lies in `/tmp` where a layer keeps it. The agent's processes may still be there, and gain nothing."""
    copy = f"rm -rf {CARRIED} && mkdir -m 1777 {CARRIED} && cp -a /tmp/. {CARRIED}/"
    await slot.execute(["/bin/sh", "-c", copy], cwd="/", timeout_s=_MOVES_S)


async def _bring_back(slot: Slot) -> None:
    copy = f"if [ -d {CARRIED} ] && [ ! -h {CARRIED} ]; then cp -a {CARRIED}/. /tmp/; rm -rf {CARRIED}; fi"
    await slot.execute(["/bin/sh", "-c", copy], cwd="/", timeout_s=_MOVES_S)


def _script(task: TerminalTask) -> Script:
    folder = task.verifier.folder
    path = folder / task.verifier.script
    try:
        beside = {str(each.relative_to(folder)): each.read_text(encoding="utf-8") for each in folder.rglob("*.sh")}
        beside.pop(task.verifier.script, None)
        script = with_others(offline(path.read_text(encoding="utf-8")), dict(sorted(beside.items())))
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path.name} cannot be read: {error}") from None
    # Terminal-Bench 1 has no verdict but pytest's, however the script comes to start it.
    return replace(script, pytest=script.pytest or task.format is task.format.TERMINAL_BENCH_1)
