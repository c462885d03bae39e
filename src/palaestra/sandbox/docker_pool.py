"""The contract's pool of docker containers whose trajectories have images of their own."""

from __future__ import annotations

from collections.abc import Callable

from palaestra.sandbox.backends.docker import DockerBackend
from palaestra.sandbox.pool import SlotPool, SlotPoolConfig
from palaestra.sandbox.slot import Backend, Slot, SlotSpec, Snapshot


class DockerDirectBackend(SlotPool):
    """A pool over docker. A trajectory with a registered image has its slot in a container of that image, or with that
    root if it is a path."""

    def __init__(self, backend: Backend | None = None, config: SlotPoolConfig | None = None) -> None:
        super().__init__(config, backend or DockerBackend())
        self._registered: dict[str, str] = {}

    def register_image(self, trajectory_id: str, image: str) -> None:
        """Set the image of the next slot of a trajectory."""
        self._registered[trajectory_id] = image

    async def acquire(
        self,
        trajectory_id: str,
        *,
        spec: SlotSpec | None = None,
        snapshot: Snapshot | None = None,
        timeout_s: float | None = None,
        admitted: Callable[[], None] | None = None,
    ) -> Slot:
        """A slot with the trajectory's image, unless `spec` or `snapshot` says another."""
        if spec is None and snapshot is None and trajectory_id in self._registered:
            spec = SlotSpec(image=self._registered[trajectory_id])
        return await super().acquire(
            trajectory_id, spec=spec, snapshot=snapshot, timeout_s=timeout_s, admitted=admitted
        )

    async def release(self, slot: Slot, reset_workspace: bool = False) -> None:
        """End a lease and the slot, and forget the trajectory's image."""
        self._registered.pop(slot.trajectory_id, None)
        await super().release(slot, reset_workspace)
