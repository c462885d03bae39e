"""A run on simulated nodes, with a virtual clock: the real driver and placement keep the slots busy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).parents[4] / "benchmarks")


@pytest.mark.parametrize("in_flight", [1.0, 1.5])
def test_slots_stay_busy_and_no_rollout_is_lost_or_ended_twice(
    monkeypatch: pytest.MonkeyPatch, in_flight: float
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from cluster_simulation import simulate

    monkeypatch.delitem(sys.modules, "cluster_simulation")
    found = simulate(nodes=8, slots=64, generations=4.0, life_s=3000.0, in_flight=in_flight)
    assert found["lost"] > 1, "the simulation must lose nodes"
    assert found["twice"] == found["missing"] == 0
    assert found["busy"] > 0.9
    assert found["affinity"] > 0.85
    assert found["longest_wait_s"] < 900
