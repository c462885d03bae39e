"""Lets Harbor run its tasks and agents in Palaestra's sandboxes, without Docker.

    harbor run -p TASKS -a oracle -e palaestra_integrations.harbor:PalaestraEnvironment --ek base_image=host

Harbor's own trial runs: its agents, verifier, artifacts, timeouts and results. An environment is one sandbox, with a
sandbox for each service of a compose file. All environments of a process share one pool of slots, which starts with the
first one. What a sandbox cannot do is refused with an error that names it; nothing is silently ignored.

Needs the package `harbor`. Source: `BaseEnvironment` of Harbor 0.26.
"""

from __future__ import annotations

import asyncio
import codecs
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.environments.definition import require_agent_environment_definition
from harbor.environments.options import EnvironmentOptions
from harbor.models.task.config import NetworkMode
from harbor.models.trial.config import ResourceMode

from palaestra import ConfigError, PalaestraError
from palaestra_slots import AllowList, Limits, Mount, Network
from palaestra_suites import TaskSandbox, TaskSandboxes, TaskSandboxSettings, TaskSandboxSpec


class PalaestraOptions(EnvironmentOptions, TaskSandboxSettings):  # type: ignore[misc]
    """The options of `--ek NAME=VALUE`: those of `TaskSandboxSettings`."""

    def settings(self) -> TaskSandboxSettings:
        """Return the options without those of Harbor."""
        return TaskSandboxSettings(**{name: getattr(self, name) for name in TaskSandboxSettings.model_fields})


class PalaestraEnvironment(BaseEnvironment):  # type: ignore[misc]
    """A task's sandbox on this machine."""

    options_model = PalaestraOptions
    options: PalaestraOptions

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._box: TaskSandbox | None = None
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return "palaestra"

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True, fractional_cpus=True)

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        """Lists of hosts need root."""
        lists = os.geteuid() == 0
        return EnvironmentCapabilities(
            disable_internet=True,
            network_allowlist=lists,
            network_allowlist_hostnames=lists,
            network_allowlist_wildcard_hostnames=lists,
            network_allowlist_ipv4_addresses=lists,
            network_allowlist_ipv4_cidrs=lists,
            docker_compose=True,
        )

    @property
    def _uses_compose(self) -> bool:
        return bool((self.environment_dir / "docker-compose.yaml").is_file())

    @classmethod
    def preflight(cls, kwargs: dict[str, Any] | None = None) -> None:
        """Check the options. Raises ValueError for an invalid one."""
        super().preflight(kwargs)
        TaskSandboxes(cls.parse_options(kwargs).settings())

    def _validate_definition(self) -> None:
        """Check the task's definition and the mounts. Raises FileNotFoundError, or `ConfigError` for what sandboxes do
        not have."""
        require_agent_environment_definition(self.environment_dir, docker_image=self.task_env_config.docker_image)
        if self.extra_docker_compose_paths:
            raise ConfigError("--extra-docker-compose is not supported: put the services into docker-compose.yaml")
        self._user_mounts()

    def _user_mounts(self) -> tuple[Mount, ...]:
        """Return the mounts of `--mounts`. Raises `ConfigError` for one that is not a read-only directory."""
        for each in self._host_mounts:
            if each.get("type") != "bind" or not each.get("read_only") or not Path(each["source"]).is_dir():
                raise ConfigError(
                    f"--mounts: {each['target']} must be a directory of this machine with type `bind` and `read_only` "
                    "true, because sandboxes have no other mounts"
                )
        return tuple(Mount(str(Path(each["source"]).absolute()), each["target"]) for each in self._host_mounts)

    async def start(self, force_build: bool) -> None:
        """Build the task's image if necessary, and start its sandbox with its services."""
        try:
            sandboxes = await TaskSandboxes.of_loop(self.options.settings())
            self._box = await sandboxes.open(self._spec(force_build))
        except PalaestraError as error:
            raise RuntimeError(_in_harbors_words(error)) from error
        await self._upload_environment_dir_after_start()
        await self.ensure_dirs(self._mount_targets(writable_only=True))

    def _spec(self, force_build: bool) -> TaskSandboxSpec:
        config = self.task_env_config
        given = {"CPUS": self._effective_cpus, "MEMORY": self._effective_memory_mb}
        suffix = {"CPUS": "", "MEMORY": "m"}
        return TaskSandboxSpec(
            name=_image_name(self.environment_name, self.environment_dir),
            folder=self.environment_dir,
            image=config.docker_image,
            build_timeout_s=config.build_timeout_sec,
            force_build=force_build,
            network=self._slot_network(),
            limits=self._limits(),
            mounts=self._user_mounts(),
            env=self._startup_env(),
            variables={name: f"{value}{suffix[name]}" for name, value in given.items() if value is not None},
        )

    def _limits(self) -> Limits:
        standard, storage = Limits(), self._effective_storage_mb
        memory = self._resource_limit_value("memory", auto_mode=ResourceMode.LIMIT)
        return Limits(
            memory_bytes=standard.memory_bytes if memory is None else memory << 20,
            cpus=self._resource_limit_value("cpu", auto_mode=ResourceMode.LIMIT),
            disk_bytes=standard.disk_bytes if storage is None else storage << 20,
        )

    def _slot_network(self) -> Network | AllowList:
        policy = self.network_policy
        if policy.network_mode == NetworkMode.ALLOWLIST:
            return (
                AllowList(tuple(f"{host}:*" for host in policy.allowed_hosts)) if policy.allowed_hosts else Network.OFF
            )
        return Network.OFF if policy.network_mode == NetworkMode.NO_NETWORK else Network.ON

    async def stop(self, delete: bool) -> None:
        """End the sandbox. Idempotent. A sandbox cannot outlive its trial, so `delete` False is only reported."""
        box, self._box = self._box, None
        if box is None:
            return
        if not delete:
            self.logger.warning("--no-delete has no effect: a sandbox ends with its trial")
        await box.aclose()

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command in the sandbox. Raises RuntimeError after the timeout, as Harbor's Docker environment does."""
        cwd, user = cwd or self.task_env_config.workdir, self._resolve_user(user)
        return await self._execute(command, None, cwd, self._merge_env(env), timeout_sec, user)

    async def service_exec(
        self,
        command: str,
        *,
        service: str | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command in a service, with the service's directory, user and variables."""
        if self.is_main_service(service):
            return await self.exec(command, cwd, env, timeout_sec, user)
        return await self._execute(command, service, cwd, env, timeout_sec, user)

    async def _execute(
        self,
        command: str,
        service: str | None,
        cwd: str | None,
        env: dict[str, str] | None,
        timeout_sec: int | None,
        user: str | int | None,
    ) -> ExecResult:
        async with self._streamed() as on_output:
            result = await self._running().execute(
                command,
                cwd=cwd,
                env=env,
                user=None if user is None else str(user),
                timeout_s=timeout_sec,
                service=service,
                on_output=on_output,
            )
        if result.metadata.get("timeout"):
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
        if result.metadata.get("truncated"):
            self.logger.warning("a command printed more than is kept; the middle of its output is missing")
        return ExecResult(
            stdout=result.metadata.get("stdout", result.output),
            stderr=result.metadata.get("stderr", ""),
            return_code=result.exit_code,
        )

    @asynccontextmanager
    async def _streamed(self) -> AsyncIterator[Callable[[bytes], None] | None]:
        """Yield a function that passes output on to Harbor's callback as it arrives; None without a callback."""
        callback = self._output_callback()
        if callback is None:
            yield None
            return
        pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        decoder = codecs.getincrementaldecoder("utf-8")("replace")

        async def pass_on() -> None:
            while (piece := await pieces.get()) is not None:
                if text := decoder.decode(piece):
                    await callback(text, "stdout")

        async with asyncio.TaskGroup() as group:
            group.create_task(pass_on())
            try:
                yield pieces.put_nowait
            finally:
                pieces.put_nowait(None)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self._running().upload_file(Path(source_path), target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._running().upload_dir(Path(source_dir), target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await self._running().download_file(source_path, Path(target_path))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self._running().download_dir(source_dir, Path(target_dir))

    async def service_download_file(
        self, source_path: str, target_path: Path | str, *, service: str | None = None
    ) -> None:
        await self._running().download_file(source_path, Path(target_path), service=service)

    async def service_download_dir(
        self, source_dir: str, target_dir: Path | str, *, service: str | None = None
    ) -> None:
        await self._running().download_dir(source_dir, Path(target_dir), service=service)

    async def stop_service(self, service: str) -> None:
        """Suspend the processes of the task's own slot. Raises `ConfigError` for another service."""
        if not self.is_main_service(service):
            raise ConfigError(f"only the service main can be stopped, not {service!r:.100}")
        await self._running().freeze()

    def _running(self) -> TaskSandbox:
        if self._box is None:
            raise RuntimeError("the environment has not started, or has stopped; call start() first")
        return self._box


def _image_name(task: str, folder: Path) -> str:
    """Return the name of a task's prebuilt root file system: TASK, or TASK.verifier and TASK.STEP.verifier for a
    separate verifier with an image of its own. `folder` is the folder of its Dockerfile."""
    if folder.name != "tests":
        return task
    step = [folder.parent.name] if folder.parent.parent.name == "steps" else []
    return ".".join([task, *step, "verifier"])


def _in_harbors_words(error: PalaestraError) -> str:
    """Return the text of an error with the options of Harbor instead of those of `palaestra eval`."""
    return str(error).replace("--env.base_image host", "--ek base_image=host").replace("--env.", "--ek ")
