"""Pools by the names that Atropos and Hermes use, and `create_tool_backend`, which chooses one."""

from __future__ import annotations

from palaestra.envs.config.build import make_pool
from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra_cloud.nomad import NomadBackend, NomadBackendConfig
from palaestra_slots.sandbox.backends.docker import DockerBackend
from palaestra_slots.sandbox.pool import SlotPool, SlotPoolConfig
from palaestra_slots.sandbox.slot import Backend


class DockerDirectBackend(SlotPool):
    """A pool of slots in docker containers. A trajectory with a registered image gets a slot in a container of that
    image; an image given as a path becomes the slot's root."""

    def __init__(self, backend: Backend | None = None, config: SlotPoolConfig | None = None) -> None:
        super().__init__(config, backend or DockerBackend())


class NomadToolBackend(SlotPool):
    """A pool whose slots run in Nomad jobs, with one job for each image."""

    def __init__(self, config: NomadBackendConfig | None = None) -> None:
        settings = config or NomadBackendConfig()
        slots = settings.slots_per_container * settings.max_containers
        super().__init__(
            SlotPoolConfig(max_slots=slots, acquire_timeout=settings.acquire_timeout_s), NomadBackend(settings)
        )


def create_tool_backend(config: HermesAgentEnvConfig) -> SlotPool:
    """Return the slots of a run with this configuration, not yet started. Existing scripts call this function; unlike
    `make_pool`, it checks the configuration first.

    Raises `ConfigError` if no run can start with this configuration.
    """
    config.check_runnable()
    pool = make_pool(config)
    return DockerDirectBackend(pool.backend, pool.config) if config.slot_backend == "docker_direct" else pool
