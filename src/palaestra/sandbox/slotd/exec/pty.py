"""Pseudo terminals of a slot: both ends are opened in its own devpts, so `tty` there names a file that is there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
import termios

from .. import files

MAX_SIDE = 1000
"""Rows and columns are at most so many."""

_GET_PEER, _SET_LOCK = 0x5441, 0x40045431  # TIOCGPTPEER, TIOCSPTLCK: the same on x86-64 and aarch64
_PTMX = os.makedev(5, 2)


def open_pair(root: int, rows: int, columns: int) -> tuple[int, int]:
    """The master, which does not block, and the slave of a new terminal. Raises OSError where there is no devpts."""
    master = files.open_at(root, "/dev/pts/ptmx", os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
    try:
        status = os.fstat(master)
        if not stat.S_ISCHR(status.st_mode) or status.st_rdev != _PTMX:
            raise OSError(errno.ENODEV, "not the terminal multiplexer", "/dev/pts/ptmx")
        fcntl.ioctl(master, _SET_LOCK, struct.pack("i", 0))
        resize(master, rows, columns)
        slave = fcntl.ioctl(master, _GET_PEER, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except BaseException:
        os.close(master)
        raise
    return master, slave


def resize(master: int, rows: int, columns: int) -> None:
    """Set the window size; the foreground processes get SIGWINCH. Raises ValueError for a size out of range."""
    if not (1 <= rows <= MAX_SIDE and 1 <= columns <= MAX_SIDE):
        raise ValueError(f"a terminal has 1 to {MAX_SIDE} rows and columns, not {rows} and {columns}")
    with contextlib.suppress(FileNotFoundError):
        fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
