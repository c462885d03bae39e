"""What becomes of browsers: they end with who started them, are replaced when they die, and are shared by turns."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from palaestra.tools.settings import ToolSettings
from palaestra.tools.tool import States
from palaestra_slots.core.errors import ToolUnavailable
from palaestra_toolsets.browser import chromium
from palaestra_toolsets.browser.shared_browser import SharedBrowser, new_home

from .conftest import Visiting, Visitor

OPENS_A_PAGE = """
import asyncio, sys
from palaestra_toolsets.browser.shared_browser import SharedBrowser
from palaestra.tools.settings import ToolSettings

async def main():
    shared = SharedBrowser()
    lease = await shared.lease(ToolSettings())
    await (await lease.context.new_page()).goto("data:text/html,<h1>here</h1>")
    print(lease.running.home.path, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


BROWSES_AT_EXIT = """
import sys, threading
from http.server import HTTPServer, SimpleHTTPRequestHandler
from palaestra import ToolSession, ToolSettings, handle_function_call, use_session

server = HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler)
threading.Thread(target=server.serve_forever, daemon=True).start()
host = f"127.0.0.1:{server.server_port}"
session = ToolSession(settings=ToolSettings(browser_allow=[host]))
use_session(session)
print(handle_function_call("browser_navigate", {"url": f"http://{host}/"}))
"""


def _alive(marks: set[str]) -> list[str]:
    """The command lines of living processes with one of these marks in environment or command line."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            words = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:
            continue
        if state not in "ZX" and any(mark.encode() in words for mark in marks):
            found.append(words[:200].decode(errors="replace"))
    return found


def _browser_pid(running_home: Path) -> int:
    """The process that Playwright's driver started: the one whose home this is and whose parent's it is not."""
    pids = [
        int(process.name)
        for process in Path("/proc").glob("[0-9]*")
        if (process / "cmdline").exists()
        and str(running_home).encode() in _read(process / "environ")
        and b"--type=" not in _read(process / "cmdline")
        and b"crashpad" not in _read(process / "cmdline")
    ]
    return min(pids)


async def _until_it_raises(visitor: Visitor) -> None:
    while True:
        await visitor.call("snapshot")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.slow
def test_nothing_stays_when_the_process_is_killed() -> None:
    if (reason := chromium.problem()) is not None:
        pytest.skip(reason)
    with subprocess.Popen([sys.executable, "-c", OPENS_A_PAGE], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        home = process.stdout.readline().strip()
        try:
            assert _alive({home})
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        while _alive({home}):  # the test's own time limit ends a wait that is in vain
            os.sched_yield()
    assert Path(home).exists()
    other = new_home()
    assert not Path(home).exists()  # the next one that starts cleans up
    again = new_home()
    assert other.path.exists()  # what is in use is left alone
    for each in (other, again):
        each.cleanup()
        assert not each.path.exists()


@pytest.mark.slow
def test_a_process_that_exits_closes_its_browser() -> None:
    if (reason := chromium.problem()) is not None:
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o711)
        environment = {**os.environ, "TMPDIR": folder}
        ended = subprocess.run(
            [sys.executable, "-c", BROWSES_AT_EXIT], cwd=folder, env=environment, capture_output=True, text=True
        )
        assert '"title"' in ended.stdout
        assert "could not be closed" not in ended.stderr
        assert list(Path(folder).glob("palaestra-browser-*")) == []


def test_contexts_are_limited_and_a_dead_browser_is_replaced(visiting: Visiting) -> None:
    async def visit(visitor: Visitor) -> None:
        own = States()
        alone = Visitor(visitor.site, own, browser_max_contexts=1)
        try:
            await alone.go("/")
            first = own.get(SharedBrowser)
            with pytest.raises(ToolUnavailable, match="raise browser_max_contexts"):
                await first.lease(ToolSettings(browser_wait_s=0.05))
            assert first.running is not None
            home = first.running.home.path
            os.kill(_browser_pid(home), signal.SIGKILL)
            with pytest.raises(ToolUnavailable, match="browser has died"):
                await _until_it_raises(alone)
            assert (await alone.go("/about"))["title"] == "About"
            assert first.running.home.path != home
            assert not home.exists()
        finally:
            await alone.tools.aclose()
            await own.aclose()

    visiting(visit)


def test_pages_close_with_the_rollout(visiting: Visiting) -> None:
    async def visit(visitor: Visitor) -> None:
        await visitor.go("/")
        browser = visitor.shared.get(SharedBrowser)
        assert browser.running is not None
        before = len(browser.running.browser.contexts)
        other = Visitor(visitor.site, visitor.shared)
        call = asyncio.ensure_future(other.call("navigate", url=f"{visitor.site.url}/silent"))
        await visitor.site.silent.wait()
        assert len(browser.running.browser.contexts) == before + 1
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await other.tools.aclose()
        assert len(browser.running.browser.contexts) == before

    visiting(visit)


def test_a_chromium_that_does_not_start_is_told_with_the_way_out(tmp_path: Path) -> None:
    broken = tmp_path / "chromium"
    broken.write_text("#!/bin/sh\necho no such library >&2\nexit 127\n")
    broken.chmod(0o755)
    assert "no such library" in (chromium.problem(str(broken)) or "")
    assert chromium.absent(str(broken)) is None  # what is installed is tried by who browses first
    assert "No such file" in (chromium.problem(str(tmp_path / "none")) or "")
    assert "apt-get install chromium" in (chromium.absent(str(tmp_path / "none")) or "")


def test_the_site_is_reached_from_nowhere_else_than_through_the_proxy(visiting: Visiting) -> None:
    """The proxy asks for its key: a program that finds its port gets nothing."""

    async def visit(visitor: Visitor) -> None:
        await visitor.go("/")
        running = visitor.shared.get(SharedBrowser).running
        assert running is not None
        proxy = running.proxy
        host, _, port = proxy.address.removeprefix("http://").partition(":")
        for key in ("", "Proxy-Authorization: Basic YnJvd3Nlcjp3cm9uZw==\r\n"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"GET {visitor.site.url}/ HTTP/1.1\r\nHost: x\r\n{key}\r\n".encode())
            assert (await reader.readline()).startswith(b"HTTP/1.1 407 ")
            writer.close()

    visiting(visit)
