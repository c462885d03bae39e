"""Unpacks and starts the slot server in a container or on another machine, and connects it to standard input and
output.

The client sends this file as the argument of `python3 -I -S -c`, then the server's files over standard input: a line
with the size of a compressed tar archive, and the archive. From then on this process passes bytes between its standard
streams and the server's socket, and ends the server when either side ends. Runs on Python 3.9 and later with nothing
but the standard library; the server itself needs 3.11 or newer.
"""

from __future__ import annotations

import sys

try:
    import contextlib
    import fcntl
    import io
    import os
    import select
    import shutil
    import socket
    import subprocess
    import tarfile
    import tempfile
    import time
except ImportError as lacking:  # for example Debian's package python3-minimal
    sys.exit(
        f"{sys.executable} there lacks the module {lacking.name} of Python's standard library, which the slot server "
        "needs: install the package python3 there (python3-minimal is not enough), or use an image such as python:3.13"
    )

PIECE = 256 << 10
NEEDED = (3, 11)
PREFIX, LOCK = "palaestra-slotd-", ".lock"
STARTING_S = 60
"""The age from which on a folder without a locked lock belongs to a killed process, and not to one that starts."""


def receive(size: int) -> bytes:
    """Read exactly `size` bytes from standard input. Raises EOFError if the input ends first."""
    pieces = []
    while size:
        piece = os.read(0, min(size, PIECE))
        if not piece:
            raise EOFError("the stream ended before the slot server had arrived")
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def receive_line() -> bytes:
    """Read a line from standard input and return it without its line end."""
    line = b""
    while not line.endswith(b"\n"):
        line += receive(1)
    return line[:-1]


class Direction:
    """The bytes on their way from one descriptor to another."""

    def __init__(self, source: int, target: int) -> None:
        self.source, self.target = source, target
        self.waiting = bytearray()

    def read(self) -> bool:
        """Read what there is, and return whether more can come."""
        try:
            piece = os.read(self.source, PIECE)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.waiting.extend(piece)
        return bool(piece)

    def write(self) -> bool:
        """Write what fits, and return whether the target takes more."""
        try:
            del self.waiting[: os.write(self.target, self.waiting)]
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True


def relay(server: socket.socket, silence_s: float | None = None) -> None:
    """Forward bytes in both directions until one side ends, or nothing has come from the client for `silence_s`
    seconds."""
    to_server, to_client = Direction(0, server.fileno()), Direction(server.fileno(), 1)
    heard_at = time.monotonic()
    # A full pipe in one direction must not stop the other one.
    for fd in (0, 1, server.fileno()):
        os.set_blocking(fd, False)
    while True:
        sources = {each.source: each for each in (to_server, to_client) if len(each.waiting) < 4 * PIECE}
        targets = {each.target: each for each in (to_server, to_client) if each.waiting}
        readable, writable, _ = select.select(list(sources), list(targets), [], silence_s)
        if 0 in readable:
            heard_at = time.monotonic()
        elif silence_s is not None and time.monotonic() > heard_at + silence_s:
            return
        for fd in readable:
            if sources[fd].read():
                continue
            if sources[fd] is to_client:
                # The last frames may say why the server has ended, so they are written even if the client reads slowly.
                os.set_blocking(1, True)
                while to_client.waiting and to_client.write():
                    pass
            return
        for fd in writable:
            if not targets[fd].write():
                return


def remove_abandoned() -> None:
    """Remove the folders of processes that were killed. One that runs holds the lock in its folder."""
    for entry in os.scandir(tempfile.gettempdir()):
        if not entry.name.startswith(PREFIX) or not entry.is_dir(follow_symlinks=False):
            continue
        with contextlib.suppress(OSError):  # it is locked, belongs to somebody else, or has just gone
            fd = os.open(os.path.join(entry.path, LOCK), os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                about = os.fstat(fd)
                if about.st_uid == os.getuid() and time.time() - about.st_mtime > STARTING_S:
                    shutil.rmtree(entry.path, ignore_errors=True)
            finally:
                os.close(fd)


def main(rung: str, silence_s: float | None = None) -> int:
    """Receive the server's files, run the server at an isolation level, and remove the files. Returns the exit status.

    `silence_s` is for networks and platforms that keep a client's streams open after the client is gone.
    """
    if sys.version_info < NEEDED:
        here, needed = (".".join(map(str, version)) for version in (sys.version_info[:2], NEEDED))
        sys.stderr.write(f"python3 is {here} there, but the slot server needs {needed} or newer")
        return 1
    archive = receive(int(receive_line()))
    remove_abandoned()
    folder = tempfile.mkdtemp(prefix=PREFIX)
    lock = os.open(os.path.join(folder, LOCK), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: nobody removes the folder there
            fcntl.flock(lock, fcntl.LOCK_EX)
        os.chmod(folder, 0o755)  # noqa: S103 - users of slots run the init
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder)  # noqa: S202 - our own archive
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-I", "-S", folder + "/slotd", str(theirs.fileno()), rung]
        with theirs:
            server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={},
                cwd="/",
            )
        relay(ours, silence_s)
        ours.close()
        return server.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(float, sys.argv[2:])))
