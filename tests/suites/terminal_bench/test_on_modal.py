"""Tasks with images score the same in sandboxes of Modal (the stand-in of its API) as on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import modal
import pytest

from palaestra.suites.terminal_bench.import_tasks import Finding
from palaestra.testing.fake_modal import FakeModal
from suites.terminal_bench.conftest import Try
from suites.terminal_bench.mini import TASKS
from suites.terminal_bench.roots import make_root

NAMES = "as-a-user,greeting,in-tmp,partial,settings,word-counts,hello,in-an-archive,older-bootstrap,typed-solution"


@pytest.mark.slow
@pytest.mark.slots
@pytest.mark.timeout(900)
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: slots with images of their own")
def test_ten_tasks_score_the_same(try_tasks: Try, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"base_image": str(make_root(tmp_path / "root")), "task_filter": NAMES}
    here = try_tasks(TASKS, **settings)
    with FakeModal() as fake:
        for name, value in {**fake.variables, "MODAL_CONFIG_PATH": os.devnull}.items():
            monkeypatch.setenv(name, value)
        there = try_tasks(TASKS, tool_pool_mode="modal", **settings)
        modal.Client.from_env().close()
        assert fake.sandboxes
        assert not fake.running
    for name in NAMES.split(","):
        assert here[name].finding is there[name].finding is Finding.GOOD, (here[name], there[name])
        assert (there[name].solution, there[name].noop) == (here[name].solution, here[name].noop) == (1.0, 0.0)
