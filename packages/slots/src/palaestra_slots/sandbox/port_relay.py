"""Listens on the loopback of a slot and sends incoming data to the host. It uses only the standard library.

    python3 -I -S -c TEXT

This file is not imported: its text runs on the slot's own Python, 3.7 or newer. The relay reaches the host through its
standard input and output, so a slot without a network can use it. `port_forward.py` is the host's end.

A frame, in either direction, consists of a kind, the number of a connection, a length (`!cII`), and the payload. The
kinds are: `p`, the port of the listening socket (in place of a connection's number), sent once; `o`, a connection was
accepted; `d`, data; `c`, one side is closed; `a`, the host has read `length` bytes (no payload). While WINDOW bytes or
more are on their way to the host, nothing more is sent, because the slot keeps only the end of a process's output.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct

HEAD = struct.Struct("!cII")
WINDOW = 128 << 10
PIECE = 16 << 10


class Relay:
    """All connections of one listening socket."""

    def __init__(self) -> None:
        # What Python itself prints, such as a traceback, must not get between the frames.
        self.out, self.entered = os.dup(1), os.dup(0)
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(nothing, standard)
        self.select = selectors.DefaultSelector()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.connections: dict[int, socket.socket] = {}
        self.unsent: dict[int, bytearray] = {}
        self.closing: set[int] = set()
        self.last = self.on_the_way = 0
        self.buffer = bytearray()

    def run(self) -> None:
        self.send(b"p", self.listener.getsockname()[1], b"")
        self.select.register(self.listener, selectors.EVENT_READ, -1)
        self.select.register(self.entered, selectors.EVENT_READ, -2)
        while True:
            for key, events in self.select.select():
                if key.data == -1:
                    self.accept()
                elif key.data == -2:
                    data = os.read(self.entered, 1 << 16)
                    if not data:
                        return
                    self.take(data)
                # An earlier event of the same round may have closed the connection.
                elif key.data in self.connections:
                    if events & selectors.EVENT_WRITE:
                        self.flush(key.data)
                    if events & selectors.EVENT_READ and key.data in self.connections:
                        self.read(key.data)

    def send(self, kind: bytes, number: int, payload: bytes) -> None:
        data = HEAD.pack(kind, number, len(payload)) + payload
        while data:
            data = data[os.write(self.out, data) :]

    def accept(self) -> None:
        connection, _ = self.listener.accept()
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.last += 1
        self.connections[self.last], self.unsent[self.last] = connection, bytearray()
        self.select.register(connection, selectors.EVENT_READ, self.last)
        self.send(b"o", self.last, b"")

    def watch(self, number: int) -> None:
        wanted = selectors.EVENT_WRITE if self.unsent[number] else 0
        if self.on_the_way < WINDOW and number not in self.closing:
            wanted |= selectors.EVENT_READ
        connection = self.connections[number]
        known = connection.fileno() in self.select.get_map()
        if not wanted:
            if known:
                self.select.unregister(connection)
        elif known:
            self.select.modify(connection, wanted, number)
        else:
            self.select.register(connection, wanted, number)

    def read(self, number: int) -> None:
        # The host is behind: wait for no connection's data until it has read.
        if self.on_the_way >= WINDOW:
            for each in list(self.connections):
                self.watch(each)
            return
        try:
            data = self.connections[number].recv(PIECE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.send(b"c", number, b"")
            self.close(number)
            return
        self.on_the_way += len(data)
        self.send(b"d", number, data)

    def take(self, data: bytes) -> None:
        self.buffer += data
        while len(self.buffer) >= HEAD.size:
            kind, number, length = HEAD.unpack_from(self.buffer)
            size = HEAD.size + (0 if kind == b"a" else length)
            if len(self.buffer) < size:
                return
            payload = bytes(self.buffer[HEAD.size : size])
            del self.buffer[:size]
            if kind == b"a":
                # The host has read some of what was sent, so connections that had to wait are read again.
                full, self.on_the_way = self.on_the_way >= WINDOW, self.on_the_way - length
                for each in list(self.connections) if full else ():
                    self.watch(each)
            elif number in self.connections:
                if kind == b"c":
                    self.closing.add(number)
                else:
                    self.unsent[number] += payload
                self.flush(number)

    def flush(self, number: int) -> None:
        unsent = self.unsent[number]
        try:
            while unsent:
                del unsent[: self.connections[number].send(unsent[: 1 << 16])]
        except BlockingIOError:
            pass
        except OSError:
            self.send(b"c", number, b"")
            self.close(number)
            return
        if not unsent and number in self.closing:
            self.close(number)
            return
        self.watch(number)

    def close(self, number: int) -> None:
        connection = self.connections.pop(number)
        if connection.fileno() in self.select.get_map():
            self.select.unregister(connection)
        connection.close()
        del self.unsent[number]
        self.closing.discard(number)


if __name__ == "__main__":
    Relay().run()
