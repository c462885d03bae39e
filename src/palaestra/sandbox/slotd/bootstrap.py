"""How the server comes to life, and what is left to do when it dies.

Two processes. The first, in a session of its own, makes a process namespace and starts the server as its pid 1, so that
the kernel kills every process of every slot when the server dies, whoever killed it. Then the first waits for that and
removes the control groups. If the first dies, the server is killed with it, and the next start removes the groups.
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

from . import syscalls
from .exec import pipes
from .namespaced import cgroups, host, namespaces, privileges
from .namespaced.namespaced_rung import Layered
from .protocol.frames import Fields, Kind, encode
from .rung import Workshop
from .server import Server

_REMOVE_PATIENCE_S = 5.0
_FEWEST_FILES = 256
"""With fewer, commands would fail for want of descriptors, and be scored for it."""


def main(arguments: list[str]) -> int:
    """`slotd FD full|userns [HANDS]`: serve the client at the other end of the stream socket FD.

    A client that is root as well gets the roots of its slots over the socket HANDS (`handing.py`).
    """
    stream = socket.socket(fileno=int(arguments[0]))
    hands = socket.socket(fileno=int(arguments[2])) if len(arguments) > 2 else None
    full = arguments[1] == "full"
    logging.basicConfig(stream=sys.stderr, format="slotd: %(message)s")
    group: cgroups.ServerGroup | None = None
    try:
        require_files()
        group = _make_group() if full else None
        server = _fork_server(stream, full, group, hands)
    except OSError as error:
        if group is not None:
            group.remove()
        stream.sendall(encode(Kind.ERROR, 0, refusal(error)))
        return 1
    stream.close()
    if hands is not None:
        hands.close()
    os.waitpid(server, 0)
    deadline = time.monotonic() + _REMOVE_PATIENCE_S
    while group is not None and not group.remove() and time.monotonic() < deadline:
        time.sleep(0.01)
    return 0


def _make_group() -> cgroups.ServerGroup:
    """The server's control groups. What other servers have left is removed on the way."""
    if not namespaces.is_real_root():
        raise PermissionError(1, "needs root")
    hierarchies = cgroups.find()
    if not hierarchies:
        raise OSError(38, "no control group hierarchy with memory and pids is mounted writable here")
    cgroups.sweep(hierarchies)
    group = cgroups.ServerGroup(hierarchies, f"{os.getpid()}-{time.time_ns():x}")
    try:
        group.create()
    except OSError as error:
        group.remove()
        why = f"control groups cannot be made: {error.strerror}: {error.filename}"
        raise OSError(error.errno, f"{why}; make them writable here, or use the rung userns") from None
    return group


def _fork_server(
    stream: socket.socket, full: bool, group: cgroups.ServerGroup | None, hands: socket.socket | None
) -> int:
    """The server's pid. In the server itself this never returns."""
    if not privileges.supported():
        raise OSError(38, f"no system call filter is known for {syscalls.MACHINE}")
    if not full and not namespaces.is_real_root():
        namespaces.enter_single_namespace(os.getuid(), os.getgid())
    syscalls.unshare(syscalls.CLONE_NEWPID)
    watcher_reader, watcher_writer = os.pipe()
    child = os.fork()
    if child:
        os.close(watcher_reader)
        return child
    os.close(watcher_writer)
    status = 1
    try:
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        make_ready()
        pipes.nothing()
        host.enter_own_root()
        serve(stream, lambda settings: Layered(full, group, settings), watcher_reader, hands)
        status = 0
    except OSError as error:
        stream.setblocking(True)
        stream.sendall(encode(Kind.ERROR, 0, refusal(error)))
    except Exception:
        logging.exception("the slot server has failed")  # the client shows it as the server's last words
    finally:
        logging.shutdown()
        os._exit(status)


def require_files() -> None:
    """Raise OSError where this process may not open as many files as slots take."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < _FEWEST_FILES:
        few = f"only {hard} files may be open here, and slots take {_FEWEST_FILES}"
        raise OSError(errno.EMFILE, f"{few}; raise the limit (ulimit -Hn)")


def make_ready() -> None:
    """What every server does first: it does not end by accident, and shows nothing of the host in its name."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    syscalls.overwrite_command_line("slotd")
    syscalls.set_name("slotd")
    os.umask(0o022)  # what slots are given has the modes that it is given, whoever started the server
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard), hard))
    sys.setrecursionlimit(10_000)


def serve(
    stream: socket.socket,
    open_workshop: Callable[[Fields], Workshop],
    watcher: int,
    hands: socket.socket | None = None,
) -> None:
    """The life of the server, until the client or the watching process is gone."""
    server = Server(stream, open_workshop, hands)
    server.loop.watch(watcher, lambda: setattr(server.loop, "running", False))
    # What is here now stays: the forks for slots share it for as long as nobody touches it.
    gc.collect()
    gc.freeze()
    server.loop.run()


def refusal(error: OSError) -> Fields:
    return {"error": "isolation", "message": error.strerror or str(error)}
