"""Building docker images, with the results that existing scripts expect."""

from __future__ import annotations

import logging
from pathlib import Path

from palaestra_slots.core.errors import ImageError
from palaestra_slots.core.io.threads import run_blocking
from palaestra_slots.sandbox.backends import docker

logger = logging.getLogger(__name__)


def docker_image_exists(tag: str) -> bool:
    """Return whether the docker daemon has the image. Blocks until the daemon has answered."""
    return run_blocking(docker.docker_image_exists(tag))


async def build_docker_image(dockerfile: str | Path, tag: str, *, timeout_s: float = 600) -> bool:
    """Build an image from a Dockerfile in its folder. Returns whether that worked; otherwise, the end of the build's
    output is logged."""
    try:
        await docker.build_docker_image(dockerfile, tag, timeout_s=timeout_s)
    except ImageError as error:
        logger.warning("%s", error)
        return False
    return True
