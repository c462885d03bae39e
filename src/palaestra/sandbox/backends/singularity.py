"""Slots in containers of Apptainer or Singularity, many slots in each container.

A container is started with `apptainer exec` (or `singularity exec`) and ends with this process. It has the user's own
rights and kernel, a root of its own and no directory of the host's but what slots mount. Its slots are isolated from
each other at the level `confined`, or better where the host allows user namespaces in it; the network is the host's,
and slots without a network are cut off by their own level.

The image is what `apptainer exec` takes: a `.sif` file, a directory, or an address. It needs Python 3.11 as `python3`.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from palaestra.core.errors import ConfigError
from palaestra.core.types import JSON
from palaestra.sandbox.backends.remote import PlaceSpec, RemoteBackend, run_command
from palaestra.sandbox.backends.server_backend import levels
from palaestra.sandbox.slot import Rung, SlotSpec

_CHECK_S = 60.0
_ISOLATE = ("--contain", "--no-home", "--cleanenv", "--writable-tmpfs")


class SingularityBackend(RemoteBackend):
    """Slots in containers of the program that is installed. `options` are further words for its `exec`."""

    name = "singularity"

    def __init__(
        self,
        image: str | None = None,
        *,
        containers: int = 1,
        slots_per_container: int = 10,
        options: Sequence[str] = (),
        rung: Rung | None = None,
        require: Rung | None = None,
    ) -> None:
        super().__init__(
            image=image, places=containers, slots_per_place=slots_per_container, rung=rung, require=require
        )
        self._program = shutil.which("apptainer") or shutil.which("singularity") or "apptainer"
        self._options = options

    @classmethod
    def from_config(cls, config: JSON) -> SingularityBackend:
        """From the settings of a run."""
        rung, require = levels(config.isolation, config.require_sandbox)
        return cls(
            config.singularity_image,
            containers=config.max_containers,
            slots_per_container=config.slots_per_container,
            rung=rung,
            require=require,
        )

    async def check(self, host: str) -> None:
        status, text = await run_command([self._program, "version"], _CHECK_S)
        if status != 0:
            raise ConfigError(f"apptainer does not run here: {text}. Install the package apptainer")

    def place_spec(self, spec: SlotSpec) -> PlaceSpec:
        wanted = super().place_spec(spec)
        if wanted.image is None:
            raise ConfigError("singularity needs an image: of the task, or one for all (--env.singularity_image)")
        return wanted

    def command(self, place: PlaceSpec, call: Sequence[str]) -> Sequence[str]:
        assert place.image is not None
        binds = [word for mount in place.mounts for word in ("--bind", f"{mount.source}:{mount.target}:ro")]
        return [self._program, "exec", *_ISOLATE, *binds, *self._options, place.image, *call]
