"""Runs on workers of this machine: what the journal says is the same, and a lost worker or driver costs nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import counting
from palaestra.rollouts.observe.status import RunReader
from palaestra_view.run_index import RunIndex
from palaestra_view.summary import run_details
from programs import until

pytestmark = [pytest.mark.slow, pytest.mark.slots]

FLAGS = ("--policy", "oracle", "--group", "3", "--env.n", "4")


def workers_of(pid: int) -> list[int]:
    """The workers that this process started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"palaestra_cloud.cluster.worker" in (stat.parent / "cmdline").read_bytes():
                found.append(int(stat.parent.name))
    return found


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() and _is_alive(pid) for pid in pids)


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@contextlib.contextmanager
def started(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        counting.palaestra(*words), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def journal_lines(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("runs/*/*/journal.jsonl"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What a run in one process writes."""
    folder = tmp_path_factory.mktemp("alone")
    counting.written(folder)
    done = counting.run(folder, "run", "lines_env.py", *FLAGS)
    assert done.returncode == 0, done.stderr
    return counting.content(Path(folder / done.stdout.strip()))


def test_two_workers_write_what_one_process_writes_even_if_one_is_killed(
    tmp_path: Path, alone: dict[str, object]
) -> None:
    counting.written(tmp_path)
    flags = (*FLAGS, "--on", "processes:2", "--slots", "4")
    with started(tmp_path, "run", "lines_env.py", *flags) as running:
        until(lambda: journal_lines(tmp_path) > 12 or running.poll() is not None, "rollouts have begun")
        before = workers_of(running.pid)
        if before:
            os.kill(before[0], signal.SIGKILL)
        out, err = running.communicate(timeout=100)
    assert running.returncode == 0, err
    assert len(before) == 2
    assert "is lost" in err
    found = counting.content(tmp_path / out.strip())
    assert found == alone
    assert gone(before)
    status = RunReader(tmp_path / out.strip() / "journal.jsonl").read()
    assert sum(node.losses for node in status.nodes) == 1
    assert sum(node.rollouts for node in status.nodes) == len(found)
    assert {(node.slots, node.groups, node.in_flight) for node in status.nodes} == {(4, 0, 0)}
    with contextlib.closing(RunIndex(tmp_path / out.strip() / "journal.jsonl")) as index:
        while index.update():
            continue
        nodes = run_details(index)["nodes"]
    shown = {(each["node"], each["host"], each["slots"], each["losses"], each["rollouts"]) for each in nodes}
    assert shown == {(each.node, each.host, each.slots, each.losses, each.rollouts) for each in status.nodes}


def test_a_killed_driver_leaves_no_worker_and_its_run_is_resumed(tmp_path: Path, alone: dict[str, object]) -> None:
    counting.written(tmp_path)
    with started(tmp_path, "run", "lines_env.py", *FLAGS, "--on", "processes:2", "--slots", "3") as running:
        until(lambda: journal_lines(tmp_path) > 14 or running.poll() is not None, "rollouts have begun")
        workers = workers_of(running.pid)
        os.kill(running.pid, signal.SIGKILL)
    assert len(workers) == 2
    until(lambda: gone(workers), "the workers of the killed driver end")
    (folder,) = tmp_path.glob("runs/*/*")
    resumed = counting.run(tmp_path, "resume", str(folder))
    assert resumed.returncode == 0, resumed.stderr
    assert "cluster 2 processes" in resumed.stderr
    assert counting.content(folder) == alone


NOTED = """
import os, sys
from palaestra.envs.config.fields import BaseEnvConfig

FOUND, OUT = BaseEnvConfig.__getattribute__, open(f"{os.getpid()}.read", "w")

def noted(self, name):
    if name in type(self).model_fields and not sys._getframe(1).f_globals["__name__"].startswith("pydantic"):
        print(name, file=OUT, flush=True)
    return FOUND(self, name)

BaseEnvConfig.__getattribute__ = noted
"""


def test_a_cluster_reads_the_settings_that_one_machine_reads(tmp_path: Path) -> None:
    def read(*words: str) -> set[str]:
        done = counting.run(tmp_path, "run", "lines_env.py", "--policy", "noop", "--env.n", "1", *words)
        assert done.returncode == 0, done.stderr
        files = list(tmp_path.glob("*.read"))
        assert len(files) == 1 + len(words) // 2, "one of each process that had the settings"
        found = {name for file in files for name in file.read_text().split()}
        for file in files:
            file.unlink()
        return found

    (tmp_path / "lines_env.py").write_text(NOTED + counting.ENVIRONMENT)
    assert "isolation" in (here := read())
    assert here - read("--on", "processes:1") == set()
