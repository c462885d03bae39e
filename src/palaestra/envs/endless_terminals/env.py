"""`EndlessTerminalsEnv`: terminal tasks from a seed, from a file of generated tasks, or from task folders.

Generated tasks are graded by their checks, task folders by their own tests; both in a fresh slot over the sealed work,
of which only the place where the work happens is shown. The reward is 1.0 when everything holds, else 0.0; for
generated tasks the share of checks that hold is recorded beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from palaestra.agent.result import AgentResult
from palaestra.core.config import later
from palaestra.core.errors import ConfigError, PrepareError, TaskError
from palaestra.core.types import JSON, Score, Task
from palaestra.envs.base_env import Item
from palaestra.envs.config import HermesAgentEnvConfig
from palaestra.envs.contract import ContractEnvironment
from palaestra.envs.endless_terminals import folder_grading
from palaestra.envs.endless_terminals.checks.index import faults, first_fault
from palaestra.envs.endless_terminals.compose import Choice, generate
from palaestra.envs.endless_terminals.folders import FolderTask, read_folder
from palaestra.envs.endless_terminals.tasks import TerminalTask, read_tasks
from palaestra.envs.endless_terminals.trial import GRADED
from palaestra.envs.hermes_base_env import HermesAgentBaseEnv
from palaestra.envs.swe.build.manifest import load_manifest
from palaestra.envs.swe.install import DependencyCache, Toolchain
from palaestra.envs.swe.rows import Install
from palaestra.inference.config import APIServerConfig
from palaestra.rollouts.base import Phase
from palaestra.rollouts.context import ToolContext
from palaestra.rollouts.grading import Grading
from palaestra.rollouts.intervals import mean_interval
from palaestra.rollouts.rollout import Rollout
from palaestra.sandbox.base import Slot, SlotSpec

logger = logging.getLogger(__name__)


class EndlessTerminalsEnvConfig(HermesAgentEnvConfig):
    """Settings of the environment. `seed` is also the seed that tasks are generated from."""

    dataset_name: str | None = Field(
        default=None,
        description="A JSONL file of `tasks build terminal`, or a folder of task folders; None: generate.",
    )
    local_tasks_dir: str | None = Field(default=None, description="A folder of task folders; the same as dataset_name.")
    n: int = Field(default=100, ge=1, description="Tasks to generate, where no data set is given.")
    level: int | None = Field(default=None, ge=1, le=5, description="Generate only this level; None is a mixture.")
    areas: list[str] = Field(default=[], description="Generate only these areas of work; empty means all.")
    families: list[str] = Field(default=[], description="Generate only these kinds of work; empty means all.")
    image: str | None = Field(default=None, description="A root file system for the slots, if not this machine's.")
    roots: str | None = Field(
        default=None, description="A folder of ready root file systems, each named as the task folder it is for."
    )
    test_timeout_s: float = Field(default=120, gt=0, description="Seconds that a task folder's tests may take.")
    cache_dir: str = Field(default="~/.cache/palaestra", description="The test tools for task folders.")
    max_agent_turns: int = Field(default=32, ge=1, description="Model calls per rollout, at most.")
    enabled_toolsets: list[str] | None = Field(default=["default"], description="Toolsets the agent has.")
    total_steps: int = Field(default=-1, ge=-1, description="Groups to process, at most; -1 means every task once.")
    allow_network: bool = Field(default=False, description="Whether the agent's commands reach the network.")

    use_local_dir: bool = later(True, "Task folders are always read where they lie.")
    prebuild_images: bool = later(False, "Build the images of task folders first.")
    max_concurrent_builds: int = later(4, "Images built at once.")
    container_build_timeout_s: float = later(600.0, "Seconds that building an image may take.")
    docker_image_prefix: str = later("endless-terminals", "How built images are called.")


class EndlessEnvironment(ContractEnvironment):
    """How the tasks are prepared and graded."""

    def __init__(self, inner: EndlessTerminalsEnv) -> None:
        super().__init__(inner)
        self.settings = inner.settings
        self._dependencies = DependencyCache(Path(self.settings.cache_dir).expanduser() / "dependencies")
        self._toolchain: Toolchain | None = None
        self._tests: dict[str, frozenset[str]] = {}

    def task(self, item: Item, number: int) -> Task:
        task = super().task(item, number)
        if isinstance(item, TerminalTask):
            made = replace(task, files=item.files, setup=item.setup or None, grading=item.grading)
            return replace(made, image=self.settings.image)
        return replace(task, image=item.image or self.settings.image)

    async def resolve(self, task: Task) -> Task:
        if isinstance(task.data, FolderTask) and self._toolchain is None:
            install = Install(load_manifest().requirements, (), ())
            self._toolchain = await self._dependencies.toolchain(install)
        return task

    def slot_spec(self, task: Task, phase: Phase) -> SlotSpec:
        spec = super().slot_spec(task, phase)
        if self._toolchain is None or not isinstance(task.data, FolderTask):
            return spec
        mounts = () if phase is Phase.AGENT else self._toolchain.mounts
        return replace(spec, mounts=mounts, env=(("HOME", folder_grading.HOME),))

    def prepares(self, task: Task) -> bool:
        return True

    async def prepare(self, task: Task, sandbox: Slot) -> None:
        if isinstance(task.data, TerminalTask):
            if wrong := await first_fault(task.data.initial, sandbox):
                raise PrepareError(f"{task.id}: its first state is not what it should be: {wrong}")
            return
        assert self._toolchain is not None
        timeout_s = self.settings.test_timeout_s
        self._tests[task.id] = await folder_grading.prepare_folder(task.data, sandbox, self._toolchain, timeout_s)

    async def score(self, rollout: Rollout, grading: Grading) -> Score:
        task = rollout.task.data
        if isinstance(task, TerminalTask):
            slot = await grading.slot(None if grading.live else GRADED)
            return _score(task, await faults(task.final, slot))
        assert self._toolchain is not None
        names, timeout_s = self._tests[rollout.task.id], self.settings.test_timeout_s
        slot = await grading.slot(folder_grading.GRADED)
        return await folder_grading.score_folder(task, names, slot, self._toolchain, timeout_s)


def _score(task: TerminalTask, found: Sequence[str]) -> Score:
    wrong = [fault for fault in found if fault]
    metrics = {"checks_held": 1 - len(wrong) / len(found), f"level_{task.level}": float(not wrong)}
    return Score(float(not wrong), metrics, {"faults": wrong[:20], "families": task.families, "level": task.level})


class EndlessTerminalsEnv(HermesAgentBaseEnv):
    """Terminal work over files, text, data, archives, permissions, processes, git, databases and scripts.

    Without a data set, tasks are generated from the seed; nothing touches the network.
    """

    name: ClassVar[str | None] = "endless_terminals"
    env_config_cls: ClassVar[type[HermesAgentEnvConfig]] = EndlessTerminalsEnvConfig

    def __init__(
        self,
        config: HermesAgentEnvConfig,
        server_configs: Sequence[APIServerConfig],
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        super().__init__(config, server_configs, slurm, testing)
        if not isinstance(config, EndlessTerminalsEnvConfig):
            raise ConfigError(f"EndlessTerminalsEnv takes an EndlessTerminalsEnvConfig, not {type(config).__name__}")
        self.settings = config
        self.items: list[TerminalTask | FolderTask] = []
        self._given = 0

    def as_environment(self) -> EndlessEnvironment:
        return EndlessEnvironment(self)

    async def setup(self) -> None:
        for item in self._source():
            if isinstance(item, TaskError):
                logger.warning("left out: %s", item)
            else:
                self.items.append(item)
        if not self.items:
            raise ConfigError("there is no task that can be used; the lines above say why")

    def _source(self) -> Iterable[TerminalTask | FolderTask | TaskError]:
        settings = self.settings
        source = settings.dataset_name or settings.local_tasks_dir
        if source is None:
            levels = () if settings.level is None else (settings.level,)
            choice = Choice(settings.seed, levels, tuple(settings.families), tuple(settings.areas))
            return generate(choice, settings.n)
        path = Path(source)
        if path.is_dir():
            return read_folder(path, Path(settings.roots) if settings.roots else None)
        return read_tasks(path)

    async def get_next_item(self) -> Item:
        """The tasks in order, again and again; once only when `total_steps` is -1."""
        if self._given >= len(self.items) and self.settings.total_steps < 0:
            return None
        item = self.items[self._given % len(self.items)]
        self._given += 1
        return item

    def item_id(self, item: Item, number: int) -> str:
        return str(item.id)

    def format_prompt(self, item: Item) -> str:
        return str(item.prompt)

    def reference_solution(self, item: Item) -> JSON:
        return item.solution

    async def compute_reward(self, item: Item, result: AgentResult, ctx: ToolContext) -> float:
        raise NotImplementedError("rollouts of this environment are graded by EndlessEnvironment.score")

    async def evaluate(self, *args: JSON, **kwargs: JSON) -> JSON:
        """Roll every task out `group_size` times and log the share that was solved, whole and by level.

        `solved_interval` is its 95 % interval, with the rollouts of one task taken together; None for a single task.
        """
        done = await self.evaluate_items(self.items, self.settings.group_size)
        scored = [trajectory for trajectory in done if trajectory.reward is not None]
        by_task: dict[str, list[float]] = {}
        for trajectory in scored:
            by_task.setdefault(trajectory.task_id, []).append(trajectory.reward or 0.0)
        metrics: dict[str, JSON] = {
            "solved": _mean([trajectory.reward for trajectory in scored]),
            "solved_interval": mean_interval(list(by_task.values())),
            "rollouts": len(done),
            "unscored": len(done) - len(scored),
        }
        for level in sorted({item.level for item in self.items if isinstance(item, TerminalTask)}):
            ids = {item.id for item in self.items if isinstance(item, TerminalTask) and item.level == level}
            metrics[f"solved_level_{level}"] = _mean([each.reward for each in scored if each.task_id in ids])
        samples = [
            {"task_id": each.task_id, "index": each.index, "reward": each.reward, "outcome": each.outcome.value}
            for each in done
        ]
        await self.evaluate_log(metrics, samples, task_name=self.name)
        return metrics


def _mean(rewards: Sequence[float | None]) -> float | None:
    known = [reward for reward in rewards if reward is not None]
    return sum(known) / len(known) if known else None
