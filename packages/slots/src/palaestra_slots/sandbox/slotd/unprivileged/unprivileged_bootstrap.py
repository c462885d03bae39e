"""Starts a server for the isolation levels without namespaces, and cleans up after its death.

There are two processes: the server, and a watcher. The slots' inits die with the server. The watcher, which inherits
all processes of the inits, kills these processes and removes the server's directory. If the watcher is killed as well,
the next start does this, but it can kill the processes only if slots have users of their own; otherwise detached
processes cannot be distinguished from other processes, and keep running.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
from typing import NoReturn

from .. import bootstrap, syscalls
from ..namespaced import privileges
from ..protocol.frames import FrameKind, encode
from . import landlock, users
from .server_directory import ServerDirectory
from .unprivileged_rung import UnprivilegedDriver

_END_PATIENCE_S = 5.0


def main(arguments: list[str]) -> int:
    """Run `slotd FD confined|none`: serve the client at the other end of the stream socket FD."""
    stream, confined = socket.socket(fileno=int(arguments[0])), arguments[1] == "confined"
    logging.basicConfig(stream=sys.stderr, format="slotd: %(message)s")
    try:
        bootstrap.require_files()
        if confined:
            _require_means()
        place = ServerDirectory.claim()
    except OSError as error:
        stream.sendall(encode(FrameKind.ERROR, 0, bootstrap.refusal(error)))
        return 1
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    # Nothing is ever written. The server reads the end of the pipe when this process, which holds the writing end,
    # dies.
    reader, writer = os.pipe()
    server = os.fork()
    if server == 0:
        os.close(writer)
        _run_server(stream, place, confined, reader)
    os.close(reader)
    stream.close()
    os.waitpid(server, 0)
    deadline = time.monotonic() + _END_PATIENCE_S
    while users.kill_orphans(set()) and time.monotonic() < deadline:
        time.sleep(0.001)
    place.clear()
    os.close(writer)
    return 0


def _run_server(stream: socket.socket, place: ServerDirectory, confined: bool, watcher: int) -> NoReturn:
    def prepare() -> None:
        syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
        with contextlib.suppress(OSError):
            syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)

    bootstrap.run_server(stream, prepare, lambda settings: UnprivilegedDriver(place, confined, settings), watcher)


def _require_means() -> None:
    """Raise OSError if slots cannot be confined here; the message names the missing part."""
    if not privileges.supported():
        raise OSError(38, f"no system call filter is known for {syscalls.MACHINE}")
    found = landlock.version()
    if found < landlock.MINIMUM:
        has = f"only version {found} of Landlock" if found else "no Landlock (it needs Linux 5.19 and lsm=landlock)"
        raise OSError(38, f"this kernel has {has}")
    if os.geteuid() == 0 and not users.starts():
        raise OSError(1, "root lacks the capabilities or uids to give slots users of their own; run as another user")
    # Commands have the user of the run, so without a scope they may send signals to it.
    if os.geteuid() != 0 and found < landlock.SCOPED:
        raise OSError(38, "without root, commands could end the run: this needs Landlock's signal scope (Linux 6.12)")
