"""Trying the miniature tasks with the pytest that runs these tests."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from envs.terminal_bench.mini import HARBOR
from palaestra.envs.settings import make_pool
from palaestra.envs.swe.install import DEPENDENCIES_DIR, DependencyCache, Toolchain, interpreter
from palaestra.envs.swe.rows import Install
from palaestra.envs.terminal_bench.config import TerminalBench2EvalConfig
from palaestra.envs.terminal_bench.env import TerminalBench2EvalEnv
from palaestra.envs.terminal_bench.environment import TerminalBenchEnvironment
from palaestra.envs.terminal_bench.proving import Line, Proving
from palaestra.envs.terminal_bench.sources import LeftOut
from palaestra.sandbox.base import Mount

collect_ignore = ["tasks"]

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


Try = Callable[..., dict[str, Line]]


@pytest.fixture
def try_tasks(installed_pytest: DependencyCache, tmp_path: Path) -> Try:
    """Try tasks of a source as `palaestra env import` does; the lines by name. `settings` are the environment's."""

    def run(source: Path | str = HARBOR, **settings: object) -> dict[str, Line]:
        own = {"base_image": "host", "cache_dir": str(tmp_path / "cache"), "dataset_name": str(source)}
        config = TerminalBench2EvalConfig(**{**own, **settings})  # type: ignore[arg-type]

        async def main() -> dict[str, Line]:
            async with make_pool(config) as pool:
                inner = TerminalBench2EvalEnv(config, [])
                await inner.sort_out()
                environment = TerminalBenchEnvironment(inner, config, installed_pytest)
                report = await Proving(environment, pool).run(
                    [each for each in inner.left_out if isinstance(each, LeftOut)]
                )
            return {line.name: line for line in report.lines}

        return asyncio.run(main())

    return run
