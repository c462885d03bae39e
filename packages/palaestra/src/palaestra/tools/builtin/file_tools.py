"""The `read_file` and `write_file` tools, over the slot's file channel.

Invariant: a reply is bounded, and a hint explains how to get the rest. A write replaces the whole file or changes no
file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from palaestra.tools import parameters
from palaestra.tools.files.syntax_check import check_syntax
from palaestra.tools.files.text_files import (
    KINDS,
    PATH_PARAMETER,
    DecodedFile,
    file_info,
    in_full,
    read_text_file,
    write_file_bytes,
)
from palaestra.tools.tool import FunctionTool, ToolMistake, ToolReply, ToolRun, ToolSchema
from palaestra_slots.core.reply_size import sent_chars
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import Slot

MAX_LINES = 2000
MAX_LINE_CHARS = 2000
MAX_CONTENT_CHARS = 100_000
_UNREADABLE = re.compile("[\udc80-\udcff]")
"""Surrogates that represent bytes that are not UTF-8."""


READ_SCHEMA = ToolSchema(
    name="read_file",
    description=(
        "Read a text file. Returns up to `limit` lines starting at line `offset`, each formatted as "
        "LINE|CONTENT; the line number and bar are not part of the file. For long files, read only the part "
        "you need, and continue with the offset given in the reply's hint. Use this instead of cat, head or "
        "sed in the terminal. Binary files are rejected. If the path does not exist, similar names are "
        "suggested."
    ),
    parameters={
        "path": PATH_PARAMETER,
        "offset": parameters.integer("Line number to start from (1-based).", default=1, minimum=1),
        "limit": parameters.integer(
            f"Maximum number of lines to return (up to {MAX_LINES}).", default=500, minimum=1, maximum=MAX_LINES
        ),
    },
    required=("path",),
)

WRITE_SCHEMA = ToolSchema(
    name="write_file",
    description=(
        "Write content to a file, replacing any existing content. Missing parent directories are created. To "
        "change part of an existing file, use patch instead. The reply reports whether the file is new and, "
        "for Python, JSON, YAML and TOML, whether it parses."
    ),
    parameters={
        "path": PATH_PARAMETER,
        "content": parameters.text("The complete content of the file."),
    },
    required=("path", "content"),
)


async def run_read_file(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    """Read one window of a text file: `content`, `total_lines`, `truncated`, and a `hint` on how to continue."""
    offset, limit = int(arguments.get("offset", 1)), int(arguments.get("limit", 500))
    slot = await run.slot()
    path = await in_full(slot, arguments["path"])
    text = (await read_text_file(slot, path)).text
    lines = text.removesuffix("\n").split("\n") if text else []
    # An empty file has a first line to ask for; otherwise every read of an empty file would be an error.
    if offset > max(len(lines), 1):
        raise ToolMistake(f"offset {offset} is beyond the end: {path} has {len(lines)} lines", total_lines=len(lines))
    shown = numbered(lines, offset, limit)
    last = offset + len(shown) - 1
    content = "\n".join(shown)
    reply: dict[str, JSON] = {"content": content, "total_lines": len(lines), "truncated": last < len(lines)}
    hints = []
    if last < len(lines):
        hints.append(f"Lines {offset} to {last} of {len(lines)} are shown; continue with offset={last + 1}")
    elif not lines:
        hints.append("The file is empty")
    if any(len(line) > MAX_LINE_CHARS for line in lines[offset - 1 : last]):
        hints.append(f"Lines of more than {MAX_LINE_CHARS} characters are cut; the terminal shows the rest (cut -c)")
    if _UNREADABLE.search(content):
        hints.append("The file is not UTF-8: ? also stands for bytes that are not characters; patch keeps them")
    return {**reply, "hint": ". ".join(hints)} if hints else reply


def numbered(lines: list[str], offset: int, limit: int) -> list[str]:
    """Return `LINE|CONTENT` for the lines from `offset` (1-based), within the bounds on lines, line length and
    content."""
    shown: list[str] = []
    size = 0
    for number, line in enumerate(lines[offset - 1 : offset - 1 + limit], start=offset):
        entry = f"{number}|{_shortened_line(line.removesuffix(chr(13)))}"
        # A line end is sent as two characters, because JSON escapes it.
        size += sent_chars(entry) + 2
        if shown and size > MAX_CONTENT_CHARS:
            break
        shown.append(entry)
    return shown


def _shortened_line(line: str) -> str:
    if len(line) <= MAX_LINE_CHARS:
        return line
    return f"{line[:MAX_LINE_CHARS]}... [{len(line) - MAX_LINE_CHARS} more characters in this line]"


async def run_write_file(arguments: Mapping[str, JSON], run: ToolRun) -> ToolReply:
    """Write the whole file; the reply has `path`, `bytes_written`, `created`, for Python, JSON, YAML and TOML files
    `syntax_check`, and `note` if the form of the old text is lost or decided the line ends."""
    slot, content = await run.slot(), arguments["content"]
    path = await in_full(slot, arguments["path"])
    try:
        data = content.encode()
    except UnicodeEncodeError:
        raise ToolMistake(
            "content contains half of a surrogate pair, which cannot be written to a file; nothing was written"
        ) from None
    present = await file_info(slot, path)
    if present is not None and present.kind not in ("file", "symlink"):
        raise ToolMistake(f"{path} already exists and is {KINDS[present.kind]}; nothing was written")
    note = ""
    if present is not None and present.size and (old := await _old_text(slot, path)) is not None:
        note = _lost_form(old, content)
        if old.mostly_crlf and "\n" in content and "\r\n" not in content:
            data = data.replace(b"\n", b"\r\n")
            note = f"The new file has the CRLF line ends (\\r\\n) of the old one. {note}".strip()
    await write_file_bytes(slot, path, data)
    reply: dict[str, JSON] = {"path": path, "bytes_written": len(data), "created": present is None}
    if note:
        reply["note"] = note
    checked = check_syntax(path, content)
    return reply if checked is None else {**reply, "syntax_check": checked}


async def _old_text(slot: Slot, path: str) -> DecodedFile | None:
    """Return the text that is replaced, or None if it is binary, too large or unreadable."""
    try:
        return await read_text_file(slot, path)
    except ToolMistake:
        return None


def _lost_form(old: DecodedFile, content: str) -> str:
    """Return a note about the byte order mark, the line ends and the last line end that the old file has and the new
    content has not. read_file does not show them, so a model drops them without knowing."""
    lost = ["a byte order mark (\\ufeff)"] if old.bom and not content.startswith("\ufeff") else []
    if old.crlf and "\r\n" in content and "\n" in content.replace("\r\n", ""):
        lost.append("CRLF line ends (\\r\\n)")
    if old.text.endswith("\n") and content and not content.endswith("\n"):
        lost.append("a line end at its end")
    return f"The old file had {' and '.join(lost)}; the new one does not. patch keeps them." if lost else ""


READ_FILE = FunctionTool(schema=READ_SCHEMA, run=run_read_file, toolset="file", parallel_safe=True)
WRITE_FILE = FunctionTool(schema=WRITE_SCHEMA, run=run_write_file, toolset="file")
