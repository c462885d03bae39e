"""Loads the init program of slots with namespaces, and encodes the steps by which it builds and confines a slot.

The program is pid 1 of each slot, built from `native/*.c` and kept in a sealed memory file. It is native code, so an
idle slot costs kilobytes instead of megabytes. `hatch_build.py` builds the program on installation; wheels contain it.
The binary's name holds the digest of its sources, so a stale binary is not used.

The server lists the steps and `native/steps.c` performs them in order; everything that depends on this machine is
decided here. A step that fails ends the slot, unless the step allows failure. A step is encoded as:

    u16 operation, u16 number of strings, u32 length of the strings, i64 a, i64 b, then the strings, each ended by a NUL
    (for FILTER: the program's bytes as they are)
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from .. import syscalls
from ..layers.layer_store import FIRST_STORE
from ..protocol import init_messages

SOURCES = ("init.c", "steps.c", "steps.h")  # the sources, in the order in which they enter the digest
_MFD_EXEC = 0x10
_ANSWER = 100
FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "native")  # sources and binaries
_TO_BUILD = "install a C compiler (a package such as gcc, or `pip install ziglang`), then install palaestra-slots again"


class NoInit(OSError):
    """The native init for this machine is missing; the message names the reason and the remedy."""


def binary_name(machine: str, sources: Sequence[bytes]) -> str:
    """Return the file name of the binary that is built from these sources for a machine."""
    return f"init-{machine}-{hashlib.sha256(b''.join(sources)).hexdigest()[:12]}"


def load(prefix: str = "") -> int:
    """Return a descriptor of the init for this machine, read-only for slots. `prefix` is the path of the host's root.
    Raises `NoInit`."""
    folder = prefix + FOLDER
    try:
        name = binary_name(syscalls.MACHINE, [_read_file(f"{folder}/{source}") for source in SOURCES])
        program = _sealed(_read_file(f"{folder}/{name}"))
    except FileNotFoundError:
        entries = os.listdir(folder) if os.path.isdir(folder) else []
        stale = any(entry.startswith(f"init-{syscalls.MACHINE}-") for entry in entries)
        was = "was built from a different version of its source" if stale else "was not built"
        raise NoInit(f"the program that runs as pid 1 of each slot {was}; {_TO_BUILD}") from None
    except OSError as error:
        raise NoInit(f"the program that runs as pid 1 of each slot cannot be read: {error}") from None
    if not _init_runs(program):
        os.close(program)
        raise NoInit(f"{name}, the program that runs as pid 1 of each slot, does not run here; {_TO_BUILD}")
    return program


def _read_file(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _sealed(content: bytes) -> int:
    """Return a descriptor of an executable file with this content, which cannot be changed."""
    try:
        memory = os.memfd_create("slot-init", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | _MFD_EXEC)
    except OSError:  # kernels before 6.3 neither know nor need the last flag
        memory = os.memfd_create("slot-init", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(memory, view) :]
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, seals)
        # A process whose program its user cannot read belongs to the program's owner. The slot's root, who has no
        # rights outside the slot, therefore cannot inspect the init.
        os.fchmod(memory, 0o111)
        # No program can be executed while it is open for writing (ETXTBSY).
        readable = os.open(f"/proc/self/fd/{memory}", os.O_RDONLY | os.O_CLOEXEC)
        try:  # an init gets other files under low numbers before its program starts
            return fcntl.fcntl(readable, fcntl.F_DUPFD_CLOEXEC, FIRST_STORE)
        finally:
            os.close(readable)
    finally:
        os.close(memory)


def _init_runs(program: int) -> bool:
    """Return whether the init runs here and supports the version of orders that the server uses."""
    try:
        pid = os.posix_spawn(f"/proc/self/fd/{program}", ["slot-init", "--version"], {})
    except OSError:
        return False
    _, status = os.waitpid(pid, 0)
    # The offset keeps the answer apart from the usual exit codes of a program that fails.
    return os.waitstatus_to_exitcode(status) == _ANSWER + init_messages.VERSION


_STEP = struct.Struct("=HHIqq")


class Do(IntEnum):
    """The operations. Brackets give the meaning of the numbers a and b, then of the strings."""

    JOIN = 1  # move to a control group. [a: descriptor]
    UNSHARE = 2  # [a: flags]
    ENTER = 3  # enter a namespace. [a: descriptor, b: kind]
    MOUNT = 4  # [a: flags; source, target, type, options]
    MKDIR = 5  # [a: mode, b: 1 if it may exist already; path]
    WRITE = 6  # write to an existing file. [a: 1 if that may fail; path, text]
    CHANGE_DIRECTORY = 7  # [path]
    OPEN = 8  # open a directory or mount point under a descriptor number. [a: the number; path]
    OPEN_INSIDE = 9  # open a path, resolved with an open directory as root. [a: the number, b: the root; path]
    BECOME_ROOT = 10  # make the current directory the root and detach the old root
    HOST_NAME = 11  # [name]
    LOOPBACK = 12  # bring up the loopback interface
    LIMIT = 13  # set a resource limit, hard and soft, to at most the present hard limit. [a: which, b: value]
    BE_ROOT = 14  # become user and group 0, without supplementary groups
    PRCTL = 15  # [a: option, b: argument]
    KEEP_CAPABILITIES = 16  # drop all other capabilities for good. [a: mask]
    FILTER = 17  # install a seccomp program. [bytes]
    SESSION = 18  # lead a new session
    UMASK = 19  # [a: mask]
    OWN = 20  # change a file's owner and group to the same number. [a: the number; path]
    OPEN_GROUP = 21  # open the file that moves a process to a control group. [a: the number; directory]
    COMMANDS_JOIN = 22  # let each command join a control group before its program starts. [a: descriptor]


@dataclass(frozen=True, slots=True)
class BuildStep:
    """One operation with its arguments."""

    do: Do
    strings: Sequence[str] = ()
    a: int = 0
    b: int = 0
    program: bytes = b""


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> BuildStep:
    """Return a MOUNT step."""
    return BuildStep(Do.MOUNT, (source, target, kind, options), flags)


def encode_steps(steps: Iterable[BuildStep | bytes]) -> bytes:
    """Return the steps, encoded for the init. Some may be encoded already: those that are the same for many slots."""
    return b"".join([step if isinstance(step, bytes) else _encoded_step(step) for step in steps])


@functools.lru_cache(maxsize=256)
def _encoded_step(step: BuildStep) -> bytes:
    """Return one step, encoded. Most steps are the same for every slot."""
    data = step.program or b"".join(os.fsencode(text) + b"\0" for text in step.strings)
    return _STEP.pack(step.do, len(step.strings), len(data), step.a, step.b) + data
