"""Finding and trying the native init, and encoding its steps. The suites of slots test what it does."""

from __future__ import annotations

import os
import shutil
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import palaestra_slots
from palaestra_slots.sandbox.slotd import syscalls
from palaestra_slots.sandbox.slotd.namespaced import native_init, privileges
from palaestra_slots.sandbox.slotd.namespaced.native_init import BuildStep, Do
from palaestra_slots.sandbox.slotd.protocol import init_messages

PACKAGE = Path(palaestra_slots.__file__).parent
STARTED = """
import asyncio
from palaestra_slots.core.errors import IsolationUnavailable
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Rung

async def main():
    for rung in (Rung.FULL, Rung.USERNS):
        try:
            await LocalBackend(rung=rung).start()
        except IsolationUnavailable as error:
            print(error)

asyncio.run(main())
"""

SOURCES = [Path(native_init.FOLDER, name).read_bytes() for name in native_init.SOURCES]


def _install(folder: Path, script: str, sources: list[bytes]) -> str:
    """A root in which the init is this script, built from these sources."""
    place = Path(f"{folder}{native_init.FOLDER}")
    place.mkdir(parents=True)
    for name, content in zip(native_init.SOURCES, SOURCES, strict=True):
        (place / name).write_bytes(content)
    (place / native_init.binary_name(syscalls.MACHINE, sources)).write_text(script)
    return str(folder)


def _built() -> int:
    try:
        return native_init.load()
    except native_init.NoInit as error:
        pytest.skip(f"no native init: {error}")


def test_what_was_built_speaks_the_servers_version() -> None:
    program = _built()
    pid = os.posix_spawn(f"/proc/self/fd/{program}", ["init", "--version"], {})
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 100 + init_messages.VERSION
    os.close(program)


def test_nobody_can_change_or_read_it() -> None:
    program = _built()
    assert stat.S_IMODE(os.fstat(program).st_mode) == 0o111
    writable = os.open(f"/proc/self/fd/{program}", os.O_RDWR) if os.geteuid() == 0 else program
    with pytest.raises(OSError):
        os.write(writable, b"x")
    with pytest.raises(OSError):
        os.ftruncate(writable, 0)
    for fd in {program, writable}:
        os.close(fd)


def test_the_source_says_the_version_of_the_orders() -> None:
    assert f"enum {{ VERSION = {init_messages.VERSION},".encode() in SOURCES[0]


@pytest.mark.parametrize(
    ("script", "sources", "why"),
    [
        ("#!/bin/sh\nexit 250\n", SOURCES, "does not run here"),  # of another version
        ("not a program", SOURCES, "does not run here"),
        (f"#!/bin/sh\nexit {100 + init_messages.VERSION}\n", [b"an older source"], "a different version of its source"),
    ],
)
def test_one_that_does_not_fit_is_not_used(tmp_path: Path, script: str, sources: list[bytes], why: str) -> None:
    with pytest.raises(native_init.NoInit, match=why):
        native_init.load(_install(tmp_path, script, sources))


def test_none_is_none(tmp_path: Path) -> None:
    with pytest.raises(native_init.NoInit, match="ziglang"):
        native_init.load(str(tmp_path))


@pytest.mark.slots
def test_without_it_no_slot_has_namespaces_and_the_error_names_what_to_install(tmp_path: Path) -> None:
    """With the package as it is where it was installed without a compiler."""
    package = tmp_path / "palaestra_slots"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("init-*-*", "__pycache__"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    told = subprocess.run(
        [sys.executable, "-c", STARTED], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert told.stdout.count("pip install ziglang") == 2


HEAD = struct.Struct("=HHIqq")


def test_the_encoding_is_what_the_native_init_reads() -> None:
    data = native_init.encode_steps(
        [
            native_init.mount("a", "/b", "tmpfs", 6, "size=1"),
            BuildStep(Do.FILTER, program=b"\0\1\2"),
            BuildStep(Do.SESSION),
        ]
    )
    assert HEAD.unpack_from(data) == (Do.MOUNT, 4, 18, 6, 0)
    assert data[HEAD.size : HEAD.size + 18] == b"a\0/b\0tmpfs\0size=1\0"
    rest = data[HEAD.size + 18 :]
    assert (HEAD.unpack_from(rest), rest[HEAD.size : HEAD.size + 3]) == ((Do.FILTER, 0, 3, 0, 0), b"\0\1\2")
    assert HEAD.unpack_from(rest, HEAD.size + 3) == (Do.SESSION, 0, 0, 0, 0)


def test_both_sides_number_the_operations_alike() -> None:
    source = Path(native_init.FOLDER, "steps.c").read_text()
    listed = source[source.index("JOIN = 1") : source.index("};", source.index("JOIN = 1"))]
    names = [name.split("=")[0].strip() for name in listed.split(",")]
    assert [name for name in names if name] == [do.name for do in Do]


def test_a_filter_is_passed_whole() -> None:
    program = privileges.program()
    assert native_init.encode_steps([BuildStep(Do.FILTER, program=program)])[HEAD.size :] == program
