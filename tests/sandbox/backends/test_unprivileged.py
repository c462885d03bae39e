"""The same suite as a user without root, where this machine lets one make user namespaces."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slots

SOMEBODY = 12345
HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def interpreter() -> str | None:
    """A Python that another user can run and that our packages fit; None where there is none."""
    for candidate in (sys.executable, f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"):
        if as_somebody(candidate, "-c", "pass").returncode == 0:
            return candidate
    return None


def as_somebody(*argv: str, cwd: str | Path = "/", timeout_s: float = 20) -> subprocess.CompletedProcess[str]:
    """Run without root, without our groups and with a clean environment."""
    packages = sysconfig.get_paths()["purelib"]
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT / 'src'}:{packages}", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        return subprocess.run(
            argv, user=SOMEBODY, group=SOMEBODY, extra_groups=[], env=env, cwd=cwd, timeout=timeout_s,
            capture_output=True, text=True,
        )  # fmt: skip
    except PermissionError as error:
        return subprocess.CompletedProcess(argv, 126, "", str(error))


@pytest.mark.skipif(os.geteuid() != 0, reason="already runs without root")
@pytest.mark.timeout(180)
def test_the_suite_of_the_local_backend_without_root() -> None:
    python = interpreter()
    if python is None or as_somebody("/bin/ls", str(HERE)).returncode != 0:
        pytest.skip("no Python and checkout that another user can read")
    probe = "import asyncio; from palaestra.sandbox.ladder import probe; print(asyncio.run(probe())[1].available)"
    if as_somebody(python, "-c", probe).stdout != "True\n":
        pytest.skip("no user namespaces without root here")
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly"]
    options += [
        "-k",
        "not model and (isolation or layers or lifetime or userns)",
        "-W",
        "ignore::hypothesis.errors.HypothesisWarning",
    ]
    with tempfile.TemporaryDirectory() as own:
        os.chown(own, SOMEBODY, SOMEBODY)
        options.append(f"--basetemp={own}/t")
        result = as_somebody(python, "-m", "pytest", *options, str(HERE), cwd=ROOT, timeout_s=170)
    assert result.returncode == 0, result.stdout[-8000:]
    assert " passed" in result.stdout
