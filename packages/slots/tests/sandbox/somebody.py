"""Running tests again as a user without root, where this machine lets such a user make user namespaces."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

SOMEBODY = 12345
TWO_AT_ONCE = ("-n", "2", "--dist", "loadgroup")
ROOT = Path(__file__).parents[4]

_PROBE = (
    "import asyncio; from palaestra_slots.sandbox.isolation.isolation_probe import probe;"
    "print(asyncio.run(probe())[1].available)"
)


def interpreter() -> str | None:
    """A Python that another user can run and that our packages fit; None where there is none."""
    for candidate in (sys.executable, f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"):
        if as_somebody(candidate, "-c", "pass").returncode == 0:
            return candidate
    return None


def as_somebody(*argv: str, cwd: str | Path = "/", timeout_s: float = 20) -> subprocess.CompletedProcess[str]:
    """Run without root, without our groups and with a clean environment."""
    # An editable install is a .pth file of site-packages, which only a Python of its own environment reads.
    ours = [*ROOT.glob("packages/*/src"), *ROOT.glob("extensions/*/src")]
    path = ":".join(map(str, [*ours, sysconfig.get_paths()["purelib"]]))
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        return subprocess.run(
            argv, user=SOMEBODY, group=SOMEBODY, extra_groups=[], env=env, cwd=cwd, timeout=timeout_s,
            capture_output=True, text=True,
        )  # fmt: skip
    except PermissionError as error:
        return subprocess.CompletedProcess(argv, 126, "", str(error))


def run_suite(folder: Path, only: str, *more: str) -> None:
    """Run the tests of a file or folder that `only` (pytest's -k) names, as somebody; skips where that cannot be.

    Two processes run them, since such tests wait more than they work."""
    python = interpreter()
    if python is None or as_somebody("/bin/ls", str(folder)).returncode != 0:
        pytest.skip("no Python and checkout that another user can read")
    probed = as_somebody(python, "-c", _PROBE)
    assert probed.returncode == 0, probed.stderr
    if probed.stdout != "True\n":
        pytest.skip("no user namespaces without root here")
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", "-k", only, *TWO_AT_ONCE, *more]
    with tempfile.TemporaryDirectory() as own:
        os.chown(own, SOMEBODY, SOMEBODY)
        options.append(f"--basetemp={own}/t")
        result = as_somebody(python, "-m", "pytest", *options, str(folder), cwd=ROOT, timeout_s=170)
    assert result.returncode == 0, result.stdout[-8000:]
    assert " passed" in result.stdout
