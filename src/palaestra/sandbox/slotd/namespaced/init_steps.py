"""Steps by which the init of a slot builds and confines the slot before anything runs in it.

The server lists the steps and `native/steps.c` performs them in order, without deciding anything: whatever depends on
this machine is decided when the list is made. The first step that fails ends the slot. Encoding of a step:

    u16 operation, u16 number of strings, u32 length of the strings, i64 a, i64 b, then the strings, each ended by a NUL
    (for FILTER: the program's bytes as they are)
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

_STEP = struct.Struct("=HHIqq")


class Do(IntEnum):
    """The operations, with the meaning of the numbers a and b and of the strings in brackets."""

    JOIN = 1
    """Move to a control group. [directory]"""
    UNSHARE = 2
    """[a: flags]"""
    ENTER = 3
    """Enter a namespace. [a: descriptor, b: kind]"""
    MOUNT = 4
    """[a: flags; source, target, type, options]"""
    MKDIR = 5
    """[a: mode, b: 1 if it may exist already; path]"""
    WRITE = 6
    """Write to an existing file. [a: 1 if that may fail; path, text]"""
    CHANGE_DIRECTORY = 7
    """[path]"""
    OPEN = 8
    """Open a directory or mount point under a descriptor number. [a: the number; path]"""
    OPEN_INSIDE = 9
    """Open a path below an open directory, resolved with that directory as root. [a: the number, b: the root; path]"""
    BECOME_ROOT = 10
    """Make the current directory the root and detach the old root."""
    HOST_NAME = 11
    """[name]"""
    LOOPBACK = 12
    """Bring up the loopback interface."""
    LIMIT = 13
    """Set a resource limit, hard and soft, to at most the present hard limit. [a: which, b: value]"""
    BE_ROOT = 14
    """Become user and group 0, without supplementary groups."""
    PRCTL = 15
    """[a: option, b: argument]"""
    KEEP_CAPABILITIES = 16
    """Drop all other capabilities for good. [a: mask]"""
    FILTER = 17
    """Install a seccomp program. [bytes]"""
    SESSION = 18
    """Lead a new session."""
    UMASK = 19
    """[a: mask]"""
    OWN = 20
    """Change a file's owner and group to the same number. [a: the number; path]"""


@dataclass(frozen=True, slots=True)
class BuildStep:
    """One operation with its arguments."""

    do: Do
    strings: Sequence[str] = ()
    a: int = 0
    b: int = 0
    program: bytes = b""


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> BuildStep:
    """A MOUNT."""
    return BuildStep(Do.MOUNT, (source, target, kind, options), flags)


def encode(steps: Sequence[BuildStep]) -> bytes:
    """The list as the init reads it."""
    parts = []
    for step in steps:
        data = step.program or b"".join(os.fsencode(text) + b"\0" for text in step.strings)
        parts += [_STEP.pack(step.do, len(step.strings), len(data), step.a, step.b), data]
    return b"".join(parts)
