"""How the command line ends: `core.exits` with what click adds, and the message on stderr."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable

import click

from palaestra.core import exits
from palaestra.core.errors import DiskError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


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
        except OSError as error:
            if error.errno not in _NO_ROOM or error.filename is not None:
                raise
            _silence()
            raise DiskError(f"cannot write the output: {error.strerror}") from error

    return exits.run_guarded(inner, report)


def _silence() -> None:
    """What is left to write on stdout goes nowhere, or Python would complain of it once more when it ends."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
