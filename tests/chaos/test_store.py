"""Runs that share a store of workspaces are killed at random, and it evicts all the while: nobody gets a wrong one."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chaos.store_worker import ROOM_BYTES
from palaestra_slots.sandbox.snapshots.folder import SnapshotStore

pytestmark = [pytest.mark.slots, pytest.mark.slow]

_WORKER, _RUNS, _KILLS, _COUNT = Path(__file__).with_name("store_worker.py"), 3, 8, 16


@pytest.mark.timeout(400)
@pytest.mark.parametrize("rung", ["full", "userns"])
def test_what_is_taken_is_whole_whoever_was_killed(rung: str, tmp_path: Path) -> None:
    if rung == "full" and os.geteuid() != 0:
        pytest.skip("the rung full needs root")
    rng, env = random.Random(7), {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def start(seed: int) -> subprocess.Popen[bytes]:
        options = [rung, str(tmp_path / "store"), str(seed), str(_COUNT)]
        return subprocess.Popen([sys.executable, str(_WORKER), *options], env=env)

    runs = [start(seed) for seed in range(_RUNS)]
    try:
        for seed in range(_RUNS, _RUNS + _KILLS):
            time.sleep(rng.uniform(0.5, 2.5))
            victim = runs.pop(rng.randrange(len(runs)))
            victim.kill()
            assert victim.wait() in (-9, 0)
            runs.append(start(seed))
        assert [run.wait(timeout=200) for run in runs] == [0] * _RUNS
    finally:
        for run in runs:
            run.kill()
            run.wait()
    store = SnapshotStore(tmp_path / "store", max_bytes=ROOM_BYTES)
    store.sweep()
    assert store.halves() == []
    assert store.entries()
    assert all(store.is_whole(entry.key) for entry in store.entries())
    store.evict()
    assert sum(entry.size_bytes for entry in store.entries()) <= ROOM_BYTES
