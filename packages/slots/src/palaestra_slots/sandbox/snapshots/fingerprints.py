"""Computes fingerprints of images, directories, the host and this package for cache keys.

The contents of files in images and directories are not read, because that would cost more than preparing the workspace
again. A change inside an image directory always changes its fingerprint if it is made through the file system. The
fingerprints of the host and of mounted directories notice fewer changes; the functions describe which. A copy at
another path may have a different fingerprint, which only costs another preparation.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import os
import platform
import stat
import sys
from pathlib import Path

from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.images.image_folders import made_root
from palaestra_slots.sandbox.images.reference import is_path

# The paths where distributions record installed packages; every installation, removal or upgrade changes them.
_PACKAGES = ("/var/lib/dpkg/status", "/var/lib/rpm", "/lib/apk/db/installed", "/var/lib/pacman/local")
_HOST = ("/usr/bin", "/usr/lib", "/usr/local/bin", "/usr/local/lib")


def of_tree(folder: str) -> tuple[str, int]:
    """Return a digest of all names, kinds, owners, modes, sizes and times of change under a folder, and the folder's
    size in bytes on disk. No program can set a time of change."""
    digest, taken, waiting = hashlib.sha256(), 0, [folder]
    while waiting:
        path = waiting.pop()
        for name in _list_folder(path):
            below = f"{path}/{name}"
            try:
                status = os.lstat(below)
            except FileNotFoundError:
                continue  # removed meanwhile
            facts = (status.st_mode, status.st_uid, status.st_gid, status.st_size, status.st_ctime_ns, status.st_rdev)
            digest.update(f"{below[len(folder) :]}\0{facts}\0".encode("utf-8", "surrogateescape"))
            # A file with several names counts once, in equal parts.
            taken += status.st_blocks * 512 // (1 if stat.S_ISDIR(status.st_mode) else status.st_nlink)
            if stat.S_ISDIR(status.st_mode):
                waiting.append(below)
    return digest.hexdigest(), taken


def _list_folder(folder: str) -> list[str]:
    """Return the sorted names in a folder. If the folder is gone or unreadable, the list is empty: the folder's own
    time of change, which is part of the digest, shows that."""
    with contextlib.suppress(OSError):
        return sorted(os.listdir(folder))
    return []


def of_image(image: str | None) -> JSON:
    """Return the fingerprint of an image. It covers the metadata of everything in a directory, or the inode, size and
    modification time of a file. The name of a pulled image means its layout. Without an image, it covers the host's
    release and the times of package changes, but not manual edits of system files."""
    if image is None:
        release = Path("/etc/os-release")
        here = os.path.realpath(sys.base_prefix)
        own = (f"{here}/bin", f"{here}/lib", *_site_packages(here), *_site_packages("/usr"))
        return [
            release.read_text() if release.is_file() else "",
            [_of_file(path) for path in (*_PACKAGES, *_HOST, *own)],
        ]
    from palaestra_slots.sandbox.images.pulled import pulled_layout  # imported here, because few tasks name an image

    path = os.path.realpath(image if is_path(image) else pulled_layout(image) or made_root(image) or image)
    return [path, of_tree(path)[0] if os.path.isdir(path) else _of_file(path)]


def _site_packages(prefix: str) -> list[str]:
    patterns = (f"{prefix}/lib/python3*/*-packages", f"{prefix}/local/lib/python3*/*-packages")
    return sorted(path for pattern in patterns for path in glob.glob(pattern))


def _of_file(path: str) -> JSON:
    """Return the fingerprint of a file or of a directory's own entries; None if the path does not exist."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return [path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns]


def of_directory(path: str) -> JSON:
    """Return the fingerprint of a host directory that slots see: its path and its own entries, not deeper ones."""
    return _of_file(os.path.realpath(path))


@functools.cache
def of_machine() -> JSON:
    """Return the kernel's release and the processor's features, on which programs compiled for this machine depend."""
    cpu: list[str] = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        cpu = sorted({line for line in lines if line.partition("\t")[0].strip() in ("model name", "flags", "Features")})
    return [platform.machine(), platform.release(), cpu]


@functools.cache
def of_project() -> str:
    """Return the fingerprint of this package's own code, which makes the slots and prepares them."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(root)}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
