"""The conformance suite on every backend that can run here: local, docker (a real daemon) and ssh (a real sshd)."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from palaestra.sandbox.backends.docker import DockerBackend
from palaestra.sandbox.backends.local import LocalBackend
from palaestra.sandbox.backends.remote import run_command
from palaestra.sandbox.backends.singularity import SingularityBackend
from palaestra.sandbox.backends.ssh import SSHBackend
from palaestra.sandbox.slot import Backend, Rung, Slot
from palaestra.testing.backend_conformance import BackendConformance
from sandbox.containers import Docker, docker
from sandbox.python_image import make_python_root

pytestmark = [pytest.mark.slots, pytest.mark.xdist_group("backends")]


class TestLocal(BackendConformance):
    @classmethod
    def make_backend(cls) -> Backend:
        return LocalBackend()

    async def end_place(self, slot: Slot) -> None:
        assert isinstance(self.backend, LocalBackend)
        os.kill(self.backend.server_pid, signal.SIGKILL)


@pytest.mark.skipif(os.geteuid() != 0, reason="without root there is one slot at a time")
class TestConfined(BackendConformance):
    @classmethod
    def make_backend(cls) -> Backend:
        return LocalBackend(rung=Rung.CONFINED)


class TestDocker(BackendConformance):
    daemon: ClassVar[Docker]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _daemon(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with docker() as daemon:
            daemon.load(make_python_root(tmp_path_factory.mktemp("root")), "python:here")
            cls.daemon = daemon
            yield

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _running(cls, _daemon: None) -> Iterator[None]:
        yield from cls.running()

    @classmethod
    def make_backend(cls) -> Backend:
        return DockerBackend("python:here", hosts=[cls.daemon.address])

    async def end_place(self, slot: Slot) -> None:
        reach = ["docker", "--host", self.daemon.address]
        _, containers = await run_command([*reach, "ps", "--quiet"], 20)
        status, text = await run_command([*reach, "kill", *containers.split()], 20)
        assert status == 0, text


class TestSSH(BackendConformance):
    options: ClassVar[list[str]]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _daemon(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with sshd(tmp_path_factory.mktemp("ssh")) as options:
            cls.options = options
            yield

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _running(cls, _daemon: None) -> Iterator[None]:
        yield from cls.running()

    @classmethod
    def make_backend(cls) -> Backend:
        return SSHBackend(["127.0.0.1"], options=cls.options)

    async def end_place(self, slot: Slot) -> None:
        status, text = await run_command(["pkill", "-KILL", "-f", "sshd: root@notty"], 20)
        assert status == 0, text


@pytest.mark.skipif(not (shutil.which("apptainer") or shutil.which("singularity")), reason="apptainer is not installed")
class TestSingularity(BackendConformance):
    root: ClassVar[Path]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _running(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        cls.root = make_python_root(tmp_path_factory.mktemp("root"))
        yield from cls.running()

    @classmethod
    def make_backend(cls) -> Backend:
        return SingularityBackend(str(cls.root))


@contextlib.contextmanager
def sshd(folder: Path) -> Iterator[list[str]]:
    """A server of our own on this machine; yields what `ssh` needs to reach it. Skips the test without OpenSSH."""
    server = shutil.which("sshd") or "/usr/sbin/sshd"
    if os.geteuid() != 0 or not os.path.exists(server):
        pytest.skip("needs root and sshd (apt-get install openssh-server)")
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (folder / "conf").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\n"
        "StrictModes no\nUsePAM no\nPermitRootLogin yes\nPidFile none\n"
    )
    process = subprocess.Popen([server, "-D", "-f", str(folder / "conf"), "-E", str(folder / "log")])
    try:
        for _ in range(100):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        known = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]
        yield ["-F", "none", "-p", str(port), "-i", str(folder / "user"), "-l", "root", *known]
    finally:
        process.terminate()
        process.wait(20)
