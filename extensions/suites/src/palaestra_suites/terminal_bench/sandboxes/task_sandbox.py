"""The sandbox of one terminal task, for a harness of others that runs the agent and the verifier itself.

Commands start in the image's directory, with the variables and the user of the image, as in a container of it. A user
who is named has the home directory of that account. What is downloaded never leads out of the target: links that leave
the downloaded folder are left out.
"""

from __future__ import annotations

import logging
import math
import os
import posixpath
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from palaestra_slots.core.errors import ConfigError, SandboxError, SlotEnded
from palaestra_slots.core.types import AllowList, Limits, Network
from palaestra_slots.images.as_user import as_user, home_of, is_root
from palaestra_slots.sandbox import transfer
from palaestra_slots.sandbox.pool import SlotPool
from palaestra_slots.sandbox.slot import ExecutionResult, Mount, Slot
from palaestra_suites.terminal_bench.compose import COMPOSE_NAME
from palaestra_suites.terminal_bench.service import MAIN
from palaestra_suites.terminal_bench.service_group import ServiceGroup

OUTPUT_BYTES = 16 << 20
"""The maximum number of bytes of each stream of a command that are returned."""

_LONGEST_S = 30 * 24 * 3600.0
"""The time limit of a command without one. The caller ends such a command by cancelling the call."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TaskSandboxSpec:
    """What the sandbox of a task is made of. Times are in seconds.

    `folder` has the task's `Dockerfile`, its compose file, or both; `image` is the name of its image. `compose` is the
    name of the compose file, and `agents` the service in which the agent works. `name` finds a prebuilt root file
    system. `variables` are those that the compose file may refer to, and `env` those of
    every command. `force_build` ignores what was built before.
    """

    name: str
    folder: Path
    image: str | None = None
    build_timeout_s: float = 600.0
    force_build: bool = False
    network: Network | AllowList = Network.ON
    limits: Limits = Limits()
    mounts: tuple[Mount, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    compose: str = COMPOSE_NAME
    agents: str = MAIN


@dataclass(frozen=True, slots=True)
class CommandDefaults:
    """The directory, user and variables of a service's commands. `user` is empty for root."""

    workdir: str
    user: str = ""
    env: Mapping[str, str] = field(default_factory=dict)


class TaskSandbox:
    """The running sandbox of a task, with its services. `service` None or `main` stands for the task's own slot."""

    def __init__(self, pool: SlotPool | None, slot: Slot, defaults: CommandDefaults) -> None:
        self.slot = slot
        self.group: ServiceGroup | None = None
        self.closers: list[Callable[[], Awaitable[None]]] = []
        self._pool = pool
        self._defaults = defaults
        self._homes: dict[tuple[str, str], str] = {}

    @classmethod
    def of_slot(cls, slot: Slot) -> Self:
        """Return a running slot as a sandbox whose commands start in its workspace. `aclose` leaves the slot to its
        owner."""
        return cls(None, slot, CommandDefaults(slot.workspace_dir))

    @property
    def workdir(self) -> str:
        """The directory in which the commands of the task start."""
        return self._defaults.workdir

    @property
    def user(self) -> str:
        """The user who runs the commands of the task; empty for root."""
        return self._defaults.user

    @property
    def services(self) -> list[str]:
        """The names of the task's services besides `main`."""
        return [] if self.group is None else [name for name in self.group.slots if name != MAIN]

    def slot_of(self, service: str | None) -> Slot:
        """Return the slot of a service. Raises `ConfigError` for a service that the task does not have."""
        if service in (None, MAIN):
            return self.slot
        if service not in self.services:
            raise ConfigError(f"the task has no service {service!r:.100}. Its services: {', '.join(self.services)}")
        assert self.group is not None
        return self.group.slots[str(service)]

    def defaults(self, service: str | None = None) -> CommandDefaults:
        """Return the directory, user and variables of a service's commands. The variables of `main` are those of its
        slot, and are not repeated."""
        if service in (None, MAIN):
            return self._defaults
        assert self.group is not None
        each = self.group.plan.services[str(service)]
        return CommandDefaults(each.workdir, each.user, each.env)

    async def execute(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout_s: float | None = None,
        service: str | None = None,
        on_output: Callable[[bytes], None] | None = None,
    ) -> ExecutionResult:
        """Run a command line with bash. Standard error is in `metadata["stderr"]`, unless `on_output` gets both streams
        as one. `timeout_s` None means no limit. A missing `cwd` gives exit code 126, as a container runtime's does."""
        slot, defaults = self.slot_of(service), self.defaults(service)
        user = defaults.user if user is None else user
        variables = {**({} if service in (None, MAIN) else defaults.env), **(env or {})}
        if not is_root(user):
            own = {"HOME": await self._home(slot, user), "USER": user.partition(":")[0]}
            variables = {**own, **variables}
        try:
            return await slot.execute(
                command if is_root(user) else as_user(["bash", "-c", command], user),
                cwd=posixpath.join(defaults.workdir, cwd or ""),
                env=variables,
                timeout_s=min(timeout_s or math.inf, _LONGEST_S),
                max_output_bytes=OUTPUT_BYTES,
                spill=False,
                stderr=on_output is None,
                on_output=on_output,
            )
        except (FileNotFoundError, NotADirectoryError) as error:
            if isinstance(error, SandboxError):
                raise
            text = f"the directory {cwd or defaults.workdir} does not exist: {error}"
            return ExecutionResult(False, text, text, metadata={"exit_code": 126, "stdout": "", "stderr": text})

    async def upload_file(self, local: Path, path: str) -> None:
        """Copy a file to a path, or into it if it is a directory. Raises OSError."""
        await self.slot.upload(local, await self._target(local.name, path))

    async def upload_dir(self, local: Path, path: str) -> None:
        """Copy the contents of a directory into a directory. Links are copied as links. Raises OSError."""
        if not local.is_dir():
            raise NotADirectoryError(20, "it is not a directory", str(local))
        done = await transfer.upload_dir(self.slot, local, posixpath.join("/", path))
        _warn_left_out(done.left_out)

    async def download_file(self, path: str, local: Path, *, service: str | None = None) -> None:
        """Copy a file to a path on this machine, or into it if it is a directory. Raises OSError."""
        target = local / posixpath.basename(path) if local.is_dir() else local
        target.parent.mkdir(parents=True, exist_ok=True)
        await self.slot_of(service).download(posixpath.join("/", path), target)

    async def download_dir(self, path: str, local: Path, *, service: str | None = None) -> None:
        """Copy the contents of a directory into a directory on this machine. Raises OSError."""
        done = await transfer.download_dir(self.slot_of(service), posixpath.join("/", path), local)
        _warn_left_out(done.left_out)
        _remove_leading_out(local)

    async def freeze(self) -> None:
        """Suspend the processes of the task's own slot until its next command. The other services continue."""
        with suppress(SlotEnded):
            await self.slot.freeze()

    async def aclose(self) -> None:
        """End the sandbox with its processes, files and services. Idempotent."""
        if self._pool is not None:
            await self._pool.release(self.slot)
        while self.closers:
            await self.closers.pop()()

    async def _home(self, slot: Slot, user: str) -> str:
        if (slot.slot_id, user) not in self._homes:
            self._homes[slot.slot_id, user] = await home_of(slot, user)
        return self._homes[slot.slot_id, user]

    async def _target(self, name: str, path: str) -> str:
        full = posixpath.join("/", path)
        found = await self.slot.execute(["test", "-d", full], cwd="/", timeout_s=60)
        return posixpath.join(full, name) if full.endswith("/") or found.success else full


def _remove_leading_out(folder: Path) -> None:
    """Remove the links in a downloaded folder that lead out of it, because who reads the folder would follow them."""
    root = folder.resolve()
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *files)):
            if path.is_symlink() and not _stays_in(path, root):
                path.unlink()
                _log.warning("%s is left out: it is a link that leads out of the downloaded folder", path.name[:200])


def _stays_in(link: Path, root: Path) -> bool:
    try:
        return link.resolve().is_relative_to(root)
    except (OSError, RuntimeError):  # a loop of links
        return False


def _warn_left_out(paths: list[str]) -> None:
    if paths:
        _log.warning("%s are left out: they are neither files nor directories nor links", ", ".join(paths)[:500])
