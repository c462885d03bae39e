"""Passes files in both directions: attachments go to `uploads/` in the sandbox, and files that the model names go to
the chat.

A line `MEDIA:path` in an answer sends that file from the sandbox. The line itself is left out of the text.
"""

from __future__ import annotations

import base64
import mimetypes
import re
from pathlib import PurePosixPath

from palaestra_gateway.platform import Attachment, Incoming
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import Slot

INSTRUCTIONS = (
    "Files that the user sends are in the folder uploads of your sandbox. To send a file to the user, write a line "
    "that contains only MEDIA: and its path."
)
FOLDER = "uploads"
_MEDIA = re.compile(r"^[ \t]*MEDIA:[ \t]*(\S[^\n]*?)[ \t]*$\n?", re.MULTILINE)
_UNSAFE = re.compile(r"[^\w.+-]+")
_LONGEST_NAME, _MOST_NAME_BYTES = 100, 200  # file systems allow 255 bytes


async def put_uploads(slot: Slot, message: Incoming) -> list[str]:
    """Write the attachments of a message into the sandbox. Returns one line per attachment, which informs the model
    about the file."""
    lines = []
    for file in message.attachments:
        path = await _free_path(slot, _safe_name(file.name))
        await slot.write_bytes(path, file.data)
        lines.append(f"[The user sent the file {path} ({file.media_type}, {len(file.data)} bytes).]")
    return lines


def message_content(text: str, message: Incoming, lines: list[str], *, images: bool) -> JSON:
    """Return the message for the model: a string, or content parts if the message has images and `images` is true."""
    said = "\n".join([*([text] if text.strip() else []), *lines])
    shown = [file for file in message.attachments if file.is_image] if images else []
    if not shown:
        return said
    urls = [f"data:{file.media_type};base64,{base64.b64encode(file.data).decode()}" for file in shown]
    return [{"type": "text", "text": said}, *({"type": "image_url", "image_url": {"url": url}} for url in urls)]


async def take_media(text: str, slot: Slot | None, max_bytes: int) -> tuple[str, list[Attachment]]:
    """Return the text of an answer without its `MEDIA:` lines, and the files that those lines name. For a file that
    cannot be read, the text reports the problem."""
    paths = _MEDIA.findall(text)
    if not paths:
        return text, []
    files: list[Attachment] = []
    problems: list[str] = []
    for path in dict.fromkeys(paths):
        try:
            if slot is None:
                raise FileNotFoundError("there is no sandbox")
            data = await slot.read_bytes(path, max_bytes=max_bytes + 1)
        except OSError as error:
            problems.append(f"(The file {path} could not be sent: {error.strerror or error}.)")
            continue
        if len(data) > max_bytes:
            problems.append(f"(The file {path} is too large to be sent.)")
            continue
        media_type = mimetypes.guess_type(path)[0] or "application/octet-stream"
        files.append(Attachment(PurePosixPath(path).name, media_type, data))
    rest = _MEDIA.sub("", text).strip()
    return "\n".join([*([rest] if rest else []), *problems]), files


def _safe_name(name: str) -> str:
    plain = _UNSAFE.sub("_", PurePosixPath(name.replace("\\", "/")).name).lstrip(".") or "file"
    return plain[-_LONGEST_NAME:].encode()[-_MOST_NAME_BYTES:].decode(errors="ignore")


async def _free_path(slot: Slot, name: str) -> str:
    path, number = PurePosixPath(FOLDER, name), 1
    while await slot.stat(str(path)) is not None:
        number += 1
        path = PurePosixPath(FOLDER, f"{PurePosixPath(name).stem}-{number}{PurePosixPath(name).suffix}")
    return str(path)
