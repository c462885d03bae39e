"""Images for docker by path, by Dockerfile, and per trajectory; with a real daemon."""

from __future__ import annotations

import asyncio
import http.server
import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from palaestra_contract.pools import DockerDirectBackend
from palaestra_slots.core.errors import ConfigError, ImageError, SandboxError
from palaestra_slots.core.types import Blame
from palaestra_slots.sandbox.backends.docker import (
    ContainerOptions,
    DockerBackend,
    build_docker_image,
    docker_image_exists,
)
from palaestra_slots.sandbox.creation_gate import CreationGate
from palaestra_slots.sandbox.slot import Rung, SlotSpec
from sandbox.containers import Docker, docker
from sandbox.python_image import make_python_root

pytestmark = [pytest.mark.slots, pytest.mark.docker, pytest.mark.slow, pytest.mark.xdist_group("docker")]

IMAGE = "python:here"


class Registry(http.server.BaseHTTPRequestHandler):
    """A registry that has no image, and says so by the image's name: STATUS-CODE."""

    def do_GET(self) -> None:
        status, _, code = self.path.removeprefix("/v2/").partition("/")[0].partition("-")
        body = json.dumps({"errors": [{"code": code.upper(), "message": code}]}).encode() if code else b"{}"
        self.send_response(int(status or 200))
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    do_HEAD = do_GET

    def log_message(self, *args: object) -> None: ...


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_python_root(tmp_path_factory.mktemp("root"))


@pytest.fixture(scope="module")
def daemon(root: Path) -> Iterator[Docker]:
    with docker() as client:
        client.load(root, IMAGE)
        yield client


def backend(daemon: Docker, *, privileged: bool = True) -> DockerBackend:
    return DockerBackend(IMAGE, hosts=[daemon.address], options=ContainerOptions(privileged=privileged))


def test_an_image_by_path_is_the_root_of_slots_which_can_change_it(daemon: Docker, root: Path, tmp_path: Path) -> None:
    (root / "etc/mark").write_text("here\n")
    archive = tmp_path / "root.tar"
    subprocess.run(["tar", "-C", str(root), "-cf", str(archive), "."], check=True)

    async def main() -> None:
        async with backend(daemon) as slots:
            for image in (str(root), str(archive)):
                spec = SlotSpec(image=image)
                one, two = [await slots.create(spec, name) for name in ("one", "two")]
                assert one.rung is Rung.FULL
                changed = await one.execute("cat /etc/mark; echo changed > /etc/mark; rm /usr/bin/seq; mkdir /app")
                assert (changed.exit_code, changed.output) == (0, "here\n")
                assert (await two.execute("cat /etc/mark; ls /usr/bin/seq")).output == "here\n/usr/bin/seq\n"
                snapshot = await slots.seal(one)
                assert {"/app", "/etc/mark", "/usr/bin/seq"} <= {each.path for each in await slots.changes(snapshot)}
                fork = await slots.create(spec, "fork", snapshot)
                assert (await fork.execute("cat /etc/mark; ls -d /app")).output == "changed\n/app\n"
                for slot in (two, fork):
                    await slots.destroy(slot)
                await slots.forget(snapshot)
        assert (root / "etc/mark").read_text() == "here\n"

    asyncio.run(main())


async def test_a_folder_with_a_dockerfile_is_built(daemon: Docker, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {IMAGE}\nCOPY mark /srv/mark\n")
    (tmp_path / "mark").write_text("built\n")
    async with backend(daemon) as slots:
        slot = await slots.create(SlotSpec(image=str(tmp_path)), "t")
        assert (await slot.execute("cat /srv/mark; echo x > /srv/mark")).output == "built\n"
    (tmp_path / "Dockerfile").write_text("FROM palaestra-no-such-image:1\n")
    async with backend(daemon) as slots:
        with pytest.raises(ImageError, match="palaestra-no-such-image"):
            await slots.create(SlotSpec(image=str(tmp_path)), "t")


async def test_an_image_by_path_needs_rights_and_a_daemon_of_this_machine(daemon: Docker, root: Path) -> None:
    async with backend(daemon, privileged=False) as slots:
        with pytest.raises(ConfigError, match="docker_privileged"):
            await slots.create(SlotSpec(image=str(root)), "t")
    far = DockerBackend(IMAGE, hosts=["tcp://far:2375"], options=ContainerOptions(privileged=True))
    with pytest.raises(ConfigError, match="another machine"):
        await far.create(SlotSpec(image=str(root)), "t")


async def test_a_trajectory_has_the_image_that_is_registered_for_it(daemon: Docker, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {IMAGE}\nCOPY Dockerfile /etc/mine\n")
    await build_docker_image(tmp_path, "mine:1", host=daemon.address)
    assert await docker_image_exists("mine:1", host=daemon.address)
    assert not await docker_image_exists("mine:2", host=daemon.address)
    await build_docker_image(tmp_path / "Dockerfile", "mine:2", host=daemon.address)
    assert await docker_image_exists("mine:2", host=daemon.address)
    tools = DockerDirectBackend(backend(daemon, privileged=False))
    await tools.start()
    try:
        tools.register_image("t1", "mine:1")
        one, two = await tools.acquire("t1"), await tools.acquire("t2")
        calls = [(slot, "bash", {"command": "ls /etc/mine"}) for slot in (one, two)]
        assert [each.success for each in await tools.execute_batch(calls)] == [True, False]
        await tools.release(one)
        again = await tools.acquire("t1")
        assert (await again.execute("ls /etc/mine")).exit_code != 0
    finally:
        await tools.stop()


@pytest.mark.parametrize("answer", ["429-toomanyrequests", "404-manifest_unknown", "403-denied", "nobody"])
def test_an_image_that_cannot_be_pulled_is_an_infrastructure_failure(
    daemon: Docker, tmp_path: Path, answer: str
) -> None:
    async def main() -> None:
        async with backend(daemon, privileged=False) as slots:
            slots.gate = CreationGate("docker", folder=tmp_path)
            slot = await slots.create(SlotSpec(), "unharmed")
            with pytest.raises(SandboxError, match=answer) as failure:
                await slots.create(SlotSpec(image=f"127.0.0.1:{port}/{answer}:1"), "t")
            assert failure.value.blame is Blame.SANDBOX
            assert (await slot.execute("echo unharmed")).output == "unharmed\n"
            states = [json.loads(each.read_text() or "{}") for each in tmp_path.glob("*.json")]
            assert any(state.get("gap") for state in states) == (answer == "429-toomanyrequests")
            await slots.destroy(slot)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Registry) as registry:
        port = 9 if answer == "nobody" else registry.server_port
        threading.Thread(target=registry.serve_forever).start()
        try:
            asyncio.run(main())
        finally:
            registry.shutdown()
