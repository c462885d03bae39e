"""A run over three docker daemons and Modal's stand-in, in which one of the daemons dies.

PALAESTRA_TEST_GROUPS sets the number of rollouts, PALAESTRA_TEST_CONCURRENCY how many run at a time.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from sandbox.containers import Docker, docker
from sandbox.python_image import make_python_root
from stand_ins.fake_modal import FakeModal

GROUPS = int(os.environ.get("PALAESTRA_TEST_GROUPS", "60"))
CONCURRENCY = os.environ.get("PALAESTRA_TEST_CONCURRENCY", "8")

pytestmark = [
    pytest.mark.slots, pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(max(600, GROUPS)),
    pytest.mark.xdist_group("docker"),
]  # fmt: skip

ENVIRONMENT = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def there(n: int = 1):
    for number in range(n):
        yield Task(id=f"t{number}", prompt="Write the number", solution=f"sleep 0.2; echo {number} > out.txt",
                   data={"number": number})

@there.score
async def right(sandbox, task):
    return (await sandbox.read_text("out.txt", missing="")).strip() == str(task.data["number"])
"""


def kill(daemon: Docker) -> None:
    """Kill a daemon and its containers, as the end of its machine would."""
    folder = str(Path(daemon.address.removeprefix("unix://")).parent)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_text()
        except OSError:
            continue
        program = command.split("\0")[0]
        if folder in command and ("dockerd" in program or "containerd-shim" in program):
            os.kill(int(process.name), signal.SIGKILL)
    for line in Path("/proc/mounts").read_text().splitlines():
        if (place := line.split()[1]).startswith(f"{folder}/exec"):
            subprocess.run(["umount", "--lazy", place], check=False)


async def test_the_death_of_a_daemon_costs_no_finished_rollout_and_no_score(tmp_path: Path) -> None:
    root = make_python_root(tmp_path / "root")
    (tmp_path / "there_env.py").write_text(ENVIRONMENT)
    with ExitStack() as stack:
        daemons = [stack.enter_context(docker()) for _ in range(3)]
        for daemon in daemons:
            daemon.load(root, "python:here")
        modal = stack.enter_context(FakeModal())
        hosts = ",".join(daemon.address for daemon in daemons)
        words = ["--backend", f"docker={hosts}", "--backend", "modal", "--env.docker_image", "python:here"]
        words += ["--policy", "oracle", "--env.modal_slots_per_sandbox", "4", "--env.modal_max_sandboxes", "1"]
        words += ["--env.n", str(GROUPS), "--group", "1", "--concurrency", CONCURRENCY]
        words += ["--env.slots_per_container", "4"]
        words += ["--env.max_containers", "3", "--env.infra_retries", "2", "--env.max_infra_rate", "1"]

        async def main() -> tuple[int, str]:
            run = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "palaestra", "run", "there_env.py", *words,
                cwd=tmp_path, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
                env={**os.environ, **modal.variables, "MODAL_CONFIG_PATH": os.devnull},
            )  # fmt: skip
            groups = asyncio.create_task(half(tmp_path))
            reading = asyncio.create_task(run.communicate())
            await asyncio.wait([groups, reading], return_when=asyncio.FIRST_COMPLETED)
            assert not reading.done(), (await reading)[1].decode()[-3000:]
            kill(daemons[0])
            _, log = await reading
            return run.returncode or 0, log.decode()

        code, log = await main()
    assert code == 0, log[-3000:]
    (lines,) = (tmp_path / "runs").rglob("groups.jsonl")
    scores = [json.loads(line)["scores"] for line in lines.read_text().splitlines()]
    assert scores == [[1.0]] * GROUPS, log[-3000:]
    assert "left out" in log or "lost" in log, log[-3000:]
    assert "slots in docker: " in log
    assert "slots in modal: " in log


async def test_the_restart_of_a_daemon_costs_no_finished_rollout_and_no_score(tmp_path: Path) -> None:
    root = make_python_root(tmp_path / "root")
    (tmp_path / "there_env.py").write_text(ENVIRONMENT)
    with docker() as daemon:
        daemon.load(root, "python:here")
        words = ["--backend", f"docker={daemon.address}", "--env.docker_image", "python:here", "--policy", "oracle"]
        words += ["--env.n", str(GROUPS), "--group", "1", "--concurrency", "8", "--env.max_infra_rate", "1"]

        async def main() -> tuple[int, str]:
            run = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "palaestra", "run", "there_env.py", *words,
                cwd=tmp_path, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            reading = asyncio.create_task(run.communicate())
            await asyncio.wait([asyncio.create_task(half(tmp_path)), reading], return_when=asyncio.FIRST_COMPLETED)
            assert not reading.done(), (await reading)[1].decode()[-3000:]
            await asyncio.to_thread(daemon.stop)
            assert await asyncio.to_thread(daemon.start)
            _, log = await reading
            return run.returncode or 0, log.decode()

        code, log = await main()
    (lines,) = (tmp_path / "runs").rglob("groups.jsonl")
    scores = [json.loads(line)["scores"] for line in lines.read_text().splitlines()]
    assert code == 0, log[-3000:]
    assert scores == [[1.0]] * GROUPS, log[-3000:]


async def half(folder: Path) -> None:
    """Wait until half of the groups are written."""
    while True:
        found = list((folder / "runs").rglob("groups.jsonl"))
        if found and found[0].read_text().count("\n") >= GROUPS // 2:
            return
        await asyncio.sleep(0.05)
