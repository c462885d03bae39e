"""A check that the work makes fail scores 0; one that fails over the reference solution too is the grader's failure."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from envs.scripts import acting, groups_file, need_level
from palaestra.cli.main import main

ATTACKS = {
    "fifo": "rm -f answer.txt; mkfifo answer.txt",
    "directory": "rm -f answer.txt; mkdir answer.txt",
    "garbage": "echo many > answer.txt",
    "not-a-number": "echo nan > answer.txt",
    "endless": "echo 1e999 > answer.txt",
    "removed": "cd /; rm -rf /workspace; ln -s /nowhere /workspace",
    "honest": "echo 4 > answer.txt",
}

ENV = f"""
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def breaking():
    for name in {[*ATTACKS]}:
        yield Task(id=name, prompt="?", files={{"answer.txt": "0"}}, solution="echo 4 > answer.txt")

@breaking.score
async def right(task, sandbox):
    text = await sandbox.read_text("answer.txt")
    return 1 - abs(float(text) - 4)
"""

FAULTY = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def faulty():
    yield Task(id="one", prompt="?", files={"answer.txt": "0"}, solution="echo 4 > answer.txt")

@faulty.score
async def right(sandbox):
    return float(int(await sandbox.read_text("nowhere.txt")) == 4)
"""


@pytest.mark.slots
def test_work_that_breaks_its_check_scores_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("breaking_env.py").write_text(ENV)
    assert main(["run", "breaking_env.py", "--policy", acting(tmp_path / "works.jsonl", ATTACKS)]) == 0
    lines = [json.loads(line) for line in groups_file().read_text().splitlines()]
    assert {line["task_id"]: line["scores"] for line in lines} == {
        "fifo": [0.0],
        "directory": [0.0],
        "garbage": [0.0],
        "not-a-number": [0.0],
        "endless": [0.0],
        "removed": [0.0],
        "honest": [1.0],
    }


@pytest.mark.slots
@pytest.mark.parametrize("level", ["full", "userns", "confined"])
def test_a_closed_root_directory_gets_a_score(level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_level(level)
    monkeypatch.chdir(tmp_path)
    Path("closed_env.py").write_text(FAULTY.replace("nowhere", "answer"))
    policy = acting(tmp_path / "works.jsonl", {"one": "chmod 000 /"})
    assert main(["run", "closed_env.py", "--policy", policy, "--env.isolation", level]) == 0


@pytest.mark.slots
def test_a_check_that_always_fails_is_the_graders_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("faulty_env.py").write_text(FAULTY)
    assert main(["run", "faulty_env.py", "--policy", "oracle", "--env.group_size", "1"]) == 3


RANDOM = """
from palaestra import Task, environment

CALLS = []

@environment(toolsets=["terminal"])
def random():
    for grading in ("sealed", "live"):
        yield Task(id=grading, prompt="?", files={"answer.txt": "0"}, solution="echo 4 > answer.txt", grading=grading)

@random.score
async def right(task, sandbox):
    text = await sandbox.read_text("answer.txt")
    CALLS.append(task.id)
    if text == "3\\n" and CALLS.count(task.id) == 1:
        raise ValueError("the work hangs the check at random")
    return float(int(text) == 4)
"""


@pytest.mark.slots
def test_work_that_breaks_its_check_only_once_is_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("random_env.py").write_text(RANDOM)
    policy = acting(tmp_path / "works.jsonl", dict.fromkeys(["sealed", "live"], "echo 3 > answer.txt"))
    assert main(["run", "random_env.py", "--policy", policy, "--env.infra_retries", "0"]) == 0
    lines = [json.loads(line) for line in groups_file().read_text().splitlines()]
    assert {line["task_id"]: line["scores"] for line in lines} == {"sealed": [0.0], "live": [0.0]}
    files = [path for path in groups_file().parent.rglob("*") if path.is_file()]
    assert any(b"at random" in path.read_bytes() and b"first_check_failed" in path.read_bytes() for path in files)


@pytest.mark.slots
def test_work_that_breaks_a_live_check_scores_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("breaking_env.py").write_text(ENV.replace('prompt="?"', 'prompt="?", grading="live"'))
    assert main(["run", "breaking_env.py", "--policy", acting(tmp_path / "works.jsonl", ATTACKS)]) == 0
    lines = [json.loads(line) for line in groups_file().read_text().splitlines()]
    scores = {line["task_id"]: line["scores"] for line in lines if line["task_id"] != "honest"}
    assert len(scores) == 6
    assert set(map(tuple, scores.values())) == {(0.0,)}


@pytest.mark.slots
@pytest.mark.parametrize("grading", ["sealed", "live"])
def test_the_reference_is_played_in_the_place_of_the_work(
    grading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollouts whose checks fail at the same time do not wait for each other's slots."""
    monkeypatch.chdir(tmp_path)
    Path("faulty_env.py").write_text(
        FAULTY.replace("nowhere", "answer").replace('prompt="?"', f'prompt="?", grading="{grading}"')
    )
    policy = acting(tmp_path / "works.jsonl", {"one": "echo many > answer.txt"}, group_size=3)
    assert main(["run", "faulty_env.py", "--policy", policy, "--group", "3", "--slots", "1"]) == 0
    (line,) = (json.loads(line) for line in groups_file().read_text().splitlines())
    assert line["scores"] == [0.0, 0.0, 0.0]


EXHAUSTING_WORKS = {
    "honest": "echo 4 > answer.txt",
    "deep": 'echo \'import os\nfor _ in range(3000): os.mkdir("d"); os.chdir("d")\' > deep.py; python3 deep.py',
    "many": "mkdir many; cd many; seq 30000 | xargs mkdir",
    "no-place": "head -c 1G /dev/zero > fill; seq 200000 | xargs touch",
    "endless-device": "ln -sf /dev/zero answer.txt",
    "terminal": "ln -sf /dev/tty answer.txt; ln -sf /dev/stdin check.sh",
    "socket": "rm answer.txt; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"answer.txt\")'",
    "circle": "ln -sf answer.txt answer.txt; ln -sf . loop",
    "sparse": "truncate -s 900G answer.txt",
    "closed": "chmod 000 . answer.txt",
    "bytes": "touch $'x\\377' $'/opt/y\\377'; ln -s $'\\376' $'l\\377'; mkdir $'d\\377'",
    "times": "touch -d 9999-12-31 answer.txt .; touch -d 1901-01-01 old",
    "marked": "setfattr -n user.overlay.opaque -v y .; chattr +i answer.txt; chmod 7777 . answer.txt; mknod w c 0 0",
    "waiting": "rm answer.txt; mkfifo answer.txt check.sh listing",
}

EXHAUSTING = f"""
from palaestra import Limits, Task, environment

@environment(toolsets=["terminal"])
def exhausting():
    for name in {[*EXHAUSTING_WORKS]}:
        limits = Limits(disk_bytes=64 << 20)
        files, solution = {{"answer.txt": "0"}}, "echo 4 > answer.txt"
        yield Task(id=name, prompt="?", files=files, solution=solution, limits=limits)

@exhausting.score
async def right(task, sandbox):
    await sandbox.write_text("check.sh", "cat answer.txt")
    done = await sandbox.execute("sh check.sh; ls -R . > listing; du -s .", timeout_s=20)
    if done.metadata["timeout"]:
        raise TimeoutError("the check did not end")
    return float(int(await sandbox.read_text("answer.txt")) == 4)
"""


@pytest.mark.slots
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_work_that_exhausts_or_hangs_its_check_scores_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every attack gets a score, and no rollout beside it is lost."""
    monkeypatch.chdir(tmp_path)
    Path("exhausting_env.py").write_text(EXHAUSTING)
    works = {name: f"bash -c {shlex.quote(command)}" for name, command in EXHAUSTING_WORKS.items()}
    policy = acting(tmp_path / "works.jsonl", works, group_size=2)
    assert main(["run", "exhausting_env.py", "--policy", policy, "--env.group_size", "2"]) == 0
    scores = {}
    for line in groups_file().read_text().splitlines():
        row = json.loads(line)
        scores[row["task_id"]] = row["scores"]
    assert scores.pop("honest") == [1.0, 1.0]
    assert len(scores) == 13
    assert set(map(tuple, scores.values())) == {(0.0, 0.0)}, scores


SET_UP = """
from palaestra import APIServerConfig, HermesAgentBaseEnv, HermesAgentEnvConfig

class SetUpEnv(HermesAgentBaseEnv):
    name = "set_up"

    @classmethod
    def config_init(cls):
        config = HermesAgentEnvConfig(enabled_toolsets=["terminal"], group_size=1, total_steps=4)
        return config, [APIServerConfig(model_name="m", base_url="http://127.0.0.1:9/v1")]

    async def setup(self):
        self.left = [{"id": name, "prompt": "?", "solution": "echo 4 > state.txt"}
                     for name in ("kept", "removed", "garbage", "honest")]

    async def get_next_item(self):
        return self.left.pop(0) if self.left else None

    def format_prompt(self, item):
        return item["prompt"]

    async def setup_trajectory_workspace(self, item, *, trajectory_id, exec_tool):
        await exec_tool("terminal", {"command": "echo 0 > state.txt"})
        return {"wanted": 4}

    async def verify_and_score_trajectory(self, item, result, *, trajectory_id, exec_tool, workspace_meta=None):
        seen = await exec_tool("terminal", {"command": "cat state.txt"})
        return float(int(seen.output) == workspace_meta["wanted"]), {}

    async def compute_reward(self, item, result, ctx):
        raise AssertionError

    async def evaluate(self, *args, **kwargs): ...

if __name__ == "__main__":
    SetUpEnv.cli()
"""


@pytest.mark.slots
def test_work_that_breaks_the_check_of_its_own_set_up_scores_nothing(tmp_path: Path) -> None:
    """The check would fail on the prepared workspace without the set-up of the rollout."""
    script = tmp_path / "set_up_env.py"
    script.write_text(SET_UP)
    works = {
        "kept": "true",
        "removed": "rm state.txt",
        "garbage": "echo many > state.txt",
        "honest": "echo 4 > state.txt",
    }
    argv = [sys.executable, str(script), "process", "--policy", acting(tmp_path / "works.jsonl", works)]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in groups_file(tmp_path).read_text().splitlines()]
    scores = {row["task_id"]: row["scores"] for row in rows}
    assert scores == {"kept": [0.0], "removed": [0.0], "garbage": [0.0], "honest": [1.0]}
