"""Finds the images that tasks name among those that were pulled, and pulls missing ones if the user wants that."""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.request import getproxies, proxy_bypass

from palaestra_slots.core.config import local_path
from palaestra_slots.core.io.file_lock import file_lock
from palaestra_slots.sandbox.images.pulled import PulledImages, pulled_layout
from palaestra_slots.sandbox.images.reference import image_name
from palaestra_slots.sandbox.images.registry.credentials import read_credentials
from palaestra_slots.sandbox.images.registry.pull import Pull
from palaestra_slots.sandbox.images.registry.repository import RegistryAccess

PullPolicy = Literal["never", "missing"]
"""Whether images that tasks name, and that are not on this machine, are pulled."""

_log = logging.getLogger(__name__)


def user_access(auth: str = "", *, plain_http: bool = False) -> RegistryAccess:
    """Return how this user reaches registries: with the credentials in `auth`, by default docker's `config.json`, and
    with the proxies in the variables of the environment. Raises `ConfigError`."""
    default = Path(os.environ.get("DOCKER_CONFIG") or "~/.docker", "config.json")
    path = local_path(auth) if auth else default.expanduser()
    return RegistryAccess(read_credentials(path), plain_http, _proxy)


def _proxy(scheme: str, host: str) -> str | None:
    return None if proxy_bypass(host) else getproxies().get(scheme)


@dataclass(frozen=True, slots=True)
class TaskImages:
    """Finds the images that tasks name among those that were pulled, and pulls them if `policy` is `missing`. `folder`
    is the folder of pulled images, by default this user's."""

    policy: PullPolicy = "never"
    folder: Path | None = None

    def may_have(self, name: str) -> bool:
        """Return whether an image was pulled, or may be."""
        return bool(name) and (self.policy == "missing" or pulled_layout(name, self.folder) is not None)

    async def find(self, name: str) -> Path | None:
        """Return the OCI layout of an image, or None if it was not pulled. Raises `ImageError`."""
        found = pulled_layout(name, self.folder)
        if found is None and self.policy == "missing":
            images = PulledImages(self.folder).open()
            key = hashlib.sha256(str(image_name(name)).encode()).hexdigest()
            async with file_lock(images.lock(f"name-{key}")):  # many tasks name the same image, and registries count
                found = pulled_layout(name, self.folder)
                if found is None:
                    _log.info("pulling %s", name)
                    found = (await Pull(images, user_access()).image(name)).path
        return None if found is None else Path(found)
