import asyncio
import contextlib
import os
import sys
from pathlib import Path

import pytest

from envs.scripts import need_level
from palaestra_slots.core.errors import PrepareError, TaskError
from palaestra_slots.sandbox.slot import Mount
from palaestra_suites.toolchain.toolchain import DependencyCache, Install, Toolchain, interpreter
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


def only_from(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pip look for packages in this folder only."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")


@pytest.mark.slots
async def test_the_error_of_a_failed_installation_has_the_installers_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_from(tmp_path, monkeypatch)
    cache = DependencyCache(tmp_path / "cache")
    with pytest.raises(PrepareError, match=r"cannot install none==1\.0(?s:.)*No matching distribution"):
        await cache.toolchain(Install(requirements=("none==1.0",)))
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


SETUP = "import os, setuptools; open('{ran}', 'a').write('ran'); setuptools.setup(name='evil', version='1.0')"
FOREIGN = [
    "{folder}",
    "{folder}/evil-1.0.tar.gz",
    "./evil",
    "evil @ file://{folder}",
    "evil@file://{folder}",
    "file://{folder}",
    "git+file://{folder}",
    "http://127.0.0.1:9/evil-1.0.tar.gz",
    "--no-binary=:all:",
    "-ifile://{folder}",
    "-e{folder}",
    "-r{folder}/requirements.txt",
    "-rrequirements.txt",
    "-c/etc/passwd",
    ".[test]",
    "evil==1.0 --no-binary=:all:",
    "evil==1.0\n--no-binary=:all:",
    "evil[/tmp]",
    "evil; python_version > '3' @ file://{folder}",
    "${{HOME}}/evil",
    "~/evil",
    "\uff0d\uff0dno-binary=:all:",
    "evil\x00",
    "",
]


@pytest.mark.parametrize("text", FOREIGN)
async def test_a_row_cannot_pass_an_address_a_path_or_an_option_to_the_installer(text: str, tmp_path: Path) -> None:
    folder = tmp_path / "evil"
    folder.mkdir()
    ran = tmp_path / "ran"
    (folder / "setup.py").write_text(SETUP.format(ran=ran))
    (folder / "requirements.txt").write_text(str(folder))
    requirement = text.format(folder=folder)
    with pytest.raises(TaskError, match="is not a requirement"):
        Install.parse({"requirements": [requirement]})
    with pytest.raises(TaskError, match="is not a requirement"):
        await DependencyCache(tmp_path / "cache").toolchain(Install(requirements=("pytest", requirement)))
    assert not ran.exists()


def test_requirements_of_real_projects_are_accepted() -> None:
    plain = [
        "pytest", "pytest<9", "attrs==25.3.0", "ruamel.yaml >= 0.18, < 1", "requests[socks,use_chardet]>=2.8.1,!=2.9",
        "zope.interface", "typing_extensions~=4.0", "torch==2.13.0+cpu", "numpy (>=1.22)", "a===1.0", "b==1.*",
        "importlib-metadata>=3.6; python_version < '3.10'", "tomli; python_full_version<='3.11.0a6'",
        'colorama ; sys_platform == "win32" and (python_version in "3.8 3.9" or extra == "x")',
    ]  # fmt: skip
    assert Install.parse({"requirements": plain}).requirements == tuple(plain)
    assert Install.parse({"requirements": [".[test,dev]", "-rtests/requirements.txt", *plain], "editable": True})
    for outside in ("-r../x.txt", "-r/etc/x.txt", "-rtests/../../x.txt", ".", "..[x]", "./[x]"):
        with pytest.raises(TaskError, match="is not a requirement"):
            Install.parse({"requirements": [outside], "editable": True})


@pytest.mark.slots
def test_an_installer_runs_in_a_slot_and_not_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_level("userns")
    name = f"tiny{os.getpid()}"
    make_wheel(tmp_path / f"{name}-1.0-py3-none-any.whl", name)
    only_from(tmp_path, monkeypatch)

    async def install() -> tuple[Toolchain, set[str]]:
        install = Install(requirements=(f"{name}==1.0",))
        work = asyncio.create_task(DependencyCache(tmp_path / "cache").toolchain(install))
        seen: set[str] = set()
        while not work.done():
            seen |= await asyncio.to_thread(mount_namespaces, f"{name}==1.0")
        return await work, seen

    chain, seen = asyncio.run(install())
    assert seen, "the installer was never seen"
    assert os.readlink("/proc/self/ns/mnt") not in seen
    place = next(Path(mount.source) for mount in chain.mounts if mount.target.endswith("/dependencies"))
    assert (place / f"site/{name}.py").read_text() == "x = 1\n"
    assert (place / f"site/{name}.py").stat().st_uid == tmp_path.stat().st_uid


def mount_namespaces(argument: str) -> set[str]:
    """The mount namespaces of the processes with this argument."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if argument.encode() in (process / "cmdline").read_bytes().split(b"\0"):
                found.add(os.readlink(process / "ns/mnt"))
    return found


@pytest.mark.slots
def test_nothing_required_is_installed_once_and_read_only(
    tmp_path: Path, run_bench: RunBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(tmp_path / "tiny-1.0-py3-none-any.whl")
    only_from(tmp_path, monkeypatch)

    async def scenario(bench: Bench) -> None:
        cache = DependencyCache(tmp_path / "cache")
        install = Install(requirements=("tiny==1.0",))
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


def make_wheel(path: Path, name: str = "tiny") -> None:
    import zipfile

    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", "x = 1\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"{name}.py,,\n")
