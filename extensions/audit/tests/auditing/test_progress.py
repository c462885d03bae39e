"""What `palaestra audit` tells while it works, after it was stopped, and when it goes on."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from auditing.played_audit import audit
from palaestra.cli.main import main
from palaestra_audit.records import Kind, Step
from palaestra_audit.trials import step_text

pytestmark = [pytest.mark.slots, pytest.mark.timeout(300)]

TOLD = """
import time
from pathlib import Path

from palaestra import Task, environment

@environment(toolsets=["terminal"])
def told():
    yield Task(id="free", prompt="Write anything to a.txt.", solution="echo x > a.txt")
    yield Task(id="sound", prompt="Write `seven` to a.txt.", solution="echo seven > a.txt")
    yield Task(id="lucky", prompt="Write `even` to a.txt.", solution="echo even > a.txt")
    yield Task(id="broken", prompt="Write `x` to a.txt.", solution="echo x > a.txt")

@told.score
async def right(task, sandbox):
    if task.id == "lucky" and (await sandbox.read_text("a.txt", missing="")).strip() == "even":
        seen = Path("seen")
        seen.write_text(seen.read_text() + "x" if seen.exists() else "x")
        return len(seen.read_text()) % 3 == 0
    if task.id == "broken":
        raise ValueError("no score")
    time.sleep(float(Path("wait").read_text()) if Path("wait").exists() else 0)
    return task.id == "free" or (await sandbox.read_text("a.txt", missing="")).strip() == "seven"
"""


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("told_env.py").write_text(TOLD)
    return tmp_path


@pytest.mark.slow
def test_the_first_pass_tells_its_findings_first_and_kept_results_say_so(
    told: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("palaestra_audit.audit._TOLD_S", 0.01)
    words = ("told_env.py", "--only", "unsolvable", "--only", "pays_for_nothing", "--only", "flaky", "--jobs", "1")
    found = audit(*words)
    lines = capsys.readouterr().err.splitlines()
    told_at = [at for at, line in enumerate(lines) if "free/pays_for_nothing/1: doing nothing scores 1" in line]
    ended = next(at for at, line in enumerate(lines) if line.startswith("[1/4] "))
    assert len(told_at) == 1
    assert any(
        re.match(r"auditing free \((first trials|unsolvable|pays_for_nothing), ", line) for line in lines[: told_at[0]]
    )
    assert any(line.startswith("found broken/unsolvable/1: ") for line in lines[told_at[0] : ended])
    free = next(at for at, line in enumerate(lines) if "] free: pays_for_nothing" in line)
    assert ended <= free < next(at for at, line in enumerate(lines) if "] lucky: flaky" in line)
    assert lines[free + 1 :][:1] != ["    free/pays_for_nothing/1: doing nothing scores 1"]
    # A reference solution that is refused by chance is no unsolvable task.
    assert {task.id: {each.kind for each in task.findings} for task in found.tasks}["lucky"] == {Kind.FLAKY}
    audit(*words)
    told_again = capsys.readouterr().err
    assert told_again.count(", kept from an earlier audit") == 4
    assert "free/pays_for_nothing/1" not in told_again


@pytest.mark.slow
def test_a_task_without_a_score_is_not_tried(told: Path, capsys: pytest.CaptureFixture[str]) -> None:
    audit("told_env.py", "--only", "pays_for_nothing")
    assert "] broken: not tried · " in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [["pays_for_nothing"], ["pays_for_nothing", "weak"]])
def test_a_stopped_audit_leaves_its_reports_and_says_how_it_goes_on(told: Path, kinds: list[str]) -> None:
    Path("wait").write_text("0.3")
    only = [word for kind in kinds for word in ("--only", kind)]
    with subprocess.Popen(
        [sys.executable, "-m", "palaestra", "audit", "told_env.py", *only, "--jobs", "1"],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "120"},
    ) as running:  # fmt: skip
        assert running.stderr is not None
        first = running.stderr.readline()
        running.send_signal(signal.SIGINT)
        rest = running.stderr.read()
    assert ("found free/pays_for_nothing" if "weak" in kinds else "] free: pays_for_nothing") in first
    assert "stopped: the same command goes on with the tasks that are left" in rest
    folder = told / "audits/told_env"
    assert "free/pays_for_nothing/1" in (folder / "audit.html").read_text()
    assert json.loads((folder / "audit.sarif").read_text())["runs"][0]["results"]
    assert main(["audit", "replay", str(folder), "free/pays_for_nothing/1"]) == 0  # the folder names its file


@pytest.mark.parametrize("name", ["notes.txt", "empty", "nosuch/"])
def test_what_is_no_environment_is_not_run_and_leaves_no_folder(
    told: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    Path("notes.txt").write_text("open('run', 'w')\n")
    Path("empty").mkdir()
    assert main(["audit", name]) == 2
    assert name.strip("/") in capsys.readouterr().err
    assert not Path("run").exists()
    assert not Path("audits").exists()


def test_a_step_is_shown_as_a_person_reads_it() -> None:
    command = "mkdir -p /solution && printf %s ZWNobyBoaQo= | base64 -d > /solution/solve.sh"
    shown = step_text(Step(tool="terminal", arguments={"command": command, "timeout": 60}))
    assert shown == "terminal (timeout 60): mkdir -p /solution && write /solution/solve.sh\necho hi\n"
    binary = "printf %s /w== | base64 -d >> /a"
    assert step_text(Step(tool="terminal", arguments={"command": binary})) == f"terminal: {binary}"


def test_carriage_returns_of_a_written_file_are_seen() -> None:
    encoded = base64.b64encode(b"a\r\nb\r\n").decode()
    for command in (f"printf %s {encoded} | base64 -d > x.py", f"base64 -d <<'END' > x.py\n{encoded}\nEND\n"):
        shown = step_text(Step(tool="terminal", arguments={"command": command}))
        assert "write x.py\na\\r\nb\\r\n" in shown
