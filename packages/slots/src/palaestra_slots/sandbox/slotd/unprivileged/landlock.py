"""Limits with Landlock which files, TCP ports and other processes a slot without namespaces can reach.

A process restricts itself and everything that it starts, permanently and without privilege. Rights are given per path
and hold for everything below the path; everything else is denied. The numbers are those of the kernel's
`linux/landlock.h`.

Users, permissions and the system call filter (for UDP, unix sockets and other protocols) restrict the rest, except
`stat` of any path.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterable

from .. import syscalls

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_PATH_BENEATH, _VERSION = 1, 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_FILE, _MAKE_REG = 1, 2, 4, 8, 1 << 5, 1 << 8
_MAKE_CHAR, _MAKE_BLOCK = 1 << 6, 1 << 11
_REFER, _TRUNCATE, _IOCTL_DEVICE = 1 << 13, 1 << 14, 1 << 15
_FIRST = (1 << 13) - 1
_TCP, _SIGNALS, _ABSTRACT_SOCKETS_AND_SIGNALS = 3, 2, 3

READ = _EXECUTE | _READ_FILE | _READ_DIR
WRITE = (READ | _FIRST | _REFER | _TRUNCATE) & ~(_MAKE_CHAR | _MAKE_BLOCK)
DEVICE = _READ_FILE | _WRITE_FILE | _TRUNCATE | _IOCTL_DEVICE
LIST = _READ_DIR
# For files that are made and found by name, in a directory that cannot be listed.
DROP = _READ_FILE | _WRITE_FILE | _MAKE_REG | _REMOVE_FILE | _TRUNCATE
_FOR_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE

# The first version that lets files be moved between directories, and the first that confines signals.
MINIMUM, SCOPED = 2, 6


def version() -> int:
    """Return the Landlock ABI version of this kernel; 0 if Landlock is missing or a container blocks it."""
    return max(0, syscalls.raw(_CREATE, None, 0, _VERSION))


def restrict(rights: Iterable[tuple[str, int]], *, tcp: bool) -> None:
    """Permanently restrict this process to `rights` (pairs of a path and the rights below it); missing paths are
    skipped. With Landlock version 4 or newer, a process without `tcp` can neither listen nor connect over TCP. With
    version 6 or newer, signals and abstract sockets reach only processes that are restricted by the same call. Requires
    that `no_new_privs` is set.
    """
    abi = version()
    handled = _FIRST | _REFER | (_TRUNCATE if abi >= 3 else 0) | (_IOCTL_DEVICE if abi >= 5 else 0)
    attributes = struct.pack("=QQQ", handled, 0 if tcp or abi < 4 else _TCP, _ABSTRACT_SOCKETS_AND_SIGNALS)
    # A kernel refuses a longer structure than it knows if the rest is not zero (E2BIG).
    size = 24 if abi >= SCOPED else 16 if abi >= 4 else 8
    ruleset = syscalls.check(syscalls.raw(_CREATE, attributes, size, 0), "landlock_create_ruleset")
    try:
        for path, wanted in rights:
            with contextlib.suppress(FileNotFoundError):
                _allow(ruleset, path, wanted & handled)
        syscalls.check(syscalls.raw(_RESTRICT, ruleset, 0), "landlock_restrict_self")
    finally:
        os.close(ruleset)


def keep_signals_in() -> None:
    """Let this process and everything that it starts signal only each other, if this process may set that restriction.
    This keeps a stray `kill -1` from ending the user's other processes; it is not isolation."""
    ruleset = syscalls.raw(_CREATE, struct.pack("=QQQ", 0, 0, _SIGNALS), 24, 0)
    if ruleset >= 0:
        syscalls.raw(_RESTRICT, ruleset, 0)  # fails without root, unless the process gives up set-uid programs
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not os.path.isdir(f"/proc/self/fd/{fd}"):
            # The kernel refuses a rule that gives a file the rights of directories (EINVAL).
            rights &= _FOR_FILES
        rule = struct.pack("=Qi", rights, fd)
        buffer = ctypes.create_string_buffer(rule, len(rule))
        syscalls.check(syscalls.raw(_ADD, ruleset, _PATH_BENEATH, buffer, 0), f"landlock_add_rule {path}")
    finally:
        os.close(fd)
