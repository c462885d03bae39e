"""Finding and trying the native init. What it does is tested by the suites of slots, which run with both inits."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from palaestra.sandbox.slotd import native, orders, syscalls

SOURCES = [Path(native.__file__).with_name(name).read_bytes() for name in native.SOURCES]


def _install(folder: Path, script: str, sources: list[bytes]) -> str:
    """A root in which the init is this script, built from these sources."""
    place = Path(f"{folder}{os.path.dirname(native.__file__)}")
    place.mkdir(parents=True)
    for name, content in zip(native.SOURCES, SOURCES, strict=True):
        (place / name).write_bytes(content)
    (place / native.binary_name(syscalls.MACHINE, sources)).write_text(script)
    return str(folder)


def _built() -> int:
    program = native.load()
    if program is None:
        pytest.skip("the native init was not built here")
    return program


def test_what_was_built_speaks_the_servers_version() -> None:
    program = _built()
    pid = os.posix_spawn(f"/proc/self/fd/{program}", ["init", "--version"], {})
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 100 + orders.VERSION
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
    assert f"enum {{ VERSION = {orders.VERSION},".encode() in SOURCES[0]


@pytest.mark.parametrize(
    ("script", "sources"),
    [
        ("#!/bin/sh\nexit 250\n", SOURCES),  # of another version
        ("not a program", SOURCES),
        (f"#!/bin/sh\nexit {100 + orders.VERSION}\n", [b"an older source"]),
    ],
)
def test_one_that_does_not_fit_is_not_used(tmp_path: Path, script: str, sources: list[bytes]) -> None:
    assert native.load(_install(tmp_path, script, sources)) is None


def test_none_is_none(tmp_path: Path) -> None:
    assert native.load(str(tmp_path)) is None
