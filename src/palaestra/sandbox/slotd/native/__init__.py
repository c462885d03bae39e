"""The native init: found, tried, and kept in a sealed memory file from which every slot executes it.

An idle slot whose pid 1 is `init.c` costs kilobytes of memory where the Python one costs megabytes. It is optional:
where it was not built, or does not run, the Python init serves, and whoever starts a server is told. A binary carries
the digest of its source in its name, so that one from another version of the source is not found.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Sequence

from .. import syscalls
from ..protocol import init_messages

SOURCES = ("init.c", "steps.c", "steps.h")
"""What the binary depends on, in the order of its digest."""

_MFD_EXEC = 0x10
_ANSWER = 100
_FOLDER = os.path.dirname(os.path.abspath(__file__))


class NoInit(Exception):
    """There is no native init here; the message says why and what would help."""


def binary_name(machine: str, sources: Sequence[bytes]) -> str:
    """What the binary for a machine is called that was built from these sources."""
    return f"init-{machine}-{hashlib.sha256(b''.join(sources)).hexdigest()[:12]}"


def load(prefix: str = "") -> int:
    """A descriptor of the init for this machine, which no slot can write to. Raises `NoInit` where none runs.

    `prefix` is where the host's root lies.
    """
    folder = prefix + _FOLDER
    try:
        name = binary_name(syscalls.MACHINE, [_read(f"{folder}/{source}") for source in SOURCES])
        program = _sealed(_read(f"{folder}/{name}"))
    except FileNotFoundError:
        entries = os.listdir(folder) if os.path.isdir(folder) else []
        stale = any(entry.startswith(f"init-{syscalls.MACHINE}-") for entry in entries)
        was = "was built from another version of its source" if stale else "was not built"
        raise NoInit(f"it {was}; install the package again where there is a C compiler or ziglang") from None
    except OSError as error:
        raise NoInit(f"it cannot be read: {error}") from None
    if not _answers(program):
        os.close(program)
        raise NoInit(f"{name} does not run here")
    return program


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _sealed(content: bytes) -> int:
    """The content as a file that can be executed and never changed again."""
    try:
        memory = os.memfd_create("slot-init", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | _MFD_EXEC)
    except OSError:  # kernels before 6.3 do not know the last flag, and do not need it
        memory = os.memfd_create("slot-init", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(memory, view) :]
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, seals)
        # A process whose program its user may not read belongs to the program's owner, so that a slot whose root is
        # nobody outside sees nothing of it.
        os.fchmod(memory, 0o111)
        return os.open(f"/proc/self/fd/{memory}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(memory)


def _answers(program: int) -> bool:
    """Whether it runs here and speaks the server's version of the orders."""
    try:
        pid = os.posix_spawn(f"/proc/self/fd/{program}", ["slot-init", "--version"], {})
    except OSError:
        return False
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) == _ANSWER + init_messages.VERSION
