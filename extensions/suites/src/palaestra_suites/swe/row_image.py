"""Run a row in the image that its data set names, if this machine has a root file system of that image, or may pull it.

Images of SWE-bench, SWE-smith and SWE-rebench have the repository in `/testbed`, those of SWE-bench Pro in `/app`;
images of SWE-rebench V2 have it in a folder named after it. A Python repository is installed for the
image's own interpreter (conda's environment `testbed`, or `python3`). The repository moves to the workspace, with a
link at its old path, because the installation refers to that path.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from palaestra_slots.core.config import local_path
from palaestra_slots.core.errors import ImageError, TaskError
from palaestra_slots.images.image_builder import ImageBuilder
from palaestra_slots.images.slot_commands import check_execute
from palaestra_slots.images.task_images import TaskImages
from palaestra_slots.images.task_root import TaskRoots
from palaestra_slots.sandbox.slot import Slot
from palaestra_suites.swe.swe_row import SweRow
from palaestra_suites.toolchain.toolchain import Toolchain

_CONDA = "/opt/miniconda3/envs/testbed/bin"
_START = f'python={_CONDA}/python; [ -x "$python" ] || python=python3; exec "$python" -s -B "$@"'
_MOVE = """
set -e
cd /
for at in {places}; do
    if [ -d "$at" ] && [ ! -h "$at" ] && [ ! "$at" -ef {target} ]; then
        mkdir -p {target}
        cp -a "$at/." {target}/
        rm -rf {target}/.git "$at"
        ln -s {target} "$at"
    fi
done
"""
_COPY_S = 600.0

IMAGE_TOOLCHAIN = Toolchain(command=("/bin/sh", "-c", _START, "python"), bin_dir=_CONDA)
"""The interpreter of an image, with the packages and the pytest that are installed in the image."""


class RowImages:
    """Finds the root file systems of rows. `images` maps names of images, or ids of rows, to paths. `pulled` finds the
    other images."""

    def __init__(self, images: Mapping[str, str], image_dir: str | None, pulled: TaskImages) -> None:
        folder = local_path(image_dir) if image_dir else None
        self._roots = TaskRoots(ImageBuilder(Path()), images, folder)
        self._pulled = pulled

    def check(self) -> None:
        """Raise `ImageError` if a path in the settings does not exist."""
        self._roots.check()

    async def find(self, row: SweRow) -> str | None:
        """Return the path of the root file system for a row, or None. It is found by the row's id, by the full name of
        its image, or by the last part of this name without the tag; otherwise it is the image of this name that was
        pulled. Raises `TaskError` if the image cannot be pulled."""
        short = row.image_name.rpartition("/")[2].partition(":")[0]
        names = (row.instance_id, row.image_name, short)
        found = (self._roots.ready(name) for name in names if (name and "/" not in name) or name in self._roots.images)
        if (given := next((path for path in found if path is not None), None)) is not None or not row.image_name:
            return None if given is None else str(given)
        try:
            pulled = await self._pulled.find(row.image_name)
        except ImageError as error:
            raise TaskError(f"{row.instance_id}: {error}") from error
        return None if pulled is None else str(pulled)


async def move_repository(slot: Slot, row: SweRow, repo_dir: str) -> None:
    """Move the repository of an image to `repo_dir`. Raises `PrepareError`."""
    places = " ".join(map(shlex.quote, ("/testbed", "/app", f"/{row.repo.rpartition('/')[2]}")))
    script = _MOVE.format(places=places, target=shlex.quote(repo_dir))
    await check_execute(slot, ["/bin/sh", "-c", script], "moving the image's repository failed", timeout_s=_COPY_S)
