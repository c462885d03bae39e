"""Reads JSON and zip files that other programs wrote, without trusting them.

Invariants: a name in an archive is never a path; what is decompressed is bounded, in each member and in all; a value
that is nested too deeply, and bytes that are not UTF-8, do no harm. A file that cannot be read is a `ConfigError` with
the reason.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import msgspec

from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.extras import install_command
from palaestra_slots.core.io.durable_files import UNREADABLE, lines_of, open_regular
from palaestra_slots.core.types import JSON

MOST_JSON_BYTES = 1 << 30
"""The maximum size of a file that is one JSON value."""

_MEMBER_BYTES = 256 << 20
_GROWTH = 100
_FREE_BYTES = 256 << 20
_MOST_MEMBERS = 1_000_000
_STORED, _DEFLATED, _ZSTD = 0, 8, 93

_values: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_lists = msgspec.json.Decoder(list[msgspec.Raw])


def decoded(data: bytes | bytearray | memoryview, decoder: msgspec.json.Decoder[Any] = _values) -> Any:
    """Return the JSON value of the decoder's type. Bytes that are not UTF-8 become U+FFFD; NaN and infinite numbers
    become None. Raises `ConfigError` with the reason, without the file's name."""
    try:
        return decoder.decode(data)
    except RecursionError:
        raise ConfigError("it is nested too deeply") from None
    except (msgspec.MsgspecError, UnicodeError) as error:
        first = str(error)
    try:
        loose = json.loads(bytes(data).decode("utf-8", "replace"), parse_constant=lambda name: None)
        return msgspec.convert(_clean(loose), decoder.type, strict=False)
    except RecursionError:
        raise ConfigError("it is nested too deeply") from None
    except ValueError:  # also msgspec's errors
        raise ConfigError(f"it is not what was expected: {first}") from None


def _clean(value: JSON) -> JSON:
    """Return the value without lone surrogates, which no file can hold."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_clean(key): _clean(each) for key, each in value.items()}
    return [_clean(each) for each in value] if isinstance(value, list) else value


def _open_after_bom(path: Path) -> IO[bytes]:
    """Open a file behind its byte order mark, which programs of Windows write."""
    file = open_regular(path)
    if file.read(len(BOM_UTF8)) != BOM_UTF8:
        file.seek(0)
    return file


def first_line(path: Path) -> bytes:
    """Return the first line with text of a file; empty if there is none. Raises `OSError` and `ConfigError`."""
    with _open_after_bom(path) as file:
        return next((line for line in lines_of(file) if line.strip()), b"")


def json_objects(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield each object of a file: its lines if the first line is a whole object, otherwise the file's one value, or
    the members of its one list. Each comes with the number of the bytes read so far. Raises `OSError`, and
    `ConfigError` for a file that is too large or no JSON."""
    if _is_object(first_line(path)):
        with _open_after_bom(path) as file:
            for line in lines_of(file):
                if line.strip():
                    yield file.tell(), line
        return
    with _open_after_bom(path) as file:
        data = file.read(MOST_JSON_BYTES + 1)
    if len(data) > MOST_JSON_BYTES:
        raise ConfigError(
            f"{path} is one JSON value of more than {MOST_JSON_BYTES >> 30} GiB: write one value per line"
        )
    if data.lstrip()[:1] != b"[":
        yield len(data), data
        return
    try:
        members = _lists.decode(data)
    except (*UNREADABLE, UnicodeError):
        members = [msgspec.Raw(json.dumps(each).encode()) for each in _members(data, path)]
    for number, member in enumerate(members, 1):
        yield len(data) * number // len(members), bytes(member)


def _members(data: bytes, path: Path) -> list[JSON]:
    try:
        found = decoded(data)
    except ConfigError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    return found if isinstance(found, list) else []


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(decoded(line), dict) if line.rstrip()[-1:] == b"}" else False
    except ConfigError:
        return False


class ZipDocuments:
    """The members of a zip file, by name. Raises `ConfigError` if the file is no archive, and `OSError`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._left = _GROWTH * path.stat().st_size + _FREE_BYTES
        try:
            with open_regular(path) as file, zipfile.ZipFile(file) as archive:
                members = archive.infolist()
        except (zipfile.BadZipFile, ValueError, struct.error, NotImplementedError) as error:
            raise ConfigError(f"{path} is not a whole zip file: {error}") from None
        if len(members) > _MOST_MEMBERS:
            raise ConfigError(f"{path} has more than {_MOST_MEMBERS:,} members, so no program wrote it as a log")
        self._members = {each.filename: each for each in members}

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the members."""
        return iter(self._members)

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def read(self, name: str) -> bytes:
        """Return a member. Raises `ConfigError` if it is damaged, too large or compressed in an unknown way."""
        info = self._members[name]
        raw = self._raw(info)
        limit = min(_MEMBER_BYTES, self._left)
        data = _decompressed(raw, info.compress_type, limit, self.path)
        if len(data) > limit:
            raise ConfigError(
                f"{self.path}: {name[:200]!r} grows to more than {limit >> 20} MiB, which no log needs: it is not read"
            )
        # `zipfile` would check this, but it knows zstd only since Python 3.14, so it does not read the members here.
        if zlib.crc32(data) != info.CRC:
            raise ConfigError(f"{self.path}: {name[:200]!r} is damaged")
        self._left -= len(data)
        return data

    def _raw(self, info: zipfile.ZipInfo) -> bytes:
        """Return the compressed bytes, which `zipfile` does not give for methods that it does not know."""
        with open_regular(self.path) as file:
            file.seek(info.header_offset)
            head = file.read(30)
            if len(head) < 30 or head[:4] != b"PK\x03\x04" or info.flag_bits & 1 or info.compress_size > _MEMBER_BYTES:
                raise ConfigError(f"{self.path}: {info.filename[:200]!r} is damaged, encrypted or too large")
            # The local header has a name and extra fields of its own, whose lengths may differ from those in the
            # directory.
            sizes: tuple[int, int] = struct.unpack("<HH", head[26:30])
            file.seek(sum(sizes), io.SEEK_CUR)
            return file.read(info.compress_size)


def _decompressed(raw: bytes, method: int, limit: int, path: Path) -> bytes:
    """Return at most `limit` + 1 bytes."""
    try:
        if method == _STORED:
            return raw
        if method == _DEFLATED:
            # One byte more than allowed shows that a member is too large. A limit of 0 would mean that there is none.
            return zlib.decompressobj(-zlib.MAX_WBITS).decompress(raw, limit + 1)
        if method == _ZSTD:
            return _zstd_reader(raw, path).read(limit + 1)
    except ConfigError:
        raise
    except Exception as error:  # each library has errors of its own
        raise ConfigError(f"{path} is damaged: {error}") from None
    raise ConfigError(f"{path} is compressed by method {method}: only stored, deflated and zstd members can be read")


def _zstd_reader(raw: bytes, path: Path) -> IO[bytes]:
    source = io.BytesIO(raw)
    for name in ("compression.zstd", "backports.zstd"):  # the first is in Python 3.14
        try:
            plain: IO[bytes] = import_module(name).ZstdFile(source)
        except ImportError:
            continue
        return plain
    try:
        reader = import_module("zstandard").ZstdDecompressor().stream_reader(source, read_across_frames=True)
    except ImportError:
        raise ConfigError(
            f"{path} is compressed with zstd, which this Python cannot read: {install_command('inspect')}"
        ) from None
    return io.BufferedReader(reader)
