"""The tasks of a tool session: the slot of each task, what runs in it, and when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from pydantic import Field

from palaestra.tools.registry.registry import ToolRegistry
from palaestra.tools.runtime.runtime import REFUSED_SLOTS, ToolRecordings
from palaestra_contract.tools.executor import DelegationSource, ToolExecutor, ToolExecutorConfig, TrajectoryTools
from palaestra_contract.tools.ttl import Leases
from palaestra_slots.core.config import nearest
from palaestra_slots.core.errors import ConfigError, ImageError, TaskError
from palaestra_slots.core.types import JSON
from palaestra_slots.processes.notifications import Notifications
from palaestra_slots.processes.registry import ProcessRegistry
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.pool import SlotPool, SlotPoolConfig
from palaestra_slots.sandbox.slot import Backend, Slot, SlotSpec, Snapshot

IMAGES = ("docker_image", "singularity_image", "modal_image", "daytona_image")
"""Overrides that name a task's image. If several are given, the first in this order counts."""
OVERRIDES = (*IMAGES, "cwd")


class ToolSessionConfig(ToolExecutorConfig):
    """The permissions of a session's calls, the lifetime of its slots, and its MCP servers."""

    idle_s: float | None = None
    """Seconds after a task's last call until its slot is released, unless a background process of the task still runs.
    Later calls raise `StaleLease` until the task is released. If this is None, slots stay."""
    checkpoint_path: Path | None = None
    """The file in which the next session finds the background processes. The backend must keep slots."""
    mcp: str | Path | dict[str, JSON] | None = None
    """MCP servers: a file, or its content. A server starts with the first call of one of its tools."""
    variables: dict[str, str] = Field(default_factory=dict, repr=False, exclude=True)
    """Values of `${NAME}` in `mcp`."""


class SessionTasks:
    """The tasks of a session by id. A task keeps its slot from its first call until it ends or, with `idle_s`, is idle
    for that long. Await all methods on the session's loop.

    If the backend keeps slots, `recover` takes over those of an earlier session, and the background processes in the
    file `checkpoint_path`. Raises `ConfigError` for such a file with a backend whose slots do not stay.
    """

    def __init__(
        self,
        tools: ToolRegistry,
        config: ToolExecutorConfig | None,
        backend: Backend,
        notifications: Notifications,
        limits: SlotPoolConfig | None,
        *,
        own: ToolSessionConfig,
        shared: Iterable[object],
        delegates: DelegationSource | None,
        world: ToolRecordings | None,
    ) -> None:
        self._lasting = backend if isinstance(backend, LocalBackend) and backend.stays else None
        if own.checkpoint_path is not None and self._lasting is None:
            raise ConfigError("checkpoint_path needs a backend whose slots stay, such as LocalBackend(service='NAME')")
        self.slots = TaskSlots(backend, limits)
        self._idle = None if own.idle_s is None else Leases(own.idle_s)
        self._processes = ProcessRegistry(checkpoint_path=own.checkpoint_path, notifications=notifications)
        self._executor = ToolExecutor(
            self.slots, tools, config, shared=(*shared, self._processes), delegates=delegates, world=world
        )
        self.registry = self._executor.registry
        self._recovering = asyncio.Lock()
        self._recovered: int | None = None if self._lasting is not None else 0
        self._sweeping: asyncio.Task[None] | None = None

    @property
    def are_kept(self) -> bool:
        """Whether the slots outlive the session."""
        return self._lasting is not None

    def tools(self, task_id: str) -> TrajectoryTools:
        """Return the tools of a task, bound to its slot."""
        return self._executor.trajectory(task_id)

    def in_use(self, task_id: str) -> AbstractContextManager[None]:
        """Mark a task as in use during the block. Raises `StaleLease` if it was idle for too long."""
        return nullcontext() if self._idle is None else self._idle.in_use(task_id)

    def expire_idle(self) -> None:
        """Begin to end tasks that are idle, if the session has a limit."""
        if self._idle is not None:
            self._sweeping = asyncio.get_running_loop().create_task(
                self._idle.sweep(self._end_task, self._executor.is_busy)
            )

    async def recover(self) -> int:
        """Take over, once, the kept slots of each task and the processes in them. Returns the number of processes.
        Raises `ConfigError` for an unreadable checkpoint, and `SandboxError` if another process uses the slots."""
        async with self._recovering:
            if self._lasting is not None and self._recovered is None:
                await self.slots.start()
                slots = self._lasting.leases()
                self._recovered = await self._processes.recover_from_checkpoint(slots)
                for slot in slots:
                    self.slots.leases.take_up(slot)
                    self.tools(slot.trajectory_id).take_up(slot)
                    with self.in_use(slot.trajectory_id):
                        pass  # the idle time of the task begins now
            return self._recovered or 0

    async def end(self, task_id: str) -> None:
        """End a task's slot with everything that runs in it. The task's next call gets a new slot."""
        await self.recover()
        if self._idle is not None:
            self._idle.end(task_id)
        await self._end_task(task_id)

    async def _end_task(self, task_id: str) -> None:
        await self._executor.release_trajectory(task_id)
        self._processes.forget(task_id)

    async def holders(self) -> list[str]:
        """Return the ids of the tasks that have a slot now."""
        await self.recover()
        return [str(each["trajectory_id"]) for each in self.slots.get_status()["holders"]]

    async def aclose(self) -> None:
        """End every task, but not the slots that the backend keeps."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        if self.are_kept:
            # Before the executor closes, because that releases all slots.
            self.slots.leave()
        await self._processes.aclose()
        await self._executor.close()


class TaskSlots(SlotPool):
    """The pool of a session, which applies the task's overrides to each slot."""

    def __init__(self, backend: Backend, limits: SlotPoolConfig | None) -> None:
        super().__init__(limits or SlotPoolConfig(), backend, start_when_used=True)
        self._overrides: dict[str, dict[str, JSON]] = {}
        self._leaving = False

    def override(self, task_id: str, overrides: Mapping[str, JSON]) -> None:
        """Set the image and the directory of the task's next slot. Raises `ConfigError` for an unknown override."""
        for key in overrides:
            if key not in OVERRIDES:
                raise ConfigError(f"{key!r} cannot be overridden for a task.{nearest(key, OVERRIDES)}")
        self._overrides[task_id] = dict(overrides)

    def clear_override(self, task_id: str) -> None:
        """Remove a task's overrides."""
        self._overrides.pop(task_id, None)

    def directory(self, task_id: str) -> JSON:
        """Return the directory that is set for a task, or None."""
        return self._overrides.get(task_id, {}).get("cwd")

    def leave(self) -> None:
        """From now on, keep slots that are released, for the next session."""
        self._leaving = True

    async def release(self, slot: Slot, reset_workspace: bool = False) -> None:
        if not self._leaving:
            await super().release(slot, reset_workspace)

    async def make(self, spec: SlotSpec, trajectory_id: str, snapshot: Snapshot | None) -> Slot:
        chosen = self._overrides.get(trajectory_id, {})
        image = next((chosen[key] for key in IMAGES if chosen.get(key)), None)
        try:
            return await super().make(replace(spec, image=str(image)) if image else spec, trajectory_id, snapshot)
        except ImageError as error:
            refused = TaskError(f"no slot can be created for the task {trajectory_id}: {error}")
            if (tasks := REFUSED_SLOTS.get()) is not None:
                tasks[trajectory_id] = refused
            raise refused from error
