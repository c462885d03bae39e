"""The sandbox `palaestra` of Inspect: each sample runs in a slot of its own, with `inspect eval task.py --sandbox
palaestra`.

The event loop of an evaluation has one pool of slots, which ends with the last task. A slot starts with the host's
system directories read-only, or with an image, and has no network unless the configuration allows one. Whatever a
sample names (files, paths, commands, users) is looked up in its slot alone.

A Dockerfile is built once, in a slot, if the configuration names a base for it. The services of a compose file have a
slot each, built in the same way; a key of the file that slots do not support is refused by its name. So are other users
below the isolation level `full`, a shell command to connect with, and Trio. A command that timed out is not repeated,
whatever `timeout_retry` is, because a slot does not lose commands.

Needs the package `inspect-ai`. Source: `inspect_ai.util.SandboxEnvironment` of Inspect 0.3.285.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import posixpath
import secrets
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

import yaml
from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxConnection,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
    concurrency,
    is_compose_yaml,
    sandboxenv,
)
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from palaestra import ConfigError, Sandbox, SandboxError, Slot
from palaestra_slots import ExecutionResult, ImageError, Rung, SlotPool, SlotPoolConfig
from palaestra_suites import TaskSandbox, TaskSandboxes, TaskSandboxSettings, TaskSandboxSpec

_log = logging.getLogger(__name__)

CONFIG_FILE = "palaestra-sandbox.yaml"
INSTEAD = "PALAESTRA_INSPECT_CONFIG"
"""The environment variable whose value is the configuration for samples that declare a Dockerfile or a compose file."""

_WORKDIR = "/workspace"
_PAGE = "docs/inspect.md"
_BUILD_S = 3600.0
_LONGEST_S = 7 * 24 * 3600.0
_MOST_OUTPUT, _MOST_STDIN = 16 << 20, 32 << 20
_SETPRIV = "/usr/bin/setpriv"
_CANNOT_RUN = 126
# Runs a command whose input is a file, of which nothing is left when the command starts.
_FROM_FILE = 'exec < "$1" && rm -f -- "$1" && shift && exec "$@"'


class PalaestraSandboxConfig(BaseModel):
    """The settings of the slots of a task or sample; see `palaestra.Sandbox`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    image: str | None = None
    """A root file system on this machine: a directory, a tar file or an OCI layout. Default: the host's programs."""
    base_image: str | None = None
    """What the Dockerfiles of samples and the services of their compose files are built over: a root file system,
    `host` (this machine's programs), or `from` (the image that is named there, from `palaestra images pull`)."""
    pull: Literal["never", "missing"] = "never"
    """Whether images that these files name are pulled if they are missing."""
    definition: str | None = None
    """The Dockerfile or compose file of a sample, which Inspect names."""
    network: bool | list[str] = False
    """Whether the slot has a network, or the only hosts that it may reach."""
    memory: str | int | None = None
    """The maximum memory in bytes, or with a unit, such as 512MB."""
    disk: str | int | None = None
    """The maximum size of the slot's own files, in bytes or with a unit."""
    cpus: float | None = None
    """The maximum number of cores."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables for all commands."""
    workdir: str | None = None
    """The directory where commands start and relative paths begin. Default: that of the Dockerfile, or /workspace."""
    isolation: str = "best"
    """The lowest isolation level that is acceptable: full, userns, confined or none."""


class _Pools:
    """The pool of each event loop, with the number of tasks that have it open."""

    def __init__(self) -> None:
        self._open: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[SlotPool, int]] = WeakKeyDictionary()

    async def open(self) -> None:
        """Count another task, for whose samples the pool starts. Raises `IsolationUnavailable`."""
        loop = _running_loop()
        pool, users = self._open.get(loop, (None, 0))
        pool = pool or SlotPool(SlotPoolConfig(acquire_timeout=_LONGEST_S))
        self._open[loop] = (pool, users + 1)
        try:
            await pool.start()
        except BaseException:
            await self.close()
            raise

    def running(self) -> SlotPool:
        """Return the pool of the running event loop."""
        found = self._open.get(_running_loop())
        if found is None:
            raise RuntimeError("the sandbox palaestra has no pool of slots: call task_init before sample_init")
        return found[0]

    async def close(self) -> None:
        """End the pool, with every slot, if this was its last task."""
        loop = _running_loop()
        pool, users = self._open.pop(loop, (None, 0))
        if pool is not None and users > 1:
            self._open[loop] = (pool, users - 1)
        elif pool is not None:
            await pool.aclose()


_POOLS = _Pools()


@sandboxenv(name="palaestra")
class PalaestraSandbox(SandboxEnvironment):  # type: ignore[misc]
    """A slot as a sandbox of Inspect. Commands start in `workdir`, and those without a user run as `user`, by default
    root. `env` has the variables of all commands that the slot does not set. `box`, if it is given, ends with the
    sample."""

    def __init__(
        self,
        slot: Slot,
        workdir: str = _WORKDIR,
        box: Sandbox | TaskSandbox | None = None,
        user: str = "",
        env: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.slot, self.workdir, self.box, self.user, self.env = slot, workdir, box, user, env or {}

    # The life of tasks and samples

    @classmethod
    async def task_init(cls, task_name: str, config: BaseModel | str | None) -> None:
        """Open the pool of slots. Raises `ConfigError` for an unusable configuration, and `IsolationUnavailable`."""
        settings = settings_of(config)
        if settings.image is not None and not Path(settings.image).exists():
            raise ImageError(
                f"the image {settings.image} of the sandbox palaestra does not exist: name a directory, a tar file or "
                f"an OCI layout on this machine"
            )
        _box(settings)
        if settings.definition is None:
            await _POOLS.open()
        elif is_compose_yaml(settings.definition):
            _default_service(Path(settings.definition))

    @classmethod
    async def sample_init(
        cls, task_name: str, config: BaseModel | str | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        """Lease a slot for a sample, and one for each further service of its compose file. The first sample with a
        Dockerfile waits until it is built."""
        settings = settings_of(config)
        if settings.definition is not None:
            file = Path(settings.definition)
            default = _default_service(file) if is_compose_yaml(settings.definition) else "default"
            built = await _built(settings, file, metadata)
            found = {default: cls(built.slot, settings.workdir or built.workdir, built, built.user)}
            for name in built.services:
                own = built.defaults(name)
                found[name] = cls(built.slot_of(name), own.workdir, None, own.user, own.env)
            return found
        workdir = settings.workdir or _WORKDIR
        box = await _box(settings, _POOLS.running()).__aenter__()
        try:
            await box.slot.make_dir(workdir)
        except BaseException:
            await box.__aexit__(None, None, None)
            raise
        return {"default": cls(box.slot, workdir, box)}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: BaseModel | str | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        """End the slots of a sample, with every process in them."""
        for each in environments.values():
            box = each.as_type(PalaestraSandbox).box
            if isinstance(box, TaskSandbox):
                await box.aclose()
            elif box is not None:
                await box.__aexit__(None, None, None)

    @classmethod
    async def task_cleanup(cls, task_name: str, config: BaseModel | str | None, cleanup: bool) -> None:
        """Close the pool when its last task ends. Slots end with the evaluation even if `cleanup` is false."""
        if not cleanup:
            _log.warning("the sandbox palaestra keeps no slots: they end with the evaluation (--no-sandbox-cleanup)")
        if settings_of(config).definition is None:
            await _POOLS.close()

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:  # noqa: A002  # Inspect passes it by name
        """Print that there is nothing to clean up, because slots end with the process that made them."""
        print("Sandboxes of palaestra end with the evaluation; there is nothing to clean up.")  # noqa: T201

    @classmethod
    def config_files(cls) -> list[str]:
        return [CONFIG_FILE]

    @classmethod
    def is_docker_compatible(cls) -> bool:
        """Return true, so that Inspect passes the Dockerfiles and compose files of tasks on. Otherwise it would run
        such a task without its image."""
        return True

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        return PalaestraSandboxConfig(**config)

    # Commands

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,  # noqa: A002  # the interface's name
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Run a command; with its end, at its timeout and on cancellation, its whole process tree ends too, except
        what it has detached, which ends with the sample. A missing program gives the exit code 127, and a missing
        `cwd` 126. Output beyond the limit raises OutputLimitExceededError with the head and tail of standard output.
        """
        stdin = input.encode() if isinstance(input, str) else input or b""
        limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        with _infrastructure():
            argv, extra = await self._as_user(list(cmd), user or self.user)
            if isinstance(argv, str):
                return ExecResult(False, _CANNOT_RUN, "", argv)
            if len(stdin) > _MOST_STDIN:
                path = f"/tmp/.stdin-{secrets.token_hex(8)}"  # noqa: S108  # in the slot
                await self.write_file(path, stdin)
                argv, stdin = ["/bin/sh", "-c", _FROM_FILE, "sh", path, *argv], b""
            async with _throttle(concurrency):
                try:
                    result = await self.slot.execute(
                        argv,
                        cwd=self._path(cwd or "."),
                        env={**self.env, **extra, **(env or {})},
                        stdin=stdin,
                        timeout_s=_LONGEST_S if timeout is None else max(timeout, 0.001),
                        max_output_bytes=min(limit, _MOST_OUTPUT),
                        spill=False,
                        stderr=True,
                    )
                except FileNotFoundError as error:  # the directory; a missing program is an exit code
                    return ExecResult(False, _CANNOT_RUN, "", f"{error}\n")
        return _exec_result(cmd, result, timeout, min(limit, _MOST_OUTPUT))

    async def _as_user(self, cmd: list[str], user: str | None) -> tuple[list[str] | str, dict[str, str]]:
        """Return the command and variables that run `cmd` as a user, or the error of an unknown user. Raises
        SandboxUserUnsupportedError if the slot has only root."""
        if user in (None, "", "root", "0"):
            return cmd, {}
        if self.slot.rung is not Rung.FULL or await self.slot.stat(_SETPRIV) is None:
            missing = "the isolation level full" if self.slot.rung is not Rung.FULL else f"{_SETPRIV} in the image"
            raise SandboxUserUnsupportedError(
                f"the sandbox palaestra cannot run a command as {user!r}: that needs {missing}; leave `user` out, or "
                f"use root"
            )
        assert user is not None
        for line in (await self.slot.read_text("/etc/passwd", missing="")).splitlines():
            name, _, uid, gid, *rest = [*line.split(":"), "", "", ""]
            if user in (name, uid) and uid.isdigit() and gid.isdigit():
                home = rest[1] if len(rest) > 1 and rest[1] else "/"
                known = {"HOME": home, "USER": name, "LOGNAME": name}
                return [_SETPRIV, f"--reuid={uid}", f"--regid={gid}", "--init-groups", "--", *cmd], known
        if user.isdigit():
            return [_SETPRIV, f"--reuid={user}", f"--regid={user}", "--clear-groups", "--", *cmd], {"HOME": "/"}
        return f"unable to find user {user}: no matching entries in passwd file\n", {}

    # Files

    async def write_file(self, file: str, contents: str | bytes) -> None:
        data = contents.encode() if isinstance(contents, str) else contents
        with _infrastructure():
            await self.slot.write_bytes(self._path(file), data)

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """Return a file's contents. A file that nobody may read raises PermissionError, even for the slot's root."""
        path, limit = self._path(file), SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        with _infrastructure():
            found = await self.slot.stat(path)
            if found is not None and found.kind == "file" and not found.mode & 0o444:
                raise PermissionError(errno.EACCES, "Permission denied", file)
            try:
                data = await self.slot.read_bytes(path, max_bytes=limit)
            except OSError as error:
                if error.errno != errno.EFBIG:
                    raise
                raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None) from None
        return data.decode() if text else data

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        """Raise NotImplementedError, because no command of the host opens a shell in a leased slot."""
        raise NotImplementedError("the sandbox palaestra offers no connection: a slot is only reached by its lease")

    def default_polling_interval(self) -> float:
        """Return the seconds between polls of a sandbox service; a call into a slot takes less than a millisecond."""
        return 0.2

    def _path(self, path: str) -> str:
        return posixpath.join(self.workdir, path)


def settings_of(config: BaseModel | str | None) -> PalaestraSandboxConfig:
    """Return the settings of a configuration: None, the model, a YAML file with its fields, or the path of an image.
    Raises `ConfigError`, also for the configurations of other sandboxes."""
    if config is None:
        return PalaestraSandboxConfig()
    if isinstance(config, PalaestraSandboxConfig):
        return config
    path = Path(config) if isinstance(config, str) else None
    if path is None or "dockerfile" in path.name.lower() or path.stem.endswith("compose"):
        if instead := os.environ.get(INSTEAD):
            return _instead(config, instead)
        builds = path is not None and _builds(path)
        way = f" with `base_image: host` or `base_image: from`, over which slots run it (see {_PAGE})"
        raise ConfigError(
            f"the sandbox palaestra does not run {config if path is not None else type(config).__name__} without "
            f"being told how: set {INSTEAD} to a {CONFIG_FILE}{way if builds else ''}, or to a root file system of its "
            "image (`docker build`, `docker create`, `docker export`)"
        )
    if path.suffix not in (".yaml", ".yml"):
        return PalaestraSandboxConfig(image=str(path.absolute()))
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        found = PalaestraSandboxConfig.model_validate(given)
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise ConfigError(f"the configuration {config} of the sandbox palaestra cannot be used: {error}") from None
    folder = path.parent.absolute()
    image = found.image and str(folder / found.image)
    base = found.base_image if found.base_image in (None, "host", "from") else str(folder / found.base_image)
    return found.model_copy(update={"image": image, "base_image": base, "definition": None})


def _instead(config: BaseModel | str, instead: str) -> PalaestraSandboxConfig:
    """Return the settings in the place of a Dockerfile or a compose file, or those by which it is built."""
    if Path(instead).stem.endswith("compose") or "dockerfile" in Path(instead).name.lower():
        raise ConfigError(f"{INSTEAD} must be the path of an image or of a {CONFIG_FILE}, not {instead}")
    settings = settings_of(instead)
    if settings.base_image is not None and isinstance(config, str) and _builds(Path(config)):
        return settings.model_copy(update={"definition": str(Path(config).absolute())})
    _log.info("the sandbox palaestra uses %s instead of %.100r", instead, config)
    return settings


def _builds(path: Path) -> bool:
    """Whether slots can run a file: a Dockerfile of the usual name, or a compose file."""
    return path.name == "Dockerfile" or bool(is_compose_yaml(str(path)))


def _default_service(file: Path) -> str:
    """Return the service of a compose file in which a sample's commands run by default: the one with `x-default`, or
    the one named `default`. Raises `ConfigError` if there is neither."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        services = dict(content["services"])
    except (OSError, yaml.YAMLError, TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"the compose file {file} cannot be read: {error!r:.300}") from None
    chosen = [name for name, fields in services.items() if isinstance(fields, dict) and fields.get("x-default")]
    if not chosen and "default" not in services:
        raise ConfigError(f"the compose file {file} has no service `default`, and none with `x-default: true`")
    return str(chosen[0]) if chosen else "default"


async def _built(settings: PalaestraSandboxConfig, file: Path, metadata: Mapping[str, str]) -> TaskSandbox:
    """Return a sandbox of the image that a Dockerfile builds, or of the services of a compose file. Raises
    `ImageError`, `TaskError` or `PrepareError` with the instruction that fails, or the key that slots do not
    support."""
    folder, spec = file.parent, _box(settings).spec
    sandboxes = await TaskSandboxes.of_loop(
        TaskSandboxSettings(base_image=settings.base_image, pull=settings.pull, isolation=settings.isolation)
    )
    wanted = TaskSandboxSpec(
        folder.name,
        folder,
        network=spec.network,
        limits=spec.limits,
        env=dict(spec.env),
        variables={f"SAMPLE_METADATA_{key.replace(' ', '_').upper()}": str(value) for key, value in metadata.items()},
        build_timeout_s=_BUILD_S,
    )
    if is_compose_yaml(str(file)):
        wanted = replace(wanted, compose=file.name, agents=_default_service(file))
    return await sandboxes.open(wanted)


def _box(settings: PalaestraSandboxConfig, pool: SlotPool | None = None) -> Sandbox:
    network = settings.network if isinstance(settings.network, list) else "on" if settings.network else "off"
    return Sandbox(
        image=settings.image,
        network=network,
        memory=settings.memory,
        disk=settings.disk,
        cpus=settings.cpus,
        env=settings.env,
        isolation=settings.isolation,
        pool=pool,
    )


def _exec_result(cmd: list[str], result: ExecutionResult, timeout: int | None, limit: int) -> ExecResult[str]:
    """Return a command's result in Inspect's type, or raise the error that Inspect documents for it."""
    stdout, stderr = str(result.metadata["stdout"]), str(result.metadata["stderr"])
    if result.metadata["timeout"]:
        raise TimeoutError(f"the command {cmd[0]} ran longer than {timeout} s and was killed")
    if result.exit_code == _CANNOT_RUN and "permission denied" in stderr.casefold():
        raise PermissionError(errno.EACCES, stderr.strip(), cmd[0])
    lost = " bytes left out …\n" in stderr and len(stderr.encode()) > limit
    if result.metadata["truncated"] or lost:
        size = f"{limit >> 20} MiB" if not limit % (1 << 20) else f"{limit} bytes"
        raise OutputLimitExceededError(size, stdout if result.metadata["truncated"] else stderr)
    return ExecResult(result.success, result.exit_code, stdout, stderr)


def _throttle(wanted: bool) -> AbstractAsyncContextManager[object]:
    """Return the limit of concurrent commands that Inspect's own local sandboxes share."""
    return concurrency("subprocesses", len(os.sched_getaffinity(0)), resizable=True) if wanted else nullcontext()


@contextmanager
def _infrastructure() -> Iterator[None]:
    """Raise failures of the slot as errors that Inspect never shows to a model as its own."""
    try:
        yield
    except SandboxError as error:
        raise SandboxUnavailableError(str(error)) from error


def _running_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError("the sandbox palaestra needs asyncio: unset INSPECT_ASYNC_BACKEND") from None
