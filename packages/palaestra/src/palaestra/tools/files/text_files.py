"""Reads and writes files in a slot as text: lossless decoding, and errors that a model can act on. Files are held in
memory.

Invariant: `decode_file` then `encode` returns the same bytes, whatever the encoding, line ends or byte order mark, so
an edit leaves the rest of the file unchanged.
"""

from __future__ import annotations

import contextlib
import difflib
import posixpath
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from palaestra.tools import parameters
from palaestra.tools.call_text import shortened
from palaestra.tools.tool import ToolMistake
from palaestra_slots.core.errors import InfraError
from palaestra_slots.core.printable import reason
from palaestra_slots.core.types import JSON
from palaestra_slots.sandbox.slot import WORKSPACE, FileInfo, Slot

MAX_TEXT_BYTES = 16 << 20
"""The maximum size in bytes of a file that the file tools open."""
KINDS = {"dir": "a directory", "other": "a device, pipe or socket", "file": "a file", "symlink": "a link"}
PATH_PARAMETER: Mapping[str, JSON] = parameters.text(f"Path of the file, absolute or relative to {WORKSPACE}.")
_SNIFFED_BYTES = 8192
_SHOWN_CHARS = 100
_MOST_COMPARED = 500
"""The maximum number of names in a directory that are compared with a missing name, because the comparison blocks the
event loop."""
_BOM = "\ufeff"


@dataclass(frozen=True, slots=True)
class DecodedFile:
    """A file's text without its byte order mark; bytes that are not UTF-8 are kept as surrogates. With `crlf`, all of
    the file's line ends are CRLF, and `\\n` stands for them in the text.

    `mode` has its permission bits, or None if they are unknown (behind a symlink) or the file is new.
    """

    text: str
    crlf: bool = False
    bom: bool = False
    mode: int | None = None

    @property
    def mostly_crlf(self) -> bool:
        """Whether most of the file's line ends are CRLF."""
        return self.crlf or self.text.count("\r\n") * 2 > self.text.count("\n")

    def encode(self) -> bytes:
        """Return the bytes to write."""
        text = self.text.replace("\n", "\r\n") if self.crlf else self.text
        return ((_BOM if self.bom else "") + text).encode("utf-8", "surrogateescape")

    def with_text(self, text: str) -> DecodedFile:
        """Return a copy with this text and the same encoding, line ends and mode."""
        return replace(self, text=text)


def decode_file(data: bytes) -> DecodedFile:
    """Decode bytes. Line ends are translated only if all are CRLF, so that `encode` can restore them."""
    text = data.decode("utf-8", "surrogateescape")
    bom = text.startswith(_BOM)
    text = text.removeprefix(_BOM)
    crlf = "\r\n" in text and text.count("\r\n") == text.count("\n") and text.count("\r") == text.count("\n")
    return DecodedFile(text.replace("\r\n", "\n") if crlf else text, crlf, bom)


def is_binary(data: bytes) -> bool:
    """Return whether the beginning of a file has a NUL byte, as binary files usually do."""
    return b"\0" in data[:_SNIFFED_BYTES]


def in_slot(path: str) -> str:
    """Return the absolute, normalised form of a path in the slot."""
    return posixpath.normpath(posixpath.join(WORKSPACE, path))


async def read_text_file(slot: Slot, path: str) -> DecodedFile:
    """Return a text file in the slot. Raises `ToolMistake` for anything else."""
    info = await file_info(slot, path)
    data = await read_file_bytes(slot, path, info)
    if is_binary(data):
        raise ToolMistake(
            f"{path} is a binary file ({len(data)} bytes); the file tools handle text only. "
            "Inspect it with terminal commands such as file, xxd or strings."
        )
    mode = info.mode if info is not None and info.kind == "file" else None
    return replace(decode_file(data), mode=mode)


async def in_full(slot: Slot, path: str) -> str:
    """Return the path with a leading `~` expanded as a shell in the slot does, because models write paths as in
    commands."""
    if path != "~" and not path.startswith("~/"):
        return path
    home = await slot.execute('printf %s "$HOME"')
    return posixpath.normpath(posixpath.join(home.output or "/", path[2:]))


@contextlib.contextmanager
def as_mistake(problem: str) -> Iterator[None]:
    """Turn an `OSError` from a call of the slot into a `ToolMistake` that begins with `problem`. An `InfraError` is
    raised unchanged."""
    try:
        yield
    except InfraError:
        # Lost slots and the like are also OSErrors, but no mistake of the model.
        raise
    except OSError as error:
        raise ToolMistake(f"{problem}: {reason(error)}") from error


async def file_info(slot: Slot, path: str) -> FileInfo | None:
    """Return the file information of a path, without following links, or None. Raises `ToolMistake` for an invalid
    path."""
    _check_name(path)
    with as_mistake(f"The path {shortened(path, _SHOWN_CHARS)} cannot be used"):
        return await slot.stat(path)


async def write_file_bytes(slot: Slot, path: str, data: bytes, mode: int | None = None) -> None:
    """Write a file in the slot. Raises `ToolMistake` if that fails."""
    _check_name(path)
    with as_mistake(f"Cannot write {path}"):
        await slot.write_bytes(path, data, mode=mode)


async def remove_file(slot: Slot, path: str) -> None:
    """Remove a file in the slot. Raises `ToolMistake` if that fails."""
    with as_mistake(f"Cannot remove {path}"):
        await slot.remove(path)


async def read_file_bytes(slot: Slot, path: str, info: FileInfo | None, *, most_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Return the bytes of a file in the slot, whose `stat` result is `info`. Raises `ToolMistake` if it cannot be read,
    for example because it is missing or too large."""
    if info is not None and info.kind == "dir":
        raise ToolMistake(f"{path} is a directory; list it with search_files (target files) or ls")
    if info is not None and info.kind == "other":
        raise ToolMistake(f"{path} is {KINDS[info.kind]}, not a file")
    # Checked before anything is read, because a file of gigabytes would otherwise be sent first.
    if info is not None and info.size > most_bytes:
        raise ToolMistake(f"{path} has {info.size} bytes; this tool opens at most {most_bytes}. Use the terminal")
    with as_mistake(f"Cannot read {path}"):
        try:
            return await slot.read_bytes(path, max_bytes=most_bytes)
        except FileNotFoundError:
            if info is not None and info.kind == "symlink":
                raise ToolMistake(f"{path} is a link to a missing file") from None
            raise await not_found(slot, path) from None


async def not_found(slot: Slot, path: str) -> ToolMistake:
    """Return a `ToolMistake` for a file that does not exist; its message suggests similar names."""
    parent, name = posixpath.split(in_slot(path))
    try:
        entries = [posixpath.basename(info.path) for info in await slot.list_dir(parent)]
    except InfraError:
        raise
    except OSError:
        return ToolMistake(f"{path} does not exist, and neither does its directory {parent}")
    by_folded = {entry[:_SHOWN_CHARS].casefold(): entry for entry in sorted(entries)}
    wanted, known = name[:_SHOWN_CHARS].casefold(), sorted(by_folded)
    first = max(0, bisect_left(known, wanted) - _MOST_COMPARED // 2)  # only alphabetical neighbours
    close = difflib.get_close_matches(wanted, known[first : first + _MOST_COMPARED], n=5, cutoff=0.6)
    similar = [posixpath.join(posixpath.dirname(path), by_folded[folded]) for folded in close]
    hint = f". Did you mean {', '.join(similar)}?" if similar else ""
    return ToolMistake(f"{path} does not exist{hint}", similar_files=similar)


def _check_name(path: str) -> None:
    if not path or "\0" in path:
        raise ToolMistake("path must be a file name: not empty and without NUL characters")
