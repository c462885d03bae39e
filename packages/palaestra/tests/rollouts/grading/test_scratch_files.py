"""The hooks of the class form see what the agent and the set-up wrote to `/tmp` and `/dev/shm`."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from envs.scripts import groups_file, need_level
from palaestra.cli.main import main
from palaestra.rollouts.finished_run import open_run
from palaestra.rollouts.grading.grader import _has_no_scratch
from palaestra.rollouts.grading.tampering import CARRIED, SCRATCH
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.pool import SlotPool, SlotPoolConfig

SCRIPT = """
from palaestra import APIServerConfig, HermesAgentBaseEnv, HermesAgentEnvConfig

class ScratchEnv(HermesAgentBaseEnv):
    name = "scratch"

    @classmethod
    def config_init(cls):
        config = HermesAgentEnvConfig(enabled_toolsets=["terminal"], group_size=1, total_steps=2)
        return config, [APIServerConfig(model_name="m", base_url="http://127.0.0.1:9/v1")]

    async def setup(self):
        self.left = [{"id": "a", "prompt": "?", "solution": "cp /tmp/seed /dev/shm/made; cp /tmp/seed /var/tmp/made"}]
        self.left.append({"id": "b", "prompt": "?", "solution": "(sleep 1000 &) > /dev/null 2>&1"})

    async def get_next_item(self):
        return self.left.pop(0) if self.left else None

    def format_prompt(self, item):
        return item["prompt"]

    async def setup_trajectory_workspace(self, item, *, trajectory_id, exec_tool):
        await exec_tool("terminal", {"command": "echo seed > /tmp/seed"})

    async def verify_and_score_trajectory(self, item, result, *, trajectory_id, exec_tool, workspace_meta=None):
        seen = await exec_tool("terminal", {"command": "cat /tmp/seed /dev/shm/made /var/tmp/made"})
        return float(seen.output.split().count("seed") == 3), {}

    async def compute_reward(self, item, result, ctx):
        raise AssertionError

    async def evaluate(self, *args, **kwargs): ...

if __name__ == "__main__":
    ScratchEnv.cli()
"""


HIDING = {
    "odd kinds": "mkfifo /tmp/pipe; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"/tmp/s\")'",
    "closed": "chmod 000 /tmp/made; mkdir -m 000 /tmp/e /dev/shm/e",
    "sparse": "truncate -s 200G /tmp/huge",
    "busy": "(setsid sh -c 'while :; do date > /tmp/x$RANDOM; rm -f /tmp/x*; done' &) > /dev/null 2>&1",
    "names": "touch \"/tmp/$(printf 'a\\nb')\" /tmp/-rf '/tmp/ x' /tmp/.hidden; ln -s /tmp/made /tmp/link",
    "circles": "ln -s /tmp /tmp/loop; ln -s / /tmp/root; ln -s ../../.. /dev/shm/up",
    "planted": "mkdir -p /.palaestra-carried; ln -s / /.palaestra-carried/tmp; ln -s /etc /.palaestra-carried/dev",
    "linked": "rm -rf /.palaestra-carried; ln -s /workspace /.palaestra-carried",
}
"""What an agent leaves in the way of the copy of its scratch files."""

ODD = SCRIPT.replace(
    'self.left = [{"id": "a", "prompt": "?", "solution": "cp /tmp/seed /dev/shm/made; cp /tmp/seed /var/tmp/made"}]',
    "made = 'cp /tmp/seed /tmp/made; cp /tmp/seed /dev/shm/made; '\n"
    f"        hiding = {HIDING!r}\n"
    "        self.left = [{'id': n, 'prompt': '?', 'solution': made + text} for n, text in hiding.items()]",
).replace('/var/tmp/made"', '/tmp/made"')


@pytest.mark.slots
@pytest.mark.parametrize("isolation", ["best", "userns"])
def test_nothing_that_an_agent_leaves_hides_its_work(tmp_path: Path, isolation: str) -> None:
    script = tmp_path / "scratch_env.py"
    script.write_text(ODD)
    argv = [sys.executable, str(script), "process", "--policy", "oracle", "--env.isolation", isolation]
    argv += ["--env.total_steps", str(len(HIDING)), "--env.grading", "sealed"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in groups_file(tmp_path).read_text().splitlines()]
    assert {row["task_id"]: row["scores"] for row in rows} == {name: [1.0] for name in HIDING}


@pytest.mark.slots
def test_scratch_files_are_graded(tmp_path: Path) -> None:
    """Also when the kept workspaces are graded again."""
    script = tmp_path / "scratch_env.py"
    script.write_text(SCRIPT)
    argv = [sys.executable, str(script), "process", "--policy", "oracle", "--env.save_workspaces", "true"]
    argv += ["--env.grading", "sealed"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    first, second = [json.loads(line) for line in groups_file(tmp_path).read_text().splitlines()]
    assert first["scores"] == [1.0]
    assert second["scores"] == [0.0]
    assert done.stderr.count("had processes when they ended") == 1
    again = [sys.executable, "-m", "palaestra", "grade", "last"]
    graded = subprocess.run(again, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (graded.returncode, graded.stdout) == (0, ""), graded.stderr


LOSING = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def losing():
    for name, more in {"kept": "", "lost": "; rm $(command -v cp)"}.items():
        yield Task(id=name, prompt="?", solution=f"echo made > /tmp/made{more}", paths=["/tmp"])

@losing.score
async def seen(sandbox):
    return await sandbox.read_text("/tmp/made", missing="") != ""
"""


@pytest.mark.slots
@pytest.mark.parametrize("level", ["full", "userns", "confined"])
def test_a_scratch_directory_that_could_not_be_carried_is_named(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_level(level)
    monkeypatch.chdir(tmp_path)
    Path("losing_env.py").write_text(LOSING)
    assert main(["run", "losing_env.py", "--policy", "oracle", "--env.isolation", level]) == 0
    found = {each.task_id: each for each in open_run().trajectories}
    named = {name: "/tmp" in each.detail.get("left_out", ()) for name, each in found.items()}
    removed = any('"exit_code": 0' in str(each["content"]) for each in found["lost"].messages if each["role"] == "tool")
    assert named == {"kept": False, "lost": removed}
    assert removed or level != "full"  # the other levels may forbid it


MODULES = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def modules():
    for place in ("/tmp", "/dev/shm", "/var/tmp"):
        plant = f"echo 'print(4)' > {place}/json.py; mkdir {place}/pip; cp {place}/json.py {place}/pip/__init__.py"
        yield Task(id=place, prompt="?", solution=plant, paths=["/tmp", "/dev/shm"])

@modules.score
async def right(task, sandbox):
    await sandbox.write_text(f"{task.id}/check.py", "import json, pip")
    return (await sandbox.execute(["python3", f"{task.id}/check.py"])).output != ""
"""


@pytest.mark.slots
def test_a_script_in_a_temporary_directory_imports_no_module_of_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("modules_env.py").write_text(MODULES)
    assert main(["run", "modules_env.py", "--policy", "oracle", "--env.group_size", "1"]) == 0
    rows = [json.loads(line) for line in groups_file().read_text().splitlines()]
    assert [row["scores"] for row in rows] == [[0.0]] * 3


KEPT = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def kept():
    yield Task(id="a", prompt="Write kept.", solution="echo kept > answer.txt")

@kept.score
async def correct(sandbox):
    return await sandbox.read_text("answer.txt", missing="") == "kept\\n"
"""


@pytest.mark.slots
@pytest.mark.parametrize("level", ["full", "userns", "confined", "none"])
def test_files_of_the_machine_stay_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    """Below the levels with namespaces, `/tmp` is that of all programs of the machine."""
    need_level(level)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept_env.py").write_text(KEPT)
    with tempfile.NamedTemporaryFile(dir="/tmp") as other:
        changed = Path(other.name).stat().st_ctime_ns
        assert main(["run", "kept_env.py", "--policy", "oracle", "--env.isolation", level]) == 0
        assert Path(other.name).stat().st_ctime_ns == changed
    (journal,) = Path("runs").glob("*/*/journal.jsonl")
    assert '"reward":1.0' in journal.read_text()
    assert not Path(CARRIED).exists()


SCRATCHES = {
    ":": True,
    "touch /tmp/.hidden": False,
    "mkdir /dev/shm/empty": False,
    "ln -s / /tmp/link": False,
    "mkfifo /dev/shm/pipe": False,
    "mkdir /.palaestra-carried": False,
    "ln -s /nowhere /.palaestra-carried": False,
    "echo a > /tmp/a; ln /tmp/a /tmp/b; rm /tmp/a": False,
    "echo a > /tmp/a; mv /tmp/a /workspace": True,
    "echo a > /tmp/a; mv /tmp/a /dev/shm/a": False,
    "echo a > /tmp/a; echo b > /tmp/b; mv /tmp/a /tmp/b; rm /tmp/b": True,
    "mkdir -p /tmp/a/b; echo c > /tmp/a/b/c; rm -r /tmp/a": True,
    "chmod 000 /tmp /dev/shm; touch /tmp/a": False,
    "rm -rf /tmp /dev/shm": True,
}
"""Commands, and whether afterwards there is nothing in the scratch directories and no earlier copy of them."""


@pytest.mark.slots
@pytest.mark.parametrize("level", ["full", "userns"])
def test_nothing_is_copied_exactly_if_there_is_nothing(level: str) -> None:
    need_level(level)

    async def main() -> dict[str, bool]:
        found = {}
        async with SlotPool(SlotPoolConfig(), LocalBackend.from_isolation(level)) as pool:
            slot = await pool.acquire("t")
            for command in SCRATCHES:
                await slot.execute(command)
                found[command] = await _has_no_scratch(slot)
                listed = [await slot.list_dir(place) for place in SCRATCH]
                assert found[command] == (not any(listed) and await slot.stat(CARRIED) is None), command
                await slot.execute("chmod 1777 /tmp /dev/shm; find /tmp /dev/shm -mindepth 1 -delete")
                await slot.remove(CARRIED)
            await pool.release(slot)
        return found

    assert asyncio.run(main()) == SCRATCHES
