"""`DockerDirectBackend`: a pool of docker containers. Programs written for Atropos and Hermes use this class name."""

from __future__ import annotations

from palaestra.sandbox.backends.docker import DockerBackend
from palaestra.sandbox.pool import SlotPool, SlotPoolConfig
from palaestra.sandbox.slot import Backend


class DockerDirectBackend(SlotPool):
    """A pool of slots in docker containers. A trajectory with a registered image gets a slot in a container of that
    image; an image given as a path becomes the slot's root."""

    def __init__(self, backend: Backend | None = None, config: SlotPoolConfig | None = None) -> None:
        super().__init__(config, backend or DockerBackend())
