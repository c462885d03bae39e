"""Runs slots in containers of docker daemons, with many slots in each container.

A container is started with `docker run -i --rm` and ends with this process. It has docker's default privileges, and it
has a network only if its slots have one. Docker isolates it from the host. Slots in a container are isolated from each
other at the level `confined`, which docker allows by default. `privileged` adds the rights to make namespaces and
control groups. Slots then reach `userns`, or `full` for images given by path, but docker's own isolation is weaker.
`runtime` selects a runtime other than the daemon's default, such as gVisor's `runsc`; the first container shows which
level that runtime allows.

An image given by name is the container's image, and needs Python 3.11 or newer as `python3`. It is pulled if the daemon
lacks it. An image given by path (a root directory, a tar file, an OCI layout, or a folder with a Dockerfile, which the
daemon builds) is the root of the slots, which run in a container of the backend's own image. Such an image needs no
Python, and slots can change everything in it, but it requires `privileged` and a daemon on this machine.

With `privileged` and daemons on this machine, slots of all containers can be joined by networks of their own
(`SlotSpec.group`). The slot servers make these networks, as they do for local slots: docker's networks join containers,
in which the slots of a group could not be kept apart from other slots. A server hands its networks to the others over
sockets in one folder, which no slot has and which ends with the backend.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from palaestra_slots.core.errors import ConfigError, ImageError, SandboxError
from palaestra_slots.core.io.host_process import run_process
from palaestra_slots.core.io.temporary_folder import TemporaryFolder
from palaestra_slots.core.types import JSON, Limits
from palaestra_slots.sandbox.backends.owner import is_alive, process_name, this_host
from palaestra_slots.sandbox.backends.remote import Place, PlaceSpec, RemoteBackend, bound, run_command
from palaestra_slots.sandbox.creation_gate import CreationGate
from palaestra_slots.sandbox.images.image_folders import default_folder
from palaestra_slots.sandbox.images.image_store import ImageStore
from palaestra_slots.sandbox.images.reference import check_image, is_path
from palaestra_slots.sandbox.server_backend import levels
from palaestra_slots.sandbox.slot import Mount, Rung, Slot, SlotSpec, Snapshot

LABEL = "palaestra.slots"
"""The label of each container; its value names the owner as `HOST/PROCESS`."""

_log = logging.getLogger(__name__)
_CHECK_S = 15.0
_PULL_S = 1800.0
_LEAST_PIDS, _SERVER_PIDS = 4096, 512
_RIGHTS = (
    "--cap-add", "SYS_ADMIN", "--cap-add", "NET_ADMIN", "--cap-add", "SYS_PTRACE", "--cgroupns", "host",
    "--security-opt", "apparmor=unconfined", "--volume", "/sys/fs/cgroup:/sys/fs/cgroup",
)  # fmt: skip
"""The options that a container needs for slots at the levels `userns` and `full`. SYS_PTRACE lets the server enter the
network of a slot whose processes have given up their rights."""

_GROUPS = "/palaestra-groups"
"""Where a container has the folder through which its server and those of other containers join slots."""


@dataclass(frozen=True, slots=True)
class ContainerOptions:
    """How containers are run. `cpus`, `memory` (in docker's notation: `2g`) and `pids` limit one container with all its
    slots. None means no limit, except for `pids`, which then defaults to the number of processes that the server and
    the slots may have. `runtime` is the name of an OCI runtime that the daemon knows; None means its default."""

    cpus: float | None = None
    memory: str | None = None
    pids: int | None = None
    privileged: bool = False
    runtime: str | None = None


class DockerPlace(Place):
    """A container. While a registry refuses pulls, fewer of them start."""

    joins_fix = "set docker_privileged with a docker daemon on this machine, or use the backend local"

    async def open(self, gate: CreationGate) -> None:
        try:
            await super().open(gate)
        except SandboxError as error:
            if "toomanyrequests" in str(error):  # the registry's code for status 429
                await gate.throttled()
            raise


class JoiningPlace(DockerPlace):
    """A container whose slots can be joined to each other and to those of other containers."""

    joins_slots = True

    def server_settings(self) -> dict[str, JSON]:
        return {**super().server_settings(), "groups": _GROUPS}


class PathRoots:
    """The root directories of the images given by path, each of which is unpacked once."""

    def __init__(self) -> None:
        self.directories: dict[str, str] = {}
        self._store: ImageStore | None = None
        self._unpacking = asyncio.Lock()

    async def prepare(self, image: str, build: Callable[[str], Awaitable[str]]) -> None:
        """Unpack the image whose path `build` returns, unless that has already been done. Raises `ImageError`."""
        async with self._unpacking:
            if image not in self.directories:
                self._store = self._store or ImageStore()
                self.directories[image] = await self._store.directory(await build(image))

    async def aclose(self) -> None:
        """Release the images. Idempotent."""
        store, self._store = self._store, None
        self.directories.clear()
        if store is not None:
            await store.aclose()


class DockerBackend(RemoteBackend):
    """Slots in docker containers. `hosts` are daemon addresses (`unix:///…`, `ssh://…`, `tcp://…`). An empty address,
    the default, means the daemon that docker itself would use (`DOCKER_HOST`, or the current context)."""

    name = "docker"

    def __init__(
        self,
        image: str | None = None,
        *,
        hosts: Sequence[str] = ("",),
        containers: int = 1,
        slots_per_container: int = 10,
        options: ContainerOptions = ContainerOptions(),
        rung: Rung | None = None,
        require: Rung | None = None,
    ) -> None:
        super().__init__(
            hosts=hosts, image=image, places=containers, slots_per_place=slots_per_container, rung=rung, require=require
        )
        self._options = options
        self.image_kinds = ("name", "path") if options.privileged else ("name",)
        self._roots = PathRoots()
        self._groups: TemporaryFolder | None = None

    @classmethod
    def from_config(cls, config: JSON) -> DockerBackend:
        """Return the backend for the settings of a run."""
        rung, require = levels(config.isolation, config.require_sandbox)
        return cls(
            config.docker_image,
            hosts=config.docker_hosts or [""],
            containers=config.max_containers,
            slots_per_container=config.slots_per_container,
            options=ContainerOptions(
                cpus=config.container_cpus,
                memory=config.container_memory,
                privileged=config.docker_privileged,
                runtime=config.docker_runtime,
            ),
            rung=rung,
            require=require,
        )

    @property
    def level_fix(self) -> str:
        if self._options.privileged:
            return "give the image as a path for the level full, or request a lower level (isolation)"
        return "set docker_privileged, or request a lower level (isolation, require_sandbox)"

    async def check(self, host: str) -> None:
        status, text = await run_command([*_docker(host), "version", "--format", "{{.Server.Version}}"], _CHECK_S)
        if status != 0:
            which = f"docker at {host}" if host else "docker"
            raise ConfigError(f"{which} does not answer: {text.rstrip('.')}. Start it, or set DOCKER_HOST")
        if self._options.runtime is not None:
            await self._require_runtime(host, self._options.runtime)
        await self._end_leftovers(host)
        if self._image is not None:
            await self._pull(host, self._image)

    async def _require_runtime(self, host: str, name: str) -> None:
        _, text = await run_command([*_docker(host), "info", "--format", "{{json .Runtimes}}"], _CHECK_S)
        known = sorted(json.loads(text))
        if name not in known:
            raise ConfigError(
                f"docker has no runtime {name!r}, only {', '.join(known)}: register it with the daemon, "
                "or set another docker_runtime"
            )

    async def _end_leftovers(self, host: str) -> None:
        """Remove the containers whose owner was a process on this machine that no longer runs."""
        listing = ["ps", "--all", "--filter", f"label={LABEL}", "--format", f'{{{{.ID}}}} {{{{.Label "{LABEL}"}}}}']
        for line in (await run_process([*_docker(host), *listing], timeout_s=_CHECK_S)).text.splitlines():
            container, _, owner = line.partition(" ")
            machine, _, process = owner.partition("/")
            # Other machines may use the same daemon, and only they know which of their processes live.
            if machine == this_host() and not is_alive(process):
                _log.warning("removing the container %s, because the process that owned it is gone", container)
                await run_command([*_docker(host), "rm", "--force", container], _CHECK_S)

    async def _pull(self, host: str, image: str) -> None:
        check_image(image)
        status, _ = await run_command([*_docker(host), "image", "inspect", image], _CHECK_S)
        if status != 0:
            status, text = await run_command([*_docker(host), "pull", "-q", image], _PULL_S)
            if status != 0:
                raise ConfigError(f"docker has no image {image} and cannot pull it: {text}")

    async def create(self, spec: SlotSpec, trajectory_id: str, snapshot: Snapshot | None = None) -> Slot:
        if spec.image is not None and is_path(spec.image):
            await self._prepare(spec.image)
        return await super().create(spec, trajectory_id, snapshot)

    def make_place(self, spec: PlaceSpec, number: int, rung: Rung | None) -> Place:
        kind = JoiningPlace if self._joins else DockerPlace
        return kind(self, spec, number, rung=rung, require=self._required)

    @property
    def _joins(self) -> bool:
        """Whether slots can be joined."""
        return self._options.privileged and self._is_here

    def _group_folder(self) -> Path:
        self._groups = self._groups or TemporaryFolder("docker-groups")
        return self._groups.path

    @property
    def _is_here(self) -> bool:
        """Whether the daemons are on this machine."""
        return all(not host or host.startswith("unix://") for host in self.hosts.names)

    async def _prepare(self, image: str) -> None:
        """Unpack an image given by path, unless that has already been done."""
        if not self._options.privileged:
            raise ConfigError(
                f"the image {image} is a path, and docker can use a path as the root of slots only with "
                "docker_privileged: set it, or give the image by name"
            )
        if not self._is_here:
            raise ConfigError(
                f"the image {image} is a path, and a docker host is another machine: give the image by name"
            )
        await self._roots.prepare(image, self._built)

    async def _built(self, folder: str) -> str:
        """Return an image's path. If it is a folder with a Dockerfile, the first daemon builds the image and exports it
        to a tar file, whose path is returned."""
        if not os.path.isfile(os.path.join(folder, "Dockerfile")):
            return folder
        docker, host = _docker(self.hosts.names[0]), self.hosts.names[0]
        tag = f"palaestra-build:{hashlib.sha256(os.path.realpath(folder).encode()).hexdigest()[:16]}"
        await build_docker_image(folder, tag, host=host)
        status, made = await run_command([*docker, "image", "inspect", "--format", "{{.Id}}", tag], _CHECK_S)
        archive = Path(default_folder("docker"), f"{made.removeprefix('sha256:')[:32]}.tar")
        if status == 0 and not archive.exists():
            archive.parent.mkdir(parents=True, exist_ok=True)
            # A container of an image without a command needs one to be created; it never runs.
            status, container = await run_command([*docker, "create", "--label", f"{LABEL}=build", tag, "x"], _CHECK_S)
            part = archive.with_suffix(f".{os.getpid()}")
            if status == 0:
                status, made = await run_command([*docker, "export", "--output", str(part), container], _PULL_S)
                await run_command([*docker, "rm", "--force", container], _CHECK_S)
            if status == 0:
                part.replace(archive)
        if status != 0:
            raise ImageError(f"docker cannot export the image that it built from {folder}: {made}")
        return str(archive)

    async def aclose(self) -> None:
        await super().aclose()
        groups, self._groups = self._groups, None
        if groups is not None:
            groups.cleanup()
        await self._roots.aclose()

    def place_spec(self, spec: SlotSpec) -> PlaceSpec:
        by_path = spec.image if spec.image is not None and is_path(spec.image) else None
        wanted = super().place_spec(spec if by_path is None else replace(spec, image=None))
        if wanted.image is None:
            raise ConfigError("docker needs an image: set docker_image, or use tasks with an image")
        if by_path is None:
            return wanted
        root = self._roots.directories[by_path]
        return replace(wanted, root=root, mounts=(*wanted.mounts, Mount(root, root)))

    def command(self, place: PlaceSpec, call: Sequence[str]) -> Sequence[str]:
        assert place.image is not None
        check_image(place.image)
        limits = self._options
        pids = limits.pids or max(_LEAST_PIDS, self._per_place * (Limits().pids or 0) + _SERVER_PIDS)
        options = ["--network", "bridge" if place.network else "none", "--pids-limit", str(pids)]
        options += [] if limits.cpus is None else ["--cpus", f"{limits.cpus:g}"]
        options += [] if limits.memory is None else ["--memory", limits.memory]
        options += _RIGHTS if self._options.privileged else []
        options += ["--volume", f"{self._group_folder()}:{_GROUPS}"] if self._joins else []
        options += [] if self._options.runtime is None else ["--runtime", self._options.runtime]
        for mount in place.mounts:
            options += ["--volume", bound(mount, ":")]
        entry, *arguments = call
        owner = f"{this_host()}/{process_name(os.getpid())}"
        # The first process of a container inherits all orphans in it. With `--init`, that is a program that reaps them.
        start = ["run", "--interactive", "--rm", "--init", "--label", f"{LABEL}={owner}", "--user", "0"]
        return [*_docker(place.host), *start, *options, "--entrypoint", entry, place.image, *arguments]


async def build_docker_image(folder: str | Path, tag: str, *, timeout_s: float = _PULL_S, host: str = "") -> None:
    """Build an image from a folder's Dockerfile, or from a Dockerfile in its folder. If that fails, raises `ImageError`
    with the end of the build's output."""
    check_image(tag)
    path = os.path.abspath(folder)
    source = ["--file", path, os.path.dirname(path)] if os.path.isfile(path) else [path]
    command = [*_docker(host), "build", "--quiet", "--tag", tag, *source]
    status, text = await run_command(command, timeout_s)
    if status != 0:
        raise ImageError(f"docker cannot build {folder}: {text}")


async def docker_image_exists(tag: str, *, host: str = "") -> bool:
    """Return whether the daemon at `host` has the image `tag`."""
    check_image(tag)
    status, _ = await run_command([*_docker(host), "image", "inspect", tag], _CHECK_S)
    return status == 0


def _docker(host: str) -> list[str]:
    return ["docker", "--host", host] if host else ["docker"]
