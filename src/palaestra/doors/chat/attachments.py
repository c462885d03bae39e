"""Attaches the files that a message names with `@file`. Text files are appended to the message's text; images become
image parts of the chat completions API."""

from __future__ import annotations

import base64
import mimetypes
import re
from pathlib import Path

from palaestra.core.errors import ConfigError
from palaestra.core.types import JSON

MAX_TEXT_BYTES, MAX_IMAGE_BYTES = 256 << 10, 20 << 20
_NAMED = re.compile(r"(?:^|(?<=\s))@(?:\"([^\"]+)\"|(\S+))")


def named_files(text: str) -> list[Path]:
    """Return the existing files that a text names with `@name`."""
    return [path for path in _named(text) if path.is_file()]


def missing_files(text: str) -> list[Path]:
    """Return the paths that a text names with `@name` and that look like files (they have a suffix or a folder),
    although no such file exists."""
    return [path for path in _named(text) if not path.is_file() and (path.suffix or len(path.parts) > 1)]


def _named(text: str) -> list[Path]:
    names = (match[1] or match[2] for match in _NAMED.finditer(text))
    return list(dict.fromkeys(Path(name).expanduser() for name in names))


def with_files(text: str, *, piped: str = "") -> JSON:
    """Return the content of a message: `text`, and the files that it names. `piped` is added to the text.
    File names in `piped` attach no files, because someone other than the user may have written it. Raises `ConfigError`
    for a file that cannot be sent."""
    parts: list[JSON] = []
    named = named_files(text)
    text = "\n\n".join(part for part in (text, piped) if part)
    for path in named:
        kind = mimetypes.guess_type(path.name)[0] or ""
        limit = MAX_IMAGE_BYTES if kind.startswith("image/") else MAX_TEXT_BYTES
        if path.stat().st_size > limit:
            raise ConfigError(
                f"{path} has {path.stat().st_size} bytes; an attached file of its type can have at most {limit}"
            )
        data = path.read_bytes()
        if kind.startswith("image/"):
            url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        elif b"\0" in data:
            raise ConfigError(f"{path} is neither text nor an image; put it into the shared folder (--workdir)")
        else:
            text += f'\n\n<file name="{path}">\n{data.decode(errors="replace")}\n</file>'
    return [{"type": "text", "text": text}, *parts] if parts else text
