"""Tasks with images score the same in sandboxes of Modal (the stand-in of its API) as on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import modal
import pytest

from palaestra_suites.terminal_bench.import_tasks import Finding
from roots import make_root
from stand_ins.fake_modal import FakeModal
from suites.terminal_bench.conftest import Try
from suites.terminal_bench.mini import TASKS

# `test_every_task_that_an_image_can_have` tries these, and five more, with slots of this machine.
NAMES = "as-a-user,partial,settings,word-counts,in-an-archive"


@pytest.mark.slow
@pytest.mark.slots
@pytest.mark.timeout(900)
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: slots with images of their own")
def test_five_tasks_score_as_here(try_tasks: Try, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(make_root(tmp_path / "root"))
    with FakeModal() as fake:
        for name, value in {**fake.variables, "MODAL_CONFIG_PATH": os.devnull}.items():
            monkeypatch.setenv(name, value)
        lines = try_tasks(TASKS, tool_pool_mode="modal", base_image=root, task_filter=NAMES)
        modal.Client.from_env().close()
        assert fake.sandboxes
        assert not fake.running
    for name in NAMES.split(","):
        assert lines[name].finding is Finding.GOOD, lines[name]
        assert (lines[name].solution, lines[name].noop) == (1.0, 0.0)
