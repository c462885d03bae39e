"""What a task's root file system is made from, and what is said of a task that slots cannot give what it asks for.

For: every environment whose tasks bring a Dockerfile or the name of an image. Does no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from palaestra.core.errors import TaskError


class Unsupported(TaskError):
    """A task that is well-formed and asks for something that slots do not have."""


@dataclass(frozen=True, slots=True)
class ImageRecipe:
    """What a task's root file system is made from: a Dockerfile in its folder, or an image that is there by name."""

    folder: Path
    dockerfile: Path | None = None
    docker_image: str | None = None
    build_timeout_s: float = 600.0
