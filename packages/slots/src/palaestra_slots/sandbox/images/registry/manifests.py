"""Reads the manifests and indexes of a registry. Does no I/O.

A registry is not trusted: whatever it sends is either an image whose blobs have valid digests and bounded sizes, or an
`ImageError`. The field `urls`, which lets a manifest name other places for a layer, is never used.

Formats: OCI image specification 1.1 (manifest.md, image-index.md), and Docker's image manifest, version 2, schema 2.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

import msgspec

from palaestra_slots.core.errors import ImageError
from palaestra_slots.core.io.durable_files import UNREADABLE
from palaestra_slots.core.printable import one_line
from palaestra_slots.core.types import JSON

MAX_MANIFEST_BYTES = 4 << 20
"""The maximum size of a manifest or an index. Source: OCI distribution specification, "Pushing manifests"."""

MAX_CONFIG_BYTES = 8 << 20
MAX_LAYERS = 1000
MAX_ENTRIES = 1000

INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_CONFIGS = ("application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json")
_LAYERS = (
    "application/vnd.oci.image.layer.v1.tar",
    "application/vnd.oci.image.layer.v1.tar+gzip",
    "application/vnd.oci.image.layer.v1.tar+zstd",
    "application/vnd.docker.image.rootfs.diff.tar",
    "application/vnd.docker.image.rootfs.diff.tar.gzip",
    "application/vnd.docker.image.rootfs.diff.tar.zstd",
)
_SCHEMA_1 = "application/vnd.docker.distribution.manifest.v1+"
_FOREIGN = ("foreign", "nondistributable")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Blob:
    """Content that its SHA-256 digest names, of `size` bytes."""

    digest: str
    size: int
    media_type: str = ""

    @property
    def value(self) -> str:
        """The digest in hexadecimal."""
        return self.digest.removeprefix("sha256:")


@dataclass(frozen=True, slots=True)
class ImageManifest:
    """The manifest of one image for one kind of machine: its configuration and its layers, lowest first."""

    blob: Blob
    config: Blob
    layers: tuple[Blob, ...]

    @property
    def blobs(self) -> tuple[Blob, ...]:
        """The configuration and each different layer, once."""
        return tuple({blob.digest: blob for blob in (self.config, *self.layers)}.values())

    @property
    def bytes(self) -> int:
        """The size of all blobs in bytes, each counted once."""
        return sum(blob.size for blob in self.blobs)


def digest_of(data: bytes) -> str:
    """Return the digest of some content."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def read(data: bytes, stated_type: str, name: str) -> dict[str, JSON]:
    """Return a manifest or an index as a JSON object with its `mediaType`. `stated_type` is the type in the reply's
    header, for content that states none. Error messages call the image `name`.

    Raises `ImageError` for manifests of schema 1 and for anything that is neither an image nor an index.
    """
    try:
        found = msgspec.json.decode(data, type=dict[str, JSON])
    except (*UNREADABLE, UnicodeDecodeError) as error:
        raise ImageError(f"{name}: the registry sent a manifest that cannot be read: {error}") from None
    stated = stated_type.partition(";")[0].strip()
    kind = found.get("mediaType") or stated
    if found.get("schemaVersion") == 1 or str(kind).startswith(_SCHEMA_1):
        raise ImageError(
            f"{name} has only a manifest of schema 1, which has no digests of its layers and which registries stopped "
            "serving: push the image again with a current tool"
        )
    if kind not in (*MANIFESTS, *INDEXES):
        raise ImageError(f"{name} is not an image: it has the type {one_line(str(kind), 100)}")
    if ("manifests" in found) != (kind in INDEXES) or ("layers" in found) != (kind in MANIFESTS):
        raise ImageError(f"{name} is not valid: it does not have the fields of its type {kind}")
    return {**found, "mediaType": kind}


def manifest_for(index: dict[str, JSON], architecture: str, name: str) -> Blob:
    """Return the manifest in an index for Linux on the given architecture. Raises `ImageError` if there is none, or if
    the entry is an index again."""
    entries = index["manifests"]
    if not isinstance(entries, list) or len(entries) > MAX_ENTRIES:
        raise ImageError(f"{name} is not valid: its index is not a list of at most {MAX_ENTRIES} entries")
    offered = []
    for entry in entries:
        platform = entry.get("platform") if isinstance(entry, dict) else None
        found = platform if isinstance(platform, dict) else {}
        if found.get("os") == "linux" and found.get("architecture") == architecture:
            chosen = _blob(entry, name, MAX_MANIFEST_BYTES)
            if chosen.media_type in INDEXES:
                raise ImageError(f"{name} is not valid: its index contains an index, which docker refuses too")
            if chosen.media_type not in MANIFESTS:
                raise ImageError(f"{name}: an entry has the type {one_line(chosen.media_type, 100)}: not a manifest")
            return chosen
        # Also for the attestations of BuildKit, whose platform is unknown/unknown.
        offered.append(f"{found.get('os') or 'unknown'}/{found.get('architecture') or 'unknown'}")
    kinds = one_line(", ".join(dict.fromkeys(offered)), 200)
    raise ImageError(f"{name} has no image for linux/{architecture}; it has {kinds}")


def image_manifest(found: dict[str, JSON], blob: Blob, name: str, max_bytes: int) -> ImageManifest:
    """Return a manifest that `read` returned, checked. Raises `ImageError`, also if the image has more than `max_bytes`
    bytes."""
    listed = found["layers"]
    if not isinstance(listed, list) or not 0 < len(listed) <= MAX_LAYERS:
        raise ImageError(f"{name} is not valid: it does not have 1 to {MAX_LAYERS} layers")
    config = _blob(found.get("config"), name, MAX_CONFIG_BYTES)
    if config.media_type not in _CONFIGS:
        raise ImageError(f"{name} is not an image: its configuration has the type {one_line(config.media_type, 100)}")
    layers = tuple(_blob(each, name, max_bytes) for each in listed)
    for layer in layers:
        # Before the check of the type, because these types are valid and their error has a reason of its own.
        if any(word in layer.media_type for word in _FOREIGN):
            raise ImageError(
                f"{name} has a foreign layer, which its registry does not have: its type is "
                f"{one_line(layer.media_type, 100)}. Such layers belong to Windows"
            )
        if layer.media_type not in _LAYERS:
            raise ImageError(f"{name} is not an image: it has a layer of type {one_line(layer.media_type, 100)}")
    sizes: dict[str, int] = {}
    for each in (blob, config, *layers):
        # A second size would let a blob pass the limit of bytes under one name and be read under the other.
        if sizes.setdefault(each.digest, each.size) != each.size:
            raise ImageError(f"{name} is not valid: it states two sizes for {each.digest}")
    manifest = ImageManifest(blob, config, layers)
    if manifest.bytes > max_bytes:
        raise ImageError(f"{name} has {manifest.bytes} bytes, and the limit of one image is {max_bytes} bytes")
    return manifest


def check_platform(config: bytes, architecture: str, name: str) -> None:
    """Raise `ImageError` if an image's configuration cannot be read, or states another kind of machine."""
    try:
        found = msgspec.json.decode(config, type=dict[str, JSON])
    except (*UNREADABLE, UnicodeDecodeError) as error:
        raise ImageError(f"{name} has a configuration that cannot be read: {error}") from None
    stated = (found.get("os") or "linux", found.get("architecture") or architecture)
    if stated != ("linux", architecture):
        raise ImageError(
            f"{name} is for {one_line(f'{stated[0]}/{stated[1]}', 100)}, and this machine is linux/{architecture}"
        )


def check_digest(text: str) -> str:
    """Return the text. Raises `ImageError` if it is not a SHA-256 digest."""
    if not _DIGEST.fullmatch(text):
        raise ImageError(f"{one_line(text, 100)} is not a digest sha256:…")
    return text


def _blob(found: JSON, name: str, max_bytes: int) -> Blob:
    """Return what a descriptor names."""
    fields = found if isinstance(found, dict) else {}
    digest, size, kind = fields.get("digest"), fields.get("size"), fields.get("mediaType")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ImageError(f"{name} is not valid: {one_line(str(digest), 100)} is not a digest sha256:…")
    # A bool is an instance of int.
    if type(size) is not int or not 0 <= size <= max_bytes:
        raise ImageError(
            f"{name} is not valid: {digest} has the size {one_line(str(size), 100)}, of {max_bytes} at most"
        )
    return Blob(digest, size, kind if isinstance(kind, str) else "")
