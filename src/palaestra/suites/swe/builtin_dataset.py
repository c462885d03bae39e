"""The data set that comes with the package: tasks of its own manifest, built when they are first asked for.

Nothing of the packages is shipped, so the first build asks the package index for their source distributions; it says
so. What was built stays in the cache, one folder per selection, and is used again by every later run.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import tempfile
from pathlib import Path

from palaestra.core.errors import ConfigError
from palaestra.envs.config.build import make_pool
from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra.suites.swe.authoring.build_command import BuildOptions, build
from palaestra.suites.swe.authoring.manifest import dump_manifest, load_manifest
from palaestra.suites.swe.locked_file import locked

logger = logging.getLogger(__name__)

BUILD_TIMEOUT_S = 1800.0
TASKS_FILE = "tasks.jsonl"


def selection(*, shuffle: bool, seed: int, max_items: int) -> list[str]:
    """The ids of the bugs to use, in order."""
    ids = [bug.id for package in load_manifest().packages for bug in package.mutations]
    if shuffle:
        random.Random(seed).shuffle(ids)
    return ids[:max_items] if max_items else ids


async def built_tasks(cache: Path, ids: list[str], config: HermesAgentEnvConfig) -> Path:
    """The file of these tasks, built now where it was not before. Raises `ConfigError` when some cannot be built."""
    text = dump_manifest(load_manifest()) + "\n".join(sorted(ids))
    name = f"built-in-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    place = cache / "tasks" / name
    place.parent.mkdir(parents=True, exist_ok=True)
    async with locked(place.with_suffix(".lock"), timeout_s=BUILD_TIMEOUT_S):
        if not place.is_dir():
            logger.warning("building %d tasks from real packages; the first time asks the package index", len(ids))
            await _build(cache, place, ids, config)
    return place / TASKS_FILE


async def _build(cache: Path, place: Path, ids: list[str], config: HermesAgentEnvConfig) -> None:
    """Build in a folder of another name, so that one of the right name is always whole."""
    with tempfile.TemporaryDirectory(dir=place.parent, prefix="new-") as temporary:
        fresh = Path(temporary, "tasks")
        fresh.mkdir()
        options = BuildOptions(out=fresh / TASKS_FILE, cache=cache, select=tuple(ids), parallel=os.cpu_count() or 1)
        async with make_pool(config) as pool:
            report = await build([], None, pool, options)
        if report.problems:
            raise ConfigError("not every built-in task could be built:\n" + "\n".join(report.problems))
        fresh.rename(place)
