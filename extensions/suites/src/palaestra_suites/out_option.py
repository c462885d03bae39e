"""The option `--out` of the commands that build a file of tasks."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryFile

import click

from palaestra_slots.core.errors import ConfigError


def _writable(context: click.Context, parameter: click.Parameter, out: Path) -> Path:
    """Return `out`. Raises `ConfigError`, before the work begins, if the file cannot be written."""
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}")
    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder: name a file in it")
    try:
        TemporaryFile(dir=out.parent).close()
    except OSError as error:
        raise ConfigError(f"--out {out}: {out.parent} is not writable: {error.strerror}") from None
    return out


out_option = click.option(
    "--out", type=click.Path(path_type=Path), required=True, callback=_writable, help="The JSONL file to write."
)
