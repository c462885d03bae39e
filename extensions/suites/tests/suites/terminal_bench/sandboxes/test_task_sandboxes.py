"""Sandboxes of tasks for other harnesses: how commands run in them, and that nothing leads out of them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from golden_messages import raises
from palaestra_slots.core.errors import ConfigError, PrepareError, TaskError
from palaestra_suites.terminal_bench.sandboxes.task_sandbox import TaskSandbox, TaskSandboxSpec
from palaestra_suites.terminal_bench.sandboxes.task_sandboxes import TaskSandboxes, TaskSandboxSettings

pytestmark = [pytest.mark.slots, pytest.mark.skipif(os.geteuid() != 0, reason="the image has a user of its own")]

DOCKERFILE = """\
FROM python:3.13
WORKDIR /app
ENV COLOUR=red
RUN echo built > built.txt && date +%N > when.txt
RUN echo "worker:x:1234:1234::/srv/w:/bin/bash" >> /etc/passwd && echo "worker:x:1234:" >> /etc/group \\
    && mkdir -p /srv/w && chown 1234:1234 /srv/w
"""
COMPOSE = """\
services:
  main: {build: .}
  web:
    build: {context: .}
    environment: {SIDE: web}
    command: ["python3", "-m", "http.server", "8000"]
    healthcheck: {test: ["CMD", "python3", "-c", "import socket; socket.create_connection(('127.0.0.1', 8000))"]}
"""


def spec(folder: Path, dockerfile: str = DOCKERFILE, compose: str = "") -> TaskSandboxSpec:
    place = folder / "task" / "environment"
    place.mkdir(parents=True, exist_ok=True)
    (place / "Dockerfile").write_text(dockerfile)
    if compose:
        (place / "docker-compose.yaml").write_text(compose)
    return TaskSandboxSpec("task", place, env={"GIVEN": "yes"})


@asynccontextmanager
async def opened(folder: Path, compose: str = "") -> AsyncIterator[tuple[TaskSandboxes, TaskSandbox]]:
    settings = TaskSandboxSettings(
        base_image="host", cache_dir=str(folder / "cache"), workspace_store=str(folder / "store")
    )
    async with TaskSandboxes(settings) as sandboxes:
        box = await sandboxes.open(spec(folder, compose=compose))
        try:
            yield sandboxes, box
        finally:
            await box.aclose()


def in_box(folder: Path, do: Callable[[TaskSandboxes, TaskSandbox], Awaitable[None]], compose: str = "") -> None:
    async def main() -> None:
        async with opened(folder, compose) as (sandboxes, box):
            await do(sandboxes, box)

    asyncio.run(main())


def test_commands_run_as_in_a_container_of_the_image(tmp_path: Path) -> None:
    async def do(sandboxes: TaskSandboxes, box: TaskSandbox) -> None:
        shown = await box.execute("pwd; cat built.txt; echo $COLOUR $GIVEN $OWN $HOME; echo bad >&2", env={"OWN": "o"})
        assert shown.metadata["stdout"] == "/app\nbuilt\nred yes o /root\n"
        assert shown.metadata["stderr"] == "bad\n"
        other = await box.execute("id -un; echo $HOME; pwd", user="worker", cwd="/srv")
        assert other.metadata["stdout"] == "worker\n/srv/w\n/srv\n"
        assert (await box.execute("true", cwd="/nowhere")).exit_code == 126
        with pytest.raises(PrepareError, match="nobody-here cannot be used"):
            await box.execute("true", user="nobody-here")
        second = await sandboxes.open(spec(tmp_path))
        first_time = (await box.execute("cat when.txt")).output
        assert (await second.execute("cat when.txt")).output == first_time, "the Dockerfile is built once"
        await second.aclose()

    in_box(tmp_path, do)


def test_a_command_that_hangs_is_killed_and_a_daemon_lives_on(tmp_path: Path) -> None:
    async def do(sandboxes: TaskSandboxes, box: TaskSandbox) -> None:
        daemon = "(while :; do date +%s%N > /app/tick; sleep 0.02; done) & echo started"
        assert (await box.execute(daemon, timeout_s=20)).output.startswith("started")
        first = (await box.execute("cat /app/tick; sleep 0.1")).output
        assert (await box.execute("cat /app/tick")).output != first
        late = await box.execute("echo partly; (sleep 300; touch /app/late) & sleep 300", timeout_s=0.3)
        assert late.metadata["timeout"]
        assert late.metadata["stdout"] == "partly\n"
        assert (await box.execute("pgrep -fc 'sleep 300'")).output == "0\n"
        task = asyncio.create_task(box.execute("sleep 301"))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (await box.execute("pgrep -fc 'sleep 301'")).output == "0\n"

    in_box(tmp_path, do)


def test_downloads_never_lead_out_of_their_folder(tmp_path: Path) -> None:
    secret, target = tmp_path / "secret.txt", tmp_path / "target"
    secret.write_text("host")
    target.mkdir()
    (target / "out").symlink_to(tmp_path)  # as an earlier download could have left it

    async def do(sandboxes: TaskSandboxes, box: TaskSandbox) -> None:
        await box.execute(
            f"mkdir -p /logs/out /logs/a && cd /logs && echo kept > a/file && ln -s file a/inside "
            f"&& ln -s {secret} host && ln -s ../../secret.txt up && ln -s {tmp_path} folder "
            "&& echo taken > out/secret.txt && mkfifo pipe"
        )
        await box.download_dir("/logs", target)
        with pytest.raises(OSError, match=r"(?i)no such file"):
            await box.download_file("/logs/host", target / "followed")  # the link is followed in the sandbox only

    in_box(tmp_path, do)
    assert secret.read_text() == "host"
    assert sorted(str(path.relative_to(target)) for path in target.rglob("*")) == [
        "a", "a/file", "a/inside", "out", "out/secret.txt",
    ]  # fmt: skip
    assert (target / "a/inside").read_text() == "kept\n"
    assert not (target / "out").is_symlink()


def test_uploads_stay_in_the_sandbox(tmp_path: Path) -> None:
    source, secret = tmp_path / "source", tmp_path / "secret.txt"
    secret.write_text("host")
    (source / "below").mkdir(parents=True)
    (source / "below/run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "below/run.sh").chmod(0o755)
    (source / "host").symlink_to(secret)

    async def do(sandboxes: TaskSandboxes, box: TaskSandbox) -> None:
        await box.upload_dir(source, "/tests")
        await box.upload_dir(source, "../../../up")
        await box.upload_file(source / "below/run.sh", "/app")
        await box.upload_file(source / "below/run.sh", "/app/new/other.sh")
        assert (
            await box.execute("/tests/below/run.sh; /up/below/run.sh; ./run.sh; new/other.sh")
        ).output == "ran\n" * 4
        assert (await box.execute("readlink /tests/host; cat /tests/host")).exit_code == 1  # copied as a link
        with pytest.raises(NotADirectoryError):
            await box.upload_dir(source / "below/run.sh", "/tests")

    in_box(tmp_path, do)


def test_sandboxes_do_not_see_each_other(tmp_path: Path) -> None:
    async def do(sandboxes: TaskSandboxes, box: TaskSandbox) -> None:
        second = await sandboxes.open(spec(tmp_path))
        await box.execute("echo mine > /app/mine; echo mine > /tmp/mine; sleep 302 & python3 -m http.server 8123 &")
        seen = await second.execute("ls /app/mine /tmp/mine; pgrep -f 'sleep 30[2]'; exec 3<>/dev/tcp/127.0.0.1/8123")
        assert seen.exit_code == 1
        assert seen.metadata["stdout"] == ""
        await second.aclose()
        await second.aclose()
        assert (await box.execute("cat /app/mine")).success, "the end of one does not end another"

    in_box(tmp_path, do)


def test_closing_after_the_slot_server_was_killed(tmp_path: Path) -> None:
    async def do(sandboxes: TaskSandboxes, box: TaskSandbox) -> None:
        os.kill(sandboxes.server_pid, signal.SIGKILL)
        await asyncio.sleep(0.2)
        await box.aclose()
        again = await sandboxes.open(spec(tmp_path))
        assert (await again.execute("cat built.txt")).output == "built\n"
        await again.aclose()

    in_box(tmp_path, do)


def test_services_are_reached_by_name(tmp_path: Path) -> None:
    async def do(sandboxes: TaskSandboxes, box: TaskSandbox) -> None:
        fetch = "import urllib.request as u; print(u.urlopen('http://web:8000/built.txt').read().decode(), end='')"
        assert (await box.execute(f'python3 -c "{fetch}"')).output == "built\n"
        side = await box.execute("echo $SIDE $GIVEN; pwd; echo left > /app/left.txt", service="web")
        assert side.metadata["stdout"] == "web\n/app\n"
        await box.freeze()
        await box.download_file("/app/left.txt", tmp_path / "left.txt", service="web")
        assert (tmp_path / "left.txt").read_text() == "left\n"
        with raises(ConfigError, "'db'", "web"):
            await box.execute("true", service="db")

    in_box(tmp_path, do, COMPOSE)


async def test_what_cannot_be_built_is_refused_by_name(tmp_path: Path) -> None:
    async with TaskSandboxes(TaskSandboxSettings(base_image="host", workspace_store=str(tmp_path / "s"))) as all_:
        with pytest.raises(TaskError, match="copies from another image"):
            await all_.open(spec(tmp_path, "FROM a:1\nCOPY --from=b:1 /x /x\n"))
        with pytest.raises(TaskError, match=r"services.main.privileged"):
            await all_.open(spec(tmp_path, compose="services:\n  main: {build: ., privileged: true}\n"))
        (tmp_path / "task/environment/docker-compose.yaml").unlink()
        (tmp_path / "task/environment/Dockerfile").unlink()
        with pytest.raises(ConfigError, match="environment/Dockerfile is missing"):
            await all_.open(TaskSandboxSpec("task", tmp_path / "task/environment"))


def test_an_event_loop_shares_its_sandboxes_and_ends_them(tmp_path: Path) -> None:
    settings = TaskSandboxSettings(base_image="host", workspace_store=str(tmp_path / "store"))

    seen: list[str] = []

    async def work(box: TaskSandbox) -> None:
        try:
            await asyncio.Event().wait()
        finally:  # as a harness collects its logs after Ctrl-C
            seen.append((await box.execute("sleep 0.1; cat built.txt")).output)

    async def main() -> int:
        first, second = await asyncio.gather(TaskSandboxes.of_loop(settings), TaskSandboxes.of_loop(settings))
        assert first is second
        working.add(asyncio.create_task(work(await first.open(spec(tmp_path)))))
        await asyncio.sleep(0.05)
        return first.server_pid

    working: set[asyncio.Task[None]] = set()
    pid = asyncio.run(main())
    assert seen == ["built\n"]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
