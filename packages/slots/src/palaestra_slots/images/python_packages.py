"""Installs the Python packages that an environment declares for its sandboxes, once per image on this machine.

`wheel_install.py` installs them in a sandbox of the image, from wheels. The files stay in the cache, in a folder named
by the requirements and the image, and sandboxes see this folder read-only. No sandbox of a task needs the package
index.

Programs of the packages, such as `ruff`, are in the folder's `bin`, which is in the PATH of these sandboxes. Not
covered: a requirement without a version keeps the version that was the newest at the first installation.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import platform
from collections.abc import Sequence
from pathlib import Path

from palaestra_slots.core.config import local_path
from palaestra_slots.images.build_once import CACHE_DIR, build_once
from palaestra_slots.images.requirements import check_requirements
from palaestra_slots.images.wheel_install import install_wheels
from palaestra_slots.sandbox.python_call import PACKAGES_DIR
from palaestra_slots.sandbox.slot import Mount
from palaestra_slots.sandbox.snapshots import fingerprints

logger = logging.getLogger(__name__)

_INSTALL_S = 1800.0


async def installed_packages(requirements: Sequence[str], image: str | None) -> Mount:
    """Return the mount that shows these packages in a sandbox with this image. It needs `PACKAGES_DIR` in PYTHONPATH.

    Raises `TaskError` for a text that is not a requirement, and `PrepareError` if the packages cannot be installed.
    """
    check_requirements(requirements)
    wanted = sorted(set(requirements))
    facts = [wanted, platform.machine(), await asyncio.to_thread(fingerprints.of_image, image)]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:20]

    async def install(fresh: Path) -> None:
        logger.info("installing %s for %s", ", ".join(wanted), image or "this machine's Python")
        await install_wheels(wanted, fresh, "python3", (), image=image, closed=False, timeout_s=_INSTALL_S)

    place = local_path(CACHE_DIR) / "packages" / key
    return Mount(str(await build_once(place, install, timeout_s=_INSTALL_S)), PACKAGES_DIR)
