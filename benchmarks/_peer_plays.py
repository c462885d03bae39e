"""Tasks with files through another package: python _peer_plays.py PEER URL OUT WIDTH TASKS [IMAGE MOUNT ...]

Runs in an interpreter that has the package (scripts/peers_env). The package is used as its documentation says: tasks as
its own objects or folders, its own clean-up, and its own limit of WIDTH tasks at a time. OUT is a folder for its logs.
Containers are of IMAGE, with the folders MOUNT of this machine read-only in them. Prints the seconds from the first
task to the last score, and the package's version, as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from _throughput_peers import CHECK, PROMPT, TERMINAL, Steps, atropos, put, verifiers

NUMBERS = "numbers.txt"
COMMANDS = (
    f"wc -l < {NUMBERS}", f"sort -n {NUMBERS} > sorted.txt", "head -3 sorted.txt", "grep -c 7 sorted.txt",
    "tail -1 sorted.txt > answer.txt",
)  # fmt: skip


WAIT = "trap exit TERM; sleep infinity & wait"
"""What a container runs that ends when it is told to. Docker's own init needs an image whose /sbin is no link."""


def numbered_tasks(count: int) -> list[Steps]:
    """Return tasks that differ: each has numbers of its own, of which the answer is the largest."""
    numbers = [[7, *((task * 7919 + line * 104_729) % 99_991 for line in range(200))] for task in range(count)]
    return [Steps({NUMBERS: "".join(f"{n}\n" for n in each)}, str(max(each))) for each in numbers]


async def converse(url: str, run: Callable[[str], Awaitable[str]]) -> None:
    """Play one task with the client of OpenAI, for a package that has no agent loop of its own."""
    from openai import AsyncOpenAI

    messages: list[Any] = [{"role": "user", "content": PROMPT}]
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
        while True:
            reply = await client.chat.completions.create(model="m", messages=messages, tools=[TERMINAL])
            said = reply.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            if not said.tool_calls:
                return
            for call in said.tool_calls:
                output = await run(json.loads(call.function.arguments)["command"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": output})


def service(mounts: Sequence[str]) -> dict[str, Any]:
    """Return the service of a compose file, without a network."""
    volumes = [f"{path}:{path}:ro" for path in mounts]
    return {"network_mode": "none", "working_dir": "/workspace", "volumes": volumes}


def inspect(url: str, out: str, width: int, tasks: Sequence[Steps], image: str = "", *mounts: str) -> float:
    """Return the seconds of `eval`, in the sandbox `local`, or with an image in the sandbox `docker`."""
    from inspect_ai import Task, eval  # noqa: A004
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import Score, accuracy, scorer
    from inspect_ai.solver import generate, use_tools
    from inspect_ai.tool import tool
    from inspect_ai.util import sandbox

    @tool
    def terminal() -> Any:
        async def execute(command: str) -> str:
            """Run a shell command.

            Args:
                command: what to run
            """
            return (await sandbox().exec(["bash", "-c", command])).stdout

        return execute

    @scorer(metrics=[accuracy()])
    def right() -> Any:
        async def score(state: Any, target: Any) -> Score:
            output = (await sandbox().exec(["bash", "-c", CHECK])).stdout
            return Score(value="C" if output.strip() == target.text else "I")

        return score

    os.environ |= {"INSTANT_API_KEY": "x", "INSTANT_BASE_URL": f"{url}/v1"}
    where: Any = "local"
    if image:
        default = {**service(mounts), "image": image, "x-local": True, "command": ["bash", "-c", WAIT]}
        file = Path(out, "compose.yaml")
        file.write_text(json.dumps({"services": {"default": default}}))
        where = ("docker", str(file))
    samples = [Sample(input=PROMPT, target=task.answer, files=dict(task.files)) for task in tasks]
    task = Task(samples, solver=[use_tools(terminal()), generate()], scorer=right(), sandbox=where)
    started = time.perf_counter()
    (log,) = eval(
        task, model="openai-api/instant/m", max_samples=width, max_sandboxes=width, log_dir=out, display="none"
    )
    took = time.perf_counter() - started
    found = [sample.scores["right"].value for sample in log.samples or () if sample.scores]
    assert found == ["C"] * len(tasks), (log.error, found)
    return took


def swe_rex(url: str, out: str, width: int, tasks: Sequence[Steps], image: str = "", *mounts: str) -> float:
    """Return the seconds of a deployment with a session for each task, on this machine or in containers.

    Each task has a thread with a loop of its own, as in SWE-agent's batches: a deployment that waits for its container
    blocks its loop, so that others in that loop miss their limit of 0.15 s for an answer.
    """
    from swerex.deployment.docker import DockerDeployment
    from swerex.deployment.local import LocalDeployment
    from swerex.runtime.abstract import BashAction, Command, CreateBashSessionRequest, WriteFileRequest

    async def play(task: Steps, folder: str) -> None:
        deployment: Any = LocalDeployment()
        if image:
            volumes = [word for path in mounts for word in ("-v", f"{path}:{path}:ro")]
            more = ["-e", f"PATH={Path(sys.executable).parent}:/usr/bin:/bin", "-w", folder]
            deployment = DockerDeployment(image=image, pull="never", docker_args=[*volumes, *more])
        await deployment.start()
        try:
            runtime = deployment.runtime
            await runtime.create_session(CreateBashSessionRequest(startup_timeout=60))
            for name, text in task.files.items():
                await runtime.write_file(WriteFileRequest(path=f"{folder}/{name}", content=text))

            async def run(command: str) -> str:
                return str(
                    (await runtime.run_in_session(BashAction(command=command, timeout=60, check="ignore"))).output
                )

            await run(f"cd {folder}")
            await converse(url, run)
            checked = await runtime.execute(Command(command=CHECK, shell=True, cwd=folder))
            assert checked.stdout.strip() == task.answer, checked
        finally:
            await deployment.stop()

    async def one(task: Steps) -> None:
        with contextlib.nullcontext("/workspace") if image else tempfile.TemporaryDirectory() as folder:
            await play(task, folder)

    started = time.perf_counter()
    with ThreadPoolExecutor(width) as pool:
        list(pool.map(lambda task: asyncio.run(one(task)), tasks))
    return time.perf_counter() - started


def harbor(url: str, out: str, width: int, tasks: Sequence[Steps], image: str = "", *mounts: str) -> float:
    """Return the seconds of the command `harbor run` with its environment `docker`."""
    for number, task in enumerate(tasks):
        folder = Path(out, "tasks", f"task-{number:02}")
        (folder / "tests").mkdir(parents=True)
        (folder / "environment").mkdir()
        (folder / "instruction.md").write_text(PROMPT)
        (folder / "task.toml").write_text(f'version = "1.0"\n[environment]\ndocker_image = "{image}"\n')
        file = folder / "environment" / "docker-compose.yaml"
        file.write_text(json.dumps({"services": {"main": service(mounts)}}))
        put(task.files, str(folder / "environment"))
        test = f'cd /workspace\n[ "$({CHECK})" = {task.answer} ] && reward=1\n'
        test += "echo ${reward:-0} > /logs/verifier/reward.txt\n"
        (folder / "tests" / "test.sh").write_text(f"#!/bin/bash\n{test}")
    command = [str(Path(sys.executable).with_name("harbor")), "run", "-p", f"{out}/tasks", "-n", str(width)]
    command += ["--agent-import-path", "_peer_harbor_agent:Loop", "-m", "m", "-o", f"{out}/jobs", "--quiet"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "INSTANT_URL": url}
    started = time.perf_counter()
    subprocess.run(command, env=environment, check=True, stdout=sys.stderr)
    took = time.perf_counter() - started
    results = [json.loads(path.read_text()) for path in Path(out, "jobs").glob("*/*/result.json")]
    found = [(result.get("verifier_result") or {}).get("rewards") for result in results]
    assert found == [{"reward": 1.0}] * len(tasks), (found, [result.get("exception_info") for result in results])
    return took


def main() -> None:
    """Play the tasks with one peer."""
    peer, url, out, width, count, *container = sys.argv[1:]
    logging.disable(logging.CRITICAL)
    os.environ["TQDM_DISABLE"] = "1"
    tasks = numbered_tasks(int(count))
    plays: dict[str, tuple[str, Callable[[], Any]]] = {
        "atroposlib": ("atroposlib", lambda: atropos(url, int(width), tasks)),
        "verifiers": ("verifiers", lambda: verifiers(url, int(width), tasks)),
        "inspect": ("inspect-ai", lambda: inspect(url, out, int(width), tasks, *container)),
        "swe-rex": ("swe-rex", lambda: swe_rex(url, out, int(width), tasks, *container)),
        "harbor": ("harbor", lambda: harbor(url, out, int(width), tasks, *container)),
    }
    package, play = plays[peer]
    with contextlib.redirect_stdout(sys.stderr):
        took = play()
        if asyncio.iscoroutine(took):
            took = asyncio.run(took)
    print(json.dumps({"seconds": took, "version": importlib.metadata.version(package)}))


if __name__ == "__main__":
    main()
