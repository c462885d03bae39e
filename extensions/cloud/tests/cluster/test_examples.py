"""The examples for KubeRay and Slurm: their form, and the batch script with stand-ins for Slurm's programs and Ray."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

EXAMPLES = Path(__file__).parents[4] / "examples" / "cluster"
SCRIPT = EXAMPLES / "palaestra.sbatch"

SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys
words = sys.argv[1:]
(count,) = (int(word.partition("=")[2]) for word in words if word.startswith("--ntasks="))
while words[0].startswith("--"):
    del words[0]
ranks = []
signal.signal(signal.SIGTERM, lambda *_: [rank.terminate() for rank in ranks])
for number in range(count):
    ranks.append(subprocess.Popen(words, env=dict(os.environ, SLURM_PROCID=str(number))))
sys.exit(max(rank.wait() for rank in ranks))
"""
RAY = """#!/bin/bash
echo "$SLURM_PROCID: $*" >> "$TOLD"
while [[ $1 != -- ]]; do shift; done
shift
[[ $SLURM_PROCID == 0 ]] || exit 0
exec "$@"
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The variables of a job on four nodes, with stand-ins on the path."""
    programs = {
        "srun": SRUN,
        "ray": RAY,
        "scontrol": "#!/bin/sh\nprintf 'node1\\nnode2\\nnode3\\nnode4\\n'\n",
        "palaestra": '#!/bin/bash\necho "palaestra $*" >> "$TOLD"\n$BODY\n',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "TOLD": str(tmp_path / "told"),
        "BODY": "true",
        "SLURM_JOB_NODELIST": "node[1-4]",
        "SLURM_JOB_NUM_NODES": "4",
        "SLURM_JOB_ID": "123456",
    }


def test_the_batch_script_starts_ray_on_every_node_and_the_run_on_the_first(slurm: dict[str, str]) -> None:
    done = subprocess.run([SCRIPT, "run", "my env.py", "--tasks", "3"], env=slurm, check=False, timeout=20)
    assert done.returncode == 0
    told = Path(slurm["TOLD"]).read_text().splitlines()
    assert len([line for line in told if "symmetric-run --address node1:23456 --min-nodes 4 -- palaestra" in line]) == 4
    assert [line for line in told if line.startswith("palaestra ")] == [
        "palaestra run my env.py --tasks 3 --on ray:node1:23456"
    ]


def test_the_batch_script_passes_on_the_runs_exit_code(slurm: dict[str, str]) -> None:
    done = subprocess.run([SCRIPT, "run", "x"], env={**slurm, "BODY": "exit 3"}, check=False, timeout=20)
    assert done.returncode == 3


def test_the_end_of_the_job_reaches_the_run(slurm: dict[str, str]) -> None:
    body = f"trap 'echo ended >> {slurm['TOLD']}; exit 130' TERM"
    Path(slurm["PATH"].partition(":")[0], "palaestra").write_text(
        f'#!/bin/bash\n{body}\necho "palaestra $*" >> "$TOLD"\nwhile :; do sleep 0.05; done\n'
    )
    with subprocess.Popen([SCRIPT, "run", "x"], env=slurm, start_new_session=True) as running:
        try:
            told = Path(slurm["TOLD"])
            while not told.exists() or not re.search("^palaestra run", told.read_text(), re.M):
                assert running.poll() is None
            running.send_signal(signal.SIGTERM)
            assert running.wait(20) == 130
            assert "ended" in told.read_text()
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)


def test_the_pods_of_the_example_may_make_isolated_slots() -> None:
    """Validated against KubeRay's schema of RayCluster too, which is too large to keep here."""
    cluster = yaml.safe_load((EXAMPLES / "raycluster.yaml").read_text())
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    head = cluster["spec"]["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0", "a head with CPUs would get a worker"
    (group,) = cluster["spec"]["workerGroupSpecs"]
    pod = group["template"]["spec"]
    assert pod["hostUsers"] is False
    (container,) = pod["containers"]
    assert container["securityContext"]["procMount"] == "Unmasked"
    assert "privileged" not in container["securityContext"]
