"""The request and response bodies for reading, listing and archiving files of a workspace, in the formats that Atropos
and Hermes use. `artifact_files` does the work."""

from __future__ import annotations

import errno
from collections.abc import Awaitable
from typing import Literal, TypeVar

from pydantic import BaseModel, Field

from palaestra_slots.core.errors import InfraError
from palaestra_slots.sandbox import artifact_files
from palaestra_slots.sandbox.slot import Slot


class ArtifactReadRequestPayload(BaseModel):
    """A request for a file of a trajectory's workspace."""

    trajectory_id: str = Field(min_length=1)
    path: str
    encoding: Literal["text", "base64"] = "text"
    max_bytes: int | None = Field(default=None, ge=0)
    include_sha256: bool = False


class ArtifactReadResponsePayload(BaseModel):
    """The file's content from its beginning; `sha256` and `bytes` describe the part that is returned."""

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
    """A request for the entries of a directory of a trajectory's workspace."""

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
    """The entries; those of each directory are sorted. `truncated` is true if there are more entries."""

    success: bool
    entries: list[ArtifactListEntryPayload] = Field(default_factory=list)
    truncated: bool = False
    error: str = ""


class ArtifactArchiveRequestPayload(BaseModel):
    """A request for a file or directory of a trajectory's workspace as a compressed tar file."""

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
    """Return the beginning of a file, up to `max_bytes` bytes. A file of more than 64 MiB is refused."""
    found = await artifact_files.read(_slot(slot, request), **request.model_dump(exclude={"trajectory_id"}))
    return ArtifactReadResponsePayload(**found)


async def list_entries(slot: Slot | None, request: ArtifactListRequestPayload) -> ArtifactListResponsePayload:
    """Return up to `max_entries` entries of a directory; those of each directory are sorted. A link is listed as an
    entry and is not followed."""
    found = await artifact_files.entries(_slot(slot, request), **request.model_dump(exclude={"trajectory_id"}))
    return ArtifactListResponsePayload(**found)


async def archive(slot: Slot | None, request: ArtifactArchiveRequestPayload) -> ArtifactArchiveResponsePayload:
    """Return a file or directory as a compressed tar file in base64. Names are relative to the directory, or to the
    directory that holds the file. Links are kept as links.

    An archive of more than `max_bytes` bytes or `max_entries` entries is refused.
    """
    found = await artifact_files.archive(_slot(slot, request), **request.model_dump(exclude={"trajectory_id"}))
    return ArtifactArchiveResponsePayload(**found)


async def or_error(work: Awaitable[ResponseT], response: type[ResponseT]) -> ResponseT:
    """Await `work` and return its response. An OSError or ValueError becomes a response with `error`; an `InfraError`
    is raised."""
    try:
        return await work
    except InfraError:
        raise
    except (OSError, ValueError) as error:
        return response(success=False, error=artifact_files.message(error))


Request = ArtifactReadRequestPayload | ArtifactListRequestPayload | ArtifactArchiveRequestPayload


def _slot(slot: Slot | None, request: Request) -> Slot:
    if slot is None:
        nothing = f"trajectory {request.trajectory_id} has no workspace: its sandbox was not started, or has ended"
        raise FileNotFoundError(errno.ENOENT, nothing, request.path)
    return slot
