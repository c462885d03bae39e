"""What a repository's tests run with: an interpreter, pytest, and what they import besides the repository.

Two ways. Pinned requirements are installed once on the host, into a directory named by their content, and mounted
read-only into every slot: no rollout can change them. Rows of the public data sets get a virtual environment with the
repository in it, made inside the preparation slot, and it lies outside the repository: what an agent does to it is not
in the graded view.

Invariant: nothing of a repository is ever executed on the host. Host installs take wheels only.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from palaestra.core.errors import PrepareError
from palaestra.sandbox.slot import Mount, Slot
from palaestra.suites.swe.host_process import run_process
from palaestra.suites.swe.locked_file import locked
from palaestra.suites.swe.swe_rows import Install

DEPENDENCIES_DIR = "/opt/palaestra/dependencies"
VENV_DIR = "/opt/palaestra/venv"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PUBLIC_TEST_REQUIREMENTS = ("pytest",)

_SYSTEM = ("/usr", "/bin", "/lib")


@dataclass(frozen=True, slots=True)
class Toolchain:
    """How tests of a repository are started in a slot.

    `command` is the interpreter's argv. `dependencies` are directories in the slot that go at the end of `sys.path`,
    `python_path` directories of the repository, relative to it. `mounts` must be in the slot's spec.
    """

    command: tuple[str, ...]
    mounts: tuple[Mount, ...] = ()
    dependencies: tuple[str, ...] = ()
    python_path: tuple[str, ...] = ()
    pytest_args: tuple[str, ...] = ()
    bin_dir: str = ""

    def environment(self, repo_dir: str) -> dict[str, str]:
        """Variables for an agent's own commands, so that `python` and `pytest` there are the ones that grade."""
        path = [f"{repo_dir}/{part}".removesuffix("/.") for part in self.python_path] + list(self.dependencies)
        found = {"PATH": f"{self.bin_dir}:{DEFAULT_PATH}" if self.bin_dir else DEFAULT_PATH}
        return {**found, "PYTHONPATH": ":".join(path)} if path else found


def interpreter() -> tuple[str, tuple[Mount, ...]]:
    """The path of this Python as slots see it, and the mount it needs when it lies outside the system directories."""
    executable, prefix = Path(sys.executable).resolve(), Path(sys.base_prefix).resolve()
    if str(prefix).startswith(_SYSTEM):
        return str(executable), ()
    return str(executable), (Mount(str(prefix), str(prefix)),)


class DependencyCache:
    """Directories of installed wheels on the host, one per set of pinned requirements. Safe across processes."""

    def __init__(self, root: Path, *, timeout_s: float = 600.0) -> None:
        self.root = root
        self._timeout_s = timeout_s

    async def toolchain(self, install: Install, *, closed: bool = True) -> Toolchain:
        """Install once, then reuse. Raises `PrepareError` with the installer's last words.

        `closed` requirements are all that is installed; otherwise what they depend on is, too.
        """
        python, mounts = interpreter()
        place = await self._ensure(install.requirements, python, closed)
        return Toolchain(
            command=(python, "-s", "-S", "-B"),
            mounts=(*mounts, Mount(str(place), DEPENDENCIES_DIR)),
            dependencies=(f"{DEPENDENCIES_DIR}/site",),
            python_path=install.python_path,
            pytest_args=install.pytest_args,
            bin_dir=f"{DEPENDENCIES_DIR}/bin",
        )

    async def _ensure(self, requirements: Sequence[str], python: str, closed: bool) -> Path:
        facts = [python, sys.version, *sorted(requirements), *([] if closed else ["and what they depend on"])]
        key = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:20]
        place = self.root / key
        self.root.mkdir(parents=True, exist_ok=True)
        async with locked(self.root / f"{key}.lock", timeout_s=self._timeout_s):
            if not place.is_dir():
                await self._install(requirements, python, place, closed)
        return place

    async def _install(self, requirements: Sequence[str], python: str, place: Path, closed: bool) -> None:
        with tempfile.TemporaryDirectory(dir=self.root, prefix="new-") as temporary:
            fresh = Path(temporary, "tree")
            (fresh / "site").mkdir(parents=True)
            result = await run_process(
                [*_installer(closed), "--target", str(fresh / "site"), *requirements], timeout_s=self._timeout_s
            )
            if result.returncode:
                raise PrepareError(f"cannot install {', '.join(requirements)}: {result.text[-2000:].strip()}")
            _finish(fresh, python, place)


def _installer(closed: bool) -> list[str]:
    """`pip install` or `uv pip install`, whichever there is; wheels only, closed without any but the named ones."""
    flags = [*(["--no-deps"] if closed else []), "--only-binary", ":all:", "--quiet"]
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *flags]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--python", sys.executable, "--compile-bytecode", *flags]
    raise PrepareError("installing test requirements needs pip or uv; run `python -m ensurepip`")


def _finish(fresh: Path, python: str, place: Path) -> None:
    _write_commands(fresh / "bin", python)
    fresh.chmod(0o755)
    fresh.rename(place)


def _write_commands(bin_dir: Path, python: str) -> None:
    """`python`, `python3` and `pytest` for the agent's shell."""
    bin_dir.mkdir(parents=True)
    for name, tail in (("python", ""), ("python3", ""), ("pytest", " -m pytest")):
        script = bin_dir / name
        script.write_text(f'#!/bin/sh\nexec "{python}"{tail} "$@"\n')
        script.chmod(0o755)


async def install_editable(
    slot: Slot, repo_dir: str, install: Install, *, timeout_s: float, env: Mapping[str, str] | None = None
) -> Toolchain:
    """Make a virtual environment with the repository and pytest in it, inside a preparation slot (network on).

    `env` are variables of the installer, such as PIP_INDEX_URL. Raises `PrepareError` with its last words.
    """
    python, mounts = interpreter()
    # The host's certificates, where the slot has them: an index behind a private authority is trusted as on the host.
    trust = {"PIP_CERT": CERTIFICATES} if await slot.stat(CERTIFICATES) else {}
    variables = {"PIP_NO_CACHE_DIR": "1", **trust, **(env or {})}
    await _in_slot(slot, [python, "-m", "venv", "--symlinks", VENV_DIR], "/", 120.0, variables)
    pip = [f"{VENV_DIR}/bin/python", "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--quiet"]
    requirements = [*PUBLIC_TEST_REQUIREMENTS, *install.requirements]
    await _in_slot(slot, [*pip, "-e", repo_dir, *requirements], repo_dir, timeout_s, variables)
    return venv_toolchain(install, mounts)


def venv_toolchain(install: Install, mounts: tuple[Mount, ...] | None = None) -> Toolchain:
    """How tests start where `install_editable` has run before, for example in a slot over its snapshot."""
    return Toolchain(
        command=(f"{VENV_DIR}/bin/python", "-s", "-B"),
        mounts=interpreter()[1] if mounts is None else mounts,
        python_path=install.python_path,
        pytest_args=install.pytest_args,
        bin_dir=f"{VENV_DIR}/bin",
    )


async def _in_slot(slot: Slot, argv: Sequence[str], cwd: str, timeout_s: float, env: Mapping[str, str]) -> None:
    result = await slot.execute(list(argv), cwd=cwd, timeout_s=timeout_s, env=env)
    if not result.success:
        raise PrepareError(f"{' '.join(argv[:6])} … failed: {result.error}\n{result.output[-3000:].strip()}")
