"""The conformance suite on local slots, docker (a real daemon), ssh (a real sshd) and Apptainer.

`test_modal.py` and `test_nomad.py` run it on the stand-ins of those platforms.
"""

from __future__ import annotations

import asyncio
import glob
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from envs.scripts import groups_file
from palaestra.cli.main import main as palaestra
from palaestra_slots.core.errors import ConfigError, IsolationUnavailable, SandboxError, SlotLost
from palaestra_slots.core.types import Limits
from palaestra_slots.sandbox.backends.docker import LABEL, ContainerOptions, DockerBackend
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.backends.owner import process_name, this_host
from palaestra_slots.sandbox.backends.remote import run_command
from palaestra_slots.sandbox.backends.singularity import SingularityBackend
from palaestra_slots.sandbox.backends.ssh import SSHBackend
from palaestra_slots.sandbox.slot import Backend, Rung, Slot, SlotSpec
from palaestra_slots.testing.backend_conformance import BackendConformance
from sandbox.containers import Docker, docker
from sandbox.python_image import make_python_root
from sandbox.ssh_server import sshd

ENVIRONMENT = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def there():
    yield Task(id="a", prompt="Count the lines", files={"a.txt": "x\\n" * 3}, solution="wc -l < a.txt > b.txt")

@there.score
async def counted(sandbox):
    return (await sandbox.read_text("b.txt", missing="")).strip() == "3"
"""

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

    @property
    def reach(self) -> list[str]:
        return ["docker", "--host", self.daemon.address]

    async def end_place(self, slot: Slot) -> None:
        _, containers = await run_command([*self.reach, "ps", "--quiet"], 20)
        status, text = await run_command([*self.reach, "kill", *containers.split()], 20)
        assert status == 0, text

    def test_a_container_has_several_slots_and_no_network(self) -> None:
        async def main() -> None:
            slots = [await self.backend.create(SlotSpec(), f"t{n}") for n in range(3)]
            status, listed = await run_command([*self.reach, "ps", "--quiet"], 20)
            assert status == 0
            assert len(listed.split()) == 1
            _, mode = await run_command(
                [*self.reach, "inspect", "--format", "{{.HostConfig.NetworkMode}} {{.HostConfig.Privileged}}", listed],
                20,
            )
            assert mode == "none false"
            for slot in slots:
                await self.backend.destroy(slot)

        self.runner.run(main())

    def test_slots_that_fork_as_often_as_they_may_keep_no_other_from_starting(self) -> None:
        words = list(self.backend.command(self.backend.place_spec(SlotSpec()), ["true"]))
        slots = DockerBackend("python:here", slots_per_container=64)
        more = list(slots.command(slots.place_spec(SlotSpec()), ["true"]))
        for options, count in ((words, 10), (more, 64)):
            assert int(options[options.index("--pids-limit") + 1]) > count * (Limits().pids or 0)

    def test_a_run_has_its_slots_in_containers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        Path("there_env.py").write_text(ENVIRONMENT)
        words = ["--backend", "docker", "--env.docker_image", "python:here", "--env.docker_hosts", self.daemon.address]
        for policy, reward in (("oracle", 1.0), ("noop", 0.0)):
            assert palaestra(["run", "there_env.py", "--policy", policy, *words, "--group", "2"]) == 0
            assert json.loads(groups_file().read_text())["scores"] == [reward, reward]

    def test_a_daemon_that_is_away_is_named(self, tmp_path: Path) -> None:
        async def main() -> None:
            away = DockerBackend("python:here", hosts=[f"unix://{tmp_path}/nothing"])
            with pytest.raises(ConfigError, match="does not answer"):
                await away.start()
            some = DockerBackend("python:here", hosts=[f"unix://{tmp_path}/nothing", self.daemon.address])
            async with some:
                await some.destroy(await some.create(SlotSpec(), "there"))

        self.runner.run(main())

    def test_containers_whose_process_is_gone_are_removed_at_the_next_start(self) -> None:
        async def main() -> None:
            left = {}
            for name, owner in (
                ("gone", f"{this_host()}/1-0"),
                ("alive", f"{this_host()}/{process_name(os.getpid())}"),
                ("elsewhere", "another/1-0"),
            ):
                words = ["run", "--detach", "--label", f"{LABEL}={owner}", "python:here", "sleep", "600"]
                status, left[name] = await run_command([*self.reach, *words], 60)
                assert status == 0, left[name]
            async with DockerBackend("python:here", hosts=[self.daemon.address]):
                pass
            _, listed = await run_command([*self.reach, "ps", "--all", "--quiet", "--no-trunc"], 20)
            assert left["gone"] not in listed.split()
            assert {left["alive"], left["elsewhere"]} <= set(listed.split())
            await run_command([*self.reach, "rm", "--force", left["alive"], left["elsewhere"]], 60)

        self.runner.run(main())

    def test_a_container_that_hangs_is_a_lost_slot(self) -> None:
        async def main() -> None:
            backend = DockerBackend("python:here", hosts=[self.daemon.address])
            backend.silence_s = 4.0
            _, before = await run_command([*self.reach, "ps", "--quiet"], 20)
            async with backend:
                slot = await backend.create(SlotSpec(), "hangs")
                _, after = await run_command([*self.reach, "ps", "--quiet"], 20)
                (container,) = set(after.split()) - set(before.split())
                assert (await run_command([*self.reach, "pause", container], 20))[0] == 0
                with pytest.raises(SlotLost):
                    await asyncio.wait_for(slot.execute("true"), 40)
                await run_command([*self.reach, "unpause", container], 20)

        self.runner.run(main())

    def test_a_level_that_containers_do_not_have_is_refused_with_the_setting_that_allows_it(self) -> None:
        async def main() -> None:
            for settings in ({"rung": Rung.FULL}, {"require": Rung.USERNS}):
                with pytest.raises(IsolationUnavailable, match="docker_privileged"):
                    await DockerBackend("python:here", hosts=[self.daemon.address], **settings).start()

        self.runner.run(main())

    def test_a_runtime_is_used_or_refused(self) -> None:
        async def main() -> None:
            hosts = [self.daemon.address]
            with pytest.raises(ConfigError, match=r"runsc.*runc"):
                await DockerBackend("python:here", hosts=hosts, options=ContainerOptions(runtime="runsc")).start()
            async with DockerBackend("python:here", hosts=hosts, options=ContainerOptions(runtime="runc")) as backend:
                await backend.create(SlotSpec(), "t")
                _, listed = await run_command([*self.reach, "ps", "--quiet", "--latest"], 20)
                words = ["inspect", "--format", "{{.HostConfig.Runtime}}", listed]
                assert (await run_command([*self.reach, *words], 20))[1] == "runc"

        self.runner.run(main())

    def test_an_image_without_python_is_named(self, tmp_path: Path) -> None:
        async def main() -> None:
            (tmp_path / "file").write_text("")
            self.daemon.load(tmp_path, "empty:here")
            for backend in (
                self.backend,
                DockerBackend("python:here", hosts=[self.daemon.address], rung=Rung.CONFINED),
            ):
                with pytest.raises(SandboxError, match="python3") as caught:
                    await backend.create(SlotSpec(image="empty:here"), "there")
                assert not isinstance(caught.value, IsolationUnavailable)

        self.runner.run(main())


class TestSSH(BackendConformance):
    options: ClassVar[list[str]]
    daemon: ClassVar[int]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _daemon(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with sshd(tmp_path_factory.mktemp("ssh")) as (cls.options, cls.daemon):
            yield

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _running(cls, _daemon: None) -> Iterator[None]:
        yield from cls.running()

    @classmethod
    def make_backend(cls) -> Backend:
        return SSHBackend(["127.0.0.1"], options=cls.options)

    async def end_place(self, slot: Slot) -> None:
        status, text = await run_command(["pkill", "-KILL", "-P", str(self.daemon)], 20)
        assert status == 0, text

    async def test_a_host_may_have_a_port(self) -> None:
        at = self.options.index("-p")
        options, port = [*self.options[:at], *self.options[at + 2 :]], self.options[at + 1]
        async with SSHBackend([f"127.0.0.1:{port}"], options=options) as backend:
            slot = await backend.create(SlotSpec(), "t")
            assert (await slot.execute("echo here")).output.strip() == "here"

    async def test_a_login_that_fails_is_named_with_the_command_that_repeats_it(self) -> None:
        key = self.options[self.options.index("-i") + 1]
        options = ["/no/such/key" if word == key else word for word in self.options]
        with pytest.raises(ConfigError) as caught:
            await SSHBackend(["127.0.0.1"], options=options).start()
        assert shlex.join(["ssh", *options, "127.0.0.1", "python3", "-V"]) in str(caught.value)

    async def test_a_place_ends_by_itself_when_the_network_to_it_fails(self) -> None:
        """A connection that hangs is closed by nobody for hours; here `ssh` itself hangs."""
        backend = SSHBackend(["127.0.0.1"], options=self.options)
        backend.silence_s, backend.gone_s = 2.0, 4.0
        _, before = await run_command(["pgrep", "-P", str(os.getpid()), "-x", "ssh"], 20)
        async with backend:
            slot = await backend.create(SlotSpec(), "t")
            await slot.spawn(f"sleep {os.getpid()}.5")
            alive = ["pgrep", "-f", f"^sleep {os.getpid()}.5"]
            for _ in range(100):  # the process gets its name only after it has begun
                if (await run_command(alive, 20))[0] == 0:
                    break
                await asyncio.sleep(0.1)
            else:
                pytest.fail("the process did not start")
            _, after = await run_command(["pgrep", "-P", str(os.getpid()), "-x", "ssh"], 20)
            (ssh,) = set(after.split()) - set(before.split())
            os.kill(int(ssh), signal.SIGSTOP)
            try:
                for _ in range(200):
                    if (await run_command(alive, 20))[0] != 0:
                        return
                    await asyncio.sleep(0.2)
                pytest.fail("the slot outlives the connection")
            finally:
                os.kill(int(ssh), signal.SIGCONT)

    def test_keys_and_ports_of_this_machine_stay_here(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whatever the user's own configuration forwards: commands of a slot at `none` are the user of the login."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            forwarded = free.getsockname()
        (tmp_path / "config").write_text(f"ForwardAgent yes\nLocalForward {forwarded[0]}:{forwarded[1]} 127.0.0.1:9\n")
        options = ["-F", str(tmp_path / "config"), *self.options[2:]]
        agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(tmp_path / "agent")], stdout=subprocess.DEVNULL)
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
        before = set(glob.glob("/tmp/ssh-*/agent.*"))

        async def main() -> None:
            async with SSHBackend(["127.0.0.1"], options=options, slots_per_host=1, rung=Rung.NONE) as backend:
                slot = await backend.create(SlotSpec(), "t")
                seen = (await slot.execute("ls /tmp/ssh-*/agent.*")).output.split()
                assert not {word for word in seen if "/agent." in word and "*" not in word} - before
                with pytest.raises(ConnectionRefusedError):
                    await asyncio.open_connection(*forwarded)

        try:
            asyncio.run(main())
        finally:
            agent.terminate()
            agent.wait(20)


class InApptainer(BackendConformance):
    root: ClassVar[Path]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _running(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        cls.root = python_image(tmp_path_factory)
        yield from cls.running()


class TestSingularity(InApptainer):
    @classmethod
    def make_backend(cls) -> Backend:
        return SingularityBackend(str(cls.root))

    async def end_place(self, slot: Slot) -> None:
        status, text = await run_command(["pkill", "-KILL", "-P", str(os.getpid()), "-f", "runtime parent"], 20)
        assert status == 0, text

    def test_slots_have_namespaces(self) -> None:
        assert self.backend.rung is Rung.USERNS

    def test_an_image_that_is_missing_or_has_no_python_is_named(self, tmp_path: Path) -> None:
        for image in (tmp_path / "missing.sif", tmp_path):
            with pytest.raises(ConfigError, match=str(image)):
                self.runner.run(SingularityBackend(str(image)).start())


class TestConfinedInSingularity(InApptainer):
    @classmethod
    def make_backend(cls) -> Backend:
        return SingularityBackend(str(cls.root), rung=Rung.CONFINED)

    def test_a_slot_sees_no_process_of_the_host(self) -> None:
        async def body(slot: Slot) -> None:
            listed = await slot.execute("ls /proc")
            assert str(os.getpid()) not in listed.output.split()

        self.in_slot(body)


def python_image(folders: pytest.TempPathFactory) -> Path:
    """A directory that Apptainer runs; skips the test without it."""
    program = shutil.which("apptainer") or shutil.which("singularity")
    if program is None or os.geteuid() != 0:
        pytest.skip("needs root and apptainer (scripts/install_apptainer)")
    return make_python_root(folders.mktemp("root"))
