"""Tasks with images in docker: the same scores as on this machine."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from palaestra_suites.terminal_bench.import_tasks import Finding
from roots import make_root
from sandbox.containers import docker
from sandbox.python_image import make_python_root
from suites.terminal_bench.conftest import Try
from suites.terminal_bench.mini import TASKS
from suites.terminal_bench.shop import make_shop

pytestmark = [
    pytest.mark.slots, pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(600),
    pytest.mark.xdist_group("docker"),
]  # fmt: skip


# `test_every_task_that_an_image_can_have` tries these, and five more, with slots of this machine.
NAMES = "as-a-user,greeting,hello,older-bootstrap,typed-solution"


def test_services_of_a_task_run_in_docker(try_tasks: Try, tmp_path: Path) -> None:
    """The four services have two root file systems, so their slots are in several containers."""
    base = make_python_root(tmp_path / "base")
    shutil.copytree(base, stock := tmp_path / "roots" / "shop.stock", symlinks=True)
    make_shop(tmp_path / "tasks")
    with docker() as daemon:
        daemon.load(base, "python:here")
        settings = {
            "tool_pool_mode": "docker", "docker_image": "python:here", "docker_hosts": [daemon.address],
            "docker_privileged": True, "max_containers": 3, "image_dir": str(stock.parent),
        }  # fmt: skip
        line = try_tasks(tmp_path / "tasks", base_image=str(base), **settings)["shop"]
    assert (line.finding, line.noop, line.solution) == (Finding.GOOD, 0.0, 1.0), line.reason


def test_five_tasks_score_in_docker_as_here(try_tasks: Try, tmp_path: Path) -> None:
    root = str(make_root(tmp_path / "root"))
    with docker() as daemon:
        daemon.load(make_python_root(tmp_path / "python"), "python:here")
        settings = {
            "tool_pool_mode": "docker", "docker_image": "python:here", "docker_hosts": [daemon.address],
            "docker_privileged": True,
        }  # fmt: skip
        lines = try_tasks(TASKS, base_image=root, task_filter=NAMES, **settings)
    names = NAMES.split(",")
    found = {name: (lines[name].finding, lines[name].noop, lines[name].solution) for name in names}
    assert found == dict.fromkeys(names, (Finding.GOOD, 0.0, 1.0)), {name: lines[name].reason for name in names}
