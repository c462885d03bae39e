"""Whatever of ours is killed, nothing stays, and no lease ever shows what another one left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slots, pytest.mark.slow]

_DRIVE = Path(__file__).with_name("drive.py")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rung", ["full", "userns"])
def test_a_storm_leaves_nothing(rung: str, request: pytest.FixtureRequest) -> None:
    if rung == "full" and os.geteuid() != 0:
        pytest.skip("the rung full needs root")
    leases = request.config.getoption("--chaos-leases", default=60)
    seed = request.config.getoption("--chaos-seed", default=7)
    options = ["--rung", rung, "--leases", str(leases), "--kills", str(leases // 5), "--seed", str(seed)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    told = subprocess.run([sys.executable, str(_DRIVE), *options], env=env, capture_output=True, text=True, timeout=590)
    assert told.returncode == 0, told.stderr[-4000:]
    report = json.loads(told.stdout)
    assert report["left"] == []
    assert report["dirty"] == []
    assert sum(report["leases"].values()) >= leases
    assert report["leases"]["clean"] > 0
    assert sum(report["killed"].values()) >= leases // 10
