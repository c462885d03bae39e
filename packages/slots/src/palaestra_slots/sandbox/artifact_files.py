"""Reads, lists and archives files of a slot's workspace for outside callers. The responses have the formats that
Atropos and Hermes use.

This module uses the slot's file calls, never its shell. Invariant: it reveals nothing outside the workspace, wherever
links in the workspace lead. A bad request raises OSError or ValueError; `status_of` returns the HTTP status for it. The
module needs no installed packages, because the slot server's network port (`palaestra_cloud.port_server`) uses it on
machines where nothing is installed.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import gzip
import hashlib
import io
import mimetypes
import posixpath
import tarfile
from collections.abc import AsyncIterator

from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import MAX_FILE_BYTES, WORKSPACE, FileInfo, Slot

MAX_BYTES = 5_000_000
"""The maximum size in bytes of one returned file or archive, unless the request sets another limit."""
MAX_ENTRIES = 5_000
_MAX_LINKS = 40


async def read(
    slot: Slot, path: str, *, encoding: str = "text", max_bytes: int | None = None, include_sha256: bool = False
) -> dict[str, JSON]:
    """Return the beginning of a file, up to `max_bytes` bytes (default: `MAX_BYTES`). A file of more than 64 MiB is
    refused."""
    target, info = await _resolved_entry(slot, path)
    if info.kind != "file":
        raise IsADirectoryError(errno.EISDIR, "not a regular file", path)
    whole = await slot.read_bytes(target, max_bytes=MAX_FILE_BYTES)
    data = whole[: MAX_BYTES if max_bytes is None else max_bytes]
    return {
        "success": True,
        "content": data.decode(errors="replace") if encoding == "text" else base64.b64encode(data).decode(),
        "encoding": encoding,
        "truncated": len(data) < len(whole),
        "bytes": len(data),
        "file_size": len(whole),
        "path": _relative(target),
        "mime": mimetypes.guess_type(target)[0],
        "sha256": hashlib.sha256(data).hexdigest() if include_sha256 else None,
    }


async def entries(
    slot: Slot, path: str = ".", *, recursive: bool = False, max_entries: int | None = None
) -> dict[str, JSON]:
    """Return up to `max_entries` entries of a directory; those of each directory are sorted. A link is listed as an
    entry and is not followed."""
    target, info = await _resolved_entry(slot, path)
    if info.kind != "dir":
        raise NotADirectoryError(errno.ENOTDIR, "not a directory", path)
    most = MAX_ENTRIES if max_entries is None else max_entries
    found: list[JSON] = []
    async for each in _walk(slot, target, recursive=recursive):
        if len(found) == most:
            return {"success": True, "entries": found, "truncated": True}
        found.append(
            {"path": _relative(each.path), "is_dir": each.kind == "dir", "size": each.size, "mtime": each.mtime}
        )
    return {"success": True, "entries": found, "truncated": False}


async def archive(
    slot: Slot,
    path: str = ".",
    *,
    format: str = "tar.gz",  # noqa: A002 - the name in the request
    max_bytes: int | None = None,
    max_entries: int | None = None,
) -> dict[str, JSON]:
    """Return a file or directory as a compressed tar file in base64. Names are relative to the directory, or to the
    directory that holds the file. Links are kept as links.

    An archive of more than `max_bytes` bytes (default: `MAX_BYTES`) or `max_entries` entries (default: `MAX_ENTRIES`)
    is refused.
    """
    target, info = await _resolved_entry(slot, path)
    most = MAX_BYTES if max_bytes is None else max_bytes
    most_entries = MAX_ENTRIES if max_entries is None else max_entries
    top = target if info.kind == "dir" else posixpath.dirname(target)
    packed, count = io.BytesIO(), 0
    # Without the time, the same files give the same archive.
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        async for each in _walk(slot, target, recursive=True) if info.kind == "dir" else _only(info):
            count += 1
            if count > most_entries:
                raise OSError(errno.EFBIG, f"more than {most_entries} entries; archive a part of it", path)
            data = await slot.read_bytes(each.path) if each.kind == "file" else b""
            member = _member(each, posixpath.relpath(each.path, top), len(data))
            if member is not None:
                await asyncio.to_thread(tar.addfile, member, io.BytesIO(data))
            if packed.tell() > most:
                break
    if packed.tell() > most:
        raise OSError(errno.EFBIG, f"the archive is larger than {most} bytes; archive a part of it", path)
    content = base64.b64encode(packed.getvalue()).decode()
    size = len(packed.getvalue())
    return {
        "success": True, "content": content, "encoding": "base64", "format": format, "bytes": size,
        "entry_count": count,
    }  # fmt: skip


def status_of(error: OSError | ValueError) -> int:
    """Return the HTTP status of a failure: 403 if the path leads out of the workspace, 404 if there is no such file,
    413 if the result is too large, and 400 otherwise."""
    match error:
        case PermissionError():
            return 403
        case FileNotFoundError():
            return 404
        case OSError(errno=errno.EFBIG):
            return 413
    return 400


def message(error: OSError | ValueError) -> str:
    """Return the error message for a response."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


async def _resolved_entry(slot: Slot, path: str) -> tuple[str, FileInfo]:
    """Return the path and the entry that `path` leads to in the workspace. Links are followed. A link that leads out of
    the workspace raises PermissionError."""
    if not path or "\0" in path:
        raise ValueError("the path is empty or contains a NUL character")
    # Links are followed here and not by the slot, which would follow one out of the workspace.
    here, left, links = WORKSPACE, _names_in_workspace(path, path), 0
    info = await _stat(slot, here, path)
    while left:
        here = posixpath.join(here, left.pop(0))
        info = await _stat(slot, here, path)
        if info.kind == "symlink":
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, "too many links", path)
            target = posixpath.join(posixpath.dirname(here), info.target)
            here, left = WORKSPACE, _names_in_workspace(posixpath.join(target, *left), path)
            info = await _stat(slot, here, path)
    return here, info


async def _stat(slot: Slot, path: str, asked: str) -> FileInfo:
    info = await slot.stat(path)
    if info is None:
        raise FileNotFoundError(errno.ENOENT, "no such file or directory", asked)
    return info


def _names_in_workspace(path: str, asked: str) -> list[str]:
    """Split a path into its names below the workspace. Raises PermissionError if the path leads out of the
    workspace."""
    whole = posixpath.normpath(posixpath.join(WORKSPACE, path))
    if whole != WORKSPACE and not whole.startswith(f"{WORKSPACE}/"):
        raise PermissionError(errno.EACCES, "outside of the workspace", asked)
    return [name for name in whole.removeprefix(WORKSPACE).split("/") if name]


def _relative(path: str) -> str:
    return posixpath.relpath(path, WORKSPACE)


async def _walk(slot: Slot, path: str, *, recursive: bool) -> AsyncIterator[FileInfo]:
    """Yield the entries of a directory. If `recursive` is true, also yield the entries of all directories below it,
    each directory before its entries."""
    trail = [iter(await slot.list_dir(path))]
    while trail:
        each = next(trail[-1], None)
        if each is None:
            trail.pop()
            continue
        yield each
        if recursive and each.kind == "dir":
            trail.append(iter(await slot.list_dir(each.path)))


async def _only(info: FileInfo) -> AsyncIterator[FileInfo]:
    yield info


def _member(info: FileInfo, name: str, size: int) -> tarfile.TarInfo | None:
    """Return the archive's entry for a file. Sockets, devices and fifos are left out, so the result for them is
    None."""
    kinds = {"file": tarfile.REGTYPE, "dir": tarfile.DIRTYPE, "symlink": tarfile.SYMTYPE}
    if info.kind not in kinds:
        return None
    member = tarfile.TarInfo(name)
    member.type, member.size, member.mode, member.mtime = kinds[info.kind], size, info.mode & 0o777, int(info.mtime)
    member.linkname = info.target
    return member
