"""The Python packages that a function environment and its tasks declare for their sandboxes.

They are installed when the first task that needs them begins, before anything of it is played, and sandboxes mount them
read-only. A failure of the environment's own packages ends the run; one of a task's packages fails this task only.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace

from palaestra.envs.api.declaration import FunctionEnvConfig
from palaestra_slots.core.errors import ConfigError, PrepareError, TaskError
from palaestra_slots.core.types import Task
from palaestra_slots.images.requirements import checked_packages
from palaestra_slots.sandbox.backends.registry import backend_words, default_image
from palaestra_slots.sandbox.python_call import PACKAGES_DIR
from palaestra_slots.sandbox.slot import Mount, Rung, SlotSpec

_BACKENDS = frozenset({"local", "docker"})
_LEVELS = ("none", "confined")
_Wanted = tuple[str | None, tuple[str, ...]]


class DeclaredPackages:
    """The packages of one run. `own` are those of the environment, which all of its tasks have."""

    def __init__(self, environment: str, own: Sequence[str], config: FunctionEnvConfig) -> None:
        self._environment = environment
        self._own = tuple(own)
        self._config = config
        self._mounts: dict[_Wanted, Mount] = {}
        self._failed: dict[_Wanted, str] = {}
        self._installing = asyncio.Lock()

    def check(self) -> None:
        """Raise `ConfigError` if sandboxes without an image of their own cannot have the environment's packages."""
        if problem := self._packages_problem(self._wanted(Task("", ""), ())[0]):
            raise ConfigError(f"environment {self._environment}: {problem}")

    async def install(self, task: Task) -> None:
        """Install the packages of a task. Raises `ConfigError` for those of the environment, and `TaskError` for those
        of the task."""
        named = checked_packages(f"task {task.id}", task.packages)
        wanted = self._wanted(task, named)
        if not wanted[1]:
            return
        failure, owner = (TaskError, f"task {task.id}") if named else (ConfigError, f"environment {self._environment}")
        async with self._installing:
            if wanted not in self._mounts and wanted not in self._failed:
                await self._install(wanted)
        if wanted in self._failed:
            raise failure(f"{owner}: {self._failed[wanted]}")

    async def _install(self, wanted: _Wanted) -> None:
        image, names = wanted
        problem = self._packages_problem(image)
        if not problem:
            from palaestra_slots.images.python_packages import installed_packages  # imported here: few declare any

            try:
                self._mounts[wanted] = await installed_packages(names, image)
                return
            except (ConfigError, PrepareError) as error:
                problem = _in_one_line(f"{error}", image)
        self._failed[wanted] = problem

    def _packages_problem(self, image: str | None) -> str:
        """Return why sandboxes with these settings cannot have packages, or nothing."""
        backend, level = self._config.slot_backend, self._config.isolation
        if not _BACKENDS.issuperset(backend_words(backend)):
            return f"sandboxes of the backend {backend} cannot have packages: use local or docker, or another image"
        if backend != "local" and image is None:
            return "packages in containers need an image: set docker_image, or the image of the task"
        if backend == "local" and level in _LEVELS:
            return f"sandboxes at the isolation level {level} cannot have packages: use {Rung.USERNS.label} or full"
        return ""

    def _wanted(self, task: Task, named: Sequence[str]) -> _Wanted:
        image = task.image or default_image(self._config.slot_backend, self._config)
        return image, tuple(sorted({*self._own, *named}))

    def added_to(self, spec: SlotSpec, task: Task) -> SlotSpec:
        """Return the settings of a sandbox that has the task's packages, once they are installed."""
        mount = self._mounts.get(self._wanted(task, task.packages))
        if mount is None:
            return spec
        return replace(spec, mounts=(*spec.mounts, mount), env=(*spec.env, ("PYTHONPATH", PACKAGES_DIR)))


def _in_one_line(error: str, image: str | None) -> str:
    """Return the reason that an installer gives among its other words."""
    first, *more = error.splitlines()
    if "Exit code: 127" in first:
        return f"packages need a python3, and {'the host' if image is None else f'the image {image}'} has none"
    said = re.findall(r"^(?:ERROR: |error: )(.+)", "\n".join(more), re.MULTILINE) or [each for each in more if each]
    return f"{first.partition(': Exit code')[0]}: {said[-1].strip()}" if said else first
