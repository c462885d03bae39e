"""Where rows come from: a local JSONL, JSON or Parquet file, or a data set of the hub by its name.

Invariant: one bad row never hides the others. It is collected with its message, and the caller decides.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from palaestra.core.errors import ConfigError, TaskError
from palaestra.core.types import JSON
from palaestra.envs.swe.rows import SweRow, parse_row

_FILE_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")


@dataclass(frozen=True, slots=True)
class Loaded:
    """The rows that can be used, and one error for each that cannot."""

    rows: tuple[SweRow, ...]
    errors: tuple[TaskError, ...]


def load_rows(
    source: str | Path, *, split: str = "train", limit: int = 0, select: Iterable[str] = (), skip: int = 0
) -> Loaded:
    """Read rows from a file (by its suffix) or else from the hub, which is the one case that uses the network.

    `limit` 0 means all; it counts usable rows, after `skip` and `select` (instance ids) have been applied. Relative
    `repo_path` columns are taken from the file's directory. Raises `ConfigError` when the source cannot be read.
    """
    wanted = frozenset(select)
    rows: list[SweRow] = []
    errors: list[TaskError] = []
    for number, raw in islice(enumerate(read_raw(source, split), 1), skip, None):
        if limit and len(rows) >= limit:
            break
        if wanted and raw.get("instance_id") not in wanted:
            continue
        try:
            rows.append(_located(parse_row(raw, number), Path(source)))
        except TaskError as error:
            errors.append(error)
    return Loaded(tuple(rows), tuple(errors))


def read_raw(source: str | Path, split: str = "train") -> Iterator[Mapping[str, JSON]]:
    """The rows of a source as they are. A line that is not a JSON object comes as an empty row."""
    path = Path(source)
    if path.suffix.lower() in _FILE_SUFFIXES or path.is_file():
        if not path.is_file():
            raise ConfigError(f"no such task file: {path} (build one with `palaestra tasks build swe --out {path}`)")
        return _read_file(path)
    return _read_hub(str(source), split)


def _read_file(path: Path) -> Iterator[Mapping[str, JSON]]:
    if path.suffix.lower() == ".parquet":
        return _read_parquet(path)
    if path.suffix.lower() == ".json":
        return _read_json(path)
    return _read_lines(path)


def _read_lines(path: Path) -> Iterator[Mapping[str, JSON]]:
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.strip():
                yield _object(line)


def _object(line: str) -> Mapping[str, JSON]:
    """A line as an object; what is none becomes an empty row, which `parse_row` reports with its number."""
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _read_json(path: Path) -> Iterator[Mapping[str, JSON]]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise ConfigError(f"{path} is not JSON: {problem}") from None
    if not isinstance(value, list):
        raise ConfigError(f"{path} must hold a list of rows")
    return (row if isinstance(row, dict) else {} for row in value)


def _read_parquet(path: Path) -> Iterator[Mapping[str, JSON]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise ConfigError(f"reading {path.name} needs the 'data' extra: pip install 'palaestra[data]'") from None
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                yield from batch.to_pylist()
    except (OSError, ValueError) as problem:
        raise ConfigError(f"{path} is not a readable Parquet file: {problem}") from problem


def _read_hub(name: str, split: str) -> Iterator[Mapping[str, JSON]]:
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"{name!r} is no local file, and data sets by hub name need the 'hub' extra: pip install 'palaestra[hub]'"
        ) from None
    try:
        yield from datasets.load_dataset(name, split=split, streaming=True)
    except Exception as problem:  # the library raises its own, requests' and plain ones for the same missing network
        raise ConfigError(
            f"the data set {name!r} (split {split!r}) cannot be read from the hub: "
            f"{type(problem).__name__}: {problem}. "
            "Check the name and the network, or give a local .jsonl or .parquet file."
        ) from problem


def _located(row: SweRow, source: Path) -> SweRow:
    if row.repo_path is None or Path(row.repo_path).is_absolute():
        return row
    return replace(row, repo_path=str((source.parent / row.repo_path).resolve()))
