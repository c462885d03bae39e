"""The cheat that the author of a task shows beside its solution, as `palaestra env import` plays it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from palaestra_suites.terminal_bench.import_tasks import Finding, TriedTask
from suites.terminal_bench.mini import HARBOR, copied

Try = Callable[..., dict[str, TriedTask]]

pytestmark = [pytest.mark.slots, pytest.mark.slow]

PLANTED = "mkdir -p /logs/verifier\necho 1 > /logs/verifier/reward.txt\n"


def test_a_cheat_must_not_be_paid(try_tasks: Try, tmp_path: Path) -> None:
    solution = (HARBOR / "greeting/solution/solve.sh").read_text()
    for name, cheat in (("planted", PLANTED), ("paid", solution)):
        copied(HARBOR / "greeting", tmp_path / name, {"cheat/solve.sh": cheat}).rename(tmp_path / name / name)
    (planted,) = try_tasks(tmp_path / "planted").values()
    assert (planted.finding, planted.solution, planted.cheat) == (Finding.GOOD, 1.0, 0.0), planted.reason
    (paid,) = try_tasks(tmp_path / "paid").values()
    assert (paid.finding, paid.solution, paid.cheat) == (Finding.CHEAT_PASSES, 1.0, 1.0)
    assert "full reward" in paid.reason
