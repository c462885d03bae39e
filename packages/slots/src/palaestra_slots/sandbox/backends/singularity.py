"""Runs slots in Apptainer or Singularity containers, with many slots in each container.

A container is started with `apptainer exec` (or `singularity exec`) and ends with this process. It has the rights of
the user who starts it; if that user is root, it has only the rights that slots need. It has its own processes and root
file system, and no host directories except those that slots mount. Its slots are isolated from each other at the level
`userns` where the host allows user namespaces, otherwise at `confined`. The container uses the host's network. A slot
whose network is off is cut off from that network.

The image is an argument of `apptainer exec`: a `.sif` file, a directory, or an address; a task's image without an
address is a name on Docker Hub. The image needs Python 3.11 or
newer as `python3`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace

from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.backends.remote import PlaceSpec, RemoteBackend, bound, run_command
from palaestra_slots.sandbox.images.reference import is_path
from palaestra_slots.sandbox.server_backend import levels
from palaestra_slots.sandbox.slot import Rung, SlotSpec

_CHECK_S = 60.0
_PULL_S = 1800.0
_ISOLATE = ("--containall", "--no-home", "--writable-tmpfs")

_ROOT_KEEPS = ",".join(
    f"CAP_{name}"
    for name in (
        *("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP", "SYS_CHROOT"),
        *("NET_BIND_SERVICE", "SYS_ADMIN", "NET_ADMIN"),
    )
)
"""The capabilities that root needs in a container to make slots at `userns` and `confined`. Without this list,
Apptainer gives root every capability, which fails if this process lacks one, as it does in most containers."""


class SingularityBackend(RemoteBackend):
    """Slots in Apptainer or Singularity containers, whichever program is installed. `options` are additional arguments
    for its `exec` command."""

    name = "singularity"
    image_kinds = ("name", "path")

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
        """Return the backend for the settings of a run."""
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
        if self._image is not None:
            status, text = await run_command(self.command(PlaceSpec(image=self._image), ["python3", "-V"]), _PULL_S)
            if status != 0:
                raise ConfigError(
                    f"apptainer cannot run python3 in {self._image}: {text}. Set another singularity_image"
                )

    def place_spec(self, spec: SlotSpec) -> PlaceSpec:
        wanted = super().place_spec(spec)
        if wanted.image is None:
            raise ConfigError("singularity needs an image: set singularity_image, or use tasks with an image")
        if spec.image and not is_path(spec.image) and "://" not in spec.image:
            # apptainer would take a task's bare name for a file in the working directory
            return replace(wanted, image=f"docker://{spec.image}")
        return wanted

    def command(self, place: PlaceSpec, call: Sequence[str]) -> Sequence[str]:
        assert place.image is not None
        if place.image.startswith("-"):
            raise ConfigError(f"singularity_image {place.image!r} would be an option of {self._program}")
        rights = ["--no-privs", "--add-caps", _ROOT_KEEPS] if os.geteuid() == 0 else []
        binds = [word for mount in place.mounts for word in ("--bind", bound(mount, ":,"))]
        return [self._program, "exec", *_ISOLATE, *rights, *binds, *self._options, place.image, *call]
