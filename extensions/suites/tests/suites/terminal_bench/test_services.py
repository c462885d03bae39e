"""Tasks of several services: how they start, what reaches them, and what is left of them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from palaestra.envs.config.build import make_pool
from palaestra.envs.policy_runs import policy_runs
from palaestra_slots.core.types import Blame
from palaestra_suites.terminal_bench import terminal_bench_1
from palaestra_suites.terminal_bench.import_tasks import Finding
from palaestra_suites.terminal_bench.terminalbench_2 import TerminalBenchEnvironment
from palaestra_suites.terminal_bench.terminalbench_2_config import TerminalBench2EvalConfig
from palaestra_suites.toolchain.toolchain import DependencyCache
from palaestra_tokens.engines.scripted import OraclePolicy
from programs import killed_after, until
from sandbox.backends.test_local_lifetime import assert_gone
from sandbox.processes import descendants
from suites.terminal_bench.conftest import Try, played_all
from suites.terminal_bench.mini import HARBOR, LEGACY, copied, written
from suites.terminal_bench.shop import COMPOSE, TOML, make_shop

pytestmark = pytest.mark.slots

KILLS = int(os.environ.get("PALAESTRA_KILLS", "8"))

SHARED = TOML.replace('environment_mode = "separate"\n', "").split("artifacts")[0] + TOML[
    TOML.index("[agent]") :
].replace('environment_mode = "separate"\n', "")
ASKING = """\
#!/bin/bash
answer=$(python3 -c 'import urllib.request; print(urllib.request.urlopen("http://shop/").read().decode())')
[ "$answer" = "$(cat /app/total.txt)" ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
"""


def test_services_start_in_order_and_their_evidence_is_graded(try_tasks: Try, tmp_path: Path) -> None:
    make_shop(tmp_path / "tasks")
    line = try_tasks(tmp_path / "tasks")["shop"]
    assert line.finding is Finding.GOOD, line.reason
    assert (line.noop, line.solution) == (0.0, 1.0)


async def test_the_record_has_the_logs_and_each_rollout_its_own_services(
    installed_pytest: DependencyCache, tmp_path: Path
) -> None:
    """Two rollouts at the same time: if one reached the services of the other, there would be four orders."""
    make_shop(tmp_path / "tasks")
    config = TerminalBench2EvalConfig(
        dataset_name=str(tmp_path / "tasks"), base_image="host", cache_dir=str(tmp_path / "cache")
    )
    async with make_pool(config) as pool:
        environment = TerminalBenchEnvironment(config, installed_pytest)
        await environment.open()
        async with policy_runs(environment, pool) as runs:
            task = await anext(environment.tasks())
            groups = await asyncio.gather(*(runs.play(OraclePolicy(), task) for _ in range(2)))
        assert pool.get_stats()["acquired_slots"] == 0
        assert pool.available_slots == pool.total_slots
        assert pool.backend.stats()["slots"] == 0
    for group in groups:
        done = group.trajectories[0]
        assert (done.reward, done.official) == (1.0, 1.0), done.detail
        services = done.detail["services"]
        assert services["seed"] == {"exit_code": 0, "log": "seeded"}
        assert services["shop"]["exit_code"] is None
        assert "restart 1 after exit code 1" in services["shop"]["log"]
        assert services["shop"]["log"].splitlines()[0] == "not yet"


def test_a_verifier_that_shares_the_agents_slot_asks_the_services(
    installed_pytest: DependencyCache, tmp_path: Path
) -> None:
    make_shop(tmp_path / "tasks", **{"task.toml": SHARED, "tests/test.sh": ASKING})
    done = played_all(tmp_path / "tasks", installed_pytest, tmp_path)["shop"]
    assert (done.reward, done.official, done.detail["grading"]) == (1.0, 1.0, "live"), done.detail
    lazy = played_all(tmp_path / "tasks", installed_pytest, tmp_path, {"shop": "echo 1 > /app/total.txt"})["shop"]
    assert (lazy.reward, lazy.official) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ('["sh", "-c", "echo seeded"]', '["sh", "-c", "echo no seed; exit 3"]', "seed ended with exit code 3"),
        ("python3 -m http.server 8000", "python3 -m no_such_server", "stock ended with exit code 1 at its start"),
        ("python3 -m http.server 8000", "no-such-program", "stock"),
        ("retries: 50", "retries: 1, start_period: 100ms", "shop is not healthy after"),
        ("interval: 200ms, timeout: 5s, retries: 50", "interval: 24h, retries: 9999", "shop is not healthy after 5 s"),
    ],
    ids=["failed", "ended", "missing", "unhealthy", "unhealthy for ever"],
)
def test_a_service_that_does_not_start_is_the_tasks_fault(
    installed_pytest: DependencyCache, tmp_path: Path, before: str, after: str, named: str
) -> None:
    assert before in COMPOSE
    slow = {"environment/shop/shop.py": "import time; time.sleep(60)"} if "retries" in before else {}
    text = COMPOSE.replace(before, after).replace("timeout: 5s", "timeout: 1s")
    toml = TOML.replace("[environment]\n", "[environment]\nbuild_timeout_sec = 5\n") if "24h" in after else TOML
    make_shop(tmp_path / "tasks", **{"environment/docker-compose.yaml": text, "task.toml": toml, **slow})
    done = played_all(tmp_path / "tasks", installed_pytest, tmp_path)["shop"]
    assert done.reward is None
    assert done.blame is Blame.TASK
    assert named in done.error


WAS_READY = """\
#!/bin/bash
test -e /app/was-ready && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
"""
CLIENT_AND_SERVER = """\
services:
  client:
    build: {dockerfile: Dockerfile}
    image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}
    container_name: ${T_BENCH_TASK_DOCKER_CLIENT_CONTAINER_NAME}
    command: ["sh", "-c", "sleep infinity"]
    volumes: ["${T_BENCH_TASK_LOGS_PATH}:${T_BENCH_CONTAINER_LOGS_PATH}"]
    depends_on: [server]
  server:
    build: ./server
    image: ${T_BENCH_TASK_DOCKER_NAME_PREFIX}__server
    healthcheck: {test: [CMD, test, -e, /srv/hello.txt]}
"""


def test_a_terminal_bench_1_task_with_a_server(try_tasks: Try, tmp_path: Path) -> None:
    files = {"docker-compose.yaml": CLIENT_AND_SERVER}
    files["server/Dockerfile"] = "FROM x\nRUN echo Hello > /srv/hello.txt\nCMD python3 -m http.server -d /srv 80\n"
    ask = (
        'python3 -c \'import urllib.request as u; print(u.urlopen("http://server/hello.txt").read().decode(), end="")\''
    )
    files["solution.sh"] = f"#!/bin/bash\nfor i in 1 2 3 4 5 6 7 8 9; do {ask} > hello.txt && break; sleep 0.3; done\n"
    copied(LEGACY / "hello", tmp_path, files)
    line = try_tasks(tmp_path)["hello"]
    assert line.finding is Finding.GOOD, line.reason
    (tmp_path / "hello/client").mkdir()
    (tmp_path / "hello/Dockerfile").rename(tmp_path / "hello/client/Dockerfile")
    apart = CLIENT_AND_SERVER.replace("{dockerfile: Dockerfile}", "{context: client}")
    (tmp_path / "hello/docker-compose.yaml").write_text(apart)
    task = terminal_bench_1.read_task(tmp_path / "hello")
    assert task.recipe.dockerfile == tmp_path / "hello/client/Dockerfile"


READY = """
[environment.healthcheck]
command = "test -e /app/ready"
interval_sec = 0.1
retries = 2
timeout_sec = 0.1
"""


@pytest.mark.parametrize("ready", ["true", "sleep 1; touch /app/ready"])
def test_the_tasks_own_health_check_holds_the_agent_back(
    installed_pytest: DependencyCache, tmp_path: Path, ready: str
) -> None:
    """What `main` runs by its compose file makes it ready, or never does."""
    compose = f"services:\n  main: {{command: [sh, -c, '{ready}; sleep 60']}}\n"
    toml = "[environment]\nworkdir = '/app'\n" + READY.replace(
        "retries = 2", "retries = 50" if "touch" in ready else "retries = 2"
    )
    changed = {"environment/docker-compose.yaml": compose, "task.toml": toml}
    changed |= {"solution/solve.sh": "#!/bin/bash\ncp /app/ready /app/was-ready\n"}
    changed |= {"tests/test.sh": WAS_READY}
    make_shop(tmp_path / "tasks", **changed)
    done = played_all(tmp_path / "tasks", installed_pytest, tmp_path)["shop"]
    if "touch" in ready:
        assert done.reward == 1.0, done.error
    else:
        assert (done.reward, done.blame) == (None, Blame.TASK)
        assert "main is not healthy after 0.4 s" in done.error


def test_services_at_the_level_userns(installed_pytest: DependencyCache, tmp_path: Path) -> None:
    make_shop(tmp_path / "tasks")
    done = played_all(tmp_path / "tasks", installed_pytest, tmp_path, isolation="userns")["shop"]
    assert done.reward == 1.0, done.error


SPY = """\
import http.server, os, socket, sys
from pathlib import Path

def seen():
    found = [path for path in ("/tests", "/solution", "/oracle", "/logs/verifier/reward.txt") if os.path.exists(path)]
    found += [name for name in os.listdir("/proc") if name.isdigit() and b"test.sh" in
              Path(f"/proc/{name}/cmdline").read_bytes()]
    for address in ("127.0.0.1", "198.19.0.1", "198.18.0.2", "169.254.169.254"):
        try:
            socket.create_connection((address, PORT), timeout=0.3).close()
            found.append(address)
        except OSError:
            pass
    return " ".join(found) or "nothing"

class Spy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(seen().encode())

http.server.HTTPServer(("0.0.0.0", 80), Spy).serve_forever()
"""
ASKING_THE_SPY = """\
#!/bin/bash
python3 -c 'import urllib.request; print(urllib.request.urlopen("http://shop/").read().decode())' > /app/spied
[ "$(cat /app/spied)" = nothing ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
cat /app/spied
"""


def test_a_service_sees_neither_the_verifier_nor_the_host(installed_pytest: DependencyCache, tmp_path: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as host:
        changed = {"environment/shop/shop.py": SPY.replace("PORT", str(host.getsockname()[1]))}
        changed |= {"task.toml": SHARED, "tests/test.sh": ASKING_THE_SPY, "solution/solve.sh": "#!/bin/bash\ntrue\n"}
        make_shop(tmp_path / "tasks", **changed)
        done = played_all(tmp_path / "tasks", installed_pytest, tmp_path)["shop"]
        assert done.official == 1.0, done.detail
        host.settimeout(0)
        with pytest.raises(BlockingIOError):
            host.accept()


def test_killed_runs_leave_nothing(tmp_path: Path) -> None:
    """Runs with services, each killed at another moment between its first slot and its end."""
    make_shop(tmp_path / "tasks")
    home = tmp_path / "tmp"
    home.mkdir()
    settings = ["--env.dataset_name", str(tmp_path / "tasks"), "--env.base_image", "host", "--env.group_size", "2"]
    settings += ["--env.cache_dir", str(tmp_path / "cache"), "--policy", "oracle"]
    command = [sys.executable, "-m", "palaestra", "run", "terminalbench_2", "evaluate", *settings]
    place: dict[str, Any] = {"cwd": tmp_path, "env": {**os.environ, "TMPDIR": str(home)}}
    chance, pids = random.Random(7), set[int]()
    for _ in range(KILLS):
        with killed_after(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **place) as run:
            until(lambda: len(descendants(run.pid)) > 4 or run.poll() is not None, "there are slots")
            deadline = time.monotonic() + chance.uniform(0, 3)
            while time.monotonic() < deadline and run.poll() is None:
                pids |= {process.pid for process in descendants(run.pid)}
                time.sleep(0.02)
            pids |= {process.pid for process in descendants(run.pid)}
        assert_gone(pids)
    assert len(pids) > 5 * KILLS
    done = subprocess.run(command, capture_output=True, text=True, **place)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in home.iterdir()] == []


def test_recorded_work_is_not_graded_without_its_services(tmp_path: Path) -> None:
    """What was kept are the files of the agent's slot, over which the verifier would find nothing and pay 0."""
    make_shop(tmp_path / "tasks")
    palaestra = [sys.executable, "-m", "palaestra"]
    settings = ["--env.dataset_name", "tasks", "--env.base_image", "host", "--env.cache_dir", str(tmp_path / "cache")]
    run = [*palaestra, "run", "terminalbench_2", "evaluate", *settings, "--policy", "oracle", "--keep-workspaces"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True)
    assert "mean reward 1.000" in done.stdout + done.stderr
    graded = subprocess.run([*palaestra, "grade", "last"], cwd=tmp_path, capture_output=True, text=True)
    assert "not graded: ServicesEnded" in graded.stdout, graded.stderr


def test_recorded_work_is_graded_again(tmp_path: Path) -> None:
    """Without the preparation of the run, which looked up how the verifier starts."""
    for name in ("greeting", "word-counts"):
        copied(HARBOR / name, tmp_path / "tasks")
    palaestra = [sys.executable, "-m", "palaestra"]
    settings = ["--env.dataset_name", "tasks", "--env.base_image", "host", "--env.cache_dir", str(tmp_path / "cache")]
    run = [*palaestra, "run", "terminalbench_2", "evaluate", *settings, "--policy", "oracle", "--keep-workspaces"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True)
    assert "mean reward 1.000" in done.stdout + done.stderr
    graded = subprocess.run([*palaestra, "grade", "last", "--json"], cwd=tmp_path, capture_output=True, text=True)
    rewards = [json.loads(line)["reward"] for line in graded.stdout.splitlines()]
    assert (graded.returncode, rewards) == (0, [1.0, 1.0]), graded.stderr


ASKS = "for i in 1 2 3 4 5 6 7 8 9; do python3 /srv/ask.py > answer.txt && break; sleep 0.5; done\n"
ASK = "import urllib.request as u\nprint(u.urlopen('http://127.0.0.1:8000/word').read().decode().strip())\n"


@pytest.mark.parametrize("compose", ["", "services: {main: {build: .}}\n"], ids=["image", "compose"])
def test_the_entry_point_of_the_image_runs_beside_the_agent(
    compose: str, installed_pytest: DependencyCache, tmp_path: Path
) -> None:
    """As in Docker, it gets the command that waits. The agent's word is the service's."""
    started = (
        '#!/bin/sh\n[ "$*" = "sh -c sleep infinity" ] || exit 1\ncd /srv\npython3 -m http.server 8000 &\nexec "$@"\n'
    )
    files = {
        "task.toml": 'schema_version = "1.4"\n[environment]\nworkdir = "/app"\n',
        "instruction.md": "Write what the server says to answer.txt.\n",
        "environment/Dockerfile": "FROM debian\nWORKDIR /app\nCOPY . /srv/\nRUN chmod 755 /srv/start\n"
        'ENTRYPOINT ["/srv/start"]\n',
        "environment/start": started,
        "environment/word": "right\n",
        "environment/ask.py": ASK,
        "solution/solve.sh": f"#!/bin/bash\n{ASKS}",
        "tests/test.sh": '#!/bin/bash\n[ "$(cat answer.txt)" = right ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n',
    }
    if compose:
        files["environment/docker-compose.yaml"] = compose
    written(tmp_path / "tasks" / "entry", files)
    done = played_all(tmp_path / "tasks", installed_pytest, tmp_path)["entry"]
    assert (done.reward, done.official, done.error) == (1.0, 1.0, ""), done.detail
