"""Build cache folders on the host once, and share them between all runs on this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from palaestra_slots.core.io.file_lock import file_lock

CACHE_DIR = "~/.cache/palaestra"
"""The default of every `cache_dir` setting. Slots cannot see this folder."""


async def build_once(place: Path, fill: Callable[[Path], Awaitable[None]], *, timeout_s: float) -> Path:
    """Return the folder `place`. If it is missing, `fill` builds it under a temporary name, so that `place` is always
    complete.

    While one process builds, other processes wait. Raises `InfraError` if a process has waited for `timeout_s` seconds.
    If `fill` raises, the unfinished folder is removed and the error is raised again.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    async with file_lock(place.parent / f"{place.name}.lock", timeout_s=timeout_s):
        if not place.is_dir():
            # In the same folder, because a rename works only within a file system.
            with tempfile.TemporaryDirectory(dir=place.parent, prefix="new-") as temporary:
                fresh = Path(temporary, place.name)
                fresh.mkdir()
                await fill(fresh)
                fresh.chmod(0o755)
                fresh.rename(place)
    return place
