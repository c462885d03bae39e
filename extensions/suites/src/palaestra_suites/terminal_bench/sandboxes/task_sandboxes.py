"""Makes the sandboxes of terminal tasks for a harness of others: their images are built as in a run of ours.

A Dockerfile is built once, in a slot over a base or by a container tool, and each sandbox starts from the result. The
built files are kept for later processes. `of_loop` shares the slots between all callers of an event loop, because a
harness makes one sandbox after the other and has no place to close them all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Self
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ConfigDict, Field

from palaestra_slots.core.config import local_path
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import Network
from palaestra_slots.images.build_once import CACHE_DIR
from palaestra_slots.images.dockerfile import ImageRecipe
from palaestra_slots.images.image_builder import ImageBuilder
from palaestra_slots.images.slot_build import build_in_slot, limits_of_build
from palaestra_slots.images.slot_commands import check_execute
from palaestra_slots.images.task_images import PullPolicy, TaskImages
from palaestra_slots.images.task_root import TaskRoot, TaskRoots
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.pool import SlotPool
from palaestra_slots.sandbox.server_backend import levels
from palaestra_slots.sandbox.slot import Slot, SlotSpec, Snapshot
from palaestra_slots.sandbox.snapshots.cache import Prepared, Recipe
from palaestra_slots.sandbox.snapshots.folder import SnapshotStore, default_folder
from palaestra_suites.terminal_bench.compose import read_services
from palaestra_suites.terminal_bench.sandboxes.task_sandbox import CommandDefaults, TaskSandbox, TaskSandboxSpec
from palaestra_suites.terminal_bench.service import MAIN
from palaestra_suites.terminal_bench.service_group import (
    GroupLead,
    ResolvedService,
    ServiceGroup,
    ServicePlan,
    service_spec,
    set_up_service,
    started_by_image,
)

_LONGEST_END_S = 120.0
"""The longest time for which sandboxes stay open for the other tasks of an event loop that ends."""

_log = logging.getLogger(__name__)


class TaskSandboxSettings(BaseModel):
    """How the images of tasks are found and built, and how slots are isolated. Each field that the environment
    terminal-bench also has means the same there."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_image: str | None = Field(
        default=None,
        description="A root file system over which slots build every Dockerfile. `host` means this machine's programs, "
        "and `from` the image that FROM names, as `palaestra images pull` stored it.",
    )
    pull: PullPolicy = Field(
        default="never",
        description="Whether the images that tasks name are pulled: `never`, or if they are `missing` here.",
    )
    image_dir: str | None = Field(
        default=None,
        description="A folder of prebuilt root file systems: TASK or TASK.tar, with an optional TASK.json next to it.",
    )
    images: dict[str, str] = Field(default={}, description="Prebuilt root file systems for single tasks, as TASK=PATH.")
    builder: str = Field(
        default="",
        description="The command that builds images. By default, the first of docker, podman and buildah that answers.",
    )
    build_network: bool = Field(default=True, description="Whether building an image reaches the network.")
    cache_dir: str = Field(default=CACHE_DIR, description="The folder of root file systems that a container tool made.")
    workspace_store: str | None = Field(
        default=None, description="The folder that keeps built workspaces. Default: the folder of this user's runs."
    )
    isolation: str = Field(default="best", description="The isolation level: best, full, userns, confined or none.")
    require_sandbox: bool = Field(default=False, description="Refuse isolation levels below `userns`.")


class TaskSandboxes:
    """Makes sandboxes in one slot pool. `async with` starts the pool, and ends it with every sandbox.

    Raises `ConfigError` for an unknown isolation level. Entering the block raises `IsolationUnavailable`, and
    `ImageError` if a path in the settings does not exist.
    """

    def __init__(self, settings: TaskSandboxSettings | None = None) -> None:
        self.settings = settings or TaskSandboxSettings()
        rung, require = levels(self.settings.isolation, self.settings.require_sandbox)
        self._backend = LocalBackend(rung=rung, require=require)
        self._pool = SlotPool(backend=self._backend)
        named = self.settings.workspace_store
        store = SnapshotStore(default_folder() if named is None else local_path(named))
        self._prepared = Prepared(self._backend, store.open, trouble=lambda trouble: _log.warning("%s", trouble))
        self._built: dict[str, Snapshot] = {}
        self._turns: dict[str, asyncio.Lock] = {}

    @classmethod
    async def of_loop(cls, settings: TaskSandboxSettings) -> Self:
        """Return the started sandboxes with these settings that the running event loop shares. They end when
        `asyncio.run` ends. Raises the errors of their start."""
        shared = _SHARED.setdefault(asyncio.get_running_loop(), {})
        key = settings.model_dump_json()
        if key not in shared or shared[key].done:
            shared[key] = _Keeper(cls(settings))
        sandboxes = await shared[key].started()
        assert isinstance(sandboxes, cls)
        return sandboxes

    @property
    def server_pid(self) -> int:
        """The pid of the process that watches the slot server. Raises `SandboxError` before the start."""
        return self._backend.server_pid

    async def __aenter__(self) -> Self:
        self._roots(force=False).check()
        await self._pool.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._pool.aclose()

    async def open(self, spec: TaskSandboxSpec) -> TaskSandbox:
        """Return a new sandbox of a task, whose services run. Raises `TaskError` for a task that slots cannot run, and
        `PrepareError` if its build or a service fails."""
        roots = self._roots(force=spec.force_build)
        recipe = _recipe(spec)
        services = read_services(
            spec.folder,
            {**spec.env, **spec.variables},
            recipe,
            spec.limits,
            agents=spec.agents,
            file=spec.compose,
            offline=spec.network is Network.OFF,
        )
        own = services[MAIN].recipe if services else recipe
        if own is None:
            raise ConfigError(f"{spec.folder.name}/Dockerfile is missing, and the task names no image")
        root = await roots.of(spec.name, own)
        plan = None
        services = services or {each.name: each for each in started_by_image(own, root, spec.limits)}
        if services:
            resolved = {MAIN: ResolvedService(services[MAIN], root)}
            for name, each in services.items():
                if name != MAIN:
                    its = root if each.recipe == own else await roots.of(f"{spec.name}.{name}", each.recipe)
                    resolved[name] = ResolvedService(each, its)
            plan = ServicePlan(resolved)
        return await self._open_sandbox(spec, own, root, plan)

    async def _open_sandbox(
        self, spec: TaskSandboxSpec, recipe: ImageRecipe, root: TaskRoot, plan: ServicePlan | None
    ) -> TaskSandbox:
        main = None if plan is None else plan.services[MAIN]
        limits = spec.limits if main is None else main.service.limits
        own = SlotSpec(root.image, limits=limits)
        built = await self._files(own, recipe, root, force=spec.force_build)
        env = {**root.config.env, **({} if main is None else main.service.env), **spec.env}
        full = replace(own, network=spec.network, mounts=spec.mounts, env=tuple(sorted(env.items())))
        prepared: dict[str, Snapshot] = {}
        for name in [] if plan is None else plan.order:
            if plan is not None and name != MAIN:
                prepared[name] = await self._service_files(spec, plan, name, own)
        leading = full if plan is None else plan.leading(full)
        slot = await self._pool.acquire(spec.name, spec=leading, snapshot=built, timeout_s=spec.build_timeout_s)
        workdir, user = (root.config.workdir, root.config.user) if main is None else (main.workdir, main.user)
        box = TaskSandbox(self._pool, slot, CommandDefaults(workdir, user))
        try:
            await check_execute(slot, ["mkdir", "-p", workdir], f"the directory {workdir} cannot be created")
            if plan is not None:
                await set_up_service(slot, plan, MAIN)
            if plan is not None and plan.starts:
                await self._start_services(box, spec, plan, replace(full, mounts=()), prepared)
        except BaseException:
            await asyncio.shield(box.aclose())
            raise
        return box

    async def _start_services(
        self, box: TaskSandbox, spec: TaskSandboxSpec, plan: ServicePlan, full: SlotSpec, prepared: dict[str, Snapshot]
    ) -> None:
        async def lead() -> Slot:
            return box.slot

        async def prepared_files(name: str) -> Snapshot:
            return prepared[name]

        async def forget() -> None:
            for snapshot in prepared.values():
                await self._pool.snapshots.forget(snapshot)

        box.closers.append(forget)
        box.group = ServiceGroup(plan, GroupLead(spec.name, self._pool, lead, spec.build_timeout_s, box.closers))
        await box.group.start(full, prepared_files)

    def _roots(self, *, force: bool) -> TaskRoots:
        settings = self.settings
        place = local_path(settings.cache_dir) / "roots"
        builder = ImageBuilder(place, tool=settings.builder, network=settings.build_network, force=force)
        folder = local_path(settings.image_dir) if settings.image_dir else None
        return TaskRoots(builder, settings.images, folder, settings.base_image, TaskImages(settings.pull))

    async def _service_files(self, spec: TaskSandboxSpec, plan: ServicePlan, name: str, own: SlotSpec) -> Snapshot:
        """Return the files from which a service starts. What the compose file mounts is copied for each sandbox."""
        each = plan.services[name]
        base = service_spec(replace(own, network=self._build_network()), each)
        built = await self._files(base, each.service.recipe, each.root, force=spec.force_build)

        async def fill(slot: Slot) -> None:
            await set_up_service(slot, plan, name)

        return await self._sealed(base, built, fill, spec.build_timeout_s)

    async def _files(self, spec: SlotSpec, recipe: ImageRecipe, root: TaskRoot, *, force: bool) -> Snapshot | None:
        """Return the files that a Dockerfile builds over a base, or None if the image has them all. They are built once
        per process; unless `force` is set, they are also looked up among those that were kept."""
        if root.build_key is None:
            return None
        spec = SlotSpec(root.image, network=self._build_network(), limits=limits_of_build(spec.limits))
        wanted = Recipe(spec, version=root.build_key, name=f"Dockerfile of {recipe.folder.parent.name}")
        key = wanted.key(self._backend.rung, lambda image: image)

        async def build(slot: Slot) -> None:
            await build_in_slot(slot, recipe, root.base)

        async def make() -> Snapshot:
            return await self._sealed(spec, None, build, recipe.build_timeout_s)

        async with self._turns.setdefault(key, asyncio.Lock()):
            known = self._built.get(key)
            if known is None or not await self._pool.snapshots.holds(known):
                known = await make() if force else (await self._prepared.take(wanted, make)).snapshot
                self._built[key] = known
            return known

    def _build_network(self) -> Network:
        return Network.ON if self.settings.build_network else Network.OFF

    async def _sealed(
        self, spec: SlotSpec, snapshot: Snapshot | None, do: Callable[[Slot], Awaitable[None]], wait_s: float
    ) -> Snapshot:
        slot = await self._pool.acquire("build", spec=spec, snapshot=snapshot, timeout_s=wait_s)
        try:
            await do(slot)
        except BaseException:
            await asyncio.shield(self._pool.release(slot))
            raise
        return await self._pool.seal(slot)


class _Keeper:
    """A task that keeps sandboxes open until the event loop ends, because `asyncio.run` cancels its tasks first."""

    def __init__(self, sandboxes: TaskSandboxes) -> None:
        self._ready: asyncio.Future[TaskSandboxes] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold_open(sandboxes))

    @property
    def done(self) -> bool:
        return self._task.done()

    async def started(self) -> TaskSandboxes:
        return await asyncio.shield(self._ready)

    async def _hold_open(self, sandboxes: TaskSandboxes) -> None:
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(sandboxes)
            except Exception as error:
                self._ready.set_exception(error)
                return
            except BaseException:
                self._ready.cancel()
                raise
            self._ready.set_result(sandboxes)
            try:
                await asyncio.Event().wait()
            finally:
                await self._wait_for_others()

    async def _wait_for_others(self) -> None:
        """Wait for the loop's other tasks, which end at the same time and may still need their sandboxes."""
        keepers = {each._task for each in _SHARED.get(asyncio.get_running_loop(), {}).values()}
        if others := asyncio.all_tasks() - keepers:
            await asyncio.wait(others, timeout=_LONGEST_END_S)


_SHARED: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _Keeper]] = WeakKeyDictionary()


def _recipe(spec: TaskSandboxSpec) -> ImageRecipe | None:
    dockerfile = spec.folder / "Dockerfile"
    if not dockerfile.is_file() and spec.image is None:
        return None
    return ImageRecipe(spec.folder, dockerfile if dockerfile.is_file() else None, spec.image, spec.build_timeout_s)
