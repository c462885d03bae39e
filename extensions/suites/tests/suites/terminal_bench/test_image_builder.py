"""Images built by a docker daemon, exported once, and then only a root file system that slots use."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from golden_messages import raises
from palaestra_slots.core.errors import ImageError, TaskError
from palaestra_slots.images.dockerfile import ImageRecipe
from palaestra_slots.images.image_builder import ImageBuilder, content_key, read_config
from palaestra_suites.terminal_bench import harbor_task, terminal_bench_1
from palaestra_suites.terminal_bench.import_tasks import Finding
from palaestra_suites.toolchain.toolchain import DependencyCache
from roots import make_root
from sandbox.containers import Docker, docker, own_bridge
from suites.endless_terminals.built import checked
from suites.terminal_bench.conftest import Try
from suites.terminal_bench.mini import HARBOR, LEGACY, TASKS, copied

BASE = "palaestra-tests/base:1"
GOOD = "as-a-user,greeting,partial,word-counts,hello"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Docker]:
    with docker() as client:
        client.load(make_root(tmp_path_factory.mktemp("base") / "root"), BASE)
        yield client


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.slots
@pytest.mark.timeout(500)
@pytest.mark.xdist_group("docker")
def test_tasks_are_built_once_and_run_in_slots(daemon: Docker, try_tasks: Try, tmp_path: Path) -> None:
    names = f"{GOOD},does-not-build,only-an-image"
    settings = {"base_image": None, "builder": daemon.command, "cache_dir": str(tmp_path / "cache")}
    lines = try_tasks(TASKS, task_filter=names, build_network=False, **settings)
    lost = {name: lines[name] for name in GOOD.split(",") if lines[name].finding is not Finding.GOOD}
    assert not lost, lost
    assert {name for name, line in lines.items() if line.finding is Finding.GOOD} == set(GOOD.split(","))
    assert "its image does not build with docker" in lines["does-not-build"].reason
    assert "registry.invalid/nobody/nothing:1 cannot be pulled" in lines["only-an-image"].reason
    roots = sorted((tmp_path / "cache/roots").glob("*.tar"))
    assert len(roots) == len(GOOD.split(",")) - 1  # two of the tasks have the same build folder
    assert not list((tmp_path / "cache/roots").glob("*.partial"))
    left = subprocess.run([*daemon.command.split(), "ps", "-aq"], capture_output=True, text=True)
    assert left.stdout == ""

    named = f'[environment]\ndocker_image = "{BASE}"\nworkdir = "/app"\n'
    task = copied(HARBOR / "partial", tmp_path, {"task.toml": named})
    (task / "environment/Dockerfile").unlink()
    assert try_tasks(task, **settings)["partial"].finding is Finding.GOOD

    # What is in the cache needs no build: one would fail now, since its base is gone.
    subprocess.run([*daemon.command.split(), "rmi", "-f", BASE], check=True, capture_output=True)
    again = try_tasks(TASKS, task_filter="greeting,hello", build_network=False, **settings)
    assert [again[name].finding for name in ("greeting", "hello")] == [Finding.GOOD] * 2
    assert set(roots) < set((tmp_path / "cache/roots").glob("*.tar"))


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.slots
@pytest.mark.timeout(500)
@pytest.mark.xdist_group("docker")
def test_task_folders_of_endless_terminals_are_built(
    daemon: Docker, installed_pytest: DependencyCache, tmp_path: Path
) -> None:
    daemon.load(make_root(tmp_path / "root"), BASE)
    proof = checked(tmp_path, installed_pytest, builder=daemon.command, build_network=False)
    assert proof.holds, proof.lines
    assert len(list((tmp_path / "cache/roots").glob("*.tar"))) == 1


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(100)
@pytest.mark.xdist_group("docker")
async def test_what_another_build_has_taken_away_is_built_again(daemon: Docker, tmp_path: Path) -> None:
    """Two builds share a layer; the one that is done removes its image, and docker the layer with it. Now and then."""
    daemon.load(make_root(tmp_path / "root"), BASE)
    tool, folder = tmp_path / "docker", tmp_path / "task"
    failing = f"mkdir {tmp_path}/failed 2>/dev/null && {{ echo 'unknown parent image ID sha256:0'; exit 1; }}"
    tool.write_text(f'#!/bin/sh\ncase $1 in build) {failing};; esac\nexec {daemon.command} "$@"\n')
    tool.chmod(0o755)
    folder.mkdir()
    (folder / "Dockerfile").write_text(f"FROM {BASE}\nRUN echo built > /built\n")
    builder = ImageBuilder(tmp_path / "roots", tool=str(tool), network=False)
    archive, _ = await builder.root(ImageRecipe(folder, folder / "Dockerfile"))
    assert (tmp_path / "failed").is_dir()
    with tarfile.open(archive) as content:
        assert "built" in content.getnames()


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.xdist_group("docker")
@pytest.mark.parametrize("bridged", [True, False])
def test_run_lines_have_a_network_but_not_the_hosts_loopback(tmp_path: Path, bridged: bool) -> None:
    folder = tmp_path / "task"
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        network = [f"--bridge={stack.enter_context(own_bridge('172.31.250.1/24'))}"] if bridged else []
        client = stack.enter_context(docker(*network))
        client.load(make_root(tmp_path / "root"), BASE)
        service = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        reach = f"if (echo > /dev/tcp/127.0.0.1/{service.getsockname()[1]}) 2>/dev/null; then exit 3; fi"
        (folder / "Dockerfile").write_text(f"FROM {BASE}\nRUN bash -c '{reach}; cat /proc/net/dev | grep eth0'\n")
        builder = ImageBuilder(tmp_path / "roots", tool=client.command)
        recipe = ImageRecipe(folder, folder / "Dockerfile")
        if bridged:
            assert asyncio.run(builder.root(recipe))[0].is_file()
        else:
            with pytest.raises(
                TaskError, match=r"no bridge network, so RUN lines had no network:\n(.|\n)*non-zero code: 1"
            ):
                asyncio.run(builder.root(recipe))


def test_how_commands_start_is_read_from_beside_the_root(tmp_path: Path) -> None:
    record = {"schema": "palaestra.root", "version": 1, "env": {"A": "b"}, "workdir": "/app", "user": "ada"}
    (tmp_path / "x.json").write_text(json.dumps(record))
    config = read_config(tmp_path / "x.tar")
    assert (config.env, config.workdir, config.user) == ({"A": "b"}, "/app", "ada")
    assert read_config(tmp_path / "y.tar").workdir == "/"
    (tmp_path / "x.json").write_text('{"version": 2}')
    with raises(ImageError):
        read_config(tmp_path / "x.tar")
    (tmp_path / "x.json").write_text("[")
    with pytest.raises(ImageError, match=r"x\.json"):
        read_config(tmp_path / "x.tar")


def test_the_key_is_the_content_of_the_build_folder(tmp_path: Path) -> None:
    first = harbor_task.read_task(HARBOR / "word-counts").recipe
    (tmp_path / "a").mkdir()
    same = copied(HARBOR / "word-counts", tmp_path / "a")
    assert content_key(harbor_task.read_task(same).recipe) == content_key(first)
    (same / "environment/text.txt").write_text("other")
    changed = content_key(harbor_task.read_task(same).recipe)
    (same / "environment/text.txt").chmod(0o755)
    assert len({content_key(first), changed, content_key(harbor_task.read_task(same).recipe)}) == 3


def test_without_a_builder_a_task_is_refused_with_the_reason(tmp_path: Path) -> None:
    task = terminal_bench_1.read_task(LEGACY / "hello")
    with pytest.raises(TaskError, match="none of palaestra-no-such-tool is installed"):
        asyncio.run(ImageBuilder(tmp_path, tool="palaestra-no-such-tool").root(task.recipe))
    broken = shutil.which("false")
    assert broken is not None
    with raises(TaskError, "false"):
        asyncio.run(ImageBuilder(tmp_path, tool=broken).root(task.recipe))
    quiet = tmp_path / "docker"
    facts = "Client:\\n Version: 28.2.2\\n Context: default\\nServer:"
    quiet.write_text(f"#!/bin/sh\nprintf '{facts}\\n'; echo 'ERROR: Cannot connect to the Docker daemon' >&2; exit 1\n")
    quiet.chmod(0o755)
    with raises(TaskError, "docker", "ERROR", "connect", "--env.base_image host") as caught:
        asyncio.run(ImageBuilder(tmp_path, tool=str(quiet)).root(task.recipe))
    assert "Cannot connect" in str(caught.value)[:120], "not behind the facts that the tool prints"
