"""The services of a terminal task, independent of the format on disk. Does no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from palaestra_slots.core.types import Limits
from palaestra_slots.images.dockerfile import ImageRecipe

MAIN = "main"
"""The name of the service in which the agent works."""


class Condition(StrEnum):
    """What a service waits for before it starts."""

    STARTED = "service_started"
    HEALTHY = "service_healthy"
    COMPLETED = "service_completed_successfully"


class Restart(StrEnum):
    """When the program of a service is started again after its end."""

    NEVER = "no"
    ON_FAILURE = "on-failure"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """A command that exits with 0 once its service is ready. Times are in seconds. The service is unhealthy after
    `retries` failures in a row, of which those in the first `start_s` seconds do not count."""

    command: tuple[str, ...]
    interval_s: float = 30.0
    timeout_s: float = 30.0
    retries: int = 3
    start_s: float = 0.0

    @property
    def longest_s(self) -> float:
        """The time after which a service without a success is unhealthy."""
        return self.start_s + self.retries * (self.interval_s + self.timeout_s)


@dataclass(frozen=True, slots=True)
class Service:
    """One service. None stands for the setting of its image.

    `names` are its names for each other service that shares a network with it: the service's own name is among them.
    `copies` are files and directories of the task's folder and the paths to which they are copied; `folders` are made
    if they are missing. `hosts` are further names and addresses. `restarts` is the maximum number of restarts.
    """

    name: str
    recipe: ImageRecipe
    env: Mapping[str, str] = field(default_factory=dict)
    entrypoint: tuple[str, ...] | None = None
    command: tuple[str, ...] | None = None
    workdir: str | None = None
    user: str | None = None
    after: Mapping[str, Condition] = field(default_factory=dict)
    health: HealthCheck | None = None
    restart: Restart = Restart.NEVER
    restarts: int | None = None
    names: tuple[str, ...] = ()
    copies: tuple[tuple[Path, str], ...] = ()
    folders: tuple[str, ...] = ()
    hosts: tuple[tuple[str, str], ...] = ()
    limits: Limits = Limits()
    online: bool = True
    """Whether it has the network that the agent has; false if all its networks are internal."""


def in_order(services: Mapping[str, Service]) -> list[Service]:
    """Return the services such that each one follows those for which it waits. Raises ValueError for a circle."""
    found: list[Service] = []
    left = dict(sorted(services.items()))
    while left:
        ready = [each for each in left.values() if not any(name in left for name in each.after)]
        if not ready:
            raise ValueError(f"the services {', '.join(left)} wait for each other")
        found += ready
        for each in ready:
            del left[each.name]
    return found
