"""Artifacts: files of a slot's workspace for callers outside, read, listed and archived, with the contract's bodies.

Through the slot's file calls, never its shell. Invariant: nothing outside the workspace is revealed, wherever links in
it lead; failures raise builtin errors, each of which has its HTTP status (`status_of`).
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
from collections.abc import AsyncIterator, Awaitable
from typing import Literal, TypeVar

from pydantic import BaseModel, Field

from palaestra.core.errors import InfraError
from palaestra.sandbox.slot import MAX_FILE_BYTES, WORKSPACE, FileInfo, Slot

MAX_BYTES = 5_000_000
"""Of one file or archive, unless the request says otherwise. The contract's."""
MAX_ENTRIES = 5_000
_MAX_LINKS = 40


class ArtifactReadRequestPayload(BaseModel):
    """A file of a trajectory's workspace."""

    trajectory_id: str = Field(min_length=1)
    path: str
    encoding: Literal["text", "base64"] = "text"
    max_bytes: int | None = Field(default=None, ge=0)
    include_sha256: bool = False


class ArtifactReadResponsePayload(BaseModel):
    """Its content, from the beginning; `sha256` is of the bytes that are in it, `bytes` how many those are."""

    success: bool
    content: str = ""
    error: str = ""
    encoding: str = "text"
    truncated: bool = False
    bytes: int = 0
    file_size: int | None = None
    path: str = ""
    mime: str | None = None
    sha256: str | None = None


class ArtifactListRequestPayload(BaseModel):
    """The entries of a directory of a trajectory's workspace."""

    trajectory_id: str = Field(min_length=1)
    path: str = "."
    recursive: bool = False
    max_entries: int | None = Field(default=None, ge=0)


class ArtifactListEntryPayload(BaseModel):
    """One entry; its path is relative to the workspace."""

    path: str
    is_dir: bool
    size: int
    mtime: float


class ArtifactListResponsePayload(BaseModel):
    """The entries, sorted by path."""

    success: bool
    entries: list[ArtifactListEntryPayload] = Field(default_factory=list)
    truncated: bool = False
    error: str = ""


class ArtifactArchiveRequestPayload(BaseModel):
    """A file or directory of a trajectory's workspace as a compressed tar file."""

    trajectory_id: str = Field(min_length=1)
    path: str = "."
    format: Literal["tar.gz", "tgz"] = "tar.gz"
    max_bytes: int | None = Field(default=None, ge=0)
    max_entries: int | None = Field(default=None, ge=0)


class ArtifactArchiveResponsePayload(BaseModel):
    """The archive; `bytes` is its size before base64."""

    success: bool
    content: str = ""
    error: str = ""
    encoding: str = "base64"
    format: str = "tar.gz"
    bytes: int = 0
    entry_count: int = 0


ResponseT = TypeVar(
    "ResponseT", ArtifactReadResponsePayload, ArtifactListResponsePayload, ArtifactArchiveResponsePayload
)


async def read(slot: Slot | None, request: ArtifactReadRequestPayload) -> ArtifactReadResponsePayload:
    """The beginning of a file, up to `max_bytes`. A file of more than 64 MiB is refused."""
    path, info = await _found(slot, request.trajectory_id, request.path)
    if slot is None or info.kind != "file":
        raise IsADirectoryError(errno.EISDIR, "not a regular file", request.path)
    most = MAX_BYTES if request.max_bytes is None else request.max_bytes
    whole = await slot.read_bytes(path, max_bytes=MAX_FILE_BYTES)
    data = whole[:most]
    text = request.encoding == "text"
    return ArtifactReadResponsePayload(
        success=True,
        content=data.decode(errors="replace") if text else base64.b64encode(data).decode(),
        encoding=request.encoding,
        truncated=len(data) < len(whole),
        bytes=len(data),
        file_size=len(whole),
        path=_relative(path),
        mime=mimetypes.guess_type(path)[0],
        sha256=hashlib.sha256(data).hexdigest() if request.include_sha256 else None,
    )


async def entries(slot: Slot | None, request: ArtifactListRequestPayload) -> ArtifactListResponsePayload:
    """The entries of a directory, sorted; links are entries and are not followed."""
    path, info = await _found(slot, request.trajectory_id, request.path)
    if slot is None or info.kind != "dir":
        raise NotADirectoryError(errno.ENOTDIR, "not a directory", request.path)
    most = MAX_ENTRIES if request.max_entries is None else request.max_entries
    found: list[ArtifactListEntryPayload] = []
    async for each in _walk(slot, path, recursive=request.recursive):
        if len(found) == most:
            return ArtifactListResponsePayload(success=True, entries=found, truncated=True)
        found.append(
            ArtifactListEntryPayload(
                path=_relative(each.path), is_dir=each.kind == "dir", size=each.size, mtime=each.mtime
            )
        )
    return ArtifactListResponsePayload(success=True, entries=found)


async def archive(slot: Slot | None, request: ArtifactArchiveRequestPayload) -> ArtifactArchiveResponsePayload:
    """A file or directory as a tar file; names in it are relative to the directory. Links are kept as links.

    An archive of more than `max_bytes` or `max_entries` is refused.
    """
    path, info = await _found(slot, request.trajectory_id, request.path)
    assert slot is not None
    most = MAX_BYTES if request.max_bytes is None else request.max_bytes
    most_entries = MAX_ENTRIES if request.max_entries is None else request.max_entries
    top = path if info.kind == "dir" else posixpath.dirname(path)
    packed, count = io.BytesIO(), 0
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        async for each in _walk(slot, path, recursive=True) if info.kind == "dir" else _only(info):
            count += 1
            if count > most_entries:
                raise OSError(errno.EFBIG, f"more than {most_entries} entries; archive a part of it", request.path)
            data = await slot.read_bytes(each.path) if each.kind == "file" else b""
            member = _member(each, posixpath.relpath(each.path, top), len(data))
            if member is not None:
                await asyncio.to_thread(tar.addfile, member, io.BytesIO(data))
            if packed.tell() > most:
                break
    if packed.tell() > most:
        raise OSError(errno.EFBIG, f"the archive is larger than {most} bytes; archive a part of it", request.path)
    return ArtifactArchiveResponsePayload(
        success=True,
        content=base64.b64encode(packed.getvalue()).decode(),
        format=request.format,
        bytes=len(packed.getvalue()),
        entry_count=count,
    )


async def or_error(work: Awaitable[ResponseT], response: type[ResponseT]) -> ResponseT:
    """The response of this work; if it fails, one with `error`. Raises `InfraError`."""
    try:
        return await work
    except InfraError:
        raise
    except (OSError, ValueError) as error:
        return response(success=False, error=message(error))


def status_of(error: OSError | ValueError) -> int:
    """The HTTP status of a failure: 403 outside, 404 not there, 413 too large, 400 anything else."""
    match error:
        case PermissionError():
            return 403
        case FileNotFoundError():
            return 404
        case OSError(errno=errno.EFBIG):
            return 413
    return 400


def message(error: OSError | ValueError) -> str:
    """The text of an error for a response."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


async def _found(slot: Slot | None, trajectory_id: str, path: str) -> tuple[str, FileInfo]:
    """The target of a path of the workspace; links are followed as long as they stay in it."""
    if slot is None:
        raise FileNotFoundError(
            errno.ENOENT, f"trajectory {trajectory_id} has no workspace: nothing has run in it yet", path
        )
    if not path or "\0" in path:
        raise ValueError("the path is empty or holds a NUL character")
    here, left, links = WORKSPACE, _parts(path, path), 0
    info = await _stat(slot, here, path)
    while left:
        here = posixpath.join(here, left.pop(0))
        info = await _stat(slot, here, path)
        if info.kind == "symlink":
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, "too many links", path)
            target = posixpath.join(posixpath.dirname(here), info.target)
            here, left = WORKSPACE, _parts(posixpath.join(target, *left), path)
            info = await _stat(slot, here, path)
    return here, info


async def _stat(slot: Slot, path: str, asked: str) -> FileInfo:
    info = await slot.stat(path)
    if info is None:
        raise FileNotFoundError(errno.ENOENT, "no such file or directory", asked)
    return info


def _parts(path: str, asked: str) -> list[str]:
    """The names below the workspace that a path goes through. Raises PermissionError if it leads out of it."""
    whole = posixpath.normpath(posixpath.join(WORKSPACE, path))
    if whole != WORKSPACE and not whole.startswith(f"{WORKSPACE}/"):
        raise PermissionError(errno.EACCES, "outside of the workspace", asked)
    return [name for name in whole.removeprefix(WORKSPACE).split("/") if name]


def _relative(path: str) -> str:
    return posixpath.relpath(path, WORKSPACE)


async def _walk(slot: Slot, path: str, *, recursive: bool) -> AsyncIterator[FileInfo]:
    """The entries below a directory, at any depth, each directory before its entries."""
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
    """The archive's entry; None for sockets, devices and fifos, which are left out."""
    kinds = {"file": tarfile.REGTYPE, "dir": tarfile.DIRTYPE, "symlink": tarfile.SYMTYPE}
    if info.kind not in kinds:
        return None
    member = tarfile.TarInfo(name)
    member.type, member.size, member.mode, member.mtime = kinds[info.kind], size, info.mode & 0o777, int(info.mtime)
    member.linkname = info.target
    return member
