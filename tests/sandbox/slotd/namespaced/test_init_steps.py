"""Steps as they are encoded for the native init."""

from __future__ import annotations

import struct
from pathlib import Path

from palaestra.sandbox.slotd.namespaced import init_steps, native_init, privileges
from palaestra.sandbox.slotd.namespaced.init_steps import BuildStep, Do

HEAD = struct.Struct("=HHIqq")


def test_the_encoding_is_what_the_native_init_reads() -> None:
    data = init_steps.encode(
        [
            init_steps.mount("a", "/b", "tmpfs", 6, "size=1"),
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
    assert init_steps.encode([BuildStep(Do.FILTER, program=program)])[HEAD.size :] == program
