"""Runs one program inside a slot and sends its output and its calls to the host. Standard library only.

    python3 -I -S supervisor.py FOLDER

This file is not imported: its text is written into the slot and run by the slot's own Python, 3.7 or newer. The
program is `FOLDER/program.py`. It reaches this process through an inherited socket pair, and this process reaches the
host through its standard input and output, so there is no address that other processes could connect to.

Frames to the host: a letter (`o` output, `c` a part of a request, `C` its last part, `e` the end), the length of the
payload, a newline, the payload. The host answers each frame but the last with a length, a newline and that many bytes.
The answer to `C` is the call's reply; the other answers are empty. The next frame is sent only after the answer, so a
program that prints waits until its output has been read.

Invariant: the program's output is sent before a request that follows it, and before the end.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import struct
import sys

FRAME_BYTES = 32768
"""The maximum length of a frame's payload in bytes."""


class Host:
    """The connection to the host: sends frames and reads answers."""

    def __init__(self) -> None:
        self._out = os.dup(1)
        self._in = os.fdopen(os.dup(0), "rb")
        # The program inherits 0, 1 and 2. If they still led to the host, it could write frames itself.
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(nothing, standard)

    def say(self, kind: bytes, payload: bytes) -> bytes:
        """Send one frame and return the host's answer."""
        self.tell(kind, payload)
        line = self._in.readline()
        if not line:
            raise SystemExit(1)  # the host is gone
        return self._in.read(int(line))

    def tell(self, kind: bytes, payload: bytes) -> None:
        """Send one frame."""
        data = kind + str(len(payload)).encode() + b"\n" + payload
        while data:
            data = data[os.write(self._out, data) :]


class ChildProgram:
    """The program as a child process, with its output and its requests."""

    def __init__(self, folder: str) -> None:
        self.requests, theirs = socket.socketpair()
        self.output, writer = os.pipe()
        self._woken, waker = os.pipe()
        for end in (self.output, self._woken, waker):
            os.set_blocking(end, False)
        # Only a signal with a handler of Python writes to the wake-up descriptor; by default, SIGCHLD is ignored.
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(waker)
        # A blocked signal stays blocked across exec, and whoever started this process may have blocked it.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        self.pid = os.fork()
        if self.pid == 0:
            self._become(folder, theirs, writer)
        theirs.close()
        os.close(writer)

    def _become(self, folder: str, channel: socket.socket, writer: int) -> None:
        # A signal before exec would otherwise wake the parent, which shares the pipe.
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for standard in (1, 2):
            os.dup2(writer, standard)
        channel.set_inheritable(True)
        # Unbuffered, so that output comes before the calls that follow it.
        environment = dict(os.environ, PALAESTRA_TOOLS_FD=str(channel.fileno()), PYTHONUNBUFFERED="1")
        os.execve(sys.executable, [sys.executable, os.path.join(folder, "program.py")], environment)  # noqa: S606

    def serve(self, host: Host) -> int:
        """Serve until the program has ended. Returns its exit status as a shell reports it."""
        asking = self.requests.fileno()
        sources = [self.output, asking, self._woken]
        while True:
            ready = select.select(sources, [], [])[0]
            if self._woken in ready:
                os.read(self._woken, 512)
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    # The pipe still holds what the program printed last.
                    self._print(host)
                    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
            if self.output in ready and not self._print(host):
                sources.remove(self.output)
            if asking in ready and not self._serve_request(host):
                sources.remove(asking)

    def _print(self, host: Host) -> bool:
        """Send the content of the pipe, in at most 64 frames. Returns False at the end of the output."""
        # More than a pipe holds. A process that the program has left behind may print without end, which must
        # delay neither the program's end nor its requests.
        for _ in range(64):
            try:
                data = os.read(self.output, FRAME_BYTES)
            except OSError as error:
                if error.errno == errno.EAGAIN:
                    return True
                raise
            if not data:
                return False
            host.say(b"o", data)
        return True

    def _serve_request(self, host: Host) -> bool:
        """Send one request to the host and its reply back. Returns False if the program has closed its end."""
        try:
            length = self._exactly(4)
            if length is None:
                return False
            left = struct.unpack("!I", length)[0]
            self._print(host)
            reply = b""
            while True:
                part = self._exactly(min(left, FRAME_BYTES))
                if part is None:
                    return False
                left -= len(part)
                reply = host.say(b"c" if left else b"C", part)
                if not left:
                    break
            self.requests.sendall(struct.pack("!I", len(reply)) + reply)
        except OSError:
            return False
        return True

    def _exactly(self, count: int) -> bytes | None:
        data = b""
        while len(data) < count:
            more = self.requests.recv(count - len(data))
            if not more:
                return None
            data += more
        return data


if __name__ == "__main__":
    HOST = Host()
    STATUS = ChildProgram(sys.argv[1]).serve(HOST)
    HOST.tell(b"e", str(STATUS).encode())
