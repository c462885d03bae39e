"""Slots with a list of hosts: what is on it is reached, through the proxy, and nothing else is by any way."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import os
import resource
import signal
import threading
from collections.abc import Iterator

import pytest

from palaestra_slots.core.errors import ConfigError, IsolationUnavailable
from palaestra_slots.core.types import AllowList
from palaestra_slots.sandbox.backends.local import LocalBackend
from palaestra_slots.sandbox.slot import Rung, Slot, SlotSpec
from sandbox.processes import descendants

pytestmark = pytest.mark.slots

_FETCH = """
import sys, urllib.error, urllib.request
try:
    with urllib.request.urlopen(sys.argv[1], data=sys.argv[2].encode() or None, timeout=20) as answer:
        print(answer.status, answer.read().decode())
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
"""


class _Echo(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = f"{self.path} {self.headers['Host']} {self.rfile.read(size).decode()}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *arguments: object) -> None:  # it is quiet
        pass


@pytest.fixture
def port() -> Iterator[int]:
    """A web server on this host's loopback."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Echo)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


@contextlib.asynccontextmanager
async def _slot(rung: Rung, *hosts: str):  # type: ignore[no-untyped-def]
    backend = LocalBackend(rung=rung)
    try:
        await backend.start()
    except IsolationUnavailable as error:
        pytest.skip(str(error))
    async with backend:
        spec = SlotSpec(network=AllowList(hosts))
        if os.geteuid() != 0 and rung is Rung.USERNS:
            with pytest.raises(IsolationUnavailable, match="needs root"):
                await backend.create(spec, "test")
            pytest.skip("a list of hosts needs root")
        yield backend, await backend.create(spec, "test")


async def _fetch(slot: Slot, url: str, data: str = "") -> str:
    result = await slot.execute(["python3", "-c", _FETCH, url, data], timeout_s=40)
    return result.output


@pytest.fixture(params=[Rung.FULL, Rung.USERNS], ids=lambda rung: str(rung.label))
def rung(request: pytest.FixtureRequest) -> Rung:
    return request.param  # type: ignore[no-any-return]


async def test_what_is_listed_is_reached_and_what_is_not_is_refused(rung: Rung, port: int) -> None:
    async with _slot(rung, f"127.0.0.1:{port}", "localhost:*") as (_, slot):
        listed = f"http://127.0.0.1:{port}"
        # A slot's own loopback is its own; only a request to the proxy can mean the host's.
        env = {"no_proxy": "", "NO_PROXY": ""}
        result = await slot.execute(["python3", "-c", _FETCH, f"{listed}/a?b=c", "body"], env=env, timeout_s=40)
        assert result.output == f"200 /a?b=c 127.0.0.1:{port} body\n"
        result = await slot.execute(["python3", "-c", _FETCH, f"http://localhost:{port}/", ""], env=env)
        assert result.output.startswith("200 / localhost")
        for url in ("http://127.0.0.1:1/", "http://example.org/", "http://127.0.0.2/"):
            result = await slot.execute(["python3", "-c", _FETCH, url, ""], env=env)
            assert result.output.startswith("403 "), result.output
            assert "list of hosts" in result.output


async def test_a_tunnel_leads_to_what_is_listed_only(rung: Rung, port: int) -> None:
    script = (
        "exec 3<>/dev/tcp/127.0.0.1/3128; printf 'CONNECT %s HTTP/1.1\\r\\n\\r\\n' \"$0\" >&3; read -r line <&3; "
        "read -r empty <&3; echo \"$line\"; printf 'GET /t HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3"
    )
    async with _slot(rung, f"127.0.0.1:{port}") as (_, slot):
        result = await slot.execute(["bash", "-c", script, f"127.0.0.1:{port}"])
        assert result.output.startswith("HTTP/1.1 200 Connection established")
        assert "/t None" in result.output
        for target in (f"localhost:{port}", "169.254.169.254:80", "127.0.0.1:22"):
            assert "403 Forbidden" in (await slot.execute(["bash", "-c", script, target])).output
        for junk in ("GET / HTTP/1.1", "CONNECT x HTTP/1.1", "\\x00\\xff"):
            raw = f"exec 3<>/dev/tcp/127.0.0.1/3128; printf '{junk}\\r\\n\\r\\n' >&3; head -1 <&3"
            assert "400 Bad Request" in (await slot.execute(raw)).output


async def test_metadata_addresses_are_refused_even_when_listed(rung: Rung) -> None:
    hosts = ("*:*", "0.0.0.0/0:*", "[::/0]:*", "169.254.169.254", "metadata.google.internal")
    refused = (
        "http://169.254.169.254/latest/meta-data/", "http://169.254.170.2/", "http://metadata.google.internal/",
        "http://[fd00:ec2::254]/", "http://[::ffff:169.254.169.254]/", "http://[64:ff9b::a9fe:a9fe]/",
        "http://0xa9fea9fe/", "http://2852039166/",
    )  # fmt: skip
    async with _slot(rung, *hosts) as (_, slot):
        for url in refused:
            answer = await _fetch(slot, url)
            assert answer.startswith("403 "), (url, answer)
        assert (await _fetch(slot, "http://127.1/")).startswith("200 ") is False


async def test_there_is_no_other_way_out(rung: Rung, port: int) -> None:
    async with _slot(rung, f"127.0.0.1:{port}") as (_, slot):
        probe = f"(exec 3<>/dev/tcp/127.0.0.1/{port}) 2>&1; (exec 3<>/dev/tcp/1.1.1.1/53) 2>&1; cat /proc/net/dev"
        output = (await slot.execute(probe)).output
        assert "Connection refused" in output
        assert "unreachable" in output
        assert [line.split(":")[0].strip() for line in output.splitlines() if ":" in line and "|" not in line][
            -1
        ] == "lo"


async def test_the_way_out_survives_the_proxy_and_ends_with_the_slot(rung: Rung, port: int) -> None:
    env = {"no_proxy": "", "NO_PROXY": ""}
    async with _slot(rung, f"127.0.0.1:{port}") as (backend, slot):
        fetch = ["python3", "-c", _FETCH, f"http://127.0.0.1:{port}/again", ""]
        assert (await slot.execute(fetch, env=env, timeout_s=30)).output.startswith("200 /again")
        [proxy] = [p for p in descendants(backend.server_pid) if p.name == "slot-proxy"]
        if rung is Rung.FULL:
            assert os.stat(f"/proc/{proxy.pid}").st_uid == 65534
        os.kill(proxy.pid, signal.SIGKILL)
        assert (await slot.execute(fetch, env=env, timeout_s=30)).output.startswith("200 /again")
        other = await backend.create(SlotSpec(), "no network")
        assert "refused" in (await other.execute("(exec 3<>/dev/tcp/127.0.0.1/3128) 2>&1")).output
        await backend.destroy(slot)


@pytest.mark.parametrize("count", [2_000, 2_500, 10_000])
async def test_a_list_of_hosts_may_have_any_length(rung: Rung, port: int, count: int) -> None:
    env = {"no_proxy": "", "NO_PROXY": ""}
    others = [f"host-{number}.example.org:443" for number in range(count)]
    async with _slot(rung, *others, f"127.0.0.1:{port}") as (backend, slot):
        fetch = ["python3", "-c", _FETCH, f"http://127.0.0.1:{port}/long", ""]
        assert (await slot.execute(fetch, env=env, timeout_s=30)).output.startswith("200 /long")
        [proxy] = [p for p in descendants(backend.server_pid) if p.name == "slot-proxy"]
        os.kill(proxy.pid, signal.SIGKILL)  # the next one gets the whole list too
        assert (await slot.execute(fetch, env=env, timeout_s=30)).output.startswith("200 /long")


async def test_a_server_without_descriptors_starts_the_proxy_again_later(rung: Rung, port: int) -> None:
    env = {"no_proxy": "", "NO_PROXY": ""}
    async with _slot(rung, f"127.0.0.1:{port}") as (backend, slot):
        fetch = ["python3", "-c", _FETCH, f"http://127.0.0.1:{port}/again", ""]
        assert (await slot.execute(fetch, env=env, timeout_s=30)).output.startswith("200 /again")
        [proxy] = [p for p in descendants(backend.server_pid) if p.name == "slot-proxy"]
        limits = resource.prlimit(proxy.parent, resource.RLIMIT_NOFILE)
        resource.prlimit(proxy.parent, resource.RLIMIT_NOFILE, (3, limits[1]))
        os.kill(proxy.pid, signal.SIGKILL)
        await asyncio.sleep(1)  # the server tries again every half second
        resource.prlimit(proxy.parent, resource.RLIMIT_NOFILE, limits)
        assert (await slot.execute(fetch, env=env, timeout_s=30)).output.startswith("200 /again")


async def test_a_list_that_means_nothing_is_an_error_before_the_slot() -> None:
    backend = LocalBackend()
    try:
        await backend.start()
    except IsolationUnavailable as error:
        pytest.skip(str(error))
    async with backend:
        for entry in ("", "a b", "http://x", "x:99999", "x:"):
            with pytest.raises(ConfigError, match="list of hosts"):
                await backend.create(SlotSpec(network=AllowList((entry,))), "test")
