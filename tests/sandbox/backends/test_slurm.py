"""The conformance suite and the sharing of work on a real Slurm: munged, slurmctld and two slurmd on this machine.

Without Debian's packages munge, slurmctld, slurmd and slurm-client, these tests skip.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from palaestra.envs.config.fields import HermesAgentEnvConfig
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.sandbox.backends.registry import make_backend
from palaestra_slots.sandbox.backends.remote import run_command
from palaestra_slots.sandbox.backends.slurm import SlurmBackend
from palaestra_slots.sandbox.slot import Backend, Slot, SlotSpec
from palaestra_slots.testing.backend_conformance import BackendConformance

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "salloc", "squeue", "scontrol")
MISSING = [name for name in PROGRAMS if shutil.which(name) is None]
NODES = ("n1", "n2")
CONFIG = """
ClusterName=palaestra
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmUser=root
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmdParameters=config_overrides
ReturnToService=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=all Nodes=n1,n2 Default=YES State=UP
"""

pytestmark = [
    pytest.mark.slots,
    pytest.mark.slow,
    pytest.mark.xdist_group("slurm"),
    pytest.mark.skipif(bool(MISSING), reason=f"Slurm is not installed: {', '.join(MISSING)}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="the daemons need root"),
]


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in found]


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[str]:
    """Run a cluster of two nodes, and yield the id of an allocation of both."""
    (folder / "state").mkdir()
    for name in NODES:
        (folder / f"spool-{name}").mkdir()
    key = folder / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(host=socket.gethostname(), folder=folder, ports=free_ports(3)))
    munge = ["munged", "--foreground", "--force", f"--socket={folder}/munge", f"--key-file={key}"]
    munge += [f"--pid-file={folder}/munge.pid", f"--seed-file={folder}/seed", f"--log-file={folder}/munge.log"]
    commands = [munge, ["slurmctld", "-D"], *(["slurmd", "-D", "-N", name] for name in NODES)]
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(config))
        log = stack.enter_context((folder / "daemons.log").open("wb"))
        for command in commands:
            stack.enter_context(ended(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)))
            for _ in range(100):
                if (folder / "munge").exists():
                    break
                time.sleep(0.05)
        for _ in range(100):
            granted = subprocess.run(["salloc", "-N2", "--no-shell"], capture_output=True, text=True, timeout=60)
            if granted.returncode == 0:
                break
            time.sleep(0.2)
        assert granted.returncode == 0, granted.stderr + (folder / "daemons.log").read_text()[-2000:]
        found = re.search(r"Granted job allocation (\d+)", granted.stderr)
        assert found, granted.stderr
        job = found[1]
        yield job
        subprocess.run(["scancel", job], check=True, timeout=60)


@contextlib.contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class TestSlurm(BackendConformance):
    job: ClassVar[str]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _cluster(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with slurm(tmp_path_factory.mktemp("slurm")) as cls.job:
            yield

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _running(cls, _cluster: None) -> Iterator[None]:
        yield from cls.running()

    @classmethod
    def make_backend(cls) -> Backend:
        return SlurmBackend(["n1"], cls.job)

    async def end_place(self, slot: Slot) -> None:
        _, steps = await run_command(["squeue", "--steps", "--noheader", "--format=%i"], 20)
        (step,) = [each for each in steps.split() if each.startswith(f"{self.job}.") and each.split(".")[1].isdecimal()]
        status, text = await run_command(["scancel", "--signal=KILL", step], 20)
        assert status == 0, text

    async def test_the_nodes_of_the_allocation_share_the_slots(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SLURM_JOB_ID", self.job)
        monkeypatch.setenv("API_KEY", "secret")
        async with make_backend("slurm", HermesAgentEnvConfig(slurm_slots_per_node=4)) as backend:
            slots = [await backend.create(SlotSpec(), f"t{number}") for number in range(6)]
            stats = backend.stats()
            assert (stats["containers"], stats["slots"]) == (2, 6)
            assert "secret" not in (await slots[0].execute("env")).output
            listed = await run_command(["squeue", "--steps", "--noheader", "--format=%N", f"--jobs={self.job}"], 20)
            assert set(NODES) <= set(listed[1].split())
            for slot in slots:
                await backend.destroy(slot)

    def test_a_job_that_does_not_run_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("SLURM_JOB_ID", raising=False)
        for given, says in ((None, "sbatch or salloc"), ("7; reboot", "not '7; reboot'"), ("99999", "99999")):
            with pytest.raises(ConfigError, match=says):
                make_backend("slurm", HermesAgentEnvConfig(slurm_job=given))
