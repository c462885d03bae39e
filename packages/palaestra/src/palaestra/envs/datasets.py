"""Reads the rows of a data set: a local JSONL, JSON, CSV or Parquet file, a folder of such files, or a data set on the
Hugging Face hub.

Rows are read one by one, so a data set need not fit in memory; only a `.json` file is read whole. A bad row is replaced
by an error; the other rows are still read.
"""

from __future__ import annotations

import codecs
import csv
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from palaestra_slots.core.config import local_path, nearest
from palaestra_slots.core.errors import ConfigError, TaskError
from palaestra_slots.core.extras import install_command
from palaestra_slots.core.types import JSON

Row: TypeAlias = Mapping[str, JSON]

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")

_MAX_CSV_FIELD = 1 << 28
_UNPACKED_BYTES, _MAX_RATIO = 1 << 30, 100
"""A Parquet file may unpack to more than this number of bytes only if that is at most 100 times the file's size."""


def read_rows(
    source: str | Path, *, split: str = "train", fields: Mapping[str, str] | None = None
) -> Iterator[tuple[int, Row | TaskError]]:
    """Yield the rows with their numbers, from 1, and a `TaskError` in place of each bad row. `fields` renames columns:
    it maps each new name to a column.

    A path is a file, or a folder whose files are read in the order of their names. If some file names begin with the
    split, or some files are in a folder of that name, only those are read. Any other source is the name of a data set
    on the hub, the only source that needs the network. Raises `ConfigError` if the source cannot be read.
    """
    for number, row in enumerate(_read_rows(source, split), 1):
        if isinstance(row, str):
            yield number, TaskError(row)
        else:
            yield number, _renamed(row, fields or {})


def is_local(source: str | Path) -> bool:
    """Return whether the source is meant as a path rather than as the name of a data set on the hub."""
    path = local_path(source)
    return path.exists() or path.suffix.lower() in SUFFIXES or str(source).startswith(("/", "./", "../", "~"))


def _renamed(row: Row, fields: Mapping[str, str]) -> Row | TaskError:
    for name, column in fields.items():
        if column not in row:
            return TaskError(
                f"no column {column!r} for the field {name!r}.{nearest(column, row)} The columns are "
                f"{', '.join(map(repr, row))}"
            )
    return {**row, **{name: row[column] for name, column in fields.items()}} if fields else row


def _read_rows(source: str | Path, split: str) -> Iterator[Row | str]:
    if not is_local(source):
        yield from _read_hub(str(source), split)
        return
    path = local_path(source)
    if not path.exists():
        raise ConfigError(
            f"there is no data set {path}; use a {', '.join(SUFFIXES)} file, a folder of them, or a data set's name "
            "on the hub"
        )
    for file in _data_files(path, split) if path.is_dir() else [path]:
        yield from _read_file(file)


def _data_files(folder: Path, split: str) -> list[Path]:
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not found:
        raise ConfigError(f"{folder} contains no data set: it has no {', '.join(SUFFIXES)} file")
    named = [path for path in found if path.name.startswith(split) or path.parent.name == split]
    return named or found


def _read_file(path: Path) -> Iterator[Row | str]:
    match path.suffix.lower():
        case ".parquet":
            return _read_parquet(path)
        case ".json":
            return _read_json(path)
        case ".csv":
            return _read_csv(path)
        case _:
            return _read_lines(path)


def _read_lines(path: Path) -> Iterator[Row | str]:
    """Yield the rows of JSONL. A file with an unknown suffix is rejected unless its first line is a row."""
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines):
                if line.strip():
                    # Programs on Windows begin a file with a byte order mark, which `json` rejects.
                    row = _parsed_row(line if number else line.removeprefix(codecs.BOM_UTF8))
                    if number == 0 and isinstance(row, str) and path.suffix.lower() not in SUFFIXES:
                        raise ConfigError(f"{path} is not JSONL ({row}); use a {', '.join(SUFFIXES)} file")
                    yield row
    except OSError as problem:
        raise ConfigError(f"{path} cannot be read: {problem.strerror}") from None


def _parsed_row(line: bytes) -> Row | str:
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as problem:
        return f"not UTF-8: {problem.reason} at byte {problem.start} of its line"
    except (ValueError, RecursionError) as problem:
        return f"not JSON: {problem}"
    return value if isinstance(value, dict) else f"not an object: {type(value).__name__}"


def _read_json(path: Path) -> Iterator[Row | str]:
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as problem:
        hint = "; if each line is a row, rename the file to .jsonl" if "Extra data" in str(problem) else ""
        raise ConfigError(f"{path} is not JSON: {problem}{hint}") from None
    if not isinstance(value, list):
        raise ConfigError(f"{path} must hold a list of rows")
    return (row if isinstance(row, dict) else f"not an object: {type(row).__name__}" for row in value)


def _read_csv(path: Path) -> Iterator[Row | str]:
    """Yield the rows of a CSV file. All values are strings; the first line names the columns."""
    csv.field_size_limit(_MAX_CSV_FIELD)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            if twice := [name for name, count in Counter(reader.fieldnames or ()).items() if count > 1]:
                raise ConfigError(f"{path} has several columns called {twice[0]!r}; give each column its own name")
            for row in reader:
                # DictReader keeps surplus fields under the key None, and gives missing ones the value None.
                if None in row or None in row.values():
                    count = len(reader.fieldnames or ())
                    yield f"line {reader.line_num} of {path.name} does not have the {count} fields of the first line"
                else:
                    yield row
    except (OSError, csv.Error, UnicodeDecodeError) as problem:
        raise ConfigError(f"{path} is not a readable CSV file: {problem}") from None


def _read_parquet(path: Path) -> Iterator[Row | str]:
    """Yield the rows of a Parquet file. A file that unpacks to much more than its size is an error: its pages can be
    compressed, and every row can repeat the same long value.

    Memory is not bounded for a file whose metadata gives wrong sizes, and for a list that repeats a long value."""
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise ConfigError(f"reading {path.name} needs the 'data' extra: {install_command('data')}") from None
    try:
        with parquet.ParquetFile(path) as file:
            most = max(_UNPACKED_BYTES, _MAX_RATIO * path.stat().st_size)
            groups = [file.metadata.row_group(number).total_byte_size for number in range(file.num_row_groups)]
            _check_unpacked(sum(groups), most)
            rows = _UNPACKED_BYTES // max([1, *groups])  # each row may repeat all values of its group
            unpacked = 0
            for batch in file.iter_batches(batch_size=min(max(1, rows), 256)):
                for row in batch.to_pylist():
                    unpacked += _size(row)
                    _check_unpacked(unpacked, most)
                    yield row
    except (OSError, ValueError) as problem:
        raise ConfigError(f"{path} is not a readable Parquet file: {problem}") from problem


def _size(value: JSON) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return 8 + sum(map(_size, value.values()))
    return 8 + sum(map(_size, value)) if isinstance(value, list | tuple) else 8


def _check_unpacked(size: int, most: int) -> None:
    if size > most:
        raise ValueError(f"it unpacks to more than {most >> 20} MiB, which is unusual for a file of its size")


def _read_hub(name: str, split: str) -> Iterable[Row]:
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"there is no file or folder {name!r}; if it is the name of a data set on the hub, reading it needs the "
            f"'hub' extra: {install_command('hub')}"
        ) from None
    try:
        yield from datasets.load_dataset(name, split=split, streaming=True)
    except Exception as problem:  # for a missing network, the library raises its own, requests' or built-in errors
        raise ConfigError(
            f"the data set {name!r} (split {split!r}) cannot be read from the hub: "
            f"{type(problem).__name__}: {problem}. Check the name and the network, or use a local .jsonl, .csv or "
            ".parquet file."
        ) from problem
