"""The Modal backend, with Modal's own client, against the stand-in of its API."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import modal
import pytest
from grpclib import Status

from envs.scripts import groups_file
from palaestra.cli.main import main as palaestra
from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra_cloud.modal import ModalBackend, ModalSandboxConfig
from palaestra_contract.modal_tool_backend import ModalToolBackend
from palaestra_slots.core.errors import AcquireTimeout, ConfigError, InfraError, SandboxError, SlotLost
from palaestra_slots.core.types import Blame, Network
from palaestra_slots.sandbox.slot import Backend, Mount, Rung, Slot, SlotSpec
from palaestra_slots.testing.backend_conformance import BackendConformance
from programs import killed_after
from sandbox.backends.test_conformance import ENVIRONMENT
from sandbox.python_image import make_python_root
from stand_ins.fake_modal import FakeModal, Fault

pytestmark = [pytest.mark.slots, pytest.mark.xdist_group("backends")]


@contextlib.contextmanager
def reached(fake: FakeModal) -> Iterator[FakeModal]:
    """The stand-in, named by the environment as Modal's server is."""
    with fake, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODAL_CONFIG_PATH", os.devnull)
        for name, value in fake.variables.items():
            patch.setenv(name, value)
        try:
            yield fake
        finally:
            modal.Client.from_env().close()  # the client is one for the process, and keeps the address


@pytest.fixture
def fake() -> Iterator[FakeModal]:
    with reached(FakeModal(missing=["nowhere:1"], secrets={"keys": {"KEY": "hidden"}})) as fake:
        yield fake


class TestModal(BackendConformance):
    fake: ClassVar[FakeModal]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _server(cls) -> Iterator[None]:
        with reached(FakeModal()) as cls.fake:
            yield

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _running(cls, _server: None) -> Iterator[None]:
        yield from cls.running()
        assert not cls.fake.running

    @classmethod
    def make_backend(cls) -> Backend:
        return ModalBackend()

    async def end_place(self, slot: Slot) -> None:
        for sandbox in self.fake.running:
            self.fake.end(sandbox.sandbox_id)


@pytest.mark.slow
class TestConfined(TestModal):
    @classmethod
    def make_backend(cls) -> Backend:
        return ModalBackend(rung=Rung.CONFINED)


def test_a_run_has_its_slots_in_sandboxes(
    fake: FakeModal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there_env.py").write_text(ENVIRONMENT)
    words = ["--backend", "modal", "--group", "2", "--env.slot_prices", "modal=36"]
    for policy, reward in (("oracle", 1.0), ("noop", 0.0)):
        assert palaestra(["run", "there_env.py", "--policy", policy, *words]) == 0
        cost = re.search(r"slots in modal: 1 .* cost ([0-9.]+)", capsys.readouterr().err)
        assert cost is not None
        assert 0 < float(cost[1]) < 1.2
        assert json.loads(groups_file().read_text())["scores"] == [reward, reward]
    assert fake.sandboxes
    assert not fake.running


def test_a_run_pauses_when_its_sandboxes_have_cost_enough(
    fake: FakeModal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there_env.py").write_text(
        ENVIRONMENT.replace("    yield", "    for n in range(9):\n        yield")
        .replace('"a"', "str(n)")
        .replace("wc -l", "sleep 1; wc -l")
    )
    words = ["--backend", "modal", "--concurrency", "1", "--env.slot_prices", "modal=3600", "--env.max_cost", "3"]
    assert palaestra(["run", "there_env.py", "--policy", "oracle", "--group", "1", *words]) == 3
    assert "max_cost" in capsys.readouterr().err
    assert sum(len(each.read_text().splitlines()) for each in Path("runs").rglob("groups.jsonl")) < 9


@pytest.mark.parametrize("field", ["tool_pool_mode", "terminal_backend"])
def test_without_credentials_a_run_ends_at_once(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODAL_CONFIG_PATH", os.devnull)
    for name in ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"):
        monkeypatch.delenv(name, raising=False)
    Path("there_env.py").write_text(ENVIRONMENT)
    begun = time.monotonic()
    assert palaestra(["run", "there_env.py", "--policy", "oracle", f"--env.{field}", "modal"]) == 2
    assert time.monotonic() - begun < 20
    said = capsys.readouterr().err
    for name in ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET", "modal token set"):
        assert name in said


def test_a_wrong_token_and_a_missing_secret_are_named(fake: FakeModal, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="modal_secrets"):
        asyncio.run(ModalBackend(ModalSandboxConfig(secrets=["others"])).start())
    modal.Client.from_env().close()
    monkeypatch.setenv("MODAL_TOKEN_ID", "ak-another")
    with pytest.raises(ConfigError, match="MODAL_TOKEN_ID"):
        asyncio.run(ModalBackend().start())


def test_the_settings_of_a_run_reach_the_sandbox(fake: FakeModal) -> None:
    settings = HermesAgentEnvConfig(
        modal_app_name="mine", modal_image="debian:12", modal_cpu=1.5, modal_memory=512, modal_idle_timeout=9,
        modal_max_lifetime=2000, modal_secrets="keys", modal_env_vars="A=1;B=x=y", worker_timeout=100,
        modal_slots_per_sandbox=3, modal_max_sandboxes=2,
    )  # fmt: skip

    async def main() -> None:
        async with ModalBackend.from_config(settings) as backend:
            assert backend.capacity == 6
            slot = await backend.create(SlotSpec(env=(("C", "2"),)), "one")
            assert (await slot.execute("echo $A $B $C $KEY")).output == "1 x=y 2 hidden\n"
            with_network = await backend.create(SlotSpec(network=Network.ON), "two")
            first, second = fake.running
            assert first.image == "debian:12"
            resources = first.definition.resources
            assert (resources.milli_cpu, resources.memory_mb) == (1500, 512)
            assert (first.definition.timeout_secs, first.definition.idle_timeout_secs) == (2000, 9)
            access = [sandbox.definition.network_access.network_access_type for sandbox in (first, second)]
            assert access[0] != access[1]
            await backend.destroy(slot)
            await backend.destroy(with_network)

    asyncio.run(main())


def test_a_sandbox_may_have_a_gpu(fake: FakeModal) -> None:
    async def main() -> None:
        async with ModalBackend(ModalSandboxConfig(gpu="T4", env_vars={"A": "1"}, secrets=["keys"])) as backend:
            slot = await backend.create(SlotSpec(), "one")
            assert (await slot.execute("echo $A $KEY")).output == "1 hidden\n"
            (sandbox,) = fake.running
            assert sandbox.definition.resources.gpu_config.gpu_type == "T4"
            await backend.destroy(slot)

    asyncio.run(main())
    assert not fake.running


def test_mounted_directories_are_copied(fake: FakeModal, tmp_path: Path) -> None:
    (tmp_path / "source/deep").mkdir(parents=True)
    (tmp_path / "source/deep/file").write_bytes(bytes(5 << 20))
    target = str(tmp_path / "target")

    async def main() -> None:
        async with ModalBackend() as backend:
            slot = await backend.create(SlotSpec(mounts=(Mount(str(tmp_path / "source"), target),)), "one")
            assert (await slot.execute(f"wc -c < {target}/deep/file")).output.strip() == str(5 << 20)
            assert (await slot.execute(f"echo x > {target}/new")).exit_code != 0
            await backend.destroy(slot)

    asyncio.run(main())


def test_a_sandbox_has_the_files_of_its_image(tmp_path: Path) -> None:
    root = make_python_root(tmp_path / "root")
    (root / "usr/marker").write_text("of the image")
    (tmp_path / "empty/tmp").mkdir(parents=True)

    async def main() -> None:
        async with ModalBackend(ModalSandboxConfig(image="python:here")) as backend:
            slot = await backend.create(SlotSpec(), "one")
            assert (await slot.execute("cat /usr/marker")).output == "of the image"
            assert (await slot.execute("ls /work 2>&1")).exit_code != 0
            await backend.destroy(slot)
            with pytest.raises(InfraError, match="python3"):
                await backend.create(SlotSpec(image="empty:here"), "two")

    with reached(FakeModal(roots={"python:here": root, "empty:here": tmp_path / "empty"})):
        asyncio.run(main())


def test_images_of_this_machine_are_copied(fake: FakeModal, tmp_path: Path) -> None:
    root = make_python_root(tmp_path / "root")
    (root / "etc/marker").write_text("of the image")
    os.chown(root / "etc/marker", 123, 456)

    async def main() -> None:
        async with ModalBackend() as backend:
            spec = SlotSpec(image=str(root))
            slots = await asyncio.gather(*(backend.create(spec, str(number)) for number in range(3)))
            for slot in slots:
                found = await slot.execute("cat /etc/marker; stat -c ' %u:%g' /etc/marker; ls /work 2>&1")
                assert found.output.startswith("of the image 123:456\n")
                assert found.exit_code != 0
            await slots[0].execute("echo kept > a")
            snapshot = await backend.seal(slots[0])
            again = await backend.create(spec, "again", snapshot)
            assert (await again.execute("cat a /etc/marker")).output == "kept\nof the image"
            assert len(fake.running) == 1
            for slot in (*slots[1:], again):
                await backend.destroy(slot)
            await backend.forget(snapshot)

    asyncio.run(main())


# Faults


def _throttle(fake: FakeModal) -> None:
    fake.fail("SandboxCreateV2", Fault(Status.RESOURCE_EXHAUSTED, "too many requests", times=99))


def _throttle_with_pause(fake: FakeModal) -> None:
    fake.fail("SandboxCreateV2", Fault(Status.RESOURCE_EXHAUSTED, times=2, retry_after_s=0.2))


def _slow(fake: FakeModal) -> None:
    fake.fail("SandboxCreateV2", Fault(delay_s=1.0))


def _quota(fake: FakeModal) -> None:
    fake.quota = 1


def _refuse(fake: FakeModal) -> None:
    fake.fail("SandboxCreateV2", Fault(Status.PERMISSION_DENIED, "not allowed", times=2))


def _exec_fails(fake: FakeModal) -> None:
    fake.fail("TaskExecStart", Fault(Status.FAILED_PRECONDITION, "no worker", times=2))


OTHER = SlotSpec(image="debian:12")  # so that the slot needs a sandbox of its own


@pytest.mark.parametrize("fault", [_throttle, _quota, _refuse, _exec_fails])
def test_a_sandbox_that_cannot_be_had_is_an_infrastructure_failure(
    fake: FakeModal, fault: Callable[[FakeModal], None]
) -> None:
    async def main() -> None:
        async with ModalBackend(ModalSandboxConfig(acquire_timeout_s=1.2)) as backend:
            slot = await backend.create(SlotSpec(), "one")
            fault(fake)
            with pytest.raises(SandboxError) as failure:
                await backend.create(OTHER, "two")
            assert failure.value.blame is Blame.SANDBOX
            assert (await slot.execute("echo unharmed")).output == "unharmed\n"
            fake.quota = None
            fake.fail("SandboxCreateV2", Fault(times=0))
            await backend.destroy(await backend.create(OTHER, "two"))
            await backend.destroy(slot)

    asyncio.run(main())
    assert not fake.running


@pytest.mark.parametrize("fault", [_throttle_with_pause, _slow])
def test_a_sandbox_that_takes_long_is_waited_for(fake: FakeModal, fault: Callable[[FakeModal], None]) -> None:
    async def main() -> None:
        async with ModalBackend() as backend:
            fault(fake)
            await backend.destroy(await backend.create(OTHER, "one"))

    asyncio.run(main())


def test_an_image_that_is_missing_is_named(fake: FakeModal) -> None:
    async def main() -> None:
        with pytest.raises(InfraError, match="nowhere:1"):
            await ModalBackend(ModalSandboxConfig(image="nowhere:1")).start()
        async with ModalBackend() as backend:
            with pytest.raises(InfraError, match="nowhere:1"):
                await backend.create(SlotSpec(image="nowhere:1"), "one")
            with pytest.raises(ConfigError, match="no/image"):
                await backend.create(SlotSpec(image="/no/image.tar"), "one")

    asyncio.run(main())


@pytest.mark.parametrize("how", ["half-open", "refused"])
def test_a_broken_connection_ends_the_slots_and_not_the_run(fake: FakeModal, how: str) -> None:
    async def main() -> None:
        async with ModalBackend(ModalSandboxConfig(idle_timeout=2)) as backend:
            slot = await backend.create(SlotSpec(), "one")
            fake.frozen = how == "half-open"
            if how == "refused":
                fake.refuse()
            with pytest.raises(SlotLost):
                await slot.execute("echo lost")
            await backend.destroy(slot)
            fake.frozen = False
            if how == "refused":
                fake.accept()
            again = await backend.create(SlotSpec(), "two")
            assert (await again.execute("echo here")).output == "here\n"
            await backend.destroy(again)

    asyncio.run(main())


# Lifetimes


async def until(holds: Callable[[], bool]) -> None:
    """Wait for something that takes a second or two here."""
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.1)


def test_a_sandbox_near_its_end_gets_no_slots_and_is_replaced(fake: FakeModal) -> None:
    config = ModalSandboxConfig(max_lifetime=303, min_sandboxes=0)

    async def main() -> None:
        async with ModalBackend(config, rollout_s=1) as backend:
            first = await backend.create(SlotSpec(), "one")
            await asyncio.sleep(2.1)  # from now on the rest is too short for a rollout and its grading
            second = await backend.create(SlotSpec(), "two")
            assert len(fake.running) == 2
            await backend.destroy(first)
            assert len(fake.running) == 1
            await backend.destroy(second)

    asyncio.run(main())
    with pytest.raises(ConfigError, match="modal_max_lifetime"):
        ModalBackend(config, rollout_s=10)
    long = ModalBackend.from_config(HermesAgentEnvConfig(worker_timeout=9000))
    assert long.config.max_lifetime > 9000


def test_sandboxes_above_the_minimum_end_when_they_are_idle(fake: FakeModal) -> None:
    async def main() -> None:
        config = ModalSandboxConfig(slots_per_sandbox=1, min_sandboxes=2, max_sandboxes=3, idle_timeout=1)
        async with ModalBackend(config) as backend:
            await until(lambda: len(fake.running) == 2)  # a busy machine may lose one and start it again
            slots = [await backend.create(SlotSpec(), str(number)) for number in range(3)]
            assert len(fake.running) == 3
            for slot in slots:
                await backend.destroy(slot)
            await until(lambda: len(fake.running) == 2)
            await asyncio.sleep(1.5)
            ended, other = fake.running
            fake.end(ended.sandbox_id)
            await until(lambda: len(fake.running) == 2)
            assert other in fake.running

    asyncio.run(main())


def test_there_are_never_more_sandboxes_than_allowed(fake: FakeModal) -> None:
    async def main() -> None:
        async with ModalBackend(ModalSandboxConfig(max_sandboxes=1, acquire_timeout_s=1)) as backend:
            slot = await backend.create(SlotSpec(), "one")
            with pytest.raises(AcquireTimeout):
                await backend.create(OTHER, "two")
            waiting = asyncio.create_task(backend.create(OTHER, "two"))
            await asyncio.sleep(0.2)
            await backend.destroy(slot)
            other = await waiting
            assert [sandbox.image for sandbox in fake.running] == ["debian:12"]
            await backend.destroy(other)

    asyncio.run(main())


KILLED = """
import asyncio
from palaestra_cloud.modal import ModalBackend, ModalSandboxConfig
from palaestra_slots.sandbox.slot import SlotSpec

async def main():
    backend = ModalBackend(ModalSandboxConfig(idle_timeout=IDLE))
    await backend.start()
    slot = await backend.create(SlotSpec(), "one")
    print("running", flush=True)
    await slot.execute("sleep 1000", timeout_s=1000)

asyncio.run(main())
"""


def kill_a_run(fake: FakeModal, idle_s: int) -> None:
    """Start a process that has a sandbox, and kill it."""
    command = [sys.executable, "-c", KILLED.replace("IDLE", str(idle_s))]
    with killed_after(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout.readline() == "running\n"
    assert len(fake.running) == 1


def test_the_next_start_ends_what_a_killed_run_has_left(fake: FakeModal) -> None:
    kill_a_run(fake, 600)
    (left,) = fake.running

    async def main() -> None:
        async with ModalBackend() as first, ModalBackend() as second:
            assert left not in fake.running
            assert len(fake.running) == 2  # a start does not end what belongs to a living process
            for backend in (first, second):
                slot = await backend.create(SlotSpec(), "one")
                assert (await slot.execute("echo alive")).output == "alive\n"
                await backend.destroy(slot)

    asyncio.run(main())


def test_a_sandbox_ends_by_itself_after_the_process_that_made_it(fake: FakeModal) -> None:
    kill_a_run(fake, 1)
    asyncio.run(until(lambda: not fake.running))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_that_is_killed_at_any_moment_leaves_nothing_that_the_next_start_does_not_end(fake: FakeModal) -> None:
    command = [sys.executable, "-c", KILLED.replace("IDLE", "600")]
    begun = time.monotonic()
    with killed_after(command, stdout=subprocess.PIPE, text=True) as whole:
        assert whole.stdout.readline() == "running\n"
        usual_s = time.monotonic() - begun
    left = 0
    for number in range(16):
        with killed_after(command, stdout=subprocess.DEVNULL):
            time.sleep(usual_s * (0.4 + 0.7 * number / 15))
        left += len(fake.running) > 0

        async def main() -> None:
            async with ModalBackend():
                assert len(fake.running) == 1

        asyncio.run(main())
        assert not fake.running
    assert left > 0


LONG = ENVIRONMENT.replace("wc -l", "sleep 3.0307; wc -l")
"""Each rollout's command can be found among this machine's processes by the time that it sleeps."""


def is_working() -> bool:
    """Whether a rollout's command runs in a sandbox."""
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process has ended
            if place.read_bytes().split(b"\0")[:2] == [b"sleep", b"3.0307"]:
                return True
    return False


def test_rollouts_whose_sandbox_dies_start_again_and_are_scored(
    fake: FakeModal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there_env.py").write_text(LONG)
    ended: list[str] = []
    over = threading.Event()

    def end_one() -> None:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and not over.is_set():
            if fake.running and is_working():
                ended.append(fake.running[0].sandbox_id)
                fake.end(ended[0])
                return
            time.sleep(0.05)

    thread = threading.Thread(target=end_one)
    thread.start()
    code = palaestra(["run", "there_env.py", "--policy", "oracle", "--backend", "modal", "--group", "3"])
    over.set()
    thread.join()
    assert code == 0
    assert ended
    assert json.loads(groups_file().read_text())["scores"] == [1.0, 1.0, 1.0]
    assert len(fake.sandboxes) == 2


# Profiles


def test_profiles_come_from_variables_and_files(tmp_path: Path) -> None:
    environ = {
        "ATROPOS_MODAL_IMAGE": "all:1",
        "ATROPOS_MODAL_PROFILES": "big-gpu",
        "ATROPOS_MODAL_PROFILE_BIG_GPU_GPU": "H100",
        "ATROPOS_MODAL_PROFILE_BIG_GPU_SECRETS": "one, two",
        "ATROPOS_MODAL_ENV_VARS": "A=1;B=2",
        "ATROPOS_MODAL_ACQUIRE_TIMEOUT": "5",
    }
    found = ModalSandboxConfig.load_profiles(environ=environ)
    assert set(found) == {"default", "big-gpu"}
    big = found["big-gpu"]
    assert (big.image, big.gpu, big.secrets) == ("all:1", "H100", ["one", "two"])
    assert (big.env_vars, big.acquire_timeout_s) == ({"A": "1", "B": "2"}, 5.0)
    assert big.get_app_name() != found["default"].get_app_name() == "atropos-sandbox"
    assert big.with_app_name("x").get_app_name() == "x"
    (tmp_path / "profiles.yaml").write_text("profiles:\n  small: {cpu: 0.5, env_vars: {A: 1}}\n")
    small = ModalSandboxConfig.load_profiles(tmp_path / "profiles.yaml", environ={})["small"]
    assert (small.name, small.cpu, small.env_vars) == ("small", 0.5, {"A": "1"})


def test_a_pool_has_several_profiles(fake: FakeModal) -> None:
    profiles = {
        "default": ModalSandboxConfig(execution_timeout_s=7),
        "small": ModalSandboxConfig("small", cpu=0.5, max_sandboxes=1, slots_per_sandbox=1, acquire_timeout_s=0.3),
    }

    async def main() -> None:
        async with ModalToolBackend.with_profiles(profiles) as pool:
            assert pool.default_timeout_s == 7
            assert len(fake.running) == 1  # a profile that nobody uses costs nothing
            one, two = await pool.acquire("one"), await pool.acquire("two", "small")
            assert [sandbox.definition.resources.milli_cpu for sandbox in fake.running] == [1000, 500]
            with pytest.raises(AcquireTimeout):
                await pool.acquire("three", profile="small")
            with pytest.raises(ConfigError, match="unknown"):
                await pool.acquire("four", "unknown")
            calls = [(slot, "bash_stateful", {"command": "echo $((X+=1))"}) for slot in (one, two, two)]
            for expected in ("1 1 2", "2 3 4"):
                results = await pool.execute_batch(calls)
                assert " ".join(sorted(result.output.strip() for result in results)) == expected
            await pool.release(two, reset_workspace=True)
            await pool.release(one)
            await pool.release(await pool.acquire("three", "small"))

    asyncio.run(main())
    assert not fake.running


@pytest.mark.parametrize(
    "data",
    [{"imgae": "x"}, {"cpu": "many"}, {"max_sandboxes": 0}, {"max_lifetime": 90_000}, {"env_vars": "A"}],
)
def test_a_profile_that_cannot_be_used_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="modal profile mine"):
        ModalSandboxConfig.from_dict("mine", data)
