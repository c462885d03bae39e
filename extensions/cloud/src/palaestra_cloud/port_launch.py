"""Waits behind a network port for the slot server's files, and becomes `port_server` when they have arrived.

The platform runs this file as the argument of `python3 -I -S -c`, with the address, the port and the number of slots as
further arguments and a secret in PALAESTRA_TOKEN. A client that has the secret sends the files with `PUT /server`.
Until then, a request without the secret gets the answer 401, and any other request 503. Runs on Python 3.9 and later
with nothing but the standard library; the server itself needs 3.11 or newer.
"""

from __future__ import annotations

import sys

try:
    import hmac
    import io
    import os
    import select
    import shutil
    import signal
    import socket
    import tarfile
    import tempfile
    import threading
    import time
    import zlib
    from collections.abc import Callable
    from typing import NoReturn
except ImportError as lacking:  # for example Debian's package python3-minimal
    sys.exit(
        f"{sys.executable} there lacks the module {lacking.name} of Python's standard library, which the slot server "
        "needs: install the package python3 there (python3-minimal is not enough), or use an image such as python:3.13"
    )

NEEDED = (3, 11)
PREFIX = "palaestra-port-"
HEAD_S, BODY_S = 10.0, 60.0
"""Seconds that a request's head, and then its body, may take in total."""
MAX_HEAD, MAX_BODY, MAX_CONNECTIONS = 64 << 10, 64 << 20, 64


class DeadlineConnection:
    """A connection that ends at a deadline, however slowly its other side sends."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self.allow(HEAD_S)

    def allow(self, seconds: float) -> None:
        """Set the deadline to this many seconds from now."""
        self._ends_at = time.monotonic() + seconds

    def receive(self, most: int) -> bytes:
        """Return from 1 to `most` bytes, or none at the end of the stream. Raises OSError at the deadline."""
        self._stream.settimeout(max(0.001, self._ends_at - time.monotonic()))
        return self._stream.recv(most)

    def reply(self, status: str, text: str) -> None:
        """Answer, and wait until the other side has closed the connection: a reset would discard the answer."""
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n"
        self._stream.sendall(f"{head}Connection: close\r\n\r\n{text}".encode())
        self._stream.shutdown(socket.SHUT_WR)
        while self.receive(MAX_HEAD):
            pass


def receive_head(connection: DeadlineConnection) -> tuple[str, dict[str, str], bytes]:
    """Return the first line, the headers, and the part of the body that has arrived. Raises ValueError for an invalid
    request."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.receive(MAX_HEAD)
        if not piece or len(data) > MAX_HEAD:
            raise ValueError("not a request")
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return first, headers, body


def receive_body(connection: DeadlineConnection, headers: dict[str, str], begun: bytes) -> bytes:
    """Return the whole body. Raises ValueError if the body is too large or incomplete."""
    size = int(headers.get("content-length", "0"))
    if not 0 <= size <= MAX_BODY:
        raise ValueError("too large")
    body = bytearray(begun)
    while len(body) < size:
        piece = connection.receive(size - len(body))
        if not piece:
            raise ValueError("the request ended early")
        body += piece
    return bytes(body)


def unpack(archive: bytes) -> str:
    """Unpack the files into a new folder and return the folder's path. Removes folders of servers that were killed."""
    for name in os.listdir(tempfile.gettempdir()):
        pid = name[len(PREFIX) :].split("-")[0]
        if name.startswith(PREFIX) and not os.path.exists("/proc/" + pid):
            shutil.rmtree(os.path.join(tempfile.gettempdir(), name), ignore_errors=True)
    folder = tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-")  # the server will have this process's number
    os.chmod(folder, 0o755)  # noqa: S103 - users of slots run the init
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder)  # noqa: S202 - our own archive
    return folder


def answer(connection: DeadlineConnection, token: str, arrived: Callable[[str], None]) -> None:
    """Answer one request. If the request delivers the files, `arrived` gets their folder before the answer is sent."""
    first, headers, begun = receive_head(connection)
    status, text = "503 Service Unavailable", '{"status": "waiting"}'
    if not hmac.compare_digest(headers.get("authorization", "").encode(), b"Bearer " + token.encode()):
        status, text = "401 Unauthorized", '{"error": "the token is missing or wrong"}'
    elif first.startswith("PUT /server "):
        connection.allow(BODY_S)
        arrived(unpack(receive_body(connection, headers, begun)))
        status, text = "200 OK", '{"status": "ok"}'
    connection.reply(status, text)


def serve(listener: socket.socket, token: str) -> str:
    """Answer requests, each in its own thread, until one of them has delivered the files; returns the folder of the
    files.

    Requests that come after the files wait in the listener for the server.
    """
    found: list[tuple[str, threading.Thread]] = []
    ready, tell = os.pipe()
    free = threading.BoundedSemaphore(MAX_CONNECTIONS)

    def arrived(folder: str) -> None:
        found.append((folder, threading.current_thread()))
        os.write(tell, b"x")

    def answer_stream(stream: socket.socket) -> None:
        try:
            with stream:
                answer(DeadlineConnection(stream), token, arrived)
        except (OSError, ValueError, EOFError, tarfile.TarError, zlib.error) as error:
            sys.stderr.write(f"a request failed: {error}\n")
        finally:
            free.release()

    while ready not in select.select([listener.fileno(), ready], [], [])[0]:
        stream, _ = listener.accept()
        if free.acquire(blocking=False):
            threading.Thread(target=answer_stream, args=(stream,), daemon=True).start()
        else:
            stream.close()
    folder, bringer = found[0]
    bringer.join()
    return folder


def main(host: str, port: str, slots: str) -> NoReturn:
    """Listen until the files have arrived, and then replace this process by the server."""
    if sys.version_info < NEEDED:
        here, needed = (".".join(map(str, version)) for version in (sys.version_info[:2], NEEDED))
        sys.exit(f"python3 is {here} there, but the slot server needs {needed} or newer")
    # for the first process of a container, SIGTERM has no default action
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    token = os.environ["PALAESTRA_TOKEN"]
    listener = socket.create_server((host, int(port)), backlog=128)
    folder = serve(listener, token)
    reader, writer = os.pipe()  # for the token, because other processes of the user can read the environment
    os.write(writer, token.encode())
    os.close(writer)
    for fd in (listener.fileno(), reader):
        os.set_inheritable(fd, True)
    program = folder + "/palaestra/cloud/port_server.py"
    command = [sys.executable, "-I", "-S", program, folder, str(listener.fileno()), str(reader), slots]
    os.chdir("/")
    os.execve(sys.executable, command, {})  # noqa: S606


if __name__ == "__main__":
    main(*sys.argv[1:4])
