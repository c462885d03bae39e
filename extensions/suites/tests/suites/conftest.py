"""The pytest of this environment as the toolchain of slots, so that nothing is installed."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Mount
from palaestra_suites.toolchain.toolchain import DEPENDENCIES_DIR, DependencyCache, Install, Toolchain, interpreter
from suites.bench import Bench, RunBench

_PYTEST = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")


class InstalledPytest(DependencyCache):
    """A cache that contains only this environment's pytest and never asks the package index."""

    async def toolchain(self, install: Install, *, closed: bool = True) -> Toolchain:
        python, mounts = interpreter()
        return Toolchain(
            command=(python,),
            mounts=(*mounts, Mount(str(self.root), DEPENDENCIES_DIR)),
            dependencies=(f"{DEPENDENCIES_DIR}/site",),
            python_path=install.python_path,
        )


@pytest.fixture(scope="session")
def installed_pytest(tmp_path_factory: pytest.TempPathFactory) -> DependencyCache:
    folder = tmp_path_factory.mktemp("packages")
    for name in _PYTEST:
        spec = find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        shutil.copytree(Path(spec.origin).parent, folder / "site" / name)
    site = Path(pytest.__file__).parent.parent
    shutil.copy(site / "py.py", folder / "site")
    for name in ("pytest", "pluggy"):
        (about,) = site.glob(f"{name}-*.dist-info")
        shutil.copytree(about, folder / "site" / about.name)
    for path in (folder, folder.parent):
        path.chmod(0o755)
    return InstalledPytest(folder)


@pytest.fixture(scope="session")
def host_toolchain() -> Toolchain:
    """This environment's pytest, mounted into slots."""
    site = Path(pytest.__file__).parent.parent
    python, mounts = interpreter()
    return Toolchain(
        command=(python, "-s", "-S", "-B"),
        mounts=(*mounts, Mount(str(site), f"{DEPENDENCIES_DIR}/site")),
        dependencies=(f"{DEPENDENCIES_DIR}/site",),
        python_path=(".",),
    )


@pytest.fixture
def run_bench(host_toolchain: Toolchain) -> RunBench:
    """Run a scenario with real slots."""

    def run(scenario: Callable[[Bench], Awaitable[None]]) -> None:
        async def main() -> None:
            async with LocalBackend() as backend:
                # Disable plugins of this environment.
                quiet = replace(host_toolchain, pytest_args=("-p", "no:xdist", "-p", "no:hypothesispytest"))
                await scenario(Bench(backend, quiet))

        asyncio.run(main())

    return run
