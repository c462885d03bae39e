"""Decides which texts are images: a path on this machine, or a name that a container tool looks up.

Names of images come from rows of data sets and from tasks, and they become arguments of `docker`, `podman`, `buildah`
and `apptainer`. These tools would read a text such as `--privileged` as an option.

Invariant: the decision is an allow-list over the whole text. Grammar of names: the Go module `distribution/reference`,
here in any case, with the addresses that Apptainer fetches. `docker-archive:` and similar prefixes, which read files or
containers of this machine, are not names.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from palaestra_slots.core.errors import ImageError

_TRANSPORT = re.compile(
    r"(?:atomic|containers-storage|dir|docker-archive|docker-daemon|oci|oci-archive|ostree|sif|tarball):"
)
"""What podman and buildah read from this machine, in the current folder too. Source: containers-transports(5)."""

_COMPONENT = r"[A-Za-z0-9]+(?:(?:\.|_|__|-+)[A-Za-z0-9]+)*"
_NAME = re.compile(
    r"(?:(?:docker|library|oras|shub|https?)://)?"
    rf"{_COMPONENT}(?::[0-9]+(?=/))?(?:/{_COMPONENT})*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@[A-Za-z0-9]+:[0-9A-Fa-f]{32,128})?",
    re.ASCII,
)
_PULLED = re.compile(
    r"(?:docker://)?(?:(?P<host>(?:[a-zA-Z0-9-]+\.)+[a-zA-Z0-9-]+|[a-zA-Z0-9-]+(?=:[0-9]+/)|localhost)"
    r"(?P<port>:[0-9]{1,5})?/)?"
    r"(?P<repository>[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?",
    re.ASCII,
)
_DOCKER = frozenset({"docker.io", "index.docker.io", "registry-1.docker.io"})
_LONGEST_REPOSITORY = 255
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_LONGEST = 4096


@dataclass(frozen=True, slots=True)
class ImageName:
    """The full name of an image in a registry. `host` may contain a port. Either `tag` or `digest` is set."""

    host: str
    repository: str
    tag: str
    digest: str

    def __str__(self) -> str:
        return f"{self.host}/{self.repository}{f'@{self.digest}' if self.digest else f':{self.tag}'}"

    @property
    def reference(self) -> str:
        """The digest or the tag by which the registry is asked for the image."""
        return self.digest or self.tag


def image_name(text: str) -> ImageName:
    """Return the full name of an image, with the same defaults as docker: the registry docker.io, there the owner
    `library`, and the tag `latest`. If a digest is given, the tag has no meaning.

    Raises `ImageError` for a text that names no image in a registry. Source: the Go module `distribution/reference`.
    """
    # The length first, since a regular expression over a long text of a stranger takes long.
    found = _PULLED.fullmatch(text) if len(text) <= _LONGEST else None
    if found is None or len(found["repository"]) > _LONGEST_REPOSITORY:
        raise ImageError(
            f"{text[:200]!r} is not the name of an image in a registry: give one such as python:3.13, "
            "ghcr.io/owner/name:tag or name@sha256:DIGEST, in lower case"
        )
    host = f"{(found['host'] or 'docker.io').lower()}{found['port'] or ''}"
    host = "docker.io" if host in _DOCKER else host
    repository = found["repository"]
    if host == "docker.io" and "/" not in repository:
        repository = f"library/{repository}"
    digest = found["digest"] or ""
    return ImageName(host, repository, "" if digest else found["tag"] or "latest", digest)


def is_path(image: str) -> bool:
    """Return whether an image is a path on this machine rather than a name."""
    return os.path.isabs(image) or image.startswith(".")


def is_image_name(text: str) -> bool:
    """Return whether a text is the name of an image, such as `ghcr.io/owner/name:tag`."""
    return len(text) <= _LONGEST and _NAME.fullmatch(text) is not None and not is_transport(text)


def is_transport(text: str) -> bool:
    """Return whether podman and buildah would read a file or a container of this machine in place of an image."""
    return _TRANSPORT.match(text) is not None


def check_image(image: str) -> None:
    """Raise `ImageError` if a text is neither a path, which begins with `/` or `.`, nor the name of an image."""
    if is_path(image) and len(image) <= _LONGEST and not _CONTROL.search(image):
        return
    if not is_image_name(image):
        raise ImageError(
            f"{image[:200]!r} is not an image: give a name such as python:3.13 or ghcr.io/owner/name:tag, or a path "
            "that begins with / or ./"
        )
