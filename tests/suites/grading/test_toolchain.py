import asyncio
import sys
from pathlib import Path

import pytest

from palaestra.core.errors import PrepareError
from palaestra.sandbox.slot import Mount
from palaestra.suites.grading.toolchain import DependencyCache, Install, Toolchain, interpreter
from suites.bench import Bench, RunBench


def test_the_interpreter_is_this_one_and_its_mount_holds_it() -> None:
    python, mounts = interpreter()
    assert Path(python) == Path(sys.executable).resolve()
    assert all(Path(python).is_relative_to(mount.target) for mount in mounts)


def test_an_agents_commands_find_the_repository_and_the_tools() -> None:
    toolchain = Toolchain(("python",), dependencies=("/d/site",), python_path=("src", "."), bin_dir="/d/bin")
    environment = toolchain.environment("/workspace/repo")
    assert environment["PYTHONPATH"] == "/workspace/repo/src:/workspace/repo:/d/site"
    assert environment["PATH"].startswith("/d/bin:")


def test_what_cannot_be_installed_is_an_error_with_the_installers_words(tmp_path: Path) -> None:
    cache = DependencyCache(tmp_path / "cache")
    missing = Install(requirements=(str(tmp_path / "none-1.0-py3-none-any.whl"),))
    with pytest.raises(PrepareError, match=r"cannot install .*none-1\.0"):
        asyncio.run(cache.toolchain(missing))
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


@pytest.mark.slots
def test_nothing_required_is_installed_once_and_read_only(tmp_path: Path, run_bench: RunBench) -> None:
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    make_wheel(wheel)

    async def scenario(bench: Bench) -> None:
        cache = DependencyCache(tmp_path / "cache")
        install = Install(requirements=(str(wheel),))
        one, two = await asyncio.gather(cache.toolchain(install), cache.toolchain(install))
        assert one == two
        (place,) = [mount for mount in one.mounts if mount.target.endswith("/dependencies")]
        assert isinstance(place, Mount)
        bench.spec = type(bench.spec)(mounts=one.mounts)
        async with bench.slot() as slot:
            done = await slot.execute("python -c 'import tiny; print(tiny.x)'", env=one.environment("/workspace"))
            assert done.output == "1\n", done.output
            done = await slot.execute(f"echo 2 > {place.target}/site/tiny.py")
            assert not done.success

    run_bench(scenario)


def make_wheel(path: Path) -> None:
    import zipfile

    info = "tiny-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("tiny.py", "x = 1\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "tiny.py,,\n")
