"""System calls that Python 3.11 does not offer. Each function except `raw` raises OSError with the errno if it fails.

Numbers above 423 are the same on every architecture; the others come from the kernel's tables.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

MACHINE = platform.machine()
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}.get(MACHINE)
_CAPSET = {"x86_64": 126, "aarch64": 91}.get(MACHINE)
_TGKILL = {"x86_64": 234, "aarch64": 131}.get(MACHINE)
_OPEN_TREE, _MOVE_MOUNT, _CLOSE_RANGE, _OPENAT2, _MOUNT_SETATTR = 428, 429, 436, 437, 442
_FSOPEN, _FSCONFIG, _FSMOUNT, _FSPICK = 430, 431, 432, 433

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x20000, 0x2000000, 0x4000000
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x8000000, 0x10000000, 0x20000000, 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE, MS_SLAVE = 4096, 8192, 16384, 1 << 18, 1 << 19
MNT_DETACH = 2

RESOLVE_NO_XDEV, RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, RESOLVE_IN_ROOT = 0x01, 0x02, 0x04, 0x10

_HOW, _LONG = struct.Struct("=QQQ"), struct.Struct("@l")
_StatFs = ctypes.c_char * 256

_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH = 1, 4
_MOUNT_ATTR_IDMAP = 0x100000
_FSCONFIG_SET_STRING, _FSCONFIG_CREATE, _FSCONFIG_RECONFIGURE, _FSPICK_EMPTY_PATH = 1, 6, 7, 8

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_NAME, PR_SET_SECCOMP = 1, 4, 8, 15, 22
PR_SET_CHILD_SUBREAPER = 36
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 24, 38, 47


def check(result: int, what: str) -> int:
    """Return the result of a C library call. Raises OSError if the result is negative."""
    if result < 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"{what}: {os.strerror(errno)}")
    return result


def raw(number: int, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """Make a system call by its number; the result is negative if it failed (see `check`)."""
    # For a function with a variable number of arguments, ctypes passes a plain int as 32 bits.
    wide = (ctypes.c_long(value) if isinstance(value, int) else value for value in arguments)
    return int(_libc.syscall(ctypes.c_long(number), *wide))


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Call mount(2)."""
    names = (source.encode(), target.encode(), kind.encode() or None)
    check(_libc.mount(*names, ctypes.c_ulong(flags), options.encode() or None), f"mount {kind or 'bind'} on {target}")


def umount(target: str) -> None:
    """Call umount2(2) lazily, so that current users of the mount keep it."""
    check(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    """Call pivot_root(2)."""
    if _PIVOT_ROOT is None:
        raise OSError(38, f"no system call table for {MACHINE}")
    check(_libc.syscall(_PIVOT_ROOT, new.encode(), old.encode()), f"pivot_root {new}")


def unshare(flags: int) -> None:
    """Call unshare(2)."""
    check(_libc.unshare(ctypes.c_int(flags)), f"unshare {flags:#x}")


def setns(fd: int, kind: int) -> None:
    """Call setns(2)."""
    check(_libc.setns(fd, ctypes.c_int(kind)), f"setns {kind:#x}")


def prctl(option: int, *arguments: int) -> int:
    """Call prctl(2) with integer arguments; missing ones are 0."""
    padded = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    return check(_libc.prctl(option, *padded), f"prctl {option}")


def set_name(name: str) -> None:
    """Set the name that `ps` shows for this thread, at most 15 bytes."""
    buffer = ctypes.create_string_buffer(name.encode()[:15])
    check(_libc.prctl(PR_SET_NAME, buffer, 0, 0, 0), "prctl name")


def capset(keep: int) -> None:
    """Set the effective and permitted capabilities of this thread to `keep`, and clear the inheritable ones."""
    if _CAPSET is None:
        raise OSError(38, f"no system call table for {MACHINE}")
    low, high = keep & 0xFFFFFFFF, keep >> 32
    header, data = struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", low, low, 0, high, high, 0)
    check(_libc.syscall(_CAPSET, header, data), "capset")


def tgkill(pid: int, thread: int, number: int) -> None:
    """Call tgkill(2), which sends a signal to one thread of a process."""
    if _TGKILL is None:
        raise OSError(38, f"no system call table for {MACHINE}")
    check(raw(_TGKILL, pid, thread, number), f"tgkill {pid}")


def close_from(first: int) -> None:
    """Close every descriptor from `first` on."""
    check(_libc.syscall(_CLOSE_RANGE, ctypes.c_uint(first), ctypes.c_uint(0xFFFFFFFF), 0), "close_range")


def openat2(directory: int, path: str | bytes, flags: int, resolve: int) -> int:
    """Call openat2(2); the descriptor is close-on-exec. Tries again if the kernel reports a race (EAGAIN)."""
    name = path if isinstance(path, bytes) else path.encode("utf-8", "surrogateescape")
    how = _HOW.pack(flags | os.O_CLOEXEC, 0, resolve)
    for _ in range(128):
        fd: int = _libc.syscall(_OPENAT2, directory, name, how, len(how))
        if fd >= 0:
            return fd
        if ctypes.get_errno() != 11:
            break
    errno = ctypes.get_errno()
    raise OSError(errno, os.strerror(errno))


def open_tree(path: str, recursive: bool = False) -> int:
    """Return a descriptor of a detached copy of the mount at `path`."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | (_AT_RECURSIVE if recursive else 0)
    return check(_libc.syscall(_OPEN_TREE, _AT_FDCWD, path.encode(), flags), f"open_tree {path}")


def set_mount_attributes(tree: int, add: int, idmap: int | None = None, recursive: bool = False) -> None:
    """Call mount_setattr(2) on a detached mount. `add` are the flags to add, and `idmap` is the user namespace that
    maps the owners of files."""
    attributes = struct.pack("=QQQQ", add | (_MOUNT_ATTR_IDMAP if idmap is not None else 0), 0, 0, idmap or 0)
    flags = _AT_EMPTY_PATH | (_AT_RECURSIVE if recursive else 0)
    check(_libc.syscall(_MOUNT_SETATTR, tree, b"", flags, attributes, len(attributes)), "mount_setattr")


def move_mount(tree: int, target: str) -> None:
    """Attach a detached mount at `target`."""
    result = _libc.syscall(_MOVE_MOUNT, tree, b"", _AT_FDCWD, target.encode(), _MOVE_MOUNT_F_EMPTY_PATH)
    check(result, f"move_mount {target}")


def detached_tmpfs(options: str) -> int:
    """Return a descriptor of a new tmpfs with nosuid and nodev that is mounted nowhere. `options` are those of
    mount(8)."""
    return _detached(b"tmpfs", options, MS_NOSUID | MS_NODEV)


def _detached(kind: bytes, options: str, flags: int) -> int:
    context = check(_libc.syscall(_FSOPEN, kind, 1), f"fsopen {kind.decode()}")
    try:
        _configure(context, options)
        check(_libc.syscall(_FSCONFIG, context, _FSCONFIG_CREATE, None, None, 0), f"fsconfig {kind.decode()}")
        return check(_libc.syscall(_FSMOUNT, context, 1, flags), f"fsmount {kind.decode()}")
    finally:
        os.close(context)


def detached_overlay(options: str) -> int:
    """Return a descriptor of a new read-only overlay with nosuid and nodev that is mounted nowhere. Raises OSError; the
    kernel also refuses an option of more than 256 bytes."""
    return _detached(b"overlay", options, MS_RDONLY | MS_NOSUID | MS_NODEV)


def reconfigure(mount: int, options: str) -> None:
    """Change the options of the file system mounted as the descriptor `mount`."""
    context = check(_libc.syscall(_FSPICK, mount, b"", _FSPICK_EMPTY_PATH), "fspick")
    try:
        _configure(context, options)
        check(_libc.syscall(_FSCONFIG, context, _FSCONFIG_RECONFIGURE, None, None, 0), "fsconfig")
    finally:
        os.close(context)


def _configure(context: int, options: str) -> None:
    for option in options.split(","):
        name, _, value = option.partition("=")
        result = _libc.syscall(_FSCONFIG, context, _FSCONFIG_SET_STRING, name.encode(), value.encode(), 0)
        check(result, f"fsconfig {option}")


def inotify() -> int:
    """Return a new inotify instance that does not block."""
    return check(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC), "inotify_init1")


def inotify_watch(instance: int, path: str, events: int) -> int:
    """Watch a file and return the number of the watch."""
    return check(_libc.inotify_add_watch(instance, path.encode(), ctypes.c_uint(events)), f"inotify_add_watch {path}")


def filesystem_type(fd: int) -> int:
    """Return the magic number of the file system of `fd` (statfs(2))."""
    found = _StatFs()  # one per call, since several threads may each have a client
    if _libc.fstatfs(fd, found) < 0:
        check(-1, "fstatfs")
    return int(_LONG.unpack_from(found)[0])


def install_filter(program: bytes) -> None:
    """Install a seccomp program (packed `sock_filter`s) for this process and every process that it starts."""
    code = ctypes.create_string_buffer(program, len(program))
    descriptor = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    check(_libc.prctl(PR_SET_SECCOMP, 2, ctypes.c_char_p(descriptor), 0, 0), "seccomp")


def overwrite_command_line(title: str) -> None:
    """Replace `/proc/PID/cmdline` of this process, so that it shows no path of the host."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b") ")[2].split()
    # arg_start and arg_end, proc_pid_stat(5).
    start, end = int(fields[45]), int(fields[46])
    if 0 < start < end:
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, title.encode()[: end - start - 1], min(len(title), end - start - 1))
