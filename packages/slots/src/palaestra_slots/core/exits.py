"""Exit codes and messages of processes that fail. Without -v, only a bug prints a traceback.

0 done                       3 finished with more unscored rollouts than allowed, or paused
1 failed, or a bug           4 the model server is unreachable or refused
2 wrong usage or settings    5 the requested isolation is not available        130 interrupted or drained
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TextIO, TypeVar

from palaestra_slots.core.errors import PalaestraError
from palaestra_slots.core.io.plugins import OWN_PACKAGES
from palaestra_slots.core.printable import guard_terminals
from palaestra_slots.core.redaction import redacted
from palaestra_slots.core.user_code import leaves, place, told

T = TypeVar("T")

DONE = 0
FAILED = 1
USAGE = 2
TOO_MANY_FAILURES = 3
INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class ProcessFailure:
    """The exit code and the message of a process that failed."""

    exit_code: int
    message: str
    kind: str = ""
    """The name of the error's class."""


JSON_FLAG = "--json"
NO_COLOR_FLAG = "--no-color"
_QUIET, _VERBOSE = ("-q", "--quiet"), ("-v", "--verbose")


class Program:
    """A running command line: a `with` block does the work, and `exit_code` is the result.

    Three flags may stand anywhere in `argv` and are left out of `words`. -q drops everything on stderr except the error
    that ends the program. -v adds the log, and tracebacks; without it, a warning is one line. --no-color sets NO_COLOR.
    A failure ends the block and is reported, as one line of JSON if `argv` contains --json. An interruption by the user
    is reported only if `argv` contains --json. A bug is raised.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self.words = [word for word in argv if word not in (*_QUIET, *_VERBOSE, NO_COLOR_FLAG)]
        self.exit_code = DONE
        self._quiet = any(word in _QUIET for word in argv)
        self._verbose = any(word in _VERBOSE for word in argv)
        self._colourless = NO_COLOR_FLAG in argv
        self._stderr = contextlib.ExitStack()

    def __enter__(self) -> Program:
        guard_terminals()
        if self._colourless:
            self._stderr.enter_context(_without_colour())
        self._stderr.enter_context(_logged() if self._verbose else _warned())
        if self._quiet:
            self._stderr.enter_context(contextlib.redirect_stderr(_OnlyErrors(sys.stderr)))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        with self._stderr:
            if error is None or read_failure(error) is None:
                return False
            if self._verbose:
                traceback.print_exception(error)
            self.exit_code = report_failure(error, self.words, as_json=JSON_FLAG in self.words)
            return True


class _OnlyErrors(io.TextIOBase):
    """A standard error stream that drops every text. `report` and `report_failure` write to `errors_to` instead."""

    def __init__(self, errors_to: TextIO) -> None:
        self.errors_to = errors_to

    def write(self, text: str) -> int:
        """Drop the text."""
        return len(text)


@contextlib.contextmanager
def _without_colour() -> Iterator[None]:
    """Set NO_COLOR, which rich and child processes read."""
    before = os.environ.get("NO_COLOR")
    os.environ["NO_COLOR"] = "1"
    try:
        yield
    finally:
        del os.environ["NO_COLOR"]
        if before is not None:
            os.environ["NO_COLOR"] = before


class _Warnings(logging.Handler):
    """Writes warnings to stderr as lines. A warning with an error gets the error's text in place of its traceback, and
    is written once: a tool with a bug may fail in every rollout."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._written: set[tuple[str, str]] = set()

    def emit(self, record: logging.LogRecord) -> None:
        line, error = record.getMessage(), record.exc_info[1] if record.exc_info else None
        if error is not None:
            error = error.__cause__ or error
            key = record.msg, told(error)
            if key in self._written:
                return
            self._written.add(key)
            line = f"{line}: {key[1]}{place(error)}; later failures like this are not listed (-v lists them)"
        with contextlib.suppress(OSError, ValueError):  # nobody reads
            sys.stderr.write(f"{line}\n")


@contextlib.contextmanager
def _warned() -> Iterator[None]:
    """Write the warnings of our packages to stderr, each as one line."""
    handler, logs = _Warnings(), [*map(logging.getLogger, OWN_PACKAGES)]
    for log in logs:
        log.addHandler(handler)
    try:
        yield
    finally:
        for log in logs:
            log.removeHandler(handler)


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    """Write the logs of our packages to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    levels = {log: log.level for log in map(logging.getLogger, OWN_PACKAGES)}
    for log in levels:
        log.addHandler(handler)
        log.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        for log, level in levels.items():
            log.removeHandler(handler)
            log.setLevel(level)


def read_failure(error: BaseException) -> ProcessFailure | None:
    """Return the failure to report for `error`, or None for a bug. A group of errors that contains a
    `KeyboardInterrupt` is an interruption by the user. Any other group that contains a bug counts as a bug."""
    found = list(leaves(error))
    if any(isinstance(leaf, KeyboardInterrupt) for leaf in found):
        return ProcessFailure(INTERRUPTED, "interrupted", "KeyboardInterrupt")
    known = [leaf for leaf in found if isinstance(leaf, PalaestraError)]
    # A task group cancels its other tasks when one fails, so a cancellation next to a failure is not a bug.
    others = [leaf for leaf in found if not isinstance(leaf, (PalaestraError, asyncio.CancelledError))]
    if others or not known:
        return None
    messages = dict.fromkeys(str(leaf) or type(leaf).__name__ for leaf in known)
    return ProcessFailure(known[0].exit_code, "\n".join(messages), type(known[0]).__name__)


def report_failure(error: BaseException, argv: Sequence[str] = (), *, as_json: bool = False) -> int:
    """Report a failure on stderr, with settings named as in `argv`, and return its exit code. An interruption by the
    user is reported only if `as_json` is true. A bug is raised again, unchanged."""
    from palaestra_slots.core.config import flags_as_typed  # imported here, because most programs do not fail

    failure = read_failure(error)
    if failure is None:
        raise error
    message = flags_as_typed(failure.message, argv)
    if as_json:
        facts = {"kind": failure.kind, "message": redacted(message), "exit_code": failure.exit_code}
        _write_error(json.dumps({"error": facts}))
    elif failure.exit_code != INTERRUPTED:
        report(message)
    return failure.exit_code


def report(message: str) -> None:
    _write_error(f"error: {redacted(message)}")


def _write_error(line: str) -> None:
    stream: TextIO = getattr(sys.stderr, "errors_to", sys.stderr)
    stream.write(f"{line}\n")


def told_to_stop() -> asyncio.Event:
    """Return an event that is set when the process gets SIGINT or SIGTERM. For servers that are started on the command
    line."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    return stop


async def ended_by_second_interrupt(work: Awaitable[T], patience_s: float = 5.0) -> T:
    """Await the work of a command. The second Ctrl-C ends the process after `patience_s` seconds if it still runs then,
    for example because a hook blocks the event loop's thread."""
    if threading.current_thread() is not threading.main_thread():  # which alone receives signals
        return await work
    before, count = signal.getsignal(signal.SIGINT), 0

    def count_interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count == 2:
            end = threading.Timer(patience_s, os._exit, [INTERRUPTED])
            # The timer must not keep a process alive that ends by itself.
            end.daemon = True
            end.start()
        if callable(before):
            before(number, frame)

    signal.signal(signal.SIGINT, count_interrupt)
    try:
        return await work
    finally:
        signal.signal(signal.SIGINT, before)


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: `1 group`, `3 groups`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
