"""Runs one command, and ends everything that the command started once the caller has ended, even if SIGKILL ended it.

    python -I -S supervised_command.py PARENT_PID COMMAND [ARGUMENT …]

This file uses only the standard library, because it is run by its path, as a process between the caller and the
command. The command inherits standard input and output. Invariant: when this process ends by itself, no descendant of
it is alive; if it is killed, the kernel ends the command. A descendant outside the command's process group survives
only if caller, supervisor and command are all killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time

_PDEATHSIG, _SUBREAPER = 1, 36
_GRACE_S = 1.0


def supervised(*command: str) -> list[str]:
    """Return the arguments that start the command as a child of this process. The command is ended when this process
    ends, or when the thread that started the command ends."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main(argv: list[str]) -> int:
    """Run the command. Returns its exit code, 128+n if signal n ended it, or 127 if it cannot be run."""
    libc = ctypes.CDLL(None)
    signals = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
    # Blocked before anything else, so that a signal that comes before the wait is kept for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    # Not SIGKILL, because this process must still end what the command has started.
    libc.prctl(_PDEATHSIG, signal.SIGTERM)
    libc.prctl(_SUBREAPER, 1)
    if os.getppid() != int(argv[0]):
        return 0  # the caller died before this process could watch it
    child = os.fork()
    if child == 0:
        _become(libc, argv[1:])
    for descriptor in (0, 1):
        os.close(descriptor)  # the caller sees end of file once the command, now the only holder, closes them
    status = None
    while status is None:
        if signal.sigwait(signals) == signal.SIGCHLD:
            status = _reaped(child)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)
            ended = _exit_by_deadline(child, time.monotonic() + _GRACE_S)
            status = 128 + signal.SIGKILL if ended is None else ended
    _end_all()
    return status


def _become(libc: ctypes.CDLL, command: list[str]) -> None:
    """Replace this forked process by the command. The kernel kills the command when the supervisor ends."""
    libc.prctl(_PDEATHSIG, signal.SIGKILL)
    # A program inherits blocked signals.
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    try:
        os.execvp(command[0], command)  # noqa: S606
    except OSError as error:
        os.write(2, f"{command[0]} cannot be run: {error.strerror}\n".encode())
        os._exit(127)


def _reaped(child: int) -> int | None:
    """Reap ended children. Returns the command's exit code once it has ended."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, code = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == child:
                code = os.waitstatus_to_exitcode(code)
                status = code if code >= 0 else 128 - code
    return status


def _exit_by_deadline(child: int, deadline: float) -> int | None:
    """Return the command's exit code, or None if it has not ended by the deadline."""
    status = _reaped(child)
    while status is None and (left := deadline - time.monotonic()) > 0:
        signal.sigtimedwait({signal.SIGCHLD}, left)
        status = _reaped(child)
    return status


def _end_all() -> None:
    """Kill every descendant. Orphans become children of this process, so repeated rounds reach all of them."""
    while children := _children():
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
        return [int(pid) for pid in file.read().split()]


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
