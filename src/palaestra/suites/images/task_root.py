"""Which root file system a task's slots have, and how commands start in it.

In this order: the one that a setting names for the task, the one of its name in the folder of ready ones, its
Dockerfile followed in a slot over a given base, or an image built and exported by a container tool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from palaestra.core.config import local_path
from palaestra.core.errors import ImageError
from palaestra.suites.images.dockerfile import ImageConfig, image_config, parse
from palaestra.suites.images.image_builder import Builder, content_key, read_config
from palaestra.suites.images.image_spec import ImageRecipe, Unsupported

HOST = "host"
"""As a base: the allow-list of this machine's system directories."""

_ENDINGS = ("", ".tar", ".tar.gz", ".tar.xz")


@dataclass(frozen=True, slots=True)
class Root:
    """What slots are made from. `image` None is the host's allow-list; `build_key` names a Dockerfile to follow there.

    `key` tells preparations apart.
    """

    image: str | None
    config: ImageConfig
    build_key: str | None = None


@dataclass(frozen=True, slots=True)
class Roots:
    """Root file systems by the settings of a run. `images` maps names of tasks to paths."""

    builder: Builder
    images: Mapping[str, str]
    image_dir: Path | None = None
    base_image: str | None = None

    def check(self) -> None:
        """Raises `ImageError` for what a setting names and is not there: no task could do with it."""
        for path in (*self.images.values(), *([] if self.base_image in (None, HOST) else [self.base_image])):
            self._there(local_path(path))
        if self.image_dir is not None and not self.image_dir.is_dir():
            raise ImageError(f"the folder of root file systems {self.image_dir} is not there")

    async def of(self, name: str, recipe: ImageRecipe) -> Root:
        """The root of the task of that name. Raises `TaskError` or `ImageError` saying why there is none."""
        ready = self._ready(name)
        if ready is not None:
            return Root(str(ready), _described(ready, recipe))
        if self.base_image is not None:
            return self._over_base(recipe, self.base_image)
        archive, config = await self.builder.root(recipe)
        return Root(str(archive), config)

    def _ready(self, name: str) -> Path | None:
        if name in self.images:
            return self._there(local_path(self.images[name]))
        if self.image_dir is None:
            return None
        found = (self.image_dir / f"{name}{ending}" for ending in _ENDINGS)
        return next((path for path in found if path.exists()), None)

    def _there(self, path: Path) -> Path:
        if not path.exists():
            raise ImageError(
                f"the root file system {path} is not there; name a root directory, a tar file or an OCI layout"
            )
        return path

    def _over_base(self, recipe: ImageRecipe, base: str) -> Root:
        if recipe.dockerfile is None:
            raise Unsupported(f"it has no Dockerfile that could be followed, only the image {recipe.docker_image}")
        instructions = parse(recipe.dockerfile.read_text(encoding="utf-8", errors="replace"))
        image = None if base == HOST else str(self._there(local_path(base)))
        return Root(image, image_config(instructions), f"{base}+{content_key(recipe)}")


def _described(image: Path, recipe: ImageRecipe) -> ImageConfig:
    """From the file beside a ready root, else from the task's Dockerfile as far as one stage says it."""
    beside = image.with_name(f"{image.name.removesuffix('.tar')}.json")
    if beside.is_file() or recipe.dockerfile is None:
        return read_config(image)
    try:
        return image_config(parse(recipe.dockerfile.read_text(encoding="utf-8", errors="replace")))
    except Unsupported:
        return ImageConfig()
