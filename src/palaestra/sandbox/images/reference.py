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

from palaestra.core.errors import ImageError

_COMPONENT = r"[A-Za-z0-9]+(?:(?:\.|_|__|-+)[A-Za-z0-9]+)*"
_NAME = re.compile(
    r"(?:(?:docker|library|oras|shub|https?)://)?"
    rf"{_COMPONENT}(?::[0-9]+(?=/))?(?:/{_COMPONENT})*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@[A-Za-z0-9]+:[0-9A-Fa-f]{32,128})?",
    re.ASCII,
)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_LONGEST = 4096


def is_path(image: str) -> bool:
    """Return whether an image is a path on this machine rather than a name."""
    return os.path.isabs(image) or image.startswith(".")


def is_image_name(text: str) -> bool:
    """Return whether a text is the name of an image, such as `ghcr.io/owner/name:tag`."""
    return len(text) <= _LONGEST and _NAME.fullmatch(text) is not None


def check_image(image: str) -> None:
    """Raise `ImageError` if a text is neither a path, which begins with `/` or `.`, nor the name of an image."""
    if is_path(image) and len(image) <= _LONGEST and not _CONTROL.search(image):
        return
    if not is_image_name(image):
        raise ImageError(
            f"{image[:200]!r} is not an image: give a name such as python:3.13 or ghcr.io/owner/name:tag, or a path "
            "that begins with / or ./"
        )
