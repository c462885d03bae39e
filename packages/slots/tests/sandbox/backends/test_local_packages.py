"""Slots see no packages of the host's Python interpreters, and still have pip, the standard library and their own."""

from __future__ import annotations

import asyncio
import glob
import sys
import sysconfig
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from palaestra_slots.core.errors import IsolationUnavailable
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Mount, Rung, Slot, SlotSpec

pytestmark = pytest.mark.slots

RUNGS = [Rung.FULL, Rung.USERNS, Rung.CONFINED]
MOUNTING = [Rung.FULL, Rung.USERNS]


def in_slot(rung: Rung, body: Callable[[LocalBackend, Slot], Awaitable[None]], spec: SlotSpec | None = None) -> None:
    async def main() -> None:
        backend = LocalBackend(rung=rung)
        try:
            await backend.start()
        except IsolationUnavailable as error:
            pytest.skip(str(error))
        async with backend:
            await body(backend, await backend.create(spec or SlotSpec(), "test"))

    asyncio.run(main())


def by_level(rungs: list[Rung]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("rung", rungs, ids=lambda rung: str(rung.label))


def host_packages() -> list[Path]:
    """The entries of this machine's directories for packages that a slot could see, without pip."""
    tops = ("/usr/lib/python3*", "/usr/local/lib/python3*", f"{sys.base_prefix}/lib/python3*")
    sites = {path for top in tops for path in glob.glob(f"{top}/*-packages")}
    return [entry for site in sites for entry in Path(site).iterdir() if entry.name.partition("-")[0] != "pip"]


def installation(root: Path, *, venv: bool = False) -> Path:
    """A Python installation with one package, or a virtual environment with it."""
    site = root / "lib/python3.11/site-packages"
    (site / "secret").mkdir(parents=True)
    (site / "secret/__init__.py").write_text("answer = 42\n")
    (site / "pip").mkdir()
    (site / "pip/__init__.py").write_text("own = 1\n")
    if venv:
        (root / "pyvenv.cfg").write_text("home = /usr/bin\n")
    else:
        (root / "lib/python3.11/os.py").write_text("")
    return root


@by_level(RUNGS)
def test_the_packages_of_the_host_cannot_be_read(rung: Rung) -> None:
    packages = host_packages()
    if not packages:
        pytest.skip("no interpreter of this machine has packages")

    async def body(_: LocalBackend, slot: Slot) -> None:
        files = [path for path in packages if path.is_file()]
        files += [path for each in packages if each.is_dir() for path in each.rglob("*.py")][:200]
        listed = "\n".join(map(str, files)).encode()
        read = await slot.execute('while read -r f; do head -c1 "$f" 2>&- && echo "$f"; done', stdin=listed)
        assert read.output == ""
        for path in files[:3]:
            with pytest.raises(OSError):
                await slot.read_bytes(str(path))

    in_slot(rung, body)


@by_level(RUNGS)
def test_pip_and_the_standard_library_work(rung: Rung) -> None:
    async def body(_: LocalBackend, slot: Slot) -> None:
        prefix = "python3" if rung is Rung.CONFINED else f"{sys.base_prefix}/bin/python3"  # whose folder may be closed
        for python in dict.fromkeys(["python3", prefix]):
            done = await slot.execute([python, "-c", "import json, sqlite3, venv, unittest; print(json.dumps(1))"])
            assert done.output == "1\n"
        if (
            rung is not Rung.CONFINED
            and (Path(sysconfig.get_path("purelib", vars={"base": sys.base_prefix})) / "pip").is_dir()
        ):
            assert (await slot.execute([prefix, "-m", "pip", "--version"])).output.startswith("pip ")

    in_slot(rung, body)


@by_level(MOUNTING)
def test_a_mounted_interpreter_shows_no_packages(rung: Rung, tmp_path: Path) -> None:
    mounted = Mount(str(installation(tmp_path / "python")), "/opt/other")

    async def body(_: LocalBackend, slot: Slot) -> None:
        found = await slot.execute("cd /opt/other/lib/python3.11; ls; ls site-packages; touch x")
        assert found.output.splitlines()[:3] == ["os.py", "site-packages", "pip"]
        assert not found.success

    in_slot(rung, body, SlotSpec(mounts=(mounted,)))


@by_level(MOUNTING)
def test_scripts_of_hidden_packages_are_hidden_too(rung: Rung, tmp_path: Path) -> None:
    """A script of a package that is not there would stand before a working program of the same name."""
    whole = installation(tmp_path / "python")
    entries = {"secret": "[console_scripts]\nsecret = secret:main\ncompiled=secret:main\n[other]\nplugin = secret\n"}
    entries |= {"pip": "[console_scripts]\npip3 = pip:main\n"}
    for name, text in entries.items():
        about = whole / f"lib/python3.11/site-packages/{name}-1.0.dist-info/entry_points.txt"
        about.parent.mkdir()
        about.write_text(text)
    (whole / "bin").mkdir()
    for name in ("secret", "pip3", "plugin", "tool"):
        (whole / f"bin/{name}").write_text("#!/usr/bin/python3\n")
    (whole / "bin/compiled").write_bytes(b"\x7fELF")

    async def body(_: LocalBackend, slot: Slot) -> None:
        found = await slot.execute("ls /opt/py/bin /opt/venv/bin")
        assert found.output.split() == [
            *("/opt/py/bin:", "compiled", "pip3", "plugin", "tool"),
            *("/opt/venv/bin:", "secret"),
        ]

    venv = installation(tmp_path / "venv", venv=True)
    (venv / "bin").mkdir()
    (venv / "bin/secret").write_text("#!/usr/bin/python3\n")
    in_slot(rung, body, SlotSpec(mounts=(Mount(str(whole), "/opt/py"), Mount(str(venv), "/opt/venv"))))


@by_level(MOUNTING)
def test_declared_packages_are_shown(rung: Rung, tmp_path: Path) -> None:
    """A virtual environment, and the packages of an interpreter that are mounted by themselves."""
    whole = installation(tmp_path / "python")
    site = whole / "lib/python3.11/site-packages"
    venv = Mount(str(installation(tmp_path / "venv", venv=True)), "/opt/venv")
    spec = SlotSpec(
        mounts=(venv, Mount(str(whole), "/opt/py"), Mount(str(site), "/opt/py/lib/python3.11/site-packages"))
    )

    async def body(_: LocalBackend, slot: Slot) -> None:
        found = await slot.execute("cat /opt/*/lib/python3.11/site-packages/secret/__init__.py")
        assert found.output == "answer = 42\n" * 2

    in_slot(rung, body, spec)


@by_level(MOUNTING)
def test_an_image_keeps_its_packages(rung: Rung, tmp_path: Path) -> None:
    installation(tmp_path / "root/usr")
    (tmp_path / "root/bin").mkdir()

    async def body(_: LocalBackend, slot: Slot) -> None:
        assert await slot.read_text("/usr/lib/python3.11/site-packages/secret/__init__.py") == "answer = 42\n"

    in_slot(rung, body, SlotSpec(image=str(tmp_path / "root")))


@by_level(MOUNTING)
def test_packages_that_a_slot_installs_reach_its_snapshot(rung: Rung) -> None:
    async def body(backend: LocalBackend, slot: Slot) -> None:
        site = next(iter(glob.glob("/usr/lib/python3*/dist-packages")), None)
        if site is None:
            pytest.skip("needs a Debian Python")
        assert (await slot.execute(f"mkdir {site}/own && echo 1 > {site}/own/__init__.py")).success
        snapshot = await backend.seal(slot)
        changes = [each.path for each in await backend.changes(snapshot)]
        assert changes == [f"{site}/own", f"{site}/own/__init__.py"]
        later = await backend.create(SlotSpec(), "later", snapshot)
        assert await later.read_text(f"{site}/own/__init__.py") == "1\n"

    in_slot(rung, body)
