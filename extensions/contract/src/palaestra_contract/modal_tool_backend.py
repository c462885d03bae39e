"""`ModalToolBackend`: a pool of slots in Modal, with one or several sandbox profiles. Atropos and Hermes use the same
class name.

If there are several profiles, each has its own sandboxes and its own limit. The default profile starts with the pool.
Every other profile starts when its first slot is acquired. `create_tool_backend` does not use this class: for
`tool_pool_mode="modal"`, it makes a `SlotPool` with the settings of the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Self

from palaestra_cloud.modal import ModalBackend, ModalSandboxConfig
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.pool import SlotPool, SlotPoolConfig
from palaestra_slots.sandbox.slot import Slot, SlotSpec, Snapshot, View


class ModalToolBackend(SlotPool):
    """A pool of slots in Modal sandboxes with the settings `config`. Use it as a `SlotPool`, or as the `backend` of a
    `ToolExecutor`."""

    def __init__(self, config: ModalSandboxConfig | None = None) -> None:
        self.profile = config = config or ModalSandboxConfig()
        wait_s = config.acquire_timeout_s
        super().__init__(SlotPoolConfig(max_slots=None, acquire_timeout=wait_s), ModalBackend(config))
        self.default_timeout_s = config.execution_timeout_s
        self._others: dict[str, ModalToolBackend] = {}
        self._pools: dict[int, SlotPool] = {}  # the pool of each slot that another profile made, by epoch

    @classmethod
    def with_profiles(cls, profiles: Mapping[str, ModalSandboxConfig] | None = None, default: str = "default") -> Self:
        """Return a backend with several profiles, by default those of `ModalSandboxConfig.load_profiles`. Slots have
        the profile `default` unless `acquire` names another one. Raises `ConfigError` if there is no profile of that
        name."""
        found = ModalSandboxConfig.load_profiles() if profiles is None else dict(profiles)
        if default not in found:
            raise ConfigError(f"unknown Modal profile {default!r}; known are {', '.join(found)}")
        made = cls(found.pop(default))
        made._others = {name: ModalToolBackend(config) for name, config in found.items()}
        return made

    async def acquire(
        self,
        trajectory_id: str,
        profile: str | None = None,
        *,
        spec: SlotSpec | None = None,
        snapshot: Snapshot | None = None,
        timeout_s: float | None = None,
        admitted: Callable[[], None] | None = None,
    ) -> Slot:
        """Acquire a slot, as `SlotPool.acquire` does, in a sandbox of the profile `profile`. None means the pool's
        default profile. Raises `ConfigError` for an unknown profile."""
        if profile is None or profile == self.profile.name:
            return await super().acquire(
                trajectory_id, spec=spec, snapshot=snapshot, timeout_s=timeout_s, admitted=admitted
            )
        if profile not in self._others:
            known = ", ".join((self.profile.name, *self._others))
            raise ConfigError(f"unknown Modal profile {profile!r}; known are {known}")
        pool = self._others[profile]
        await pool.start()
        slot = await pool.acquire(trajectory_id, spec=spec, snapshot=snapshot, timeout_s=timeout_s, admitted=admitted)
        self._pools[slot.epoch] = pool
        return slot

    async def release(self, slot: Slot, reset_workspace: bool = False) -> None:
        pool = self._pools.pop(slot.epoch, None)
        if pool is None:
            await super().release(slot, reset_workspace)
        else:
            self.leases.close_shell(slot)
            await pool.release(slot, reset_workspace)

    async def seal(self, slot: Slot, view: View | None = None) -> Snapshot:
        self._refuse_other_profiles(slot)
        return await super().seal(slot, view)

    async def checkpoint(self, slot: Slot, *, continued: bool = False) -> Snapshot:
        self._refuse_other_profiles(slot)
        return await super().checkpoint(slot, continued=continued)

    def _refuse_other_profiles(self, slot: Slot) -> None:
        if slot.epoch in self._pools:
            raise ConfigError(
                f"no snapshot can be made of {slot.slot_id}: only slots of the default profile, {self.profile.name}, "
                "have snapshots"
            )

    async def aclose(self) -> None:
        for pool in self._others.values():
            await pool.aclose()
        self._pools.clear()
        await super().aclose()

    def get_status(self) -> Mapping[str, JSON]:
        """Return the pool's status, with the status of each other profile under `profiles`."""
        others = {name: pool.get_status() for name, pool in self._others.items()}
        return {**super().get_status(), **({"profiles": others} if others else {})}
