"""The pytest that runs these tests, as slots get it: nothing is installed and no package index is asked."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from palaestra.sandbox.slot import Mount
from palaestra.suites.swe.install import DEPENDENCIES_DIR, DependencyCache, Toolchain, interpreter
from palaestra.suites.swe.swe_rows import Install

_PYTEST = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")


class InstalledPytest(DependencyCache):
    """A cache that holds this environment's pytest, and nothing else: no package index is asked."""

    async def toolchain(self, install: Install, *, closed: bool = True) -> Toolchain:
        python, mounts = interpreter()
        return Toolchain(
            command=(python,),
            mounts=(*mounts, Mount(str(self.root), DEPENDENCIES_DIR)),
            dependencies=(f"{DEPENDENCIES_DIR}/site",),
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
