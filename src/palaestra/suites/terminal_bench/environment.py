"""How terminal tasks are prepared and graded: one root per task, one verifier, and what lies between them.

When an agent stops, everything it runs is killed, and the verifier runs in a fresh slot over its work: tests and
verdict were never within its reach, and what could speak for the verifier is shown as the image had it
(`protected_paths.py`). A task about a running service says so and is graded in the agent's own slot. Files in `/tmp`
are carried over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from palaestra.agent.result import AgentResult
from palaestra.core.config import local_path
from palaestra.core.types import Network, NetworkPolicy, Say, Score, Task, ToolStep
from palaestra.envs.adapters.class_adapter import numbers
from palaestra.envs.adapters.hermes_adapter import ContractEnvironment
from palaestra.envs.api.hermes_env import HermesAgentBaseEnv
from palaestra.rollouts.environment import Phase
from palaestra.rollouts.grading.grader import LIVE, SEALED, Grading
from palaestra.rollouts.rollout import Rollout
from palaestra.sandbox.slot import Slot, SlotSpec, View
from palaestra.suites.images.agent_user import start_in, tools_of_user
from palaestra.suites.images.as_user import UserSlot, home_of, is_root
from palaestra.suites.images.image_builder import Builder
from palaestra.suites.images.pytest_toolchain import TestTools, find_test_tools, working_command
from palaestra.suites.images.slot_build import build_in_slot
from palaestra.suites.images.task_root import Roots
from palaestra.suites.swe.install import DependencyCache
from palaestra.suites.terminal_bench import protected_paths
from palaestra.suites.terminal_bench.group_state import Part, Work, parts_of
from palaestra.suites.terminal_bench.solution import solution_steps
from palaestra.suites.terminal_bench.steps import Stepwise, combined
from palaestra.suites.terminal_bench.tb_config import TerminalBench2EvalConfig
from palaestra.suites.terminal_bench.terminal_task import TerminalTask
from palaestra.suites.terminal_bench.verifier import SYSTEM_PATH, Setting, tampering, verify
from palaestra.suites.terminal_bench.verifier_files import HARNESS_DIR

CARRIED = "/.palaestra-tmp"
"""Where `/tmp`, which no layer holds, lies in a sealed workspace."""

_MOVES_S = 300.0


@dataclass(frozen=True, slots=True)
class Prepared:
    """What preparing a workspace has found in it."""

    command: tuple[str, ...]
    home: str


class TerminalBenchEnvironment(ContractEnvironment):
    """How the tasks are prepared and graded."""

    def __init__(
        self, inner: HermesAgentBaseEnv, settings: TerminalBench2EvalConfig, packages: DependencyCache | None = None
    ) -> None:
        super().__init__(inner)
        self.settings = settings
        cache = local_path(settings.cache_dir)
        self.packages = packages or DependencyCache(cache / "dependencies")
        builder = Builder(
            cache / "roots", tool=settings.builder, network=settings.build_network, force=settings.force_build
        )
        self.roots = Roots(
            builder,
            settings.images,
            local_path(settings.image_dir) if settings.image_dir else None,
            settings.base_image,
        )
        self._prepared: dict[str, Prepared] = {}

    async def open(self) -> None:
        self.roots.check()  # said before the run has a folder
        await super().open()

    async def resolve(self, task: Task) -> Task:
        terminal: TerminalTask = task.data
        root = await self.roots.of(terminal.name, terminal.recipe)
        parts = parts_of(terminal)
        wanted = sorted({name for part in parts if part.script.pytest for name in part.script.requirements})
        started = any(part.script.pytest for part in parts)
        tools = await find_test_tools(self.packages, wanted) if started else TestTools()
        work = Work(terminal, root, parts, tools)
        return replace(
            task,
            data=work,
            image=root.image,
            limits=terminal.limits,
            network=self._network(terminal),
            grading=LIVE if terminal.live or terminal.is_named(self.settings.live_tasks) else SEALED,
            solution=self._solution(work),
        )

    def _solution(self, work: Work) -> Sequence[ToolStep | Say] | None:
        """The reference solutions of all parts, one after the other."""
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
        await start_in(sandbox, work.workdir, "/logs/agent", "/logs/verifier")
        self._prepared[task.id] = Prepared(command, await home_of(sandbox, work.user))

    def _agent_s(self, task: TerminalTask) -> float:
        return task.agent_timeout_s or self.settings.task_timeout

    async def act(self, rollout: Rollout) -> AgentResult:
        work: Work = rollout.task.data
        self._choose_server(rollout)
        if not work.task.steps:
            return await self.converse(rollout, work.parts[0])
        steps = Stepwise(self, rollout)
        rollout.meta["steps"] = steps.scores
        return await steps.run()

    async def converse(self, rollout: Rollout, part: Part, *, goes_on: bool = False) -> AgentResult:
        """Let the agent work at a part of its task, as its image's user. `goes_on` after an earlier part."""
        work: Work = rollout.task.data
        budget = replace(rollout.settings.budget, wall_s=self._agent_s(part.task))
        rollout.settings = replace(rollout.settings, budget=budget)
        about = part.task.instruction
        handler = tools_of_user(rollout, work.user, lambda: self.agent_slot(rollout), about)
        if goes_on:
            return await rollout.go_on({"role": "user", "content": about.strip()}, tool_handler=handler)
        if handler is None:
            return await self.inner._run_agent_loop(rollout, rollout.opening())
        return await rollout.run_agent(tool_handler=handler)

    async def agent_slot(self, rollout: Rollout) -> Slot:
        """The rollout's slot as its image's user has it."""
        work: Work = rollout.task.data
        slot = await rollout.sandbox()
        return slot if is_root(work.user) else UserSlot(slot, work.user, self._prepared[rollout.task.id].home)

    async def score(self, rollout: Rollout, grading: Grading) -> Score:
        work: Work = rollout.task.data
        if work.task.steps:
            return combined(work.task, rollout.meta["steps"])
        return await self.verified(rollout, grading, work.parts[0])

    async def verified(self, rollout: Rollout, grading: Grading, part: Part) -> Score:
        """What the verifier of a part says of the work, if it is believed."""
        slot, hidden, made = await self._graded(rollout, grading, part)
        setting = self._setting(rollout.task, part)
        if grading.live:
            verdict = await verify(slot, part.task, part.script, setting, alone=False)
        else:
            async with slot.fork() as fork:
                await self.bring_back(fork)
                verdict = await verify(fork, part.task, part.script, setting, alone=True, made=made)
        detail = verdict.detail() | {
            "category": part.task.category,
            "hidden": list(hidden),
            "replaced": list(part.script.replaced),
            "grading": rollout.task.grading,
        }
        reward = verdict.reward
        if reward > 0 and self.settings.controls:
            await self.bring_back(slot)
            detail["tampering"] = await tampering(slot, part.task, part.script, setting, verdict)
            reward = 0.0 if detail["tampering"] else reward
        return Score(reward, {**numbers(detail), **verdict.rewards}, detail)

    async def _graded(
        self, rollout: Rollout, grading: Grading, part: Part
    ) -> tuple[Slot, Sequence[str], Sequence[str]]:
        """The slot to verify in, what of the agent's change it leaves out, and what the agent made or changed."""
        work: Work = rollout.task.data
        if grading.live:
            return await grading.slot(), (), ()
        await _carry(await rollout.sandbox())
        changes = await grading.changes()
        without = protected_paths.left_out(
            changes,
            await grading.planted(work.workdir, self.settings.keep_programs),
            script=part.script.text,
        )
        slot = await grading.slot(View(without=without))
        hidden = [change.path for change in changes if change.path in without]
        made = [change.path for change in changes if change.kind == "file" and change.path not in without]
        return slot, hidden, made

    async def bring_back(self, slot: Slot) -> None:
        """Put what was carried out of `/tmp` there again."""
        copy = f"if [ -d {CARRIED} ] && [ ! -h {CARRIED} ]; then cp -a {CARRIED}/. /tmp/; rm -rf {CARRIED}; fi"
        await slot.execute(["/bin/sh", "-c", copy], cwd="/", timeout_s=_MOVES_S)

    def _setting(self, task: Task, part: Part) -> Setting:
        work: Work = task.data
        prepared = self._prepared[task.id]
        verifier = part.task.verifier
        user = verifier.user or work.root.config.user
        path = work.env.get("PATH", SYSTEM_PATH)
        env = {**work.env, "PYTEST_ADDOPTS": "", "PYTHONDONTWRITEBYTECODE": "1", **verifier.env}
        home = prepared.home if user == work.user else "/root"
        return Setting(
            command=prepared.command,
            dependencies=work.tools.dependencies,
            env={"HOME": home, **env, "PATH": f"{HARNESS_DIR}/bin:{path}"},
            workdir=work.workdir,
            user=user,
            timeout_s=verifier.timeout_s or self.settings.test_timeout,
        )


async def _carry(slot: Slot) -> None:
    """Put what lies in `/tmp` where a layer keeps it. The agent's processes may still be there, and gain nothing."""
    copy = f"rm -rf {CARRIED} && mkdir -m 1777 {CARRIED} && cp -a /tmp/. {CARRIED}/"
    await slot.execute(["/bin/sh", "-c", copy], cwd="/", timeout_s=_MOVES_S)
