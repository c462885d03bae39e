"""SWE rows of a data set: each one that can be used, and an error in place of each that cannot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from palaestra.core.errors import TaskError
from palaestra.envs.datasets import read_rows
from palaestra.suites.swe.swe_rows import SweRow, parse_row


def load_rows(
    source: str | Path, *, split: str = "train", fields: Mapping[str, str] | None = None
) -> Iterator[SweRow | TaskError]:
    """The rows of a source, see `datasets.read_rows`. Relative `repo_path` columns are taken from where it lies."""
    for number, raw in read_rows(source, split=split, fields=fields):
        try:
            if isinstance(raw, TaskError):
                yield TaskError(f"row {number}: {raw}")
            else:
                yield _located(parse_row(raw, number), Path(source))
        except TaskError as error:
            yield error


def _located(row: SweRow, source: Path) -> SweRow:
    if row.repo_path is None or Path(row.repo_path).is_absolute():
        return row
    folder = source if source.is_dir() else source.parent
    return replace(row, repo_path=str((folder / row.repo_path).resolve()))
