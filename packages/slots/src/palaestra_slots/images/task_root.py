"""Choose the root file system of a task's slots, with the configuration of its commands.

The first of these sources that applies is used: the path that a setting gives for the task; the file or folder with the
task's name in a folder of prebuilt root file systems; the task's Dockerfile, built in a slot over a given base; the
image that the task names, if it was pulled (`palaestra images pull`); or an image that a container tool builds and
exports.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from palaestra_slots.core.config import local_path
from palaestra_slots.core.errors import ImageError
from palaestra_slots.images.dockerfile import (
    DEFAULT_PATH,
    ImageConfig,
    ImageRecipe,
    base_name,
    image_config,
    parse_recipe,
)
from palaestra_slots.images.image_builder import ImageBuilder, content_key, known_config, read_config
from palaestra_slots.images.task_files import Unsupported
from palaestra_slots.images.task_images import TaskImages
from palaestra_slots.sandbox.images.reference import is_image_name
from palaestra_slots.sandbox.server_backend import host_path

_log = logging.getLogger(__name__)

HOST = "host"
"""The name of a base that consists of this machine's allow-listed system directories."""

FROM = "from"
"""The name of a base that consists of the pulled image which the Dockerfile's FROM names."""

_ENDINGS = ("", ".tar", ".tar.gz", ".tar.xz")


@dataclass(frozen=True, slots=True)
class TaskRoot:
    """The root file system of a task's slots. If `image` is None, it consists of this machine's allow-listed system
    directories.

    `build_key` is the cache key of a Dockerfile that must still be built over `image`, whose own configuration is
    `base`.
    """

    image: str | None
    config: ImageConfig
    build_key: str | None = None
    base: ImageConfig = ImageConfig()


@dataclass(frozen=True, slots=True)
class TaskRoots:
    """Chooses root file systems according to the settings of a run. `images` maps names of tasks to paths, and `pulled`
    finds the images that tasks name."""

    builder: ImageBuilder
    images: Mapping[str, str]
    image_dir: Path | None = None
    base_image: str | None = None
    pulled: TaskImages = TaskImages()

    def check(self) -> None:
        """Raise `ImageError` if a path in the settings does not exist."""
        for path in (*self.images.values(), *([] if self.base_image in (None, HOST, FROM) else [self.base_image])):
            self._existing(local_path(path))
        if self.image_dir is not None and not self.image_dir.is_dir():
            raise ImageError(f"the folder of root file systems {self.image_dir} does not exist")

    async def of(self, name: str, recipe: ImageRecipe) -> TaskRoot:
        """Return the root file system for the task `name`. Raises `TaskError` or `ImageError`."""
        ready = self.ready(name)
        if ready is not None:
            return TaskRoot(str(ready), _prebuilt_config(ready, recipe))
        if self.base_image is not None:
            return await self._over_base(recipe, self.base_image)
        layout = await self._pulled(recipe)
        if layout is not None:
            return TaskRoot(str(layout), read_config(layout))
        archive, config = await self.builder.root(recipe)
        return TaskRoot(str(archive), config)

    async def _pulled(self, recipe: ImageRecipe) -> Path | None:
        """Return the layout of the image that the task names, or None if it was not pulled. If it cannot be pulled, its
        Dockerfile is built, as with a container tool. Raises `ImageError` if there is none."""
        if recipe.docker_image is None or self.builder.force or not is_image_name(recipe.docker_image):
            return None
        try:
            return await self.pulled.find(recipe.docker_image)
        except ImageError as error:
            if recipe.dockerfile is None:
                raise
            _log.warning("%s; its Dockerfile is built instead", error)
            return None

    def ready(self, name: str) -> Path | None:
        """Return the path of the prebuilt root file system for the task `name`, or None. Raises `ImageError` if the
        path that the settings give for the task does not exist."""
        if name in self.images:
            return self._existing(local_path(self.images[name]))
        if self.image_dir is None or name in ("", ".", "..") or "/" in name:  # a row's name never leads elsewhere
            return None
        found = (self.image_dir.absolute() / f"{name}{ending}" for ending in _ENDINGS)
        return next((path for path in found if path.exists()), None)

    def _existing(self, path: Path) -> Path:
        if not path.exists():
            raise ImageError(
                f"the root file system {path} does not exist; give a root directory, a tar file or an OCI layout"
            )
        return path.absolute()  # a relative path could be taken for the name of an image

    async def _over_base(self, recipe: ImageRecipe, base: str) -> TaskRoot:
        if recipe.dockerfile is None:
            raise Unsupported(f"it has no Dockerfile to build over the base, only the image {recipe.docker_image}")
        stages = parse_recipe(recipe)
        if base == FROM:
            name = base_name(stages)
            image = await self.pulled.find(name)
            if image is None:
                raise ImageError(
                    f"the base image {name} was not pulled: run `palaestra images pull {name}`, "
                    "or set --env.pull missing"
                )
            base = str(image)
        else:
            image = None if base == HOST else self._existing(local_path(base))
        own = _of_host() if image is None else read_config(image)
        config = image_config(stages[-1].instructions, own)
        # The configuration of the base can change while its path stays the same.
        settings = hashlib.sha256(repr((own, config)).encode()).hexdigest()[:16]
        key = f"{base}+{content_key(recipe)}+{settings}"
        return TaskRoot(None if image is None else str(image), config, key, own)


def _of_host() -> ImageConfig:
    """Return the configuration of a base that consists of this machine's directories. Its PATH is set only if it is not
    Docker's default, for a Python that is installed elsewhere."""
    path = host_path()
    return ImageConfig({} if path == DEFAULT_PATH else {"PATH": path})


def _prebuilt_config(image: Path, recipe: ImageRecipe) -> ImageConfig:
    """Return the configuration of a prebuilt root file system: from the JSON file next to it, or else as the image
    itself states it, or else from the task's Dockerfile, or else the default one."""
    known = known_config(image)
    if known is not None or recipe.dockerfile is None:
        return known or ImageConfig()
    return image_config(parse_recipe(recipe)[-1].instructions)
