"""What the init of a slot does before anything runs in it, as a list of steps: written once, done by either init.

The server lists the steps, so that both inits build and confine a slot in the same way; the Python one performs them
here, the native one in `native/steps.c`. Nothing is decided while they are performed: what depends on this machine is
decided when they are listed, and the first step that fails ends the slot.

    step    u16 operation, u16 strings, u32 length of the strings, i64 a, i64 b, then the strings, each ended by a NUL
            (for FILTER: the program's bytes as they are)
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from .. import syscalls
from . import namespaces, privileges

_STEP = struct.Struct("=HHIqq")


class Do(IntEnum):
    """The operations. In brackets: the numbers a and b, the strings."""

    JOIN = 1
    """Move to a control group. [directory]"""
    UNSHARE = 2
    """[a: flags]"""
    ENTER = 3
    """Enter a namespace. [a: descriptor, b: kind]"""
    MOUNT = 4
    """[a: flags; source, target, type, options]"""
    MKDIR = 5
    """[a: mode, b: 1 where it may be there; path]"""
    CREATE = 6
    """An empty file. [a: mode; path]"""
    SYMLINK = 7
    """[target, path]"""
    WRITE = 8
    """To a file that is there. [a: 1 where that may fail; path, text]"""
    CHANGE_DIRECTORY = 9
    """[path]"""
    OPEN = 10
    """A directory or mount point, as a place. [a: its number; path]"""
    OPEN_INSIDE = 11
    """A path below a place whatever links lie there. [a: its number, b: the place's; path]"""
    BECOME_ROOT = 12
    """Make the current directory the root and forget the old one."""
    HOST_NAME = 13
    """[name]"""
    LOOPBACK = 14
    """Bring it up."""
    LIMIT = 15
    """Set a resource limit, hard and soft, no higher than the hard one is. [a: which, b: value]"""
    BE_ROOT = 16
    """User and group 0, without others."""
    PRCTL = 17
    """[a: option, b: argument]"""
    KEEP_CAPABILITIES = 18
    """Give up all others for good. [a: mask]"""
    FILTER = 19
    """Bind to a seccomp program. [bytes]"""
    SESSION = 20
    """Lead a new session."""
    UMASK = 21
    """[a: mask]"""
    OWN = 22
    """Give a file to a user and the group of the same number. [a: the number; path]"""


@dataclass(frozen=True, slots=True)
class Step:
    """One operation with its arguments."""

    do: Do
    strings: Sequence[str] = ()
    a: int = 0
    b: int = 0
    program: bytes = b""


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> Step:
    """A MOUNT."""
    return Step(Do.MOUNT, (source, target, kind, options), flags)


def encode(steps: Sequence[Step]) -> bytes:
    """The list for the native init."""
    parts = []
    for step in steps:
        data = step.program or b"".join(os.fsencode(text) + b"\0" for text in step.strings)
        parts += [_STEP.pack(step.do, len(step.strings), len(data), step.a, step.b), data]
    return b"".join(parts)


def perform(steps: Sequence[Step]) -> None:
    """Do them all. Raises OSError at the first that fails."""
    for step in steps:
        try:
            _PERFORM[step.do](step)
        except OSError as error:
            raise OSError(error.errno, describe(step, error.strerror or str(error))) from error


def describe(step: Step, why: str) -> str:
    """What failed, as the person reads it who asked for the slot."""
    what = f"{step.strings[2] or 'bind'} on {step.strings[1]}" if step.do is Do.MOUNT else " ".join(step.strings[:1])
    return f"{step.do.name.lower().replace('_', ' ')} {what}".strip() + f": {why.removeprefix(f'mount {what}: ')}"


def _join(step: Step) -> None:
    """In version 1 by moving the thread: moving a process takes a lock that waits for every processor."""
    try:
        _write(f"{step.strings[0]}/tasks", "0")
    except FileNotFoundError:
        _write(f"{step.strings[0]}/cgroup.procs", "0")


def _mount(step: Step) -> None:
    source, target, kind, options = step.strings
    syscalls.mount(source, target, kind, step.a, options)


def _mkdir(step: Step) -> None:
    with contextlib.suppress(*([FileExistsError] if step.b else [])):
        os.mkdir(step.strings[0], step.a)


def _create(step: Step) -> None:
    os.close(os.open(step.strings[0], os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, step.a))


def _write_step(step: Step) -> None:
    with contextlib.suppress(*([OSError] if step.a else [])):
        _write(*step.strings)


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _open(step: Step) -> None:
    _place(os.open(step.strings[0], os.O_PATH | os.O_CLOEXEC), step.a)


def _open_inside(step: Step) -> None:
    how = syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_MAGICLINKS
    _place(syscalls.openat2(step.b, step.strings[0], os.O_PATH, how), step.a)


def _place(fd: int, number: int) -> None:
    if fd != number:
        os.dup2(fd, number, inheritable=False)
        os.close(fd)


def _become_root(step: Step) -> None:
    """Some containers refuse pivot_root but not the other way."""
    try:
        syscalls.pivot_root(".", ".")
        syscalls.umount(".")
    except PermissionError:
        syscalls.mount(".", "/", flags=syscalls.MS_MOVE)
        os.chroot(".")
    os.chdir("/")


def _limit(step: Step) -> None:
    _, hard = resource.getrlimit(step.a)
    ceiling = step.b if hard == resource.RLIM_INFINITY else min(step.b, hard)
    resource.setrlimit(step.a, (ceiling, ceiling))


def _be_root(step: Step) -> None:
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


_PERFORM: dict[Do, Callable[[Step], object]] = {
    Do.JOIN: _join,
    Do.UNSHARE: lambda step: syscalls.unshare(step.a),
    Do.ENTER: lambda step: syscalls.setns(step.a, step.b),
    Do.MOUNT: _mount,
    Do.MKDIR: _mkdir,
    Do.CREATE: _create,
    Do.SYMLINK: lambda step: os.symlink(step.strings[0], step.strings[1]),
    Do.WRITE: _write_step,
    Do.CHANGE_DIRECTORY: lambda step: os.chdir(step.strings[0]),
    Do.OPEN: _open,
    Do.OPEN_INSIDE: _open_inside,
    Do.BECOME_ROOT: _become_root,
    Do.HOST_NAME: lambda step: socket.sethostname(step.strings[0]),
    Do.LOOPBACK: lambda step: namespaces.bring_up_loopback(),
    Do.LIMIT: _limit,
    Do.BE_ROOT: _be_root,
    Do.PRCTL: lambda step: syscalls.prctl(step.a, step.b),
    Do.KEEP_CAPABILITIES: lambda step: privileges.drop(step.a),
    Do.FILTER: lambda step: syscalls.install_filter(step.program),
    Do.SESSION: lambda step: os.setsid(),
    Do.UMASK: lambda step: os.umask(step.a),
    Do.OWN: lambda step: os.chown(step.strings[0], step.a, step.a),
}
