"""Runs on a real Ray cluster of two nodes on this machine."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import counting
from cluster.on_loop import on_loop
from cluster.ray_nodes import SMALL, processes_with, ray_cluster
from cluster.test_processes import gone, journal_lines, started
from golden_messages import raises
from palaestra.envs.run.elsewhere import check_elsewhere, open_cluster
from palaestra_cloud.cluster.opened import on_processes, on_ray
from palaestra_slots.core.errors import ConfigError
from programs import until

FLAGS = ("--policy", "oracle", "--group", "3", "--env.n", "4", "--slots", "4")


@on_loop
async def test_without_ray_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        each for each in sys.modules if each == "ray" or each.startswith(("ray.", "palaestra_cloud.cluster.ray_"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    request: Any = None
    with raises(ConfigError, "ray"):
        async with on_ray("", request):
            pass


@on_loop
async def test_a_number_of_processes_is_required() -> None:
    request: Any = None
    for words in ("", "many", "0", "-1"):
        with raises(ConfigError):
            async with on_processes(words, request):
                pass


def test_an_unknown_cluster_is_named_with_the_known_ones() -> None:
    request: Any = type("Request", (), {"config": type("Config", (), {"on": "rey"})})
    with raises(ConfigError, "rey"):
        open_cluster(request)


def test_what_one_machine_alone_can_do_is_refused_by_name() -> None:
    from palaestra.envs.config.fields import HermesAgentEnvConfig

    config = HermesAgentEnvConfig(on="ray", save_workspaces=True, agent="codex")
    with raises(ConfigError, "--agent", "codex", "--keep-workspaces"):
        check_elsewhere(config, in_process=False, begins=None)
    check_elsewhere(HermesAgentEnvConfig(on="ray"), in_process=False, begins=None)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_cluster() as made:
        yield made


@pytest.mark.slow
@pytest.mark.slots
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("default")
def test_a_lost_node_and_a_killed_driver_change_nothing_in_the_journal(cluster: Any, tmp_path: Path) -> None:
    counting.written(tmp_path)
    alone = counting.run(tmp_path, "run", "lines_env.py", *FLAGS, "--env.on", "none")
    assert alone.returncode == 0, alone.stderr
    expected = counting.content(tmp_path / alone.stdout.strip())
    doomed = cluster.add_node(**SMALL)

    on = ("--on", f"ray:{cluster.address}")
    before = journal_lines(tmp_path)
    with started(tmp_path, "run", "lines_env.py", *FLAGS, *on) as running:
        until(lambda: journal_lines(tmp_path) > before + 8 or running.poll() is not None, "rollouts have begun")
        cluster.remove_node(doomed, allow_graceful=False)
        out, err = running.communicate(timeout=150)
    assert running.returncode == 0, err
    assert "2 of 2 nodes" in err
    assert counting.content(tmp_path / out.strip()) == expected

    before, known = journal_lines(tmp_path), set(tmp_path.glob("runs/*/*"))
    with started(tmp_path, "run", "lines_env.py", *FLAGS, *on) as running:
        until(lambda: journal_lines(tmp_path) > before + 8 or running.poll() is not None, "rollouts have begun")
        workers = processes_with(b"palaestra_cloud.cluster.worker")
        os.kill(running.pid, signal.SIGKILL)
    assert workers
    until(lambda: gone(workers), "the workers of the killed driver end")
    (folder,) = set(tmp_path.glob("runs/*/*")) - known
    resumed = counting.run(tmp_path, "resume", str(folder), "--on", "none")
    assert resumed.returncode == 0, resumed.stderr
    assert counting.content(folder) == expected


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_wrong_address_is_said_at_once(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the extra `ray`")
    counting.written(tmp_path)
    for address, told in (("127.0.0.1:1", "nothing answers there"), ("head", "HOST:PORT")):
        done = counting.run(tmp_path, "run", "lines_env.py", *FLAGS, "--on", f"ray:{address}", timeout_s=60)
        assert done.returncode == 2, done.stderr
        assert told in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.glob("runs"))
