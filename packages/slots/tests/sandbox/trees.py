"""Every detail of a folder's files, to prove that nothing in it has changed."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path


def fingerprint(folder: Path) -> dict[str, tuple[object, ...]]:
    """For each entry: its inode, mode, owner, links, size, times, attributes, and a digest of its content. The time of
    the last access is not among them."""
    found = {}
    for path in sorted([folder, *folder.rglob("*")]):
        status = path.lstat()
        content = ""
        if stat.S_ISREG(status.st_mode):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        elif stat.S_ISLNK(status.st_mode):
            content = os.readlink(path)
        names = os.listxattr(path, follow_symlinks=False)
        marks = {name: os.getxattr(path, name, follow_symlinks=False) for name in sorted(names)}
        found[str(path.relative_to(folder))] = (
            *(status.st_ino, status.st_mode, status.st_uid, status.st_gid, status.st_nlink, status.st_size),
            *(status.st_rdev, status.st_mtime_ns, status.st_ctime_ns, marks, content),
        )
    return found
