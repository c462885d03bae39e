"""A run that is killed and gone on with gives what an undisturbed one gives, byte for byte, and repeats nothing."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from envs import scripts
from palaestra.rollouts.events import RolloutEnded
from palaestra.rollouts.journal.journal import read_journal
from palaestra.rollouts.resume.state import read_finished, repair
from palaestra_slots.core.errors import ConfigError

pytestmark = pytest.mark.slow

RUN = [sys.executable, "-m", "palaestra", "run", "my_env.py", "--policy", "oracle", "--env.n", "10", "--group", "2"]
TIMEOUT_S = 60


def start(folder: Path, *flags: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*RUN, *flags], cwd=folder, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
    )


def killed_after(folder: Path, lines: int, *flags: str) -> bool:
    """Run until the journal has grown by so many lines, then SIGKILL. False when the run ended by itself before."""
    begun = sum(len(path.read_bytes().splitlines()) for path in folder.glob("runs/*/*/journal.jsonl"))
    with start(folder, *flags) as running:
        while running.poll() is None:
            now = sum(len(path.read_bytes().splitlines()) for path in folder.glob("runs/*/*/journal.jsonl"))
            if now >= begun + lines:
                os.kill(running.pid, signal.SIGKILL)
                running.wait(TIMEOUT_S)
                return True
    return False


def finish(folder: Path) -> Path:
    (run,) = folder.glob("runs/*/*")
    with start(folder, "--resume", str(run)) as running:
        assert running.wait(TIMEOUT_S) == 0
    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "my_env.py").write_text(scripts.COUNT_LINES)
    with start(folder) as running:
        assert running.wait(TIMEOUT_S) == 0
    return scripts.groups_file(folder).read_bytes()


@pytest.mark.slots
@pytest.mark.parametrize("seed", range(4))
def test_killed_and_resumed_equals_undisturbed(tmp_path: Path, undisturbed: bytes, seed: int) -> None:
    (tmp_path / "my_env.py").write_text(scripts.COUNT_LINES)
    rng = random.Random(seed)
    killed = killed_after(tmp_path, rng.randrange(1, 60))
    for _ in range(2):
        if killed:
            (run,) = tmp_path.glob("runs/*/*")
            killed = killed_after(tmp_path, rng.randrange(1, 40), "--resume", str(run))
    run = finish(tmp_path)
    assert (run / "groups.jsonl").read_bytes() == undisturbed
    assert len(list(tmp_path.glob("runs/*/*/groups*.jsonl"))) == 1
    ran = Counter(
        event.trajectory.beside.started_at
        for event in read_journal(run / "journal.jsonl")
        if isinstance(event, RolloutEnded)
    )
    assert len(ran) == 20, "a finished rollout was repeated, or one is missing"


def test_a_torn_line_is_cut_off_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"event":"run","run_id":"r","env":"e","model":"m","seed":0}\n{"event":"gro')
    assert repair(path)
    assert not repair(path)
    assert read_finished(path).run.env == "e"
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match="no run to resume"):
        read_finished(path)


@pytest.mark.slots
def test_resuming_something_else_is_refused(tmp_path: Path, undisturbed: bytes) -> None:
    (tmp_path / "my_env.py").write_text(scripts.COUNT_LINES)
    with start(tmp_path, "--env.seed", "3") as running:
        assert running.wait(TIMEOUT_S) == 0
    (run,) = tmp_path.glob("runs/*/*")
    before = (run / "journal.jsonl").read_bytes()
    for flags, says in ((["--resume", str(run)], "seed 3, not 0"), (["--resume", str(tmp_path)], "not a run folder")):
        done = subprocess.run([*RUN, *flags], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert done.returncode == 2
        assert says in done.stderr
    assert (run / "journal.jsonl").read_bytes() == before
    assert json.loads((run / "groups.jsonl").read_text().splitlines()[0])["scores"] == [1.0, 1.0]


@pytest.mark.slots
@pytest.mark.timeout(1800)
def test_whatever_is_killed_at_any_line_of_the_journal(request: pytest.FixtureRequest) -> None:
    points = request.config.getoption("--crash-points", default=9)
    drive = [sys.executable, str(Path(__file__).with_name("boundaries.py")), "--points", str(points)]
    told = subprocess.run(drive, capture_output=True, text=True, timeout=1790)
    assert told.stdout, told.stderr[-4000:]
    report = json.loads(told.stdout)
    assert report["points"] == points
    assert report["wrong"] == {}
    assert report["counted"]["taken up"] > 0
