"""How the command line ends: `core.exits` with what click adds, and the message on stderr."""

from __future__ import annotations

from collections.abc import Callable

import click

from palaestra.core import exits


def report(message: str) -> None:
    """One error message on stderr."""
    click.echo(f"error: {message}", err=True)


def run_guarded(main: Callable[[], int | None]) -> int:
    """Run `main` and return the process's exit code; see `palaestra.core.exits`."""

    def inner() -> int | None:
        try:
            return main()
        except click.exceptions.Exit as error:
            return error.exit_code
        except click.Abort:
            raise KeyboardInterrupt from None
        except click.ClickException as error:
            error.show()
            return error.exit_code

    return exits.run_guarded(inner, report)
