"""`palaestra audit --patch` offers changes that close a finding, and none that does not hold."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from auditing.played_audit import audit
from palaestra.cli.main import main
from palaestra_audit.patches import (
    Source,
    _file_name,
    _patch,
    _source,
    pinned_surroundings,
    run_tests_for_exit_code,
    without_leaked_files,
)
from palaestra_audit.records import Audit, Finding, Kind, Trial, World

pytestmark = pytest.mark.timeout(600)

TASK = {
    "task.toml": 'version = "1.0"\n',
    "instruction.md": "Sort the words of /app/in.txt into /app/out.txt, one per line.",
    "environment/Dockerfile": "FROM python:3.11-slim\nWORKDIR /app\nCOPY in.txt /app/in.txt\n",
    "environment/in.txt": "pear\nfig\nplum\napricot\ncherry\nbanana\nmulberry\n",
    "solution/solve.sh": "#!/bin/bash\nsort /app/in.txt > /app/out.txt\n",
    "tests/test.sh": "#!/bin/bash\ncmp /app/out.txt /tests/right.txt\necho $((! $?)) > /logs/verifier/reward.txt\n",
    "tests/right.txt": "apricot\nbanana\ncherry\nfig\nmulberry\npear\nplum\n",
}
COPIED = {"environment/Dockerfile": TASK["environment/Dockerfile"] + "COPY old/right.txt /app/old/right.txt\n",
          "environment/old/right.txt": TASK["tests/right.txt"]}  # fmt: skip
IN_ZONE = {"tests/test.sh": TASK["tests/test.sh"].replace("cmp", '[ "$(date -d @0 +%H)" = 00 ] && cmp')}


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, content in {**TASK, **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def patched(*argv: str) -> Audit:
    return audit(*argv, "--patch", "patches")


@pytest.mark.slots
@pytest.mark.slow
def test_a_patch_takes_a_leaked_file_away_if_the_task_stays_solvable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("tasks/copied"), COPIED)
    # The solution needs the file that has the answer, so a copy of the task without it cannot be solved.
    write(Path("tasks/needed"), {**COPIED, "solution/solve.sh": "#!/bin/bash\npaste /app/old/* > /app/out.txt\n"})
    found = patched("tasks", "--only", "leaks", "--env.base_image", "host")
    assert {task.id for task, each in found.findings() if not each.note} == {"copied", "needed"}
    (patch,) = Path("patches").iterdir()
    assert patch.name == "copied-leaks.patch"
    said = capsys.readouterr().out
    assert "no patch for needed/leaks: a change was tried, which brings another finding: needed: unsolvable" in said
    subprocess.run(["patch", "-p1", "-d", "tasks", "-i", patch.absolute()], check=True)
    assert not Path("tasks/copied/environment/old/right.txt").exists()
    assert Path("tasks/copied/environment/Dockerfile").read_text() == TASK["environment/Dockerfile"]


@pytest.mark.slots
@pytest.mark.slow
def test_a_patch_pins_the_time_zone_of_the_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("tasks/zone"), IN_ZONE)
    patched("tasks/zone", "--only", "depends_on_the_world", "--env.base_image", "host")
    (patch,) = Path("patches").iterdir()
    subprocess.run(["patch", "-p1", "-d", "tasks/zone", "-i", patch.absolute()], check=True)
    assert "#!/bin/bash\nexport TZ=UTC\n[" in Path("tasks/zone/tests/test.sh").read_text()


TRUSTING = """
from palaestra import Task, environment

TEST = "from work import double\\n\\ndef test_it():\\n    assert double(2) == 4\\n    assert double(5) == 10\\n"
WORK = "printf 'def double(x):\\\\n    return 2 * x\\\\n' > work.py"


@environment(toolsets=["terminal"])
def trusting():
    yield Task(id="a", prompt="Write work.py with double(x).", solution=WORK)


@trusting.score
async def right(sandbox):
    await sandbox.write_text("test_work.py", TEST)
    return (await sandbox.execute("python3 -m pytest -q test_work.py")).exit_code == 0
"""
COPY = """
from palaestra import Task, environment

TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps.\\n"


@environment(toolsets=["terminal"])
def foxes():
    files = {"a.txt": "a"}
    yield Task(id="first", prompt="Write the sentence about a fox.", solution=f"printf %s '{TEXT}' > fox.txt",
               files={"a.txt": "a", ".hidden/fox": TEXT})
    yield Task(id="second", prompt="Write it again.", solution=f"printf %s '{TEXT}' > b.txt", files=files)


@foxes.score
async def right(task, sandbox):
    return await sandbox.read_text("fox.txt" if task.id == "first" else "b.txt", missing="") == TEXT
"""


@pytest.mark.slots
@pytest.mark.slow
def test_a_patch_of_a_function_environment_takes_one_entry_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own_env.py").write_text(COPY)
    assert any(not each.note for _, each in patched("own_env.py", "--only", "leaks").findings())
    (patch,) = Path("patches").iterdir()
    assert Path("own_env.py").read_text() == COPY
    subprocess.run(["git", "apply", patch.absolute()], check=True)
    assert Path("own_env.py").read_text() == COPY.replace(', ".hidden/fox": TEXT', "")


@pytest.mark.slots
@pytest.mark.slow
def test_tests_whose_exit_code_was_trusted_are_run_by_run_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own_env.py").write_text(TRUSTING)
    source = Source("a", tmp_path, "own_env.py")
    change = run_tests_for_exit_code(source, [])
    assert change is not None
    for text, failed in ((TRUSTING, 1), (str(change.files["own_env.py"]), 0)):
        Path("own_env.py").write_text(text)
        assert main(["env", "check", "own_env.py", "--only", "conftest-skip"]) == failed
    for old, new in (("exit_code == 0", "exit_code < 9"), ("pytest", "unittest"), (", TEST)", ", 'import work')")):
        Path("own_env.py").write_text(TRUSTING.replace(old, new))
        assert run_tests_for_exit_code(source, []) is None


def test_names_and_links_of_a_set_choose_no_place_on_this_machine(tmp_path: Path) -> None:
    assert _file_name("../../a b", Kind.WEAK) != _file_name("a-b", Kind.WEAK) == "a-b-weak.patch"
    assert "/" not in _file_name("/etc/x", Kind.WEAK)
    write(tmp_path / "set/a", {})
    write(tmp_path / "other", {})
    (tmp_path / "set/b").symlink_to(tmp_path / "other")
    assert _source(str(tmp_path / "set"), "../other") is _source(str(tmp_path / "set"), "b") is None
    task = _source(str(tmp_path / "set"), "a")
    assert task == Source("a", tmp_path / "set/a", prefix="a/")
    zone = Finding(kind=Kind.WORLD, what="", trial=Trial(world=World(env={"TZ": "EAST-14"})))
    change = pinned_surroundings(task, [zone])
    assert change is not None
    assert _patch(task, change).startswith("diff --git a/a/tests/test.sh b/a/tests/test.sh\n")
    (tmp_path / "set/a/tests/test.sh").unlink()
    (tmp_path / "set/a/tests/test.sh").symlink_to(tmp_path / "other/tests/test.sh")
    assert pinned_surroundings(task, [zone]) is None
    odd = tmp_path / "set/a/environment/in\n+++ b/x.txt"
    odd.parent.mkdir(parents=True, exist_ok=True)
    odd.mkdir()
    (odd / "y.txt").write_text("y")
    leak = without_leaked_files(task, [Finding(kind=Kind.LEAKS, what="", places=["/app/y.txt"])])
    assert leak is not None
    assert _patch(task, leak) == ""
