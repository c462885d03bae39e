"""Exit codes and messages for failures at the end of a process. A bug is a traceback and never looks expected.

0 done                       3 finished with more unscored rollouts than allowed, or paused
1 failed, or a bug           4 the model server is unreachable or refused
2 wrong usage or settings    5 the requested isolation is not available        130 interrupted or drained
"""

from __future__ import annotations

import asyncio
import signal
import sys
from dataclasses import dataclass

from palaestra.core.errors import PalaestraError
from palaestra.core.redaction import redacted
from palaestra.core.user_code import leaves

DONE = 0
FAILED = 1
USAGE = 2
TOO_MANY_FAILURES = 3
INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class ProcessFailure:
    """The end of a process that failed."""

    exit_code: int
    message: str


def read_failure(error: BaseException) -> ProcessFailure | None:
    """The failure that `error` means to a user, or None for a bug. In a group of errors, one bug makes it a bug."""
    found = list(leaves(error))
    if any(isinstance(leaf, KeyboardInterrupt) for leaf in found):
        return ProcessFailure(INTERRUPTED, "interrupted; what was finished is kept")
    known = [leaf for leaf in found if isinstance(leaf, PalaestraError)]
    others = [leaf for leaf in found if not isinstance(leaf, (PalaestraError, asyncio.CancelledError))]
    if others or not known:
        return None
    messages = dict.fromkeys(str(leaf) or type(leaf).__name__ for leaf in known)
    return ProcessFailure(known[0].exit_code, "\n".join(messages))


def report_failure(error: BaseException) -> int:
    """Report a failure on stderr and return its exit code. Raises a bug as it is."""
    failure = read_failure(error)
    if failure is None:
        raise error
    report(failure.message)
    return failure.exit_code


def report(message: str) -> None:
    sys.stderr.write(f"error: {redacted(message)}\n")


def told_to_stop() -> asyncio.Event:
    """An event that is set when the process gets SIGINT or SIGTERM. For servers that run at the command line."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    return stop
