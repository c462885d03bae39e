"""Plain HTTP for the tests of the E2B server: what the SDKs send, without the SDKs."""

from __future__ import annotations

import base64
import http.client
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from palaestra_slots.core.types import JSON

_HEAD = struct.Struct("!BI")


@dataclass(frozen=True)
class Answer:
    """One answer; `json` is its parsed body."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def envelope(message: JSON) -> bytes:
    data = json.dumps(message).encode()
    return _HEAD.pack(0, len(data)) + data


def messages(body: Any) -> Iterator[tuple[int, JSON]]:
    """Yield the flags and the content of the messages in a body or an open answer."""
    while head := body.read(_HEAD.size):
        flags, length = _HEAD.unpack(head)
        yield flags, json.loads(body.read(length))


@dataclass(frozen=True)
class Open:
    """An open connection with its answer, which holds the socket too."""

    connection: http.client.HTTPConnection
    answer: http.client.HTTPResponse

    def close(self) -> None:
        self.answer.close()
        self.connection.close()


class Api:
    """The server, for one API key."""

    def __init__(self, url: str, key: str) -> None:
        self.url, self.key = url, key
        self._opened: list[Open] = []

    def open(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
        """Send a request and return the open connection and answer."""
        place = urlsplit(self.url)
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
        connection.request(method, path, body=body, headers=dict(headers or {}))
        answer = connection.getresponse()
        opened = Open(connection, answer)
        self._opened.append(opened)
        return opened, answer

    def close(self) -> None:
        """Close what tests have left open."""
        for each in self._opened:
            each.close()
        self._opened.clear()

    def send(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Answer:
        connection, answer = self.open(method, path, body, headers)
        try:
            return Answer(answer.status, answer.headers, answer.read())
        finally:
            connection.close()

    def call(self, method: str, path: str, body: JSON = None, **headers: str) -> Answer:
        """Call the control API with this key."""
        data = None if body is None else json.dumps(body).encode()
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.send(method, path, data, {"X-API-Key": self.key, **given})

    def create(self, template: str = "base", **body: JSON) -> Box:
        answer = self.call("POST", "/v2/sandboxes", {"templateID": template, **body})
        assert answer.status == 201, answer.body
        return Box(self, answer.json)


class Box:
    """One sandbox. `token` is what its calls are sent with."""

    def __init__(self, api: Api, created: JSON) -> None:
        self.api, self.created = api, created
        self.id, self.token = created["sandboxID"], created["envdAccessToken"]

    @property
    def headers(self) -> dict[str, str]:
        return {"E2b-Sandbox-Id": self.id, "X-Access-Token": self.token}

    def rpc(self, method: str, message: JSON, **headers: str) -> Answer:
        """Make a unary call, such as `filesystem.Filesystem/Stat`."""
        given = {**self.headers, "Content-Type": "application/json", **headers}
        return self.api.send("POST", f"/{method}", json.dumps(message).encode(), given)

    def files(self, method: str, message: JSON, **headers: str) -> Answer:
        return self.rpc(f"filesystem.Filesystem/{method}", message, **headers)

    def stream(self, method: str, message: JSON, **headers: str) -> Any:
        """Open a stream; returns the connection and the open answer."""
        given = {**self.headers, "Content-Type": "application/connect+json", **headers}
        return self.api.open("POST", f"/{method}", envelope(message), given)

    def start(self, command: str, stdin: bool = False, **fields: JSON) -> Any:
        """Start a command; returns the connection and the iterator over its messages."""
        headers = fields.pop("headers", {})
        config = {"cmd": "/bin/bash", "args": ["-l", "-c", command], **fields.pop("config", {})}
        message = {"process": config, "stdin": stdin, **fields}
        connection, answer = self.stream("process.Process/Start", message, **headers)
        assert answer.status == 200, answer.read()
        return connection, messages(answer)

    def run(self, command: str, **fields: JSON) -> Ran:
        """Run a command to its end."""
        connection, found = self.start(command, **fields)
        ran = Ran()
        for flags, message in found:
            ran.take(flags, message)
        connection.close()
        return ran

    def read(self, path: str) -> Answer:
        return self.api.send("GET", f"/files?path={quote(path)}", None, self.headers)

    def write(self, path: str, data: bytes, **headers: str) -> Answer:
        given = {**self.headers, "Content-Type": "application/octet-stream", **headers}
        return self.api.send("POST", f"/files?path={quote(path)}", data, given)

    def kill(self) -> int:
        return self.api.call("DELETE", f"/sandboxes/{self.id}").status


class Ran:
    """What the messages of a command say."""

    def __init__(self) -> None:
        self.pid = 0
        self.out = self.err = self.pty = b""
        self.end: JSON = None
        self.error: JSON = None

    def take(self, flags: int, message: JSON) -> None:
        if flags & 2:
            self.error = message.get("error")
            return
        event = message["event"]
        self.pid = event.get("start", {}).get("pid", self.pid)
        data = {name: base64.b64decode(value) for name, value in event.get("data", {}).items()}
        self.out += data.get("stdout", b"")
        self.err += data.get("stderr", b"")
        self.pty += data.get("pty", b"")
        self.end = event.get("end", self.end)

    @property
    def code(self) -> int:
        return int(self.end["exitCode"])
