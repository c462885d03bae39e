"""What an image on disk may look like, and its layers in order.

    a directory with bin/ or usr/       the root itself: nothing to do (a debootstrap tree, an unpacked image)
    a directory with oci-layout         an OCI image layout (image-spec, image-layout.md): index.json, blobs/
    a tar file of a root                `docker export`, `debootstrap --make-tarball`, `tar -C root -c .`
    a tar file with manifest.json       `docker save`
    a tar file with oci-layout          an OCI image layout in one file

Layers may be plain or compressed with gzip, bzip2 or xz. Blobs of OCI layouts are held against their digests.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import tarfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import BinaryIO

from palaestra.core.errors import ImageError
from palaestra.core.types import JSON

_ZSTD = b"\x28\xb5\x2f\xfd"
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_MAX_JSON_BYTES, _PIECE_BYTES = 16 << 20, 1 << 20

OpenBlob = Callable[[str], AbstractContextManager[BinaryIO]]
"""Opens a file of the image by its name inside it; raises KeyError or FileNotFoundError where there is none."""


def layers(path: str) -> Iterator[tarfile.TarFile]:
    """The layers of the image at `path`, lowest first, each open until the next is asked for. Raises `ImageError`."""
    try:
        if os.path.isdir(path):
            yield from _of_layout(path, _file_opener(path))
            return
        with tarfile.open(path) as archive:
            names = {name.removeprefix("./") for name in _first_names(archive)}
            if "oci-layout" in names or "index.json" in names:
                yield from _of_layout(path, _member_opener(archive))
            elif "manifest.json" in names:
                yield from _of_saved(path, _member_opener(archive))
            else:
                archive_again = tarfile.open(path)  # noqa: SIM115 - closed below; the first one has been read ahead
                with archive_again:
                    yield archive_again
    except (tarfile.TarError, EOFError, KeyError, json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        with open(path, "rb") if os.path.isfile(path) else io.BytesIO() as file:
            hint = _compression_hint(file.read(4))
        raise ImageError(f"{path} cannot be read as an image: {error or type(error).__name__}{hint}") from error


def identity(path: str) -> str:
    """What tells an image from every other, so that it is unpacked once: a SHA-256 in hexadecimal.

    Of an OCI layout, the digest of its manifest; of a file, that of its bytes.
    """
    if os.path.isdir(path):
        try:
            with open(os.path.join(path, "index.json"), "rb") as file:
                return str(_choose(_load(file))["digest"]).rpartition(":")[2]
        except (OSError, KeyError, json.JSONDecodeError) as error:
            raise ImageError(f"{path} cannot be read as an image: {error}") from error
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_layout(path: str) -> bool:
    """Whether a directory is an OCI layout and not a root."""
    return os.path.isfile(os.path.join(path, "oci-layout")) or (
        os.path.isfile(os.path.join(path, "index.json")) and os.path.isdir(os.path.join(path, "blobs"))
    )


def _of_layout(path: str, open_blob: OpenBlob) -> Iterator[tarfile.TarFile]:
    with open_blob("index.json") as file:
        entry = _choose(_load(file))
    while True:
        with _checked(open_blob, entry["digest"], path) as file:
            manifest = _load(file)
        if "layers" in manifest:
            break
        entry = _choose(manifest)  # an index in the index: one image for several machines
    for layer in manifest["layers"]:
        with _checked(open_blob, layer["digest"], path) as file:
            yield from _layer(file, path)


def _of_saved(path: str, open_blob: OpenBlob) -> Iterator[tarfile.TarFile]:
    with open_blob("manifest.json") as file:
        images = json.loads(file.read(_MAX_JSON_BYTES))
    if len(images) != 1:
        raise ImageError(f"{path} holds {len(images)} images; save the one that is meant")
    for name in images[0]["Layers"]:
        with open_blob(name) as file:
            yield from _layer(file, path)


def _layer(file: BinaryIO, path: str) -> Iterator[tarfile.TarFile]:
    start = file.read(4)
    file.seek(0)
    if hint := _compression_hint(start):
        raise ImageError(f"{path} has a layer that cannot be read{hint}")
    with tarfile.open(fileobj=file) as layer:
        yield layer


def _choose(index: dict[str, JSON]) -> dict[str, JSON]:
    """The entry for this machine; the only one, where there is only one."""
    entries: list[dict[str, JSON]] = index["manifests"]
    wanted = _MACHINES.get(platform.machine(), platform.machine())
    fitting = [entry for entry in entries if (entry.get("platform") or {}).get("architecture") == wanted]
    if not entries or (len(entries) > 1 and not fitting):
        raise ImageError(f"the image has nothing for {wanted}, among {len(entries)} entries")
    return fitting[0] if fitting else entries[0]


def _load(file: BinaryIO) -> dict[str, JSON]:
    loaded = json.loads(file.read(_MAX_JSON_BYTES))
    if not isinstance(loaded, dict):
        raise KeyError("an object was expected")
    return loaded


@contextmanager
def _checked(open_blob: OpenBlob, digest: str, path: str) -> Iterator[BinaryIO]:
    """A blob, after its bytes have been held against its digest."""
    kind, _, value = digest.partition(":")
    if kind not in ("sha256", "sha512") or not value.isalnum():
        raise ImageError(f"{path} names a blob by {digest!r}, which is no digest")
    with open_blob(f"blobs/{kind}/{value}") as file:
        digested = hashlib.new(kind)
        while data := file.read(_PIECE_BYTES):
            digested.update(data)
        if digested.hexdigest() != value:
            raise ImageError(f"{path} is damaged: blob {digest} has other bytes")
        file.seek(0)
        yield file


def _file_opener(folder: str) -> OpenBlob:
    @contextmanager
    def opener(name: str) -> Iterator[BinaryIO]:
        with open(os.path.join(folder, name), "rb") as file:
            yield file

    return opener


def _member_opener(archive: tarfile.TarFile) -> OpenBlob:
    names = {member.name.removeprefix("./"): member for member in archive if member.isfile()}

    @contextmanager
    def opener(name: str) -> Iterator[BinaryIO]:
        file = archive.extractfile(names[name])
        assert file is not None
        with file:
            yield file  # type: ignore[misc]  # typeshed has IO[bytes]

    return opener


def _first_names(archive: tarfile.TarFile) -> Iterator[str]:
    """Of a root, its first entries are enough to see that it is one."""
    for count, member in enumerate(archive):
        yield member.name
        top = member.name.removeprefix("./").partition("/")[0]
        if count > 0 and top in ("bin", "etc", "usr", "lib", "dev"):
            return


def _compression_hint(start: bytes) -> str:
    return "; it is compressed with zstd: write it with gzip" if start == _ZSTD else ""
