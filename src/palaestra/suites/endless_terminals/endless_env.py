"""`EndlessTerminalsEnv`: terminal tasks from a seed, from a file of generated tasks, or from task folders.

Generated tasks are graded by their checks, task folders by their own tests; both in a fresh slot over the sealed work,
of which only the place where the work happens is shown. The reward is 1.0 when everything holds, else 0.0; for
generated tasks the share of checks that hold is recorded beside it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from palaestra.agent.result import AgentResult
from palaestra.core.config import later, local_path
from palaestra.core.errors import PrepareError, TaskError
from palaestra.core.types import JSON, Score, Task
from palaestra.envs.adapters.hermes_adapter import ContractEnvironment
from palaestra.envs.api.base_env import Item
from palaestra.envs.api.dataset_env import ListedEnv, ListedEnvConfig
from palaestra.rollouts.environment import Phase
from palaestra.rollouts.grading.grader import Grading
from palaestra.rollouts.grading.tool_context import ToolContext
from palaestra.rollouts.rollout import Rollout
from palaestra.sandbox.slot import Slot, SlotSpec
from palaestra.suites.endless_terminals import folder_grading
from palaestra.suites.endless_terminals.checks.all_checks import faults, first_fault, live_faults
from palaestra.suites.endless_terminals.compose_tasks import Choice, generate
from palaestra.suites.endless_terminals.folder_grading import HOME
from palaestra.suites.endless_terminals.generated_task import TerminalTask, read_tasks
from palaestra.suites.endless_terminals.task_folders import FolderTask, read_folder
from palaestra.suites.endless_terminals.triple_check import GRADED
from palaestra.suites.images.agent_user import start_in, tools_of_user
from palaestra.suites.images.as_user import UserSlot, home_of
from palaestra.suites.images.dockerfile import ImageConfig
from palaestra.suites.images.image_builder import Builder
from palaestra.suites.images.pytest_toolchain import TestTools, find_test_tools, working_command
from palaestra.suites.images.slot_build import build_in_slot
from palaestra.suites.images.task_root import HOST, Root, Roots
from palaestra.suites.swe.install import DependencyCache, Toolchain


class EndlessTerminalsEnvConfig(ListedEnvConfig):
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
    image: str | None = Field(
        default=None,
        description="A root file system for all slots, or `host`, this machine's; Dockerfiles are followed over it.",
    )
    roots: str | None = Field(
        default=None, description="A folder of ready root file systems, each named as the task folder it is for."
    )
    test_timeout_s: float = Field(default=120, gt=0, description="Seconds that a task folder's tests may take.")
    cache_dir: str = Field(default="~/.cache/palaestra", description="The test tools for task folders.")
    max_agent_turns: int = Field(default=32, ge=1, description="Model calls per rollout, at most.")
    enabled_toolsets: list[str] | None = Field(default=["default"], description="Toolsets the agent has.")
    total_steps: int = Field(default=-1, ge=-1, description="Groups to process, at most; -1 means every task once.")
    allow_network: bool = Field(default=False, description="Whether the agent's commands reach the network.")

    builder: str = Field(
        default="", description="The command that builds images; empty: docker, podman or buildah, whatever answers."
    )
    build_network: bool = Field(default=True, description="Whether building an image reaches the network.")
    container_build_timeout_s: float = Field(
        default=600.0, gt=0, description="Seconds that building an image may take."
    )

    use_local_dir: bool = later(True, "Task folders are always read where they lie.")
    prebuild_images: bool = later(False, "Images are built when their task's group starts, once each.")
    max_concurrent_builds: int = later(4, "As many images are built at once as groups are under way.")
    docker_image_prefix: str = later("endless-terminals", "Built images are exported and not kept by the tool.")


@dataclass(frozen=True, slots=True)
class Made:
    """A folder task whose root is known."""

    item: FolderTask
    root: Root


@dataclass(frozen=True, slots=True)
class Prepared:
    """What preparing a folder task has found: how its tests start, which must pass, and its user's home."""

    toolchain: Toolchain
    names: frozenset[str]
    home: str


class EndlessEnvironment(ContractEnvironment):
    """How the tasks are prepared and graded."""

    def __init__(self, inner: EndlessTerminalsEnv, packages: DependencyCache | None = None) -> None:
        super().__init__(inner)
        self.settings = settings = inner.config
        cache = local_path(settings.cache_dir)
        self._packages = packages or DependencyCache(cache / "dependencies")
        builder = Builder(cache / "roots", tool=settings.builder, network=settings.build_network)
        self._roots = Roots(builder, {}, base_image=settings.image)
        self._tools: TestTools | None = None
        self._prepared: dict[str, Prepared] = {}

    async def open(self) -> None:
        self._roots.check()  # said before the run has a folder
        await super().open()

    def task(self, item: Item, number: int) -> Task:
        task = super().task(item, number)
        if isinstance(item, TerminalTask):
            made = replace(task, files=item.files, setup=item.setup or None, grading=item.grading)
            return replace(made, image=self._image)
        return replace(task, image=item.image or self._image)

    @property
    def _image(self) -> str | None:
        named = self.settings.image
        return None if named is None or named == HOST else str(local_path(named))

    async def resolve(self, task: Task) -> Task:
        item = task.data
        if not isinstance(item, FolderTask):
            return task
        if self._tools is None:
            self._tools = await find_test_tools(self._packages, ())
        if item.recipe is None:
            return replace(task, data=Made(item, Root(task.image, ImageConfig())))
        root = await self._roots.of(item.id, item.recipe)
        return replace(task, data=Made(item, root), image=root.image)

    def slot_spec(self, task: Task, phase: Phase) -> SlotSpec:
        spec, made = super().slot_spec(task, phase), task.data
        if not isinstance(made, Made):
            return spec
        assert self._tools is not None
        mounts = () if phase is Phase.AGENT else self._tools.mounts
        return replace(spec, mounts=mounts, env=tuple(sorted({"HOME": HOME, **made.root.config.env}.items())))

    def foundation(self, task: Task) -> str | None:
        return task.data.root.build_key if isinstance(task.data, Made) else None

    async def lay(self, task: Task, sandbox: Slot) -> None:
        await build_in_slot(sandbox, task.data.item.recipe)

    def prepares(self, task: Task) -> bool:
        return True

    async def prepare(self, task: Task, sandbox: Slot) -> None:
        made = task.data
        if isinstance(made, TerminalTask):
            if wrong := await first_fault(made.initial, sandbox):
                raise PrepareError(f"{task.id}: its first state is not what it should be: {wrong}")
            return
        assert self._tools is not None
        config = made.root.config
        if made.item.recipe is not None:
            await start_in(sandbox, HOME if config.workdir == "/" else config.workdir)
        command = await working_command(sandbox, self._tools)
        toolchain = Toolchain(command, self._tools.mounts, self._tools.dependencies)
        timeout_s = self.settings.test_timeout_s
        names = await folder_grading.prepare_folder(made.item, sandbox, toolchain, timeout_s)
        self._prepared[task.id] = Prepared(toolchain, names, await home_of(sandbox, config.user))

    async def act(self, rollout: Rollout) -> AgentResult:
        made = rollout.task.data
        if not isinstance(made, Made):
            return await super().act(rollout)
        user, home = made.root.config.user, self._prepared[rollout.task.id].home

        async def slot() -> Slot:
            return UserSlot(await rollout.sandbox(), user, home)

        handler = tools_of_user(rollout, user, slot, made.item.prompt)
        if handler is None:
            return await super().act(rollout)
        self._choose_server(rollout)
        return await rollout.run_agent(tool_handler=handler)

    async def score(self, rollout: Rollout, grading: Grading) -> Score:
        task = rollout.task.data
        if isinstance(task, TerminalTask):
            if not grading.live:
                return _score(task, await faults(task.final, await grading.slot(GRADED)))

            async def sealed() -> Slot:
                grading.settle()
                return await grading.slot(GRADED)

            return _score(task, await live_faults(task.final, await grading.slot(), sealed))
        known, timeout_s = self._prepared[rollout.task.id], self.settings.test_timeout_s
        slot = await grading.slot(folder_grading.GRADED)
        return await folder_grading.score_folder(task.item, known.names, slot, known.toolchain, timeout_s)


def _score(task: TerminalTask, found: Sequence[str]) -> Score:
    wrong = [fault for fault in found if fault]
    metrics = {"checks_held": 1 - len(wrong) / len(found), f"level_{task.level}": float(not wrong)}
    return Score(float(not wrong), metrics, {"faults": wrong[:20], "families": task.families, "level": task.level})


class EndlessTerminalsEnv(ListedEnv):
    """Terminal work over files, text, data, archives, permissions, processes, git, databases and scripts.

    Without a data set, tasks are generated from the seed; nothing touches the network.
    """

    name: ClassVar[str | None] = "endless_terminals"
    env_config_cls: ClassVar[type[ListedEnvConfig]] = EndlessTerminalsEnvConfig
    config: EndlessTerminalsEnvConfig

    def as_environment(self) -> EndlessEnvironment:
        return EndlessEnvironment(self)

    async def load(self) -> Iterable[Item | TaskError]:
        config = self.config
        source = config.dataset_name or config.local_tasks_dir
        if source is None:
            levels = () if config.level is None else (config.level,)
            choice = Choice(config.seed, levels, tuple(config.families), tuple(config.areas))
            return generate(choice, config.n)
        if Path(source).is_dir():
            roots = Path(config.roots) if config.roots else None
            return read_folder(Path(source), roots, config.container_build_timeout_s)
        return read_tasks(source, split=config.dataset_split, fields=config.dataset_fields)

    def labels(self, item: Item) -> Collection[str]:
        return (f"level/{item.level}",) if isinstance(item, TerminalTask) else ()

    def item_id(self, item: Item, number: int) -> str:
        return str(item.id)

    def format_prompt(self, item: Item) -> str:
        return str(item.prompt)

    def reference_solution(self, item: Item) -> JSON:
        return item.solution

    async def compute_reward(self, item: Item, result: AgentResult, ctx: ToolContext) -> float:
        raise NotImplementedError("rollouts of this environment are graded by EndlessEnvironment.score")

    def own_figures(self, metrics: Mapping[str, JSON]) -> Mapping[str, JSON]:
        return {"eval/percent_correct": metrics.get("pass_rate")}
