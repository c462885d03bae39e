"""The flags that the commands which run a server share, and what such a command prints."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from palaestra.envs.config.host_path import HostPath
from palaestra_slots.core.config import sent_secret
from palaestra_slots.core.errors import ConfigError

C = TypeVar("C", bound=Callable[..., None])


def address_options(port: int) -> Callable[[C], C]:
    """Return a decorator that adds `--host` and `--port` to a command, with this port as the default."""
    host = click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
    known = click.IntRange(0, 65535)
    port_option = click.option(
        "--port", type=known, default=port, show_default=True, help="The port; 0 picks a free one."
    )
    return lambda command: host(port_option(command))


token_file = click.option(
    "--token-file",
    type=HostPath(dir_okay=False),
    help="A file with the token that callers must send.",
)


def _remember(context: click.Context, parameter: click.Parameter, as_json: bool) -> None:
    context.meta[__name__] = as_json


json_option = click.option(
    "--json", is_flag=True, expose_value=False, callback=_remember, help="Print the address as JSON."
)


def print_url(url: str) -> None:
    """Print the address of a server that is ready, as JSON if `--json` is set."""
    click.echo(json.dumps({"url": url}) if click.get_current_context().meta[__name__] else url)


def read_token(file: Path | None, variable: str) -> str | None:
    """Return the token of a server, from the file if one is given, otherwise from the environment variable. Raises
    `ConfigError`."""
    if file is None:
        return sent_secret(os.environ.get(variable), variable)
    try:
        token = sent_secret(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the token from {file}: {error}") from None
    if token is None:
        raise ConfigError(f"{file} contains no token; write the token to it")
    return token
