"""Harbor's own command line runs its tasks in our sandboxes, with the rewards that our own evaluation gives."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("harbor", reason="the package harbor is not installed (make faces)")

from harbor.environments.base import HealthcheckError
from harbor.models.task.config import EnvironmentConfig, HealthcheckConfig, NetworkMode, NetworkPolicy
from harbor.models.trial.config import ResourceMode
from harbor.models.trial.paths import TrialPaths

from palaestra_integrations.harbor import PalaestraEnvironment
from suites.terminal_bench.ledger import make_steps

pytestmark = [pytest.mark.slots, pytest.mark.timeout(600), pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]

ENVIRONMENT = "palaestra_integrations.harbor:PalaestraEnvironment"
TOML = """\
schema_version = "1.4"
{top}
[agent]
timeout_sec = 60.0
{agent}
[verifier]
{verifier}
[environment]
{env}
"""
DOCKERFILE = "FROM python:3.13\nWORKDIR /app\nRUN seq 1 100 > numbers.txt\n"
USER = """\
RUN echo "worker:x:1234:1234::/srv/w:/bin/bash" >> /etc/passwd && echo "worker:x:1234:" >> /etc/group \\
    && mkdir -p /srv/w && chown -R 1234:1234 /srv/w /app
"""
COMPOSE = """\
services:
  main: {build: .}
  web:
    build: {context: .}
    command: ["python3", "-m", "http.server", "8000"]
    healthcheck: {test: ["CMD", "python3", "-c", "import socket; socket.create_connection(('127.0.0.1', 8000))"]}
"""


def reward_if(condition: str) -> str:
    return f"#!/bin/bash\n{condition} && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"


def task(
    folder: Path,
    name: str,
    solve: str,
    test: str,
    *,
    docker: str = "",
    files: dict[str, str] | None = None,
    **toml: str,
) -> None:
    texts = {"task.toml": TOML.format(**{"top": "", "agent": "", "verifier": "", "env": "", **toml})}
    texts |= {"instruction.md": "Do it.\n", "environment/Dockerfile": DOCKERFILE + docker}
    texts |= {"solution/solve.sh": f"#!/bin/bash\n{solve}\n", "tests/test.sh": test, **(files or {})}
    for path, text in texts.items():
        (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / name / path).write_text(text)


def make_tasks(folder: Path) -> None:
    task(folder, "sums", "awk '{s+=$1} END {print s}' numbers.txt > sum.txt", reward_if("grep -qx 5050 sum.txt"))
    task(folder, "wrong", "echo 1 > sum.txt", reward_if("grep -qx 5050 sum.txt"))
    task(
        folder,
        "half",
        "echo a > a",
        "#!/bin/bash\n[ -f a ] && r=0.5\necho '{\"reward\": '${r:-0}'}' > /logs/verifier/reward.json\n",
    )
    task(
        folder,
        "variables",
        "echo $COLOUR > c",
        reward_if('[ "$(cat c)" = red ] && [ "$WANTED" = red ]'),
        env='env = { COLOUR = "red" }',
        verifier='env = { WANTED = "red" }',
    )
    task(
        folder,
        "users",
        "(id -un; echo $HOME) > who",
        reward_if('[ "$(id -u)" = 0 ] && printf "worker\\n/srv/w\\n" | cmp -s - who'),
        docker=USER,
        agent='user = "worker"',
        verifier='user = "root"',
    )
    task(
        folder,
        "offline",
        "(exec 3<>/dev/tcp/1.1.1.1/53) 2> /dev/null || echo off > net",
        reward_if("grep -qx off net"),
        env='network_mode = "no-network"',
    )
    answer = 'artifacts = ["/app/answer.txt"]'
    task(
        folder,
        "separate",
        "echo 42 > answer.txt",
        reward_if('[ "$(cat /app/answer.txt)" = 42 ] && [ ! -e /app/numbers.txt ]'),
        top=answer,
        verifier='environment_mode = "separate"',
        files={"tests/Dockerfile": "FROM python:3.13\nWORKDIR /app\nCOPY . /tests/\n"},
    )
    task(
        folder,
        "collected",
        "seq 1 3 > parts",
        reward_if('[ "$(cat /app/total)" = 3 ] && [ ! -e /app/parts ]'),
        top='artifacts = ["/app/total"]',
        verifier='environment_mode = "separate"\n[[verifier.collect]]\n'
        'command = "[[ -s parts ]] && wc -l < parts > total"',
        files={"tests/Dockerfile": "FROM python:3.13\nWORKDIR /app\nCOPY . /tests/\n"},
    )
    task(
        folder,
        "healthy",
        "cp ready done",
        reward_if("grep -qx yes done"),
        docker="RUN echo yes > ready\n",
        env='[environment.healthcheck]\ncommand = "grep -qx yes /app/ready"\ninterval_sec = 0.1',
    )
    task(
        folder,
        "hidden",
        "ls /tests /solution > seen 2>&1; pwd >> seen",
        reward_if("! grep -q test.sh seen && grep -qx /srv seen && [ -e /tests/test.sh ]"),
        env='workdir = "/srv"',
    )
    fetch = "python3 -c \"import urllib.request as u; open('page','wb').write(u.urlopen('http://web:8000/numbers.txt').read())\""
    task(
        folder,
        "services",
        fetch,
        reward_if("cmp -s page numbers.txt"),
        files={"environment/docker-compose.yaml": COMPOSE},
    )
    steps = "\n[[steps]]\nname = 'one'\n[[steps]]\nname = 'two'\n"
    task(folder, "steps", "true", reward_if("false"), files={
        **{f"steps/{name}/instruction.md": "Go on.\n" for name in ("one", "two")},
        **{f"steps/{name}/solution/solve.sh": f"echo {name} >> done\n" for name in ("one", "two")},
        "steps/one/tests/test.sh": reward_if("grep -qx one done"),
        "steps/two/tests/test.sh": reward_if("[ $(wc -l < done) = 2 ]"),
    }, env=steps)  # fmt: skip
    make_steps(folder)


def harbor_rewards(tasks: Path, agent: str, folder: Path) -> dict[str, Any]:
    command = [Path(sys.executable).with_name("harbor"), "run", "-p", tasks, "-a", agent, "-e", ENVIRONMENT, "-n", "3"]
    command += [
        "--ek",
        "base_image=host",
        "--ek",
        f"workspace_store={folder / 'store'}",
        "-o",
        folder,
        "--job-name",
        agent,
    ]
    env = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HARBOR_TELEMETRY": "off"}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300, env=env, cwd=folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = {}
    for path in (folder / agent).glob("*/result.json"):
        result = json.loads(path.read_text())
        assert result["exception_info"] is None, result["exception_info"]
        found[result["task_name"].rpartition("/")[2]] = result["verifier_result"]["rewards"]["reward"]
    return found


def our_rewards(tasks: Path, policy: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "palaestra", "eval", str(tasks), "--policy", policy, "--env.base_image", "host"]
    done = subprocess.run(
        [*command, "--out", str(folder / "ours.jsonl")], capture_output=True, text=True, timeout=300, cwd=folder
    )
    assert done.returncode in (0, 3), done.stderr[-3000:]
    (groups,) = (folder / "runs").glob(f"*{policy}/*/groups.jsonl")
    rows = [json.loads(line) for line in groups.read_text().splitlines()]
    return {row["task_id"]: row["rollouts"][0]["official"] for row in rows}


@pytest.mark.parametrize(("agent", "policy"), [("oracle", "oracle"), ("nop", "noop")])
def test_harbors_rewards_are_those_of_our_evaluation(tmp_path: Path, agent: str, policy: str) -> None:
    make_tasks(tmp_path / "tasks")
    theirs = harbor_rewards(tmp_path / "tasks", agent, tmp_path)
    solved = {"wrong": 0, "half": 0.5}
    assert theirs == {
        path.name: solved.get(path.name, 1) if agent == "oracle" else 0 for path in (tmp_path / "tasks").iterdir()
    }
    assert our_rewards(tmp_path / "tasks", policy, tmp_path) == theirs


def made(
    folder: Path,
    docker: str = "",
    options: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    **settings: Any,
) -> PalaestraEnvironment:
    place = folder / "task" / "environment"
    place.mkdir(parents=True, exist_ok=True)
    (place / "Dockerfile").write_text(DOCKERFILE + docker)
    paths = TrialPaths(folder / "trial")
    paths.mkdir()
    own = {"base_image": "host", "workspace_store": str(folder / "store"), **(options or {})}
    return PalaestraEnvironment(
        place, "task", "task__1__env", paths, EnvironmentConfig(**(config or {})), **settings, **own
    )


def started(environment: PalaestraEnvironment, do: Callable[[PalaestraEnvironment], Awaitable[None]]) -> None:
    async def main() -> None:
        await environment.start(force_build=False)
        try:
            await do(environment)
        finally:
            await environment.stop(delete=True)
            await environment.stop(delete=True)

    asyncio.run(main())


def test_commands_and_their_output(tmp_path: Path) -> None:
    async def do(env: PalaestraEnvironment) -> None:
        result = await env.exec("pwd; echo $A $B; echo err >&2; exit 3", env={"B": "2"})
        assert (result.stdout, result.stderr, result.return_code) == ("/app\n1 2\n", "err\n", 3)
        with env.with_default_user("worker"), env.scoped_exec_env({"B": "3"}):
            assert (await env.exec("id -un; echo $B", env={"B": "2"})).stdout == "worker\n3\n"
            assert (await env.exec("id -u", user=0)).stdout == "0\n"
        with pytest.raises(RuntimeError, match="timed out after 1 seconds"):
            await env.exec("sleep 100", timeout_sec=1)
        pieces: list[tuple[str, str]] = []

        async def keep(text: str, stream: str) -> None:
            pieces.append((text, stream))

        with env.scoped_output_callback(keep):
            result = await env.exec("echo one; sleep 0.3; echo zwei ü >&2")
        assert [text for text, _ in pieces] == ["one\n", "zwei ü\n"]
        assert result.stdout == "one\nzwei ü\n"
        for folder in ("/logs/agent", "/logs/verifier", "/logs/artifacts"):
            assert (await env.exec(f"touch {folder}/x", user="worker")).return_code == 0, folder
        await env.run_healthcheck()
        with pytest.raises(HealthcheckError):
            await env.run_healthcheck(HealthcheckConfig(command="false", interval_sec=0.01, retries=2))

    standard = [
        {"type": "bind", "source": str(tmp_path), "target": f"/logs/{name}"}
        for name in ("agent", "verifier", "artifacts")
    ]
    config = {"healthcheck": {"command": "test -f numbers.txt"}, "env": {"A": "1"}}
    started(made(tmp_path, USER, config=config, auto_mounts=standard), do)
    with pytest.raises(RuntimeError, match="has not started"):
        asyncio.run(made(tmp_path / "b").exec("true"))


def test_files_go_in_and_out(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub/file").write_text("text")

    async def do(env: PalaestraEnvironment) -> None:
        await env.upload_dir(source, "/data")
        await env.upload_file(source / "sub/file", "/data/other")
        assert await env.is_dir("/data/sub")
        assert await env.is_file("/data/other")
        assert not await env.is_file("/data/sub")
        await env.exec("ln -s /etc/passwd /data/passwd; mkfifo /data/pipe; touch /data/skip.log")
        await env.download_dir("/data", tmp_path / "all")
        await env.download_file("/data/other", tmp_path / "deep/file")
        await env.download_dir_with_exclusions(source_dir="/data/sub", target_dir=tmp_path / "tar", exclude=["*.log"])
        await env.download_dir_filtered(source_dir="/data", target_dir=tmp_path / "some", exclude=["*.log"])

    started(made(tmp_path), do)
    assert sorted(path.name for path in (tmp_path / "all").rglob("*")) == ["file", "other", "skip.log", "sub"]
    assert (tmp_path / "deep/file").read_text() == (tmp_path / "tar/file").read_text() == "text"
    assert sorted(path.name for path in (tmp_path / "some").rglob("*")) == ["file", "other", "sub"]


def test_settings_and_limits_reach_the_sandbox(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "tool").write_text("mounted")
    tmp_path.chmod(0o755)

    async def do(env: PalaestraEnvironment) -> None:
        assert (await env.exec("cat /opt/tools/tool")).stdout == "mounted"
        assert (await env.exec("touch /opt/tools/new")).return_code == 1
        assert (await env.exec("pwd")).stdout == "/srv\n"
        assert (await env.exec("(exec 3<>/dev/tcp/1.1.1.1/53)")).return_code == 1

    mount = {"type": "bind", "source": str(tools), "target": "/opt/tools", "read_only": True}
    config = {"workdir": "/srv", "cpus": 0.5, "memory_mb": 256, "storage_mb": 512}
    offline = NetworkPolicy(network_mode=NetworkMode.NO_NETWORK)
    environment = made(tmp_path, config=config, mounts=[mount], network_policy=offline)
    limits = environment._limits()
    assert (limits.cpus, limits.memory_bytes, limits.disk_bytes) == (0.5, 256 << 20, 512 << 20)
    started(environment, do)
    free = made(tmp_path / "b", config=config, cpu_enforcement_policy=ResourceMode.IGNORE)
    assert free._limits().cpus is None
    listed = NetworkPolicy(network_mode=NetworkMode.ALLOWLIST, allowed_hosts=["*.example.org", "10.0.0.0/8"])
    assert made(tmp_path / "c", network_policy=listed)._slot_network().hosts == ("*.example.org:*", "10.0.0.0/8:*")


def test_what_sandboxes_lack_is_refused_by_name(tmp_path: Path) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"options": {"base": "host"}}, "Unknown option 'base'"),
        ({"options": {"auto_mounting": True}}, "does not support automatic host mounts"),
        ({"mounts": [{"type": "bind", "source": str(tmp_path), "target": "/x"}]}, "--mounts: /x"),
        ({"mounts": [{"type": "volume", "source": "v", "target": "/x", "read_only": True}]}, "--mounts: /x"),
        ({"config": {"gpus": 1}}, "GPU"),
        ({"config": {"os": "windows"}}, "windows"),
        ({"config": {"cpus": 1}, "cpu_enforcement_policy": ResourceMode.REQUEST}, "request"),
        ({"network_policy": NetworkPolicy(network_mode=NetworkMode.ALLOWLIST, allowed_hosts=["::1"])}, "IPv6"),
        ({"phase_network_policies": [NetworkPolicy(network_mode=NetworkMode.NO_NETWORK)]}, "cannot change network"),
        ({"extra_docker_compose": [Path(__file__)]}, "--extra-docker-compose is not supported"),
    ]
    for number, (settings, problem) in enumerate(refused):
        with pytest.raises((ValueError, RuntimeError), match=f"(?i){problem}"):
            made(tmp_path / str(number), **settings)
    with pytest.raises(ValueError, match="unknown isolation 'best-of-all'"):
        PalaestraEnvironment.preflight({"isolation": "best-of-all"})
    with pytest.raises(RuntimeError, match="--ek base_image=host"):
        started(made(tmp_path / "tool", options={"base_image": None, "builder": "palaestra-no-such-tool"}), _nothing)
    with pytest.raises(RuntimeError, match=r"uses COMPILE \(line 4\)"):
        started(made(tmp_path / "line", "COMPILE all\n"), _nothing)


async def _nothing(_: PalaestraEnvironment) -> None:
    raise AssertionError("it must not start")
