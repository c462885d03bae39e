"""How a server for the rungs without namespaces comes to life, and what its death leaves to be done.

Two processes again: the server, and one that watches it. There is no process namespace whose end would be everybody's:
when the server dies, however, its inits die with it, and the watcher, to whom all that they had started falls, ends
that too and removes the server's directory. If the watcher is killed as well, the next start does it (where slots have
users of their own; without, processes cut loose from their slot cannot be told from others, and stay).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import time

from .. import bootstrap, syscalls
from ..namespaced import privileges
from ..protocol.frames import Kind, encode
from . import landlock, users
from .server_directory import Base
from .unprivileged_rung import Confined

_END_PATIENCE_S = 5.0


def main(arguments: list[str]) -> int:
    """`slotd FD confined|none`: serve the client at the other end of the stream socket FD."""
    stream, confined = socket.socket(fileno=int(arguments[0])), arguments[1] == "confined"
    logging.basicConfig(stream=sys.stderr, format="slotd: %(message)s")
    try:
        bootstrap.require_files()
        if confined:
            _require_means()
        place = Base.claim()
    except OSError as error:
        stream.sendall(encode(Kind.ERROR, 0, bootstrap.refusal(error)))
        return 1
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    reader, writer = os.pipe()
    server = os.fork()
    if server == 0:
        os.close(writer)
        _serve(stream, place, confined, reader)
    os.close(reader)
    stream.close()
    os.waitpid(server, 0)
    deadline = time.monotonic() + _END_PATIENCE_S
    while users.kill_orphans(set()) and time.monotonic() < deadline:
        time.sleep(0.001)
    place.clear()
    os.close(writer)
    return 0


def _serve(stream: socket.socket, place: Base, confined: bool, watcher: int) -> None:
    """In the server; never returns."""
    status = 1
    try:
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
        bootstrap.make_ready()
        with contextlib.suppress(OSError):
            syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
        bootstrap.serve(stream, lambda settings: Confined(place, confined, settings), watcher)
        status = 0
    except Exception:
        logging.exception("the slot server has failed")  # the client shows it as the server's last words
    finally:
        logging.shutdown()
        os._exit(status)


def _require_means() -> None:
    """Raise OSError, saying what is missing, where slots cannot be confined."""
    if not privileges.supported():
        raise OSError(38, f"no system call filter is known for {syscalls.MACHINE}")
    found = landlock.version()
    if found < landlock.MINIMUM:
        has = f"only version {found} of Landlock" if found else "no Landlock (lsm= must name it, Linux 5.19 or later)"
        raise OSError(38, f"this kernel has {has}")
    if os.geteuid() == 0 and not users.starts():
        raise OSError(1, "root has not the capabilities, or the uids, to give slots users of their own; run as a user")
    if os.geteuid() != 0 and found < landlock.SCOPED:
        raise OSError(38, "without root it takes Landlock's signal scope (Linux 6.12): commands could end the run")
