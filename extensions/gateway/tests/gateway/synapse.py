"""A real Synapse on the loopback, in an environment of its own (`scripts/synapse_env`), for the tests of Matrix."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[4]
PYTHON = Path(os.environ.get("SYNAPSE_PYTHON", _ROOT / ".venv-synapse" / "bin" / "python"))


def needed() -> None:
    """Skip a test where Synapse is not installed."""
    if not PYTHON.exists():
        pytest.skip("Synapse is not installed: scripts/synapse_env")


@contextmanager
def synapse(folder: Path, *extra: str) -> Iterator[str]:
    """A homeserver named `test`; yields its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    limits = "{per_second: 1000, burst_count: 1000}"
    (folder / "homeserver.yaml").write_text(
        f"""
server_name: test
pid_file: {folder}/pid
listeners: [{{port: {port}, type: http, bind_addresses: [127.0.0.1], resources: [{{names: [client, media]}}]}}]
database: {{name: sqlite3, args: {{database: {folder}/db.sqlite}}}}
media_store_path: {folder}/media
signing_key_path: {folder}/signing.key
log_config: {folder}/log.yaml
trusted_key_servers: []
report_stats: false
enable_registration: true
enable_registration_without_verification: true
macaroon_secret_key: test
form_secret: test
rc_message: {limits}
rc_registration: {limits}
rc_joins: {{local: {limits}}}
rc_invites: {{per_room: {limits}, per_user: {limits}, per_issuer: {limits}}}
rc_login: {{address: {limits}, account: {limits}, failed_attempts: {limits}}}
rc_room_creation: {limits}
"""
    )
    (folder / "log.yaml").write_text(
        f"version: 1\nhandlers: {{f: {{class: logging.FileHandler, filename: {folder}/log}}}}\n"
        "root: {level: WARNING, handlers: [f]}\ndisable_existing_loggers: false\n"
    )
    command = [str(PYTHON), "-m", "synapse.app.homeserver", "-c", str(folder / "homeserver.yaml")]
    subprocess.run([*command, "--generate-keys"], check=True, capture_output=True)
    with (folder / "out").open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as server:
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(url, server, folder)
            yield url
        finally:
            server.terminate()


def _wait(url: str, server: subprocess.Popen[bytes], folder: Path) -> None:
    for _ in range(600):
        try:
            urllib.request.urlopen(f"{url}/_matrix/client/versions", timeout=5).close()
        except OSError:
            if server.poll() is not None:
                pytest.fail(f"Synapse ended: {(folder / 'out').read_text()[-2000:]}")
            time.sleep(0.1)
        else:
            return
    pytest.fail("Synapse does not start")


class Account:
    """A person or a bot of the homeserver."""

    def __init__(self, url: str, name: str) -> None:
        self.url = url
        self._number = 0
        self.token = ""
        auth = {"type": "m.login.dummy"}
        body = {"username": name, "password": "a long password", "auth": auth}
        made = self.call("POST", "/register", body)
        self.user_id, self.token = made["user_id"], made["access_token"]

    def call(self, method: str, path: str, body: Any = None, *, media: bytes | None = None) -> Any:
        data = media if media is not None else None if body is None else json.dumps(body).encode()
        base = "" if path.startswith("/_matrix") else "/_matrix/client/v3"
        request = urllib.request.Request(f"{self.url}{base}{path}", data, method=method)
        if self.token:
            request.add_header("Authorization", f"Bearer {self.token}")
        request.add_header("Content-Type", "application/octet-stream" if media is not None else "application/json")
        with urllib.request.urlopen(request, timeout=60) as reply:
            content = reply.read()
        return json.loads(content) if reply.headers["Content-Type"].startswith("application/json") else content

    def make_room(self, *invited: str, encrypted: bool = False) -> str:
        state = [{"type": "m.room.encryption", "content": {"algorithm": "m.megolm.v1.aes-sha2"}}] if encrypted else []
        body = {"invite": list(invited), "preset": "trusted_private_chat", "is_direct": True, "initial_state": state}
        return str(self.call("POST", "/createRoom", body)["room_id"])

    def send(self, room: str, content: Any, kind: str = "m.room.message") -> str:
        self._number += 1
        path = f"/rooms/{room}/send/{kind}/t{self._number}"
        return str(self.call("PUT", path, content)["event_id"])

    def say(self, room: str, text: str, **more: Any) -> str:
        return self.send(room, {"msgtype": "m.text", "body": text, **more})

    def upload(self, name: str, data: bytes) -> str:
        return str(self.call("POST", f"/_matrix/media/v3/upload?filename={name}", media=data)["content_uri"])

    def download(self, uri: str) -> bytes:
        path = uri.removeprefix("mxc://")
        content: bytes = self.call("GET", f"/_matrix/client/v1/media/download/{path}")
        return content

    def messages(self, room: str, sender: str) -> list[Any]:
        """The contents of a sender's messages in a room, in order, edited ones as they are now."""
        events: list[Any] = []
        start = ""
        while True:
            page = self.call("GET", f"/rooms/{room}/messages?dir=f&limit=500{start}")
            events += page["chunk"]
            if "end" not in page:
                break
            start = f"&from={page['end']}"
        found: dict[str, Any] = {}
        for event in events:
            if event["sender"] == sender and event["type"] == "m.room.message":
                content = event["content"]
                relation = content.get("m.relates_to", {})
                if relation.get("rel_type") == "m.replace":
                    found[relation["event_id"]] = content["m.new_content"]
                else:
                    found[event["event_id"]] = content
        return list(found.values())

    def wait_for_messages(self, room: str, sender: str, count: int, patience_s: float = 60.0) -> list[Any]:
        end = time.monotonic() + patience_s
        while time.monotonic() < end:
            found = self.messages(room, sender)
            if len(found) >= count:
                return found
            time.sleep(0.1)
        pytest.fail(f"{len(found)} of {count} messages came")

    def wait_for_member(self, room: str, user_id: str) -> None:
        for _ in range(200):
            if user_id in self.call("GET", f"/rooms/{room}/joined_members")["joined"]:
                return
            time.sleep(0.05)
        pytest.fail(f"{user_id} did not join")
