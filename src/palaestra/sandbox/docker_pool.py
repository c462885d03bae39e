"""`DockerDirectBackend`: a pool in which each trajectory can have its own docker image. Programs written for Atropos
and Hermes use this class name."""

from __future__ import annotations

from dataclasses import replace

from palaestra.sandbox.backends.docker import DockerBackend
from palaestra.sandbox.pool import SlotPool, SlotPoolConfig
from palaestra.sandbox.slot import Backend, Slot, SlotSpec, Snapshot


class DockerDirectBackend(SlotPool):
    """A pool of slots in docker containers. A trajectory with a registered image gets a slot in a container of that
    image; an image given as a path becomes the slot's root."""

    def __init__(self, backend: Backend | None = None, config: SlotPoolConfig | None = None) -> None:
        super().__init__(config, backend or DockerBackend())
        self._registered: dict[str, str] = {}

    def register_image(self, trajectory_id: str, image: str) -> None:
        """Set the image of the next slot of a trajectory."""
        self._registered[trajectory_id] = image

    async def make(self, spec: SlotSpec, trajectory_id: str, snapshot: Snapshot | None) -> Slot:
        """Return a slot with the trajectory's image, unless `spec` names an image or `snapshot` is given."""
        if spec.image is None and snapshot is None:
            spec = replace(spec, image=self._registered.get(trajectory_id))
        return await super().make(spec, trajectory_id, snapshot)

    async def release(self, slot: Slot, reset_workspace: bool = False) -> None:
        """End a lease and its slot, and forget the trajectory's image."""
        self._registered.pop(slot.trajectory_id, None)
        await super().release(slot, reset_workspace)
