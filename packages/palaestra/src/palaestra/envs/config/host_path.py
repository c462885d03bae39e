"""The type of options and arguments that are paths on this machine. A shell does not expand `~` in `--out=~/x`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from palaestra_slots.core.config import local_path
from palaestra_slots.core.errors import ConfigError


class HostPath(click.Path):
    """A path in which `~` and variables are expanded; `settings` are those of `click.Path`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(path_type=Path, **settings)

    def convert(self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the expanded path."""
        try:
            path = local_path(os.fspath(value))
        except ConfigError as error:
            self.fail(str(error), param, ctx)
        return super().convert(str(path), param, ctx)
