"""The benchmark that plays the same tasks in other packages: its tasks, its accounting, and a run without the peers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

ORPHAN = """
import json, subprocess, sys, time
import _process_tree as tree
tree.adopt()
before = tree.cpu_s()
burn = "import time\\nwhile time.process_time() < 0.3: pass"
stay = burn + "\\nheld = b'x' * 50_000_000\\ntime.sleep(60)"
with tree.peak_memory() as grown:
    for program, end in ((burn, ""), (stay, "&")):
        subprocess.run(["setsid", "sh", "-c", f'"$0" -c "$1" {end}', sys.executable, program], check=True)
    while grown[0] < 45_000:
        time.sleep(0.02)
(left,) = tree.alive()
print(json.dumps([tree.cpu_s() - before, grown[0], tree.alive({left})]))
__import__("os").kill(left, 9)
"""


@pytest.mark.slow
def test_processes_that_leave_their_parent_are_counted() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ORPHAN], cwd=BENCHMARKS, capture_output=True, text=True, check=True, timeout=60
    )
    cpu_s, grown_kb, alive = json.loads(done.stdout)
    assert cpu_s >= 0.6
    assert grown_kb > 45_000
    assert alive == {}


def test_each_task_has_an_answer_of_its_own_that_the_commands_find(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from _peer_plays import COMMANDS, numbered_tasks
    from _throughput_peers import CHECK, put

    tasks = numbered_tasks(30)
    assert len({task.answer for task in tasks}) == 30
    put(tasks[-1].files, str(tmp_path))
    done = subprocess.run(
        ["bash", "-c", "\n".join([*COMMANDS, CHECK])], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-1] == tasks[-1].answer


@pytest.mark.slow
@pytest.mark.slots
def test_a_peer_that_is_absent_is_named_next_to_those_measured(tmp_path: Path) -> None:
    page, found = tmp_path / "peers.md", tmp_path / "found.json"
    names = ["Palaestra", "Palaestra, level none", "Harbor, docker"]
    command = [sys.executable, str(BENCHMARKS / "peers.py"), "--quick", "--only", *names]
    subprocess.run([*command, "--page", str(page), "--json", str(found)], capture_output=True, check=True, timeout=170)
    data = json.loads(found.read_text())
    for name in names[:2]:
        assert not any(data["notes"][name][kind] for kind in ("processes", "containers", "networks", "files")), name
        numbers = {row["name"]: row["value"] for row in data["rows"] if row["name"].startswith(f"{name}: ")}
        assert len(numbers) == 4
        assert all(numbers.values())
    assert "not measured: give --peers PYTHON (scripts/peers_env)" in page.read_text()
