"""What is an image: told by its first bytes, never by its name or by what a server says. No I/O.

The types are those that chat servers take. An image is not decoded here: a broken one is the model server's to refuse.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from palaestra.tools.tool import ToolMistake

TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")


@dataclass(frozen=True, slots=True)
class Image:
    """An image and its type."""

    data: bytes
    type: str

    def data_url(self) -> str:
        """As chat servers take it (RFC 2397)."""
        return f"data:{self.type};base64,{base64.b64encode(self.data).decode()}"


def recognised(data: bytes, most_bytes: int, name: str) -> Image:
    """The image that these bytes are. Raises `ToolMistake` for what is none, or too large."""
    if len(data) > most_bytes:
        raise ToolMistake(f"{name} has {len(data)} bytes, more than the {most_bytes} that an image may have")
    if not data:
        raise ToolMistake(f"{name} is empty")
    kind = _kind(data)
    if kind is None:
        raise ToolMistake(f"{name} is not an image of a known type ({', '.join(TYPES)}); it begins with {data[:12]!r}")
    return Image(data, kind)


def from_data_url(url: str, most_bytes: int) -> Image:
    """The image that is written out in a data URL. Raises `ToolMistake`."""
    head, comma, body = url.partition(",")
    if not comma:
        raise ToolMistake("This data URL has no comma, so it holds no data")
    if len(body) > 4 * most_bytes:
        raise ToolMistake(f"This data URL holds more than the {most_bytes} bytes that an image may have")
    try:
        data = unquote_to_bytes(body)
        if head.lower().endswith(";base64"):
            data = base64.b64decode(b"".join(data.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ToolMistake(f"This data URL is not base64: {error}") from None
    return recognised(data, most_bytes, "the data URL")


def _kind(data: bytes) -> str | None:
    """The type by its magic bytes (https://mimesniff.spec.whatwg.org/#matching-an-image-type-pattern)."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    if data[:4] == b"RIFF" and data[8:14] == b"WEBPVP":
        return "image/webp"
    return None
