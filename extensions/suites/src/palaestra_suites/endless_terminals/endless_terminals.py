"""Terminal tasks generated from a seed, read from a file of generated tasks, or read from task folders.

Generated tasks are graded by their checks, and task folders by their own tests. Both run in a fresh slot that has the
graded part of the agent's changes as they were at the end. Only checks of running processes run in the agent's slot.
The reward is 1.0 if every check holds, or if every test passes and no tampering is found, else 0.0. For generated
tasks, the share of checks that hold is also recorded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import Field

from palaestra.agent.result import AgentResult
from palaestra.envs.api.listed_environment import ListedEnvironment
from palaestra.envs.config.fields import ListedEnvConfig
from palaestra.rollouts.grading.grader import Grading
from palaestra.rollouts.grading.tampering import changes_in
from palaestra.rollouts.rollout import Rollout
from palaestra.rollouts.spec import Phase
from palaestra_slots.core.config import local_path
from palaestra_slots.core.errors import PrepareError, TaskError
from palaestra_slots.core.types import JSON, Network, NetworkPolicy, Score, Task
from palaestra_slots.images.as_user import UserSlot, home_of
from palaestra_slots.images.build_once import CACHE_DIR
from palaestra_slots.images.dockerfile import ImageConfig
from palaestra_slots.images.image_builder import ImageBuilder
from palaestra_slots.images.slot_build import build_in_slot
from palaestra_slots.images.task_root import HOST, TaskRoot, TaskRoots
from palaestra_slots.sandbox.slot import Change, Slot, SlotSpec, View
from palaestra_suites.endless_terminals.checks.all_checks import faults, first_fault, live_faults
from palaestra_suites.endless_terminals.compose_tasks import TaskSelection, generate
from palaestra_suites.endless_terminals.generated_task import GeneratedTask, read_tasks
from palaestra_suites.endless_terminals.task_folders import (
    HOME,
    TESTS_DIR,
    FolderTask,
    folder_scope,
    prepare_folder,
    read_folder,
    score_folder,
)
from palaestra_suites.endless_terminals.triple_check import GRADED as WORKSPACE_ONLY
from palaestra_suites.images.agent_user import start_in, tools_of_user
from palaestra_suites.images.pytest_toolchain import TestTools, find_test_tools, working_command
from palaestra_suites.task_paths import TaskScope
from palaestra_suites.toolchain.toolchain import DependencyCache, Toolchain


class EndlessTerminalsEnvConfig(ListedEnvConfig):
    """Settings of the environment. Without a dataset, tasks are generated from `seed`."""

    dataset_name: str | None = Field(
        default=None,
        description="A JSONL file of `tasks build terminal`, or a folder of task folders. By default, tasks are "
        "generated.",
    )
    local_tasks_dir: str | None = Field(
        default=None,
        description="A folder of task folders; same as dataset_name.",
        json_schema_extra={"host_path": True},
    )
    n: int = Field(default=100, ge=1, description="Number of tasks to generate if there is no dataset.")
    level: int | None = Field(
        default=None, ge=1, le=5, description="Generate only this level. By default, levels are mixed."
    )
    areas: list[str] = Field(default=[], description="Generate only these areas. By default, all.")
    families: list[str] = Field(default=[], description="Generate only these families. By default, all.")
    image: str | None = Field(
        default=None,
        description="A root file system for all slots, over which Dockerfiles are built. `host` means this machine's.",
        json_schema_extra={"host_path": True},
    )
    roots: str | None = Field(
        default=None,
        description="A folder of prebuilt root file systems, named after their task folders.",
        json_schema_extra={"host_path": True},
    )
    test_timeout_s: float = Field(default=120, gt=0, description="Time limit in seconds of a task folder's tests.")
    cache_dir: str = Field(
        default=CACHE_DIR,
        description="The folder of test tools for task folders.",
        json_schema_extra={"host_path": True},
    )
    max_agent_turns: int = Field(default=32, ge=1, description="Maximum number of model calls per rollout.")
    enabled_toolsets: list[str] | None = Field(default=["default"], description="The agent's toolsets.")
    total_steps: int = Field(default=-1, ge=-1, description="Maximum number of groups; -1 means one for every task.")
    allow_network: bool = Field(default=False, description="Whether the agent's commands reach the network.")

    builder: str = Field(
        default="", description="The command that builds images. By default, docker, podman or buildah."
    )
    build_network: bool = Field(default=True, description="Whether building an image reaches the network.")
    container_build_timeout_s: float = Field(
        default=600.0, gt=0, description="Time limit in seconds for building an image."
    )


@dataclass(frozen=True, slots=True)
class ResolvedFolder:
    """A task read from a folder, with its root file system."""

    item: FolderTask
    root: TaskRoot


@dataclass(frozen=True, slots=True)
class PreparedFolder:
    """The result of preparing a folder task: its toolchain, the tests that must pass, and the user's home."""

    toolchain: Toolchain
    names: frozenset[str]
    home: str


class EndlessEnvironment(ListedEnvironment):
    """Terminal work over files, text, data, archives, permissions, processes, git, databases and scripts.

    Without a dataset, tasks are generated from the seed. Generated tasks do not use the network.
    """

    name = "endless_terminals"
    config_class = EndlessTerminalsEnvConfig
    config: EndlessTerminalsEnvConfig

    def __init__(self, config: EndlessTerminalsEnvConfig, packages: DependencyCache | None = None) -> None:
        super().__init__(config)
        cache = local_path(config.cache_dir)
        self._packages = packages or DependencyCache(cache / "dependencies")
        builder = ImageBuilder(cache / "roots", tool=config.builder, network=config.build_network)
        self._roots = TaskRoots(builder, {}, base_image=config.image)
        self._tools: TestTools | None = None
        self._prepared: dict[str, PreparedFolder] = {}

    async def open(self) -> None:
        self._roots.check()  # before the run's folder is made
        await super().open()

    async def load(self) -> Iterable[JSON | TaskError]:
        config = self.config
        source = config.dataset_name or config.local_tasks_dir
        if source is None:
            levels = () if config.level is None else (config.level,)
            selection = TaskSelection(config.seed, levels, tuple(config.families), tuple(config.areas))
            return generate(selection, config.n)
        if Path(source).is_dir():
            roots = Path(config.roots) if config.roots else None
            return read_folder(Path(source), roots, config.container_build_timeout_s)
        return read_tasks(source, split=config.dataset_split, fields=config.dataset_fields)

    def labels(self, item: JSON) -> Collection[str]:
        return (f"level/{item.level}",) if isinstance(item, GeneratedTask) else ()

    def item_id(self, item: JSON) -> str:
        return str(item.id)

    def prompt(self, item: JSON) -> str:
        return str(item.prompt)

    def solution(self, item: JSON) -> JSON:
        return item.solution

    def own_metrics(self, metrics: Mapping[str, JSON]) -> Mapping[str, JSON]:
        return {"eval/percent_correct": metrics.get("pass_rate")}

    def task(self, item: JSON) -> Task:
        task = super().task(item)
        if isinstance(item, GeneratedTask):
            made = replace(task, files=item.files, setup=item.setup or None, grading=item.grading)
            return replace(made, image=self._image)
        return replace(task, image=item.image or self._image)

    @property
    def _image(self) -> str | None:
        named = self.config.image
        return None if named is None or named == HOST else str(local_path(named).absolute())

    async def resolve(self, task: Task) -> Task:
        item = task.data
        if not isinstance(item, FolderTask):
            return task
        if self._tools is None:
            self._tools = await find_test_tools(self._packages, ())
        if item.recipe is None:
            return replace(task, data=ResolvedFolder(item, TaskRoot(task.image, ImageConfig())))
        root = await self._roots.of(item.id, item.recipe)
        agent = Network.ON if self.config.allow_network else Network.OFF
        network = NetworkPolicy(prepare=Network.ON if self.config.build_network else Network.OFF, agent=agent)
        return replace(task, data=ResolvedFolder(item, root), image=root.image, network=network)

    def slot_spec(self, task: Task, phase: Phase) -> SlotSpec:
        spec, made = super().slot_spec(task, phase), task.data
        if not isinstance(made, ResolvedFolder):
            return spec
        assert self._tools is not None
        mounts = () if phase is Phase.AGENT else self._tools.mounts
        return replace(spec, mounts=mounts, env=tuple(sorted({"HOME": HOME, **made.root.config.env}.items())))

    def shared_setup(self, task: Task) -> str | None:
        return task.data.root.build_key if isinstance(task.data, ResolvedFolder) else None

    async def prepare_shared(self, task: Task, sandbox: Slot) -> None:
        await build_in_slot(sandbox, task.data.item.recipe, task.data.root.base)

    def prepares(self, task: Task) -> bool:
        return True

    async def prepare(self, task: Task, sandbox: Slot) -> None:
        made = task.data
        if isinstance(made, GeneratedTask):
            if wrong := await first_fault(made.initial, sandbox):
                raise PrepareError(f"{task.id}: its initial state is wrong: {wrong}")
            return
        assert self._tools is not None
        config = made.root.config
        if made.item.recipe is not None:
            await start_in(sandbox, HOME if config.workdir == "/" else config.workdir)
        command = await working_command(sandbox, self._tools)
        toolchain = Toolchain(command, self._tools.mounts, self._tools.dependencies)
        timeout_s = self.config.test_timeout_s
        names = await prepare_folder(made.item, sandbox, toolchain, timeout_s)
        self._prepared[task.id] = PreparedFolder(toolchain, names, await home_of(sandbox, config.user))

    async def act(self, rollout: Rollout) -> AgentResult:
        made = rollout.task.data
        if not isinstance(made, ResolvedFolder):
            return await super().act(rollout)
        user, home = made.root.config.user, self._prepared[rollout.task.id].home

        async def slot() -> Slot:
            return UserSlot(await rollout.sandbox(), user, home)

        handler = tools_of_user(rollout, user, slot, made.item.prompt)
        if handler is None:
            return await super().act(rollout)
        return await rollout.run_agent(tool_handler=handler)

    async def score(self, rollout: Rollout, grading: Grading) -> Score:
        task = rollout.task.data
        if isinstance(task, GeneratedTask):
            if not grading.live:
                return _score(task, await faults(task.final, await grading.slot(WORKSPACE_ONLY)))

            async def sealed() -> Slot:
                grading.settle()
                return await grading.slot(WORKSPACE_ONLY)

            return _score(task, await live_faults(task.final, await grading.slot(), sealed))
        known, timeout_s = self._prepared[rollout.task.id], self.config.test_timeout_s
        scope = folder_scope(task.item)
        table = await grading.view(scope.paths, workspace=HOME, text=task.item.prompt)
        changes = await grading.changes()
        view = View(table.only, (*table.without, *_compiled(changes, scope), TESTS_DIR))
        slot = await grading.slot(view)
        await grading.disarm(slot, rollout.task, changes_in(view, changes), (TESTS_DIR,))
        return await score_folder(task.item, known.names, slot, known.toolchain, timeout_s)


def _compiled(changes: Sequence[Change], scope: TaskScope) -> list[str]:
    """Return the compiled files that Python would load in place of a source, unless the task names them."""
    new = [each.path for each in changes if each.kind != "deleted" and "__pycache__" in each.path.split("/")]
    return [path for path in new if path not in scope.paths]


def _score(task: GeneratedTask, found: Sequence[str]) -> Score:
    wrong = [fault for fault in found if fault]
    metrics = {"checks_held": 1 - len(wrong) / len(found), f"level_{task.level}": float(not wrong)}
    return Score(float(not wrong), metrics, {"faults": wrong[:20], "families": task.families, "level": task.level})
