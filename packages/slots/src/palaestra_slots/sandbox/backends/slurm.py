"""Runs slots on the nodes of a Slurm allocation, which it reaches with `srun`.

Each node runs one slot server as a job step of the allocation (`srun --overlap`), for as long as the step's standard
input lasts. Its slots have the same isolation levels as slots on this machine: at best `full` if the job's user is
root, otherwise `userns` or `confined`, as the node's kernel allows. Slurm's own limits for the job (memory, cores,
time) hold for all slots of a node together. When the allocation ends, all its slots end with it.

A node needs Python 3.11 or newer as `python3` and `slurmd`. Run the command inside an allocation (`sbatch`, `salloc`),
or name one with `slurm_job`. Source of the options: srun(1) of Slurm 22.05.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence

from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.backends.remote import MachineBackend, PlaceSpec, run_command
from palaestra_slots.sandbox.server_backend import levels
from palaestra_slots.sandbox.slot import Rung

_CHECK_S = 60.0
_STEP = ("--nodes=1", "--ntasks=1", "--overlap", "--unbuffered", "--quiet", "--export=PATH,HOME", "--chdir=/")
"""One task on one node, beside the other steps of the job, without this process's variables, which may hold keys."""

_JOB = re.compile(r"[0-9]+(_[0-9]+)?")


class SlurmBackend(MachineBackend):
    """Slots on the nodes of the Slurm job `job`. `options` are additional arguments for `srun`."""

    name = "slurm"
    with_images = "singularity"

    def __init__(
        self,
        nodes: Sequence[str],
        job: str,
        *,
        slots_per_node: int = 64,
        options: Sequence[str] = (),
        rung: Rung | None = None,
        require: Rung | None = None,
    ) -> None:
        super().__init__(
            hosts=nodes, places=max(1, len(nodes)), slots_per_place=slots_per_node, rung=rung, require=require
        )
        self._srun = ["srun", f"--jobid={job}", *_STEP, *options]

    @classmethod
    def from_config(cls, config: JSON) -> SlurmBackend:
        """Return the backend for the settings of a run. Raises `ConfigError` outside of an allocation."""
        job = str(config.slurm_job or os.environ.get("SLURM_JOB_ID", ""))
        if not _JOB.fullmatch(job):
            raise ConfigError(
                "the backend slurm needs an allocation: start the command with sbatch or salloc, or set slurm_job to "
                f"the id of a running job{f' (not {job!r})' if job else ''}"
            )
        rung, require = levels(config.isolation, config.require_sandbox)
        slots = config.slurm_slots_per_node
        return cls(nodes_of(job), job, slots_per_node=slots, rung=rung, require=require)

    async def check(self, host: str) -> None:
        status, text = await run_command(self.command(PlaceSpec(host=host), ["python3", "-V"]), _CHECK_S)
        if status != 0:
            raise ConfigError(
                f"srun cannot run python3 on the node {host}: {text.rstrip('.')}. Try it: {' '.join(self._srun)} "
                f"--nodelist={host} python3 -V"
            )

    def command(self, place: PlaceSpec, call: Sequence[str]) -> Sequence[str]:
        return [*self._srun, f"--nodelist={place.host}", *call]


def nodes_of(job: str) -> list[str]:
    """Return the names of a job's nodes. Raises `ConfigError` if the job does not run or Slurm does not answer."""
    status, listed = _run_command("squeue", "--noheader", f"--jobs={job}", "--states=RUNNING", "--format=%N")
    if status != 0:
        raise ConfigError(f"squeue does not know the job {job}: {listed}")
    if not listed:
        raise ConfigError(f"the Slurm job {job} does not run (squeue --jobs={job})")
    # squeue shortens the list, for example to node[1-3].
    status, names = _run_command("scontrol", "show", "hostnames", listed)
    if status != 0:
        raise ConfigError(f"scontrol cannot list the nodes of the job {job}: {names}")
    return names.split()


def _run_command(*command: str) -> tuple[int, str]:
    """Run a command of Slurm and return its exit status and its output or, if it failed, its error."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CHECK_S)
    except FileNotFoundError:
        raise ConfigError(f"the backend slurm needs {command[0]}, which is not installed here") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{command[0]} has not answered within {_CHECK_S:g} s") from None
    return done.returncode, (done.stderr if done.returncode else done.stdout).strip()
