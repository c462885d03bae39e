"""Slots in containers of docker daemons, many slots in each container.

A container is started with `docker run -i --rm`: it has docker's default privileges, no network unless its slots have
one, and ends with this process. Docker isolates it from the host. Slots in it are isolated from each other at the level
`confined`, which docker's default allows; `privileged` allows `full`, and gives up docker's own isolation.

The image needs Python 3.11 as `python3`. It is taken as the daemon has it, and pulled if it is missing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from palaestra.core.errors import ConfigError
from palaestra.core.types import JSON
from palaestra.sandbox.backends.remote import PlaceSpec, RemoteBackend, run_command
from palaestra.sandbox.backends.server_backend import levels
from palaestra.sandbox.slot import Rung, SlotSpec

LABEL = "palaestra.slots"
_CHECK_S = 15.0
_PULL_S = 1800.0


@dataclass(frozen=True, slots=True)
class ContainerLimits:
    """The resources of one container: all its slots together. `memory` as docker takes it (`2g`); None is no limit."""

    cpus: float | None = None
    memory: str | None = None
    pids: int = 4096


class DockerBackend(RemoteBackend):
    """Slots in docker containers. `hosts` are daemon addresses (`unix:///…`, `ssh://…`, `tcp://…`); empty is the
    daemon of the environment (`DOCKER_HOST`, the current context)."""

    name = "docker"

    def __init__(
        self,
        image: str | None = None,
        *,
        hosts: Sequence[str] = ("",),
        containers: int = 1,
        slots_per_container: int = 10,
        limits: ContainerLimits | None = None,
        privileged: bool = False,
        rung: Rung | None = None,
        require: Rung | None = None,
    ) -> None:
        super().__init__(
            hosts=hosts, image=image, places=containers, slots_per_place=slots_per_container, rung=rung, require=require
        )
        self._limits = limits or ContainerLimits()
        self._privileged = privileged

    @classmethod
    def from_config(cls, config: JSON) -> DockerBackend:
        """From the settings of a run."""
        rung, require = levels(config.isolation, config.require_sandbox)
        return cls(
            config.docker_image,
            hosts=config.docker_hosts or [""],
            containers=config.max_containers,
            slots_per_container=config.slots_per_container,
            limits=ContainerLimits(cpus=config.container_cpus, memory=config.container_memory),
            privileged=config.docker_privileged,
            rung=rung,
            require=require,
        )

    async def check(self, host: str) -> None:
        status, text = await run_command([*_docker(host), "version", "--format", "{{.Server.Version}}"], _CHECK_S)
        if status != 0:
            raise ConfigError(
                f"docker{f' at {host}' if host else ''} does not answer: {text}. Start it, or set DOCKER_HOST"
            )
        if self._image is not None:
            await self._pull(host, self._image)

    async def _pull(self, host: str, image: str) -> None:
        status, _ = await run_command([*_docker(host), "image", "inspect", image], _CHECK_S)
        if status != 0:
            status, text = await run_command([*_docker(host), "pull", "-q", image], _PULL_S)
            if status != 0:
                raise ConfigError(f"docker has no image {image} and cannot pull it: {text}")

    def place_spec(self, spec: SlotSpec) -> PlaceSpec:
        wanted = super().place_spec(spec)
        if wanted.image is None:
            raise ConfigError("docker needs an image: of the task, or one for all (--env.docker_image)")
        if os.path.isabs(wanted.image) or wanted.image.startswith("."):
            raise ConfigError(f"docker takes images by name, and {wanted.image} is a path: docker import it first")
        return wanted

    def command(self, place: PlaceSpec, call: Sequence[str]) -> Sequence[str]:
        assert place.image is not None
        limits = self._limits
        options = ["--network", "bridge" if place.network else "none", "--pids-limit", str(limits.pids)]
        options += [] if limits.cpus is None else ["--cpus", f"{limits.cpus:g}"]
        options += [] if limits.memory is None else ["--memory", limits.memory]
        options += ["--privileged"] if self._privileged else []
        for mount in place.mounts:
            options += ["--volume", f"{mount.source}:{mount.target}:ro"]
        entry, *arguments = call
        start = ["run", "--interactive", "--rm", "--init", "--label", f"{LABEL}={os.getpid()}", "--user", "0"]
        return [*_docker(place.host), *start, *options, "--entrypoint", entry, place.image, *arguments]


def _docker(host: str) -> list[str]:
    return ["docker", "--host", host] if host else ["docker"]
