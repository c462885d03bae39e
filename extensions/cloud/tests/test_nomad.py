"""The nomad backend against the stand-in of Nomad's API, whose tasks really run."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from palaestra.cli.main import main as palaestra
from palaestra_cloud.nomad import OWNER, NomadBackend, NomadBackendConfig, job_specification
from palaestra_cloud.nomad_api import NomadAccess
from palaestra_cloud.port_client import ask
from palaestra_contract.pools import NomadToolBackend
from palaestra_slots.core.errors import AcquireTimeout, ConfigError, SandboxError, SlotLost
from palaestra_slots.core.types import Blame
from palaestra_slots.sandbox.pool import SlotPool, SlotPoolConfig
from palaestra_slots.sandbox.slot import Backend, Slot, SlotSpec
from palaestra_slots.testing.backend_conformance import BackendConformance
from stand_ins.fake_nomad import FakeNomad, NomadFault, fake_nomad

pytestmark = [pytest.mark.slots, pytest.mark.xdist_group("backends")]


def config(nomad: FakeNomad, **settings: Any) -> NomadBackendConfig:
    return NomadBackendConfig(**{"nomad_address": nomad.url, "driver": "raw_exec", **settings})


def run(body: Callable[[FakeNomad], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        async with FakeNomad(**settings) as nomad:
            await body(nomad)

    asyncio.run(main())


class TestNomad(BackendConformance):
    nomad: ClassVar[FakeNomad]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _running(cls) -> Iterator[None]:
        with fake_nomad() as cls.nomad:
            yield from cls.running()
            assert not cls.nomad.jobs
            assert not cls.nomad.running()

    @classmethod
    def make_backend(cls) -> Backend:
        return NomadBackend(config(cls.nomad))

    async def end_place(self, slot: Slot) -> None:
        self.nomad.crash_tasks()


async def lives(slot: Slot) -> bool:
    return (await slot.execute("true")).exit_code == 0


@pytest.mark.slow
def test_the_job_is_scaled_up_with_the_slots_and_down_when_they_are_idle() -> None:
    async def body(nomad: FakeNomad) -> None:
        settings = config(nomad, slots_per_container=2, max_containers=3, scale_cooldown_s=0.3)
        async with NomadBackend(settings) as backend:
            slots = await asyncio.gather(*(backend.create(SlotSpec(), f"t{n}") for n in range(6)))
            assert all([await lives(slot) for slot in slots])
            assert len(nomad.running("atropos-sandbox")) == 3
            for slot in slots:
                await backend.destroy(slot)
            async with asyncio.timeout(20):
                while len(nomad.running()) > 1:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            await backend.destroy(await backend.create(SlotSpec(), "again"))
        assert nomad.jobs == {}
        assert nomad.running() == []

    run(body)


def test_a_missing_image_is_reported_within_seconds_with_the_reason() -> None:
    async def body(nomad: FakeNomad) -> None:
        begun = time.monotonic()
        with pytest.raises(SandboxError, match=r"Failed to pull `nothing:here`.*pull access denied"):
            await NomadBackend(config(nomad, driver="docker", sandbox_image="nothing:here")).start()
        assert time.monotonic() - begun < 10
        assert nomad.jobs == {}

    run(body)


def test_a_crash_loop_is_reported_within_seconds_with_its_log() -> None:
    async def body(nomad: FakeNomad) -> None:
        nomad.crashing = True
        begun = time.monotonic()
        with pytest.raises(SandboxError, match=r"Exit Code: 1.*the task is told to crash"):
            await NomadBackend(config(nomad)).start()
        assert time.monotonic() - begun < 15

    run(body)


@pytest.mark.parametrize(
    ("fake", "settings", "reason"),
    [
        ({"memory": 100}, {}, r"'memory' exhausted on 1"),
        ({"drivers": ("docker",)}, {}, r"missing drivers"),
        ({"quota": "memory exhausted (512 needed > 100 limit)"}, {}, r"quota exhausted: memory"),
        ({}, {"datacenter": "far"}, r"no node in datacenter far"),
    ],
)
def test_a_job_that_has_no_place_is_not_registered(fake: Any, settings: Any, reason: str) -> None:
    async def body(nomad: FakeNomad) -> None:
        with pytest.raises(SandboxError, match=reason) as failure:
            await NomadBackend(config(nomad, **settings)).start()
        assert failure.value.blame is Blame.SANDBOX
        assert nomad.jobs == {}

    run(body, **fake)


@pytest.mark.slow
def test_a_full_cluster_fails_the_slot_with_the_reason_and_keeps_the_others() -> None:
    async def body(nomad: FakeNomad) -> None:
        async with NomadBackend(config(nomad, slots_per_container=1, max_containers=3)) as backend:
            slots = [await backend.create(SlotSpec(), f"t{n}") for n in range(2)]
            more = await asyncio.gather(
                *(backend.create(SlotSpec(), f"too many {n}") for n in range(2)), return_exceptions=True
            )
            assert [isinstance(each, SandboxError) and "'memory' exhausted" in str(each) for each in more] == [True] * 2
            assert all([await lives(slot) for slot in slots])

    run(body, memory=1100)


@pytest.mark.slow
def test_runs_at_the_same_time_have_jobs_of_their_own() -> None:
    async def body(nomad: FakeNomad) -> None:
        async with NomadBackend(config(nomad)) as one:
            slot = await one.create(SlotSpec(), "t")
            async with NomadBackend(config(nomad)) as two:
                assert sorted(nomad.jobs) == ["atropos-sandbox", f"atropos-sandbox-{two.owner[:8]}"]
                await two.create(SlotSpec(), "t")
            assert sorted(nomad.jobs) == ["atropos-sandbox"]
            assert await lives(slot)
            with pytest.raises(ConfigError, match="live run"):
                await NomadBackend(config(nomad, purge_job_on_start=True)).start()
            assert await lives(slot)

    run(body)


KILLED = """
import asyncio, sys
from palaestra_cloud.nomad import NomadBackend, NomadBackendConfig
from palaestra_slots.sandbox.slot import SlotSpec

async def main():
    backend = NomadBackend(NomadBackendConfig(nomad_address=sys.argv[1], driver="raw_exec"))
    await backend.start()
    await backend.create(SlotSpec(), "t")
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.slow
def test_the_job_of_a_killed_run_is_removed_at_the_next_start() -> None:
    async def body(nomad: FakeNomad) -> None:
        killed = await asyncio.create_subprocess_exec(
            sys.executable, "-c", KILLED, nomad.url, stdout=asyncio.subprocess.PIPE
        )
        assert killed.stdout is not None
        assert await killed.stdout.readline() == b"ready\n"
        killed.kill()
        await killed.wait()
        (before,) = nomad.running()
        port = before["AllocatedResources"]["Shared"]["Ports"][0]
        token = nomad.jobs["atropos-sandbox"]["TaskGroups"][0]["Tasks"][0]["Env"]["PALAESTRA_TOKEN"]
        async with asyncio.timeout(20):
            while (await ask((port["HostIP"], port["Value"]), token, "GET", "/health"))[1]["streams"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        async with NomadBackend(config(nomad, unattended_s=0.0)) as backend:
            assert nomad.jobs["atropos-sandbox"]["Meta"][OWNER] == backend.owner
            (after,) = nomad.running()
            assert before["ID"] != after["ID"]

    run(body)


@pytest.mark.slow
def test_a_job_of_somebody_else_is_left_alone_unless_it_is_to_be_removed() -> None:
    async def body(nomad: FakeNomad) -> None:
        other = job_specification(config(nomad), "atropos-sandbox", None, None, "secret")
        other["TaskGroups"][0]["Tasks"][0]["Config"] = {"command": "sleep", "args": ["600"]}
        async with NomadBackend(config(nomad, sandbox_job_id="mine")) as mine:
            await mine._api.post("/v1/jobs", {"Job": other})
            with pytest.raises(ConfigError, match="purge_job_on_start"):
                await NomadBackend(config(nomad)).start()
            assert "atropos-sandbox" in nomad.jobs
            async with NomadBackend(config(nomad, purge_job_on_start=True)) as backend:
                assert nomad.jobs["atropos-sandbox"]["Meta"][OWNER] == backend.owner

    run(body)


@pytest.mark.slow
def test_the_end_stops_the_job_and_keeps_it_listed_if_asked() -> None:
    async def body(nomad: FakeNomad) -> None:
        async with NomadBackend(config(nomad, purge_job_on_shutdown=False)):
            pass
        assert nomad.jobs["atropos-sandbox"]["Stop"] is True
        assert nomad.running() == []
        async with NomadBackend(config(nomad)) as backend:
            assert await lives(await backend.create(SlotSpec(), "t"))

    run(body)


@pytest.mark.slow
def test_a_lost_node_costs_its_slots_and_no_more() -> None:
    async def body(nomad: FakeNomad) -> None:
        async with NomadBackend(config(nomad)) as backend:
            slot = await backend.create(SlotSpec(), "t")
            await nomad.lose_node()
            with pytest.raises(SlotLost):
                await slot.execute("sleep 20")
            await backend.destroy(slot)
            assert await lives(await backend.create(SlotSpec(), "again"))

    run(body)


@pytest.mark.slow
def test_tasks_with_images_have_jobs_of_their_own() -> None:
    async def body(nomad: FakeNomad) -> None:
        async with NomadBackend(config(nomad, driver="docker", sandbox_image="a:1")) as backend:
            for image in ("b:1", None, "a:1"):
                assert await lives(await backend.create(SlotSpec(image=image), "t"))
            images = [job["TaskGroups"][0]["Tasks"][0]["Config"]["image"] for job in nomad.jobs.values()]
            assert sorted(images) == ["a:1", "b:1"]
            with pytest.raises(SandboxError, match="c:1"):
                await backend.create(SlotSpec(image="c:1"), "t")
        assert nomad.jobs == {}

    run(body, images=("a:1", "b:1"))


def test_an_overloaded_or_failing_agent_is_asked_again() -> None:
    async def body(nomad: FakeNomad) -> None:
        nomad.faults = [
            NomadFault("POST /v1/jobs", status=429, text="Too many requests", headers={"Retry-After": "0"}, times=2),
            NomadFault("GET /v1/allocation/", status=503, text="No cluster leader"),
            NomadFault("GET .*/allocations", cut=True),
            NomadFault("POST .*/plan", delay_s=0.5),
        ]
        async with NomadBackend(config(nomad)) as backend:
            assert await lives(await backend.create(SlotSpec(), "t"))
        assert all(fault.times == 0 for fault in nomad.faults)

    run(body)


def test_an_agent_that_is_away_or_refuses_the_token_is_named(tmp_path: Path) -> None:
    async def body(nomad: FakeNomad) -> None:
        with pytest.raises(ConfigError, match="nomad_token"):
            await NomadBackend(config(nomad, access=NomadAccess("wrong"))).start()
        async with NomadBackend(config(nomad, access=NomadAccess("right"))):
            pass
        with pytest.raises(ConfigError, match="nomad_address"):
            await NomadBackend(config(nomad, nomad_address="http://127.0.0.1:9")).start()

    run(body, token="right")


def test_a_namespace_and_a_region_are_in_every_request_and_in_the_job() -> None:
    async def body(nomad: FakeNomad) -> None:
        for wrong, told in ((NomadAccess(namespace="other"), "namespace"), (NomadAccess(region="eu"), "region")):
            with pytest.raises(ConfigError, match=f"{told}.*nomad_namespace or nomad_region"):
                await NomadBackend(config(nomad, access=wrong)).start()
        assert not nomad.jobs
        async with NomadBackend(config(nomad, access=NomadAccess(namespace="team", region="us"))) as backend:
            slot = await backend.create(SlotSpec(), "t")
            assert await lives(slot)
            await backend.destroy(slot)

    run(body, namespace="team", region="us")


def test_an_agent_with_tls_asks_for_the_clients_certificate(tmp_path: Path) -> None:
    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=tmp_path, check=True, capture_output=True)

    new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj")
    openssl(*new, "/CN=authority", "-x509", "-keyout", "ca.key", "-out", "ca.pem")
    for name in ("server.global.nomad", "client"):
        (tmp_path / "names").write_text(f"subjectAltName=DNS:{name}")
        openssl(*new, f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
        openssl("x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.pem")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(tmp_path / "ca.pem"))
    tls.load_cert_chain(tmp_path / "server.global.nomad.pem", tmp_path / "server.global.nomad.key")
    tls.verify_mode = ssl.CERT_REQUIRED
    files = {name: str(tmp_path / file) for name, file in
             (("ca_cert", "ca.pem"), ("client_cert", "client.pem"), ("client_key", "client.key"))}  # fmt: skip
    whole = {**files, "tls_server_name": "server.global.nomad"}

    async def body(nomad: FakeNomad) -> None:
        assert nomad.url.startswith("https://")
        for missing in ("ca_cert", "tls_server_name", "client_cert"):
            access = NomadAccess(**{name: each for name, each in whole.items() if name != missing})
            with pytest.raises(ConfigError, match="does not answer"):
                await NomadBackend(config(nomad, access=access)).start()
        with pytest.raises(ConfigError, match=r"nomad_ca_cert /nowhere\) cannot be used"):
            NomadBackend(config(nomad, access=NomadAccess(ca_cert="/nowhere")))
        async with NomadBackend(config(nomad, access=NomadAccess(**whole))) as backend:
            slot = await backend.create(SlotSpec(), "t")
            assert await lives(slot)
            await backend.destroy(slot)

    run(body, tls=tls)


def test_a_pool_with_the_contracts_settings() -> None:
    async def body(nomad: FakeNomad) -> None:
        settings = SlotPoolConfig(
            nomad_address=nomad.url, job_id="mine", driver="raw_exec", slots_per_container=2, max_containers=2, cpu=100,
            memory=200, scale_cooldown=0.2, health_check_interval=0.2,
        )  # fmt: skip
        pool = SlotPool(settings)
        await pool.start()
        slots = [await pool.acquire(f"t{n}") for n in range(4)]
        assert (pool.total_slots, pool.acquired_slots, pool.get_stats()["containers"]) == (4, 4, 2)
        with pytest.raises(AcquireTimeout):
            await pool.acquire("one too many", timeout_s=0.1)
        for slot in slots:
            await pool.release(slot, reset_workspace=True)
        assert nomad.jobs["mine"]["TaskGroups"][0]["Tasks"][0]["Resources"] == {"CPU": 100, "MemoryMB": 200}
        await pool.stop(purge_job=True)
        assert nomad.jobs == {}

    run(body)


def test_the_contracts_tool_backend() -> None:
    async def body(nomad: FakeNomad) -> None:
        tools = NomadToolBackend(config(nomad))
        await tools.start()
        slot = await tools.acquire("t")
        (done,) = await tools.execute_batch([(slot, "bash", {"command": "echo here"})], timeout_s=20)
        assert done.output == "here\n"
        await tools.stop(purge=True)
        assert nomad.jobs == {}

    run(body)


ENVIRONMENT = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def there():
    yield Task(id="a", prompt="Count the lines", files={"a.txt": "x\\n" * 3}, solution="wc -l < a.txt > b.txt")

@there.score
async def counted(sandbox):
    return (await sandbox.read_text("b.txt", missing="")).strip() == "3"
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["flags", "variables"])
def test_a_run_has_its_slots_in_nomad(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there_env.py").write_text(ENVIRONMENT)
    with fake_nomad() as nomad:
        words = ["--backend", "nomad", "--env.nomad_address", nomad.url, "--env.driver", "raw_exec"]
        if way == "variables":
            words = []
            monkeypatch.setenv("TERMINAL_ENV", "slot_pool")
            monkeypatch.setenv("TERMINAL_SLOT_BACKEND", "nomad")
            for name, value in (("DRIVER", "raw_exec"), ("ADDRESS", nomad.url), ("JOB_ID", "mine")):
                monkeypatch.setenv(f"TERMINAL_NOMAD_{name}", value)
        words += ["--env.slot_prices", "nomad=36"]
        for policy, reward in (("oracle", 1.0), ("noop", 0.0)):
            assert palaestra(["run", "there_env.py", "--policy", policy, *words, "--group", "2"]) == 0
            assert "slots in nomad: 1 container " in capsys.readouterr().err
            (group,) = Path("runs").rglob("groups.jsonl")
            assert json.loads(group.read_text())["scores"] == [reward, reward]
            group.unlink()
        assert nomad.jobs == {}
        job = "mine" if way == "variables" else "atropos-sandbox"
        assert {each["JobID"] for each in nomad.allocations.values()} == {job}


@pytest.mark.parametrize(
    "wrong", [{"driver": "qemu"}, {"privileged": True}, {"min_containers": 3, "max_containers": 2}]
)
def test_settings_that_cannot_be_in_force_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        NomadBackendConfig(**{"driver": "raw_exec", **wrong})


def test_what_nomad_does_not_offer_is_refused() -> None:
    backend = NomadBackend(NomadBackendConfig(driver="raw_exec"))
    with pytest.raises(ConfigError, match="raw_exec"):
        backend.place_spec(SlotSpec(image="a:1"))
    with pytest.raises(ConfigError, match="path"):
        NomadBackend(NomadBackendConfig()).place_spec(SlotSpec(image="/a"))


def test_the_specification_forwards_every_setting() -> None:
    settings = NomadBackendConfig(sandbox_image="i:1", privileged=True, cpu=700, memory=900, datacenter="d")
    job = job_specification(settings, "name", "i:1", {OWNER: "x"}, "t0ken")
    (group,) = job["TaskGroups"]
    (task,) = group["Tasks"]
    assert (job["ID"], job["Type"], job["Datacenters"]) == ("name", "service", ["d"])
    assert (group["Name"], group["Count"], task["Name"], task["Driver"]) == ("sandbox", 1, "sandbox-server", "docker")
    assert task["Resources"] == {"CPU": 700, "MemoryMB": 900}
    assert (task["Config"]["image"], task["Config"]["privileged"]) == ("i:1", True)
    assert not {"${", "%{"} & {task["Config"]["args"][3][n : n + 2] for n in range(9000)}, "templates of Nomad's"
    assert "t0ken" not in json.dumps(task["Config"])


def test_a_pool_with_settings_of_nomad_runs_on_nomad() -> None:
    assert SlotPool(SlotPoolConfig(nomad_address="http://nomad:4646", job_id="mine")).backend.name == "nomad"
