"""The images that were pulled from registries, each an OCI layout whose blobs are shared.

    blobs/sha256/HEX    a verified blob, once for all images: manifests, configurations, compressed layers
    images/HEX/         the OCI layout of the manifest HEX; its `blobs` is a link to the folder above
    names/KEY.json      the manifest of a full name (`docker.io/library/python:3.13`); KEY is a hash of the name
    partial/HEX         a blob as far as it was downloaded     locks/HEX   locked while a process downloads the blob
    lock                shared while images are pulled, exclusive while images are removed

A file or a folder gets its name by a rename once it is complete, so a killed pull leaves only parts in `partial/`, with
which the next pull continues. The layers are unpacked by `ImageStore`, once for each image.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from palaestra_slots.core.errors import ImageError
from palaestra_slots.core.io.durable_files import UNREADABLE, private, read_regular, replaced
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.images import image_folders
from palaestra_slots.sandbox.images.reference import ImageName, image_name

SCHEMA, VERSION = "palaestra.pulled", 1
_FOLDERS = ("blobs/sha256", "images", "names", "partial", "locks")
_HEX = re.compile(r"[0-9a-f]{64}", re.ASCII)
_MAX_RECORD_BYTES = 64 << 10
_MAX_MANIFEST_BYTES = 4 << 20


def default_folder() -> Path:
    """Return the folder of this user's pulled images."""
    return Path(image_folders.default_folder("pulled"))


@dataclass(frozen=True, slots=True)
class PulledImage:
    """One pulled image: its full name, the digest of its manifest, its layout, and the size of its blobs in bytes,
    which other images may share."""

    name: str
    digest: str
    path: str
    bytes: int


class PulledImages:
    """The folder of pulled images. Safe across processes."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or default_folder()

    def open(self) -> PulledImages:
        """Make the folder if it is missing. Raises `ImageError` if it cannot be made or if others may write to it,
        because slots execute what it contains."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.folder.stat()
            if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                raise ImageError(f"the folder {self.folder} must be yours and writable only by you (chmod 700)")
            for name in _FOLDERS:
                (self.folder / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ImageError(f"the folder of pulled images {self.folder} cannot be used: {error.strerror}") from None
        return self

    @contextlib.contextmanager
    def in_use(self, *, alone: bool = False) -> Iterator[None]:
        """Hold the folder's lock: shared for a pull, exclusive for a removal. Raises `ImageError` if a process holds it
        the other way."""
        with open(self.folder / "lock", "wb", opener=private) as lock:
            try:
                fcntl.flock(lock, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            except BlockingIOError:
                other = "an image is being pulled" if alone else "images are being removed"
                raise ImageError(f"{other} in {self.folder}: try again when this has ended") from None
            yield

    def blob(self, value: str) -> Path:
        """Return the path of a verified blob, whether or not it exists."""
        return self.folder / "blobs" / "sha256" / value

    def partial(self, value: str) -> Path:
        """Return the path of a blob that is being downloaded."""
        return self.folder / "partial" / value

    def lock(self, value: str) -> Path:
        """Return the lock file of a download."""
        return self.folder / "locks" / value

    def store(self, data: bytes) -> str:
        """Keep a small blob, and return the hexadecimal value of its digest."""
        value = hashlib.sha256(data).hexdigest()
        with replaced(self.blob(value)) as file:
            file.write(data)
        return value

    def add(self, name: ImageName, value: str, media_type: str, size: int, total: int) -> PulledImage:
        """Record an image whose blobs are all stored. `value` is its manifest's digest in hexadecimal, `size` the
        manifest's size and `total` that of all blobs, in bytes. Raises `OSError`."""
        layout = self._layout(value)
        if not layout.is_dir():
            fresh = self.folder / "partial" / f"image-{os.getpid()}-{os.urandom(8).hex()}"
            fresh.mkdir()
            try:
                manifest: dict[str, JSON] = {"mediaType": media_type, "digest": f"sha256:{value}", "size": size}
                index = {"schemaVersion": 2, "manifests": [manifest]}
                for file, content in (("oci-layout", {"imageLayoutVersion": "1.0.0"}), ("index.json", index)):
                    _write_json(fresh / file, content)
                (fresh / "blobs").symlink_to("../../blobs")
                try:
                    fresh.rename(layout)
                except OSError:
                    if not layout.is_dir():  # otherwise, another process was first
                        raise
            finally:
                shutil.rmtree(fresh, ignore_errors=True)
        record = {"schema": SCHEMA, "version": VERSION, "name": str(name), "digest": f"sha256:{value}", "bytes": total}
        _write_json(self._record_file(name), record)
        return PulledImage(str(name), f"sha256:{value}", str(layout), total)

    def find(self, name: ImageName) -> PulledImage | None:
        """Return a pulled image, or None. Raises `ImageError` if its record was written by a newer version."""
        return self._read_record(self._record_file(name))

    def images(self) -> list[PulledImage]:
        """Return all pulled images, by name."""
        folder = self.folder / "names"
        records = sorted(folder.glob("*.json")) if folder.is_dir() else []
        return sorted((found for path in records if (found := self._read_record(path))), key=lambda image: image.name)

    def remove(self, names: list[ImageName]) -> int:
        """Remove names, then every layout that no name means, every blob that no layout needs, and unfinished
        downloads. Returns the bytes that this frees.

        Raises `ImageError` for a name that was not pulled, and while an image is being pulled.
        """
        with self.in_use(alone=True):
            for name in names:
                # All names are checked before the first is removed, so a wrong one removes nothing.
                if self.find(name) is None:
                    raise ImageError(f"{name} was not pulled; `palaestra images list` lists what was")
            for name in names:
                self._record_file(name).unlink()
            kept = {image.digest.removeprefix("sha256:") for image in self.images()}
            needed = set().union(*(self._needed(value) for value in kept), kept)
            freed = 0
            for layout in (self.folder / "images").iterdir():
                if layout.name not in kept:
                    shutil.rmtree(layout)
            for folder in ("blobs/sha256", "partial", "locks"):
                for path in (self.folder / folder).iterdir():
                    if folder != "blobs/sha256" or path.name not in needed:
                        freed += path.lstat().st_size
                        shutil.rmtree(path) if path.is_dir() else path.unlink()
            return freed

    def _needed(self, value: str) -> set[str]:
        """Return the values of the blobs of a manifest."""
        try:
            found = msgspec.json.decode(read_regular(self.blob(value), _MAX_MANIFEST_BYTES))
            return {str(each["digest"]).removeprefix("sha256:") for each in (found["config"], *found["layers"])}
        except (*UNREADABLE, OSError, KeyError, TypeError) as error:
            raise ImageError(f"the manifest {self.blob(value)} is damaged; pull the image again: {error}") from None

    def _read_record(self, path: Path) -> PulledImage | None:
        try:
            record = msgspec.json.decode(read_regular(path, _MAX_RECORD_BYTES), type=dict[str, JSON])
            if record["version"] > VERSION:
                raise ImageError(f"{path} was written by a newer version")
            value = str(record["digest"]).removeprefix("sha256:")
            layout = self._layout(value)
            if not _HEX.fullmatch(value) or not layout.is_dir():
                return None
            return PulledImage(str(record["name"]), f"sha256:{value}", str(layout), int(record["bytes"]))
        except FileNotFoundError:
            return None
        except (*UNREADABLE, OSError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, ImageError):
                raise
            raise ImageError(f"{path} is damaged: remove it, and pull the image again: {error}") from None

    def _layout(self, value: str) -> Path:
        return self.folder / "images" / value

    def _record_file(self, name: ImageName) -> Path:
        return self.folder / "names" / f"{hashlib.sha256(str(name).encode()).hexdigest()}.json"


def _write_json(path: Path, content: JSON) -> None:
    with replaced(path) as file:
        file.write(json.dumps(content).encode())


def pulled_layout(image: str, folder: Path | None = None) -> str | None:
    """Return the OCI layout of an image that was pulled under this name; None for any other text."""
    try:
        name = image_name(image)
    except ImageError:
        return None
    found = PulledImages(folder).find(name)
    return None if found is None else found.path
