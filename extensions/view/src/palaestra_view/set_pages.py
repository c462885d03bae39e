"""Writes the pages of an evaluation set: its table, and next to it one page for each run, to which the table links."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from palaestra.envs.run.run_table import as_html, set_rows
from palaestra.envs.run.set_file import runs_of
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io.durable_files import replaced, writing


def write_set(path: Path, folder: Path, write_run: Callable[[Path, Path], object]) -> list[str]:
    """Write the table of the set in `folder` to `path`. `write_run` gets the folder and the page of each run. Returns a
    line about each run of which no page can be made. Raises `DiskError`."""
    links, problems = dict[str, str](), list[str]()
    for place in runs_of(folder):
        page = path.with_name(f"{path.stem}-{place.name}.html")
        try:
            write_run(place, page)
        except ConfigError as error:
            problems.append(f"{place} has no page: {error}")
        else:
            links[str(place)] = quote(page.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path.parent), replaced(path) as file:
        file.write(as_html(set_rows(folder), links).encode())
    return problems
