"""A server in the sandbox, opened on this machine from the chat."""

from __future__ import annotations

import socket
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from chat.test_terminal import asked, echo_server, finish, seen, terminal, terminal_call

pytestmark = [pytest.mark.slow, pytest.mark.slots]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def page(port: int) -> str:
    """Return what the server answers once it is up, or nothing if the connection is closed."""
    until = time.monotonic() + 20
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/index.html", timeout=10) as answer:
                return str(answer.read().decode())
        except (urllib.error.URLError, OSError):
            if time.monotonic() > until:
                return ""
            time.sleep(0.1)


def test_a_server_of_the_agent_is_reached_until_its_port_is_closed(tmp_path: Path) -> None:
    work, here = tmp_path / "work", free_port()
    work.mkdir()
    (work / "index.html").write_text("the page")
    with (
        echo_server() as server,
        terminal(work, server.url, "--workdir", str(work), "--write", "no", home=tmp_path) as child,
    ):
        seen(child, "auto · echo")
        child.send(f"{terminal_call('python3 -m http.server 8000', background=True)}\r")
        asked(server, 2)
        child.send(f"/port 8000:{here}\r")
        seen(child, f"http://127.0.0.1:{here}")
        assert page(here) == "the page"
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            child.send(f"/port 8000:{taken.getsockname()[1]}\r")
            seen(child, "cannot be opened")
        child.send(f"/port close {here}\r")
        seen(child, "no port of the sandbox is open")
        with pytest.raises(OSError), socket.create_connection(("127.0.0.1", here), 5):
            pass
        finish(child)
