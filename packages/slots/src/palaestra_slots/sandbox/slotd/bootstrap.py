"""Starts a server for the isolation levels with namespaces, and cleans up after its death.

There are two processes. The first, in a session of its own, makes a process namespace and starts the server as pid 1 of
that namespace, so that the kernel kills every process of every slot together with the server. The first process then
waits for the server's end and removes its control groups, if it has any. If the first process dies, the server is
killed with it, and the next start removes the groups.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from . import syscalls
from .exec import pipes
from .namespaced import cgroups, host, namespaces, privileges
from .namespaced.namespaced_rung import NamespaceDriver
from .protocol.frames import Fields, FrameKind, encode
from .rung import AnyDriver
from .server import SlotServer

_REMOVE_PATIENCE_S = 5.0
_FEWEST_FILES = 256  # with fewer descriptors, commands would fail and agents would score lower


def main(arguments: list[str]) -> int:
    """Run `slotd FD full|userns [HANDOVER]`: serve the client at the other end of the stream socket FD. A client that
    is also root gets descriptors of its slots over the socket HANDOVER."""
    stream = socket.socket(fileno=int(arguments[0]))
    handover = socket.socket(fileno=int(arguments[2])) if len(arguments) > 2 else None
    full = arguments[1] == "full"
    logging.basicConfig(stream=sys.stderr, format="slotd: %(message)s")
    group: cgroups.ServerCgroup | None = None
    try:
        require_files()
        group = _make_group() if full else None
        server = _fork_server(stream, full, group, handover)
    except OSError as error:
        if group is not None:
            group.remove()
        stream.sendall(encode(FrameKind.ERROR, 0, refusal(error)))
        return 1
    stream.close()
    if handover is not None:
        handover.close()
    os.waitpid(server, 0)
    deadline = time.monotonic() + _REMOVE_PATIENCE_S
    # A group can be removed only when the kernel has finished the last process in it.
    while group is not None and not group.remove() and time.monotonic() < deadline:
        time.sleep(0.01)
    return 0


def _make_group() -> cgroups.ServerCgroup:
    """Make and return the server's control groups. Removes the groups of dead servers first."""
    if not namespaces.is_real_root():
        raise PermissionError(1, "needs root")
    hierarchies = cgroups.find()
    if not hierarchies:
        raise OSError(38, "no control group hierarchy with memory and pids is mounted writable here")
    cgroups.sweep(hierarchies)
    group = cgroups.ServerCgroup(hierarchies, f"{os.getpid()}-{time.time_ns():x}")
    try:
        group.create()
    except OSError as error:
        group.remove()
        why = f"control groups cannot be made: {error.strerror}: {error.filename}"
        raise OSError(error.errno, f"{why}; make them writable here, or use the level userns") from None
    return group


def _fork_server(
    stream: socket.socket, full: bool, group: cgroups.ServerCgroup | None, handover: socket.socket | None
) -> int:
    """Fork the server and return its pid. Never returns in the server."""
    if not privileges.supported():
        raise OSError(38, f"no system call filter is known for {syscalls.MACHINE}")
    if not full and not namespaces.is_real_root():
        namespaces.enter_single_namespace(os.getuid(), os.getgid())
    syscalls.unshare(syscalls.CLONE_NEWPID)
    watcher_reader, watcher_writer = os.pipe()

    def prepare() -> None:
        pipes.nothing()
        host.enter_own_root()

    child = os.fork()
    if child == 0:
        # The server ends when this pipe ends, so only the first process may hold its writing end.
        os.close(watcher_writer)
        run_server(stream, prepare, lambda settings: NamespaceDriver(full, group, settings), watcher_reader, handover)
    os.close(watcher_reader)
    return child


def require_files() -> None:
    """Raise OSError if this process may not open as many files as slots need."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < _FEWEST_FILES:
        few = f"only {hard} files may be open here, but slots need {_FEWEST_FILES}"
        raise OSError(errno.EMFILE, f"{few}; raise the limit (ulimit -Hn)")


def make_ready() -> None:
    """Protect the server from accidental termination, and remove the host's paths from its command line."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    syscalls.overwrite_command_line("slotd")
    syscalls.set_name("slotd")
    os.umask(0o022)  # files in slots get the modes that are requested
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard), hard))
    # Jobs walk a tree of layers by recursion, up to `MAX_DEPTH` directories deep and with several frames for each.
    sys.setrecursionlimit(10_000)


def run_server(
    stream: socket.socket,
    prepare: Callable[[], None],
    open_driver: Callable[[Fields], AnyDriver],
    watcher: int,
    handover: socket.socket | None = None,
) -> NoReturn:
    """Run the server, in the child of a fork, until the client or the watching process is gone. An OSError before the
    start is sent to the client as a refusal. Any other error is logged, and the client reads the log when the server
    has ended."""
    status, started = 1, False
    try:
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        make_ready()
        prepare()
        server = SlotServer(stream, open_driver, handover)
        server.loop.watch(watcher, lambda: setattr(server.loop, "running", False))
        # Forks of this process share its current objects as long as no process writes to them.
        gc.collect()
        gc.freeze()
        started = True
        server.loop.run()
        status = 0
    except Exception as error:
        if started or not isinstance(error, OSError):
            logging.exception("the slot server has failed")  # the client reads the log when the server has ended
        else:
            stream.sendall(encode(FrameKind.ERROR, 0, refusal(error)))
    finally:
        logging.shutdown()
        os._exit(status)


def refusal(error: OSError) -> Fields:
    """Return the fields of the ERROR frame for a server that cannot be started."""
    return {"error": "isolation", "message": error.strerror or str(error)}
