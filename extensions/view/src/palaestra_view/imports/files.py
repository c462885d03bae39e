"""Opens files and folders of other programs as sources of rollouts, and finds them below a folder.

The content decides the format, not the name: an archive, lines of JSON objects, one JSON value, or a folder with ATIF
documents below it. Links are not followed.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io.durable_files import UNREADABLE, open_regular, read_regular
from palaestra_view.imports import atif, conversations, inspect_log
from palaestra_view.imports.documents import decoded, json_objects
from palaestra_view.imports.inspect_log import InspectArchive
from palaestra_view.imports.source import Imported, LogFacts, Source, mapping_of

READABLE = "Inspect logs (.eval, .json), ATIF documents, and JSON lines with messages, conversations or groups"

_DEEP = 4
_MOST_FILES = 20_000
_MOST_UNKNOWN = 50
_HEAD_BYTES = 4096
_ENDINGS = (".eval", ".json", ".jsonl")
_entries = msgspec.json.Decoder(dict[str, msgspec.Raw])


def open_source(path: Path) -> Source:
    """Return the source for a file or a folder. Raises `ConfigError` if it has no known format, and `OSError`."""
    if path.is_dir():
        return AtifFolder(path)
    with open_regular(path) as file:
        head = file.read(4)
    if head == b"PK\x03\x04" and zipfile.is_zipfile(path):
        return InspectArchive(path)
    if head[:2] == b"PK" or path.suffix == ".eval":
        raise ConfigError(f"{path} is not a whole zip file: the program that writes it may not have ended")
    return JsonFile(path)


def sources_below(folder: Path) -> list[Path]:
    """Return the files below a folder that look like logs, and the folder itself if there are ATIF documents in it.
    Last come logs that cannot be read: `open_source` names the reason. A `.json` file of another kind is no log, and
    neither is a `.jsonl` file next to ATIF documents."""
    found, unknown, documents = [], list[Path](), False
    for path in log_files(folder):
        kind = _file_format(path)
        documents = documents or kind == atif.NAME
        if kind and kind != atif.NAME:
            found.append(path)
        elif not kind and path.suffix != ".json":
            unknown.append(path)
    unknown = [path for path in unknown if path.suffix == ".eval" or not documents]
    return [*([folder] if documents else []), *found, *unknown[:_MOST_UNKNOWN]]


class JsonFile:
    """The source for a file with JSON objects. Its first object decides the format."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.place, self.size = 0, path.stat().st_size

    def facts(self) -> LogFacts:
        """Return the facts about the file, which its first object has."""
        for _, data in json_objects(self.path):
            try:
                match _format(data):
                    case inspect_log.NAME:
                        return inspect_log.facts(data, self.path)
                    case atif.NAME:
                        return atif.facts(data)
                    case conversations.NAME:
                        return conversations.facts(decoded(data))
            except ConfigError as error:
                raise ConfigError(f"{self.path} cannot be read: {error}") from None
            break
        raise ConfigError(f"{self.path} is in no format that can be shown: a run's folder or journal, {READABLE}")

    def rollouts(self) -> Iterator[Imported | str]:
        """Yield the rollouts of each object."""
        for number, (place, data) in enumerate(json_objects(self.path), 1):
            self.place = place
            try:
                match _format(data):
                    case inspect_log.NAME:
                        yield from inspect_log.read(data)
                    case atif.NAME:
                        yield from atif.read(data, atif.trial_verdict(self.path))
                    case _:
                        yield from conversations.read(mapping_of(decoded(data)))
            except ConfigError as error:
                yield f"record {number}: {error}"
        self.place = self.size


def _format(data: bytes) -> str:
    """Return the format of an object by the names of its entries; empty if it has none that is known. The entries are
    not decoded, because an Inspect log may be one large object."""
    names: Collection[str]
    try:
        names = _entries.decode(data).keys()
    except (*UNREADABLE, UnicodeError):
        names = mapping_of(decoded(data)).keys() if data.lstrip()[:1] == b"{" else ()
    if "schema_version" in names:
        return atif.NAME
    if {"version", "eval"} <= set(names):
        return inspect_log.NAME
    return conversations.NAME if {"messages", "conversations", "scores", "prompt_ids"} & set(names) else ""


class AtifFolder:
    """The source for a folder with ATIF documents, one per file, as Harbor writes them. A document and its continuation
    in another file are two rollouts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._paths = sorted(each for each in log_files(path) if _file_format(each) == atif.NAME)
        self.place, self.size = 0, sum(each.stat().st_size for each in self._paths)

    def facts(self) -> LogFacts:
        """Return the facts about the folder, which its first document has."""
        for path in self._paths:
            try:
                return atif.facts(read_regular(path))
            except (ConfigError, OSError):
                continue
        raise ConfigError(f"there is nothing in {self.path} that can be shown: a run's folder or journal, {READABLE}")

    def rollouts(self) -> Iterator[Imported | str]:
        """Yield the rollout of each document."""
        for path in self._paths:
            try:
                data = read_regular(path)
                self.place += len(data)
                yield from atif.read(data, atif.trial_verdict(path))
            except (ConfigError, OSError) as error:
                yield f"{path}: {error}"


def log_files(folder: Path) -> Iterator[Path]:
    """Yield the files with a known ending below a folder, in order of their paths."""
    count = 0
    for place, folders, names in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        folders[:] = sorted(folders) if depth < _DEEP else []
        for name in sorted(names):
            path = Path(place, name)
            # In a folder of another person, a link could lead to any file of this machine.
            if path.suffix not in _ENDINGS or path.is_symlink() or not path.is_file():
                continue
            count += 1
            if count > _MOST_FILES:
                raise ConfigError(f"{folder} has more than {_MOST_FILES:,} files: specify a folder below it")
            yield path


def _file_format(path: Path) -> str:
    """Return the format of a file by its first bytes, or an empty text."""
    try:
        with open_regular(path) as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return ""
    if head[:4] == b"PK\x03\x04":
        return inspect_log.NAME if path.suffix == ".eval" else ""
    if b'"schema_version"' in head and b'"ATIF-v' in head and path.suffix == ".json":
        return atif.NAME
    if path.suffix == ".json":
        return inspect_log.NAME if b'"eval"' in head and b'"version"' in head else ""
    known = (b'"messages"', b'"conversations"', b'"ATIF-v', b'"tokens"', b'"palaestra.row/1"')
    return conversations.NAME if path.suffix == ".jsonl" and any(each in head for each in known) else ""
