"""`NomadToolBackend`: a pool whose slots run on Nomad. Atropos and Hermes use the same class name."""

from __future__ import annotations

from palaestra.sandbox.backends.nomad import NomadBackend, NomadBackendConfig
from palaestra.sandbox.pool import SlotPool, SlotPoolConfig


class NomadToolBackend(SlotPool):
    """A pool whose slots run in Nomad jobs, with one job for each image."""

    def __init__(self, config: NomadBackendConfig | None = None) -> None:
        settings = config or NomadBackendConfig()
        slots = settings.slots_per_container * settings.max_containers
        super().__init__(
            SlotPoolConfig(max_slots=slots, acquire_timeout=settings.acquire_timeout_s), NomadBackend(settings)
        )
