"""Steps: what is encoded for the native init, and what the Python one does with those that need no privilege."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from palaestra.sandbox.slotd import native
from palaestra.sandbox.slotd.namespaced import init_steps, privileges
from palaestra.sandbox.slotd.namespaced.init_steps import Do, Step

HEAD = struct.Struct("=HHIqq")


def test_the_encoding_is_what_the_native_init_reads() -> None:
    data = init_steps.encode(
        [init_steps.mount("a", "/b", "tmpfs", 6, "size=1"), Step(Do.FILTER, program=b"\0\1\2"), Step(Do.SESSION)]
    )
    assert HEAD.unpack_from(data) == (Do.MOUNT, 4, 18, 6, 0)
    assert data[HEAD.size : HEAD.size + 18] == b"a\0/b\0tmpfs\0size=1\0"
    rest = data[HEAD.size + 18 :]
    assert (HEAD.unpack_from(rest), rest[HEAD.size : HEAD.size + 3]) == ((Do.FILTER, 0, 3, 0, 0), b"\0\1\2")
    assert HEAD.unpack_from(rest, HEAD.size + 3) == (Do.SESSION, 0, 0, 0, 0)


def test_both_inits_count_the_operations_alike() -> None:
    source = Path(native.__file__).with_name("steps.c").read_text()
    listed = source[source.index("JOIN = 1") : source.index("};", source.index("JOIN = 1"))]
    names = [name.split("=")[0].strip() for name in listed.split(",")]
    assert [name for name in names if name] == [do.name for do in Do]


def test_files_and_places(tmp_path: Path) -> None:
    os.symlink("/etc", tmp_path / "link")
    number = 200
    init_steps.perform(
        [
            Step(Do.MKDIR, (f"{tmp_path}/d",), 0o700),
            Step(Do.MKDIR, (f"{tmp_path}/d",), 0o700, 1),
            Step(Do.CREATE, (f"{tmp_path}/d/f",), 0o600),
            Step(Do.WRITE, (f"{tmp_path}/d/f", "text")),
            Step(Do.WRITE, (f"{tmp_path}/d/missing", "text"), 1),
            Step(Do.SYMLINK, ("d", f"{tmp_path}/s")),
            Step(Do.OPEN, (str(tmp_path),), number),
            Step(Do.OPEN_INSIDE, ("s/f",), number + 1, number),
        ]
    )
    assert Path(f"/proc/self/fd/{number + 1}").read_text() == "text"
    with pytest.raises(OSError, match="open inside link/passwd"):  # the link leads to the place's own /etc
        init_steps.perform([Step(Do.OPEN_INSIDE, ("link/passwd",), number + 1, number)])
    os.close(number)
    os.close(number + 1)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (Step(Do.MKDIR, ("/proc/x",), 0o755), "mkdir /proc/x: "),
        (Step(Do.CHANGE_DIRECTORY, ("/no/such",)), "change directory /no/such: No such file"),
        (init_steps.mount("a", "/no/such", "tmpfs"), "mount tmpfs on /no/such: "),
        (init_steps.mount("a", "/no/such"), "mount bind on /no/such: "),
        (Step(Do.WRITE, ("/no/such", "x")), "write /no/such: "),
    ],
)
def test_what_fails_is_named_with_its_reason(step: Step, message: str) -> None:
    with pytest.raises(OSError) as failed:
        init_steps.perform([step])
    assert str(failed.value.strerror).startswith(message)
    assert failed.value.errno


def test_a_filter_is_passed_whole() -> None:
    program = privileges.program()
    assert init_steps.encode([Step(Do.FILTER, program=program)])[HEAD.size :] == program
