"""Finding and trying the native init. What it does is tested by the suites of slots, which run with both inits."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from palaestra.sandbox.slotd import native, orders, syscalls

SOURCE = Path(native.__file__).with_name("init.c").read_bytes()


def _install(folder: Path, script: str, source: bytes = SOURCE) -> str:
    """A root in which the init is this script, built from this source."""
    place = Path(f"{folder}{os.path.dirname(native.__file__)}")
    place.mkdir(parents=True)
    (place / "init.c").write_bytes(SOURCE)
    (place / native.binary_name(syscalls.MACHINE, source)).write_text(script)
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
    assert f"enum {{ VERSION = {orders.VERSION},".encode() in SOURCE


@pytest.mark.parametrize(
    ("script", "source"),
    [
        ("#!/bin/sh\nexit 250\n", SOURCE),  # of another version
        ("not a program", SOURCE),
        (f"#!/bin/sh\nexit {100 + orders.VERSION}\n", b"an older source"),
    ],
)
def test_one_that_does_not_fit_is_not_used(tmp_path: Path, script: str, source: bytes) -> None:
    assert native.load(_install(tmp_path, script, source)) is None


def test_none_is_none(tmp_path: Path) -> None:
    assert native.load(str(tmp_path)) is None
