"""The cost of preparing a group compared with one rollout: python benchmarks/group_preparation.py [--quick]

The preparation does real work: it unpacks a source tree (the standard library), compiles every file and installs the
result into a new virtual environment. This takes about ten seconds on one core and needs no network. `one` is a group
of one rollout, and `group` a group of 16; every rollout leases its own slot and finds the installed tree in it. Wall
time is measured from the group's start until the last rollout has its slot. CPU time is that of this process and of all
processes in slots, including the creation and removal of slots. `kept` is a group whose workspace is also written to an
empty store for other runs; `again` is the same group in another process, which finds the workspace in the store. Each
sample runs in a separate process, and the cases alternate; both targets are ratios to `one` in the same run.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import _measure as measure

GROUP = 16
TARGET = 1.15
SETUP = """
set -e
library=$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
mkdir src
tar --exclude=__pycache__ --exclude=site-packages --exclude=dist-packages -cf src.tar -C "$library" PARTS
tar -xf src.tar -C src
python3 -m compileall -q -f -o 0 -o 1 src > compiled.log 2>&1 || true
python3 -m venv --without-pip env
cp -a src/. env/lib/python3*/site-packages/
env/bin/python -c 'import json, sys; assert json.loads("1") == 1' && touch installed
"""
"""Unpack, compile, install. A few files of the library's own tests are not supposed to compile."""

WHOLE, PART = ".", "email json asyncio"


def sample(rollouts: int, parts: str, store: str) -> measure.Sample:
    """Prepare a group of this many rollouts in this process, with a store if one is given, and return the time that
    this took."""
    with tempfile.TemporaryDirectory() as folder:
        wall_s = asyncio.run(prepared(Path(folder), rollouts, parts, store))
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {"wall_s": wall_s, "cpu_s": sum(each.ru_utime + each.ru_stime for each in used)}


async def prepared(folder: Path, rollouts: int, parts: str, store: str) -> float:
    """Measure the seconds until every rollout of the group has its slot with the installed tree."""
    from palaestra.rollouts.environment import Environment
    from palaestra.rollouts.grading.grader import Grading
    from palaestra.rollouts.journal.journal import EventStream, Journal
    from palaestra.rollouts.rollout import Rollout
    from palaestra.rollouts.runner import Runner
    from palaestra.rollouts.spec import RunContext, RunSettings
    from palaestra.rollouts.workspaces import Workspaces
    from palaestra.tools.registry.registry import Kit, ToolRegistry
    from palaestra_slots.core.types import Limits, Score, Task
    from palaestra_slots.sandbox.backends.local import LocalBackend
    from palaestra_slots.sandbox.pool import SlotPool, SlotPoolConfig
    from palaestra_slots.sandbox.snapshots.cache import Prepared as PreparedBefore
    from palaestra_slots.sandbox.snapshots.folder import SnapshotStore
    from palaestra_tokens.config import APIServerConfig
    from palaestra_tokens.server_group import ServerGroup

    ready: list[float] = []

    class Prepared(Environment):
        """One task with the preparation; its rollouts only check that the preparation has run."""

        @property
        def name(self) -> str:
            return "prepared"

        async def tasks(self) -> AsyncIterator[Task]:
            setup = SETUP.replace("PARTS", parts)
            yield Task(id="t", prompt="?", setup=setup, limits=Limits(disk_bytes=4 << 30), recipe="1")

        def kit(self, task: Task, rng: random.Random) -> Kit:
            return Kit(ToolRegistry([]))

        async def begin(self, rollout: Rollout) -> None:
            slot = await rollout.sandbox()
            assert await slot.stat("installed") is not None, "the workspace was not prepared"
            ready.append(time.perf_counter())

        async def score(self, rollout: Rollout, grading: Grading) -> Score:
            return Score(1.0)

    backend = LocalBackend.from_isolation("best")
    async with SlotPool(SlotPoolConfig(), backend) as pool:
        run = RunContext(
            ServerGroup([APIServerConfig(server_type="scripted", model_name="noop")]),
            Workspaces(pool, partial(PreparedBefore, backend, SnapshotStore(Path(store)).open) if store else None),
            EventStream(Journal(folder / "journal.jsonl")),
            settings=RunSettings(group_size=rollouts),
        )
        started = time.perf_counter()
        totals = await Runner(Prepared(), run).run()
        run.events.journal.close()
    assert totals.scored == rollouts == len(ready), totals.errors
    return max(ready) - started


NAMES = {
    "one": "one rollout",
    "group": f"group of {GROUP}",
    "kept": f"group of {GROUP}, kept for others",
    "again": f"group of {GROUP} in another run",
}


def rows(found: dict[str, dict[str, float]]) -> list[measure.Row]:
    """Return the rows of the table: one rollout, and the groups compared with it."""
    table: list[measure.Row] = []
    for key, what in (("wall_s", "until the last has its slot"), ("cpu_s", "CPU")):
        for case, name in NAMES.items():
            ratio = found[case][key] / found["one"][key]
            row = measure.Row(f"{name}: {what}", found[case][key], "s", ratio)
            table.append(measure.judged(row, TARGET, ratio <= TARGET) if case == "group" else row)
    return table


def main() -> int:
    """Measure all cases in turns and print the table."""
    parser = measure.options_parser(__doc__)
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else 5)
    parts = PART if options.quick else WHOLE

    def case(size: int, store: str = "", *, empty: bool = False) -> measure.Sample:
        if empty:
            shutil.rmtree(store, ignore_errors=True)
        return measure.fresh_process(__file__, "--sample", str(size), parts, store)

    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:  # on disk, because /tmp may be in memory
        store = f"{folder}/store"
        cases = {
            "one": lambda: case(1),
            "group": lambda: case(GROUP),
            "kept": lambda: case(GROUP, store, empty=True),
            "again": lambda: case(GROUP, store),
        }
        found = measure.interleaved(cases, rounds)
    return measure.report(f"Preparing a group of {GROUP}, median of {rounds}", rows(found), options.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--sample"]:
        print(json.dumps(sample(int(sys.argv[2]), *sys.argv[3:5])))
    else:
        sys.exit(main())
