"""The slot server behind a network port: authenticated, out of reach of slots, and with the contract's routes."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from palaestra_cloud import port_launch
from palaestra_cloud.port_client import PortClient, archive, ask, deliver, program
from palaestra_cloud.port_launch import MAX_CONNECTIONS
from palaestra_cloud.port_server import MAX_UNKNOWN
from palaestra_slots.core.errors import SandboxError, SlotLost
from palaestra_slots.core.types import Network
from palaestra_slots.sandbox.server_backend import ServerBackend, environment
from palaestra_slots.sandbox.slot import Rung, SlotSpec
from programs import assert_missing_module_is_named

pytestmark = pytest.mark.slots

Address = tuple[str, int]
TOKEN = "s3cret"


class Behind(ServerBackend):
    """Slots behind a port."""

    name = "behind"

    def __init__(self, address: Address, silence_s: float = 60.0) -> None:
        super().__init__()
        self._address, self._silence_s = address, silence_s

    async def _start_server(self, rung: Rung) -> None:
        settings = {"prefix": "", "first_epoch": self._last_epoch + 1}
        self._server = await PortClient.connect(
            self._address, TOKEN, rung.label, settings, self._on_lost, silence_s=self._silence_s
        )

    async def _place(self, spec: SlotSpec) -> dict[str, Any]:
        return {"image": None, "allow": None, "mounts": [], "env": environment(spec)}


@contextlib.asynccontextmanager
async def served(*, delivered: bool = True) -> AsyncIterator[tuple[Address, subprocess.Popen[bytes]]]:
    """A place with a port of its own, with two numbered slots."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    command = [sys.executable, "-I", "-S", "-c", program(), address[0], str(address[1]), "2"]
    process = subprocess.Popen(command, env={"PALAESTRA_TOKEN": TOKEN})  # noqa: ASYNC220
    try:
        for _ in range(200):
            with contextlib.suppress(OSError):
                await ask(address, TOKEN, "GET", "/health")
                break
            await asyncio.sleep(0.05)
        if delivered:
            await deliver(address, TOKEN)
        yield address, process
    finally:
        process.kill()
        process.wait()


def run(body: Callable[[Address, subprocess.Popen[bytes]], Awaitable[None]], *, delivered: bool = True) -> None:
    async def main() -> None:
        async with served(delivered=delivered) as (address, process):
            await body(address, process)

    asyncio.run(main())


async def post(address: Address, path: str, body: Any) -> tuple[int, Any]:
    return await ask(address, TOKEN, "POST", path, json.dumps(body).encode())


def test_without_the_token_nothing_is_answered() -> None:
    async def body(address: Address, process: subprocess.Popen[bytes]) -> None:
        for method, path in (
            ("GET", "/health"),
            ("POST", "/execute"),
            ("PUT", "/server"),
            ("POST", "/stream?rung=full"),
        ):
            assert (await ask(address, "wrong", method, path))[0] == 401
            assert (await ask(address, "", method, path))[0] == 401
        with pytest.raises(SandboxError, match="401"):
            await PortClient.connect(address, "wrong", "full", {}, lambda name, epoch: None)

    run(body)


def test_a_wrong_token_is_refused_before_its_body_is_read() -> None:
    async def body(address: Address, process: subprocess.Popen[bytes]) -> None:
        head = "POST /execute HTTP/1.1\r\nAuthorization: Bearer wr\xf6ng\r\nContent-Length: 1000000\r\n\r\n"
        reader, writer = await asyncio.open_connection(*address)
        writer.write(head.encode("latin-1"))
        answer = await asyncio.wait_for(reader.read(), 20)
        assert answer.startswith(b"HTTP/1.1 401 ")
        writer.close()

    run(body)


def test_before_the_files_arrive_requests_wait_and_wrong_ones_do_no_harm() -> None:
    async def body(address: Address, process: subprocess.Popen[bytes]) -> None:
        assert (await ask(address, TOKEN, "GET", "/health"))[0] == 503
        assert (await ask(address, "wrong", "PUT", "/server", archive()))[0] == 401
        with socket.create_connection(address) as silent:
            silent.send(b"\0\xff not HTTP\r\n\r\n")
        with pytest.raises(OSError, match="HTTP"):
            await ask(address, TOKEN, "PUT", "/server", b"not an archive")
        await deliver(address, TOKEN)
        await deliver(address, TOKEN)
        status, health = await ask(address, TOKEN, "GET", "/health")
        assert (status, health["status"], health["slots"], health["streams"]) == (200, "ok", 2, 0)

    run(body, delivered=False)


@pytest.mark.parametrize("delivered", [False, True])
def test_an_ordinary_http_client_is_answered_and_learns_that_the_connection_ends(delivered: bool) -> None:
    def get(address: Address, path: str) -> tuple[int, bool]:
        connection = http.client.HTTPConnection(*address, timeout=20)
        connection.request("GET", path, headers={"Authorization": "Bearer wrong"})
        answer = connection.getresponse()
        answer.read()
        return answer.status, answer.will_close

    async def body(address: Address, process: subprocess.Popen[bytes]) -> None:
        assert await asyncio.to_thread(get, address, "/health") == (401, True)

    run(body, delivered=delivered)


def test_a_stream_has_its_own_slots_and_ends_with_its_client() -> None:
    async def body(address: Address, process: subprocess.Popen[bytes]) -> None:
        async with Behind(address) as one, Behind(address) as two:
            slot = await one.create(SlotSpec(), "t")
            data = os.urandom(3 << 20)
            await slot.write_bytes("data", data)
            assert await slot.read_bytes("data") == data
            assert (await (await two.create(SlotSpec(), "t")).execute("ls -A")).output == ""
            assert (await ask(address, TOKEN, "GET", "/health"))[1]["streams"] == 2
        for _ in range(200):
            health = (await ask(address, TOKEN, "GET", "/health"))[1]
            if health["streams"] == 0:
                break
            await asyncio.sleep(0.05)
        assert health["streams"] == 0
        assert health["unattended_s"] >= 0

    run(body)


async def test_the_files_of_a_killed_server_are_removed_by_the_next() -> None:
    def folders(process: subprocess.Popen[bytes]) -> list[Path]:
        return list(Path(tempfile.gettempdir()).glob(f"palaestra-port-{process.pid}-*"))

    async def main() -> None:
        async with served() as (_, killed):
            assert len(folders(killed)) == 1
        async with served() as (address, process):
            assert folders(killed) == []
            assert (await ask(address, TOKEN, "GET", "/health"))[0] == 200
            process.terminate()
            await asyncio.to_thread(process.wait, 20)
            assert folders(process) == []

    await main()


def test_the_end_of_the_place_is_a_lost_slot() -> None:
    async def body(address: Address, process: subprocess.Popen[bytes]) -> None:
        async with Behind(address) as backend:
            slot = await backend.create(SlotSpec(), "t")
            running = asyncio.create_task(slot.execute("sleep 60"))
            await asyncio.sleep(0.2)
            process.kill()
            with pytest.raises(SlotLost):
                await asyncio.wait_for(running, 20)

    run(body)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_server_that_hangs_is_a_lost_slot() -> None:
    async def body(address: Address, process: subprocess.Popen[bytes]) -> None:
        async with Behind(address, silence_s=5.0) as backend:
            slot = await backend.create(SlotSpec(), "t")
            running = asyncio.create_task(slot.execute("sleep 60"))
            await asyncio.sleep(0.2)
            for server in (watching := children(process.pid)) + [each for pid in watching for each in children(pid)]:
                os.kill(server, signal.SIGSTOP)
            with pytest.raises(SlotLost):
                await asyncio.wait_for(running, 40)

    run(body)


@pytest.mark.parametrize("delivered", [False, True])
def test_connections_that_send_nothing_keep_nobody_out(delivered: bool) -> None:
    async def body(address: Address, process: subprocess.Popen[bytes]) -> None:
        with contextlib.ExitStack() as silent:
            for _ in range(MAX_UNKNOWN + 20 if delivered else MAX_CONNECTIONS // 2):
                stream = silent.enter_context(socket.create_connection(address))
                stream.sendall(b"GET /heal")
            async with asyncio.timeout(8):
                await deliver(address, TOKEN)
                assert (await ask(address, TOKEN, "GET", "/health"))[0] == 200

    run(body, delivered=delivered)


@pytest.mark.skipif(os.geteuid() != 0, reason="users of slots differ from the caller's only for root")
def test_a_slot_with_a_network_does_not_reach_the_port_even_with_the_token() -> None:
    async def body(address: Address, process: subprocess.Popen[bytes]) -> None:
        request = f"GET /health HTTP/1.1\\r\\nAuthorization: Bearer {TOKEN}\\r\\nConnection: close\\r\\n\\r\\n"
        call = f"exec 3<>/dev/tcp/{address[0]}/{address[1]} && printf '{request}' >&3; cat <&3; echo end"
        async with Behind(address) as backend:
            for network in (Network.ON, Network.OFF):
                slot = await backend.create(SlotSpec(network=network), "t")
                assert "200" not in (await slot.execute(call, timeout_s=10)).output
                assert (await ask(address, TOKEN, "GET", "/health"))[0] == 200

    run(body)


def test_the_contracts_routes() -> None:
    async def body(address: Address, process: subprocess.Popen[bytes]) -> None:
        def call(tool: str, slot: str = "slot_0", **args: Any) -> dict[str, Any]:
            return {"slot_id": slot, "tool": tool, "args": args, "execution_id": "e1", "timeout": 20}

        status, done = await post(address, "/execute", call("bash", command="echo out; echo err >&2; exit 3"))
        assert status == 200
        assert set(done) == {"success", "output", "error", "execution_id", "metadata"}
        assert (done["success"], done["error"], done["execution_id"]) == (False, "Exit code: 3", "e1")
        assert done["output"] == "out\n\n[stderr]\nerr"
        assert done["metadata"]["exit_code"] == done["metadata"]["returncode"] == 3
        _, done = await post(address, "/execute", call("bash", command="yes | head -c 300000"))
        assert len(done["output"]) < 60_000
        _, many = await post(
            address,
            "/batch",
            [
                call("write_file", path="a/b.txt", content="x"),
                call("bash", "slot_1", command="ls"),
                call("bash", "slot_9"),
            ],
        )
        assert [each["success"] for each in many] == [True, True, False]
        await post(address, "/execute", call("bash_stateful", command="cd a; X=1"))
        _, done = await post(address, "/execute", call("bash_stateful", command="echo $X; ls"))
        assert done["output"] == "1\nb.txt"
        assert (await post(address, "/artifacts/read", {"slot_id": "slot_0", "path": "a/b.txt"}))[1]["content"] == "x"
        _, listed = await post(address, "/artifacts/list", {"slot_id": "slot_0", "path": ".", "recursive": True})
        assert [each["path"] for each in listed["entries"]] == ["a", "a/b.txt"]
        _, packed = await post(address, "/artifacts/archive", {"slot_id": "slot_0", "path": "a"})
        with tarfile.open(fileobj=io.BytesIO(base64.b64decode(packed["content"]))) as files:
            assert files.getnames() == ["b.txt"]
        _, done = await post(address, "/execute", call("tmux", action="send_keys", keys="ls"))
        assert "start" in done["error"]
        _, done = await post(address, "/execute", call("tmux", action="start", pane_width=80, pane_height=20))
        assert done["success"], done
        keys = ["echo $((40 + 2)) $COLUMNS; sleep 0.3; echo end", "Enter"]
        _, done = await post(address, "/execute", call("tmux", action="send_keys", keys=keys, block=True))
        assert {"42 80", "end"} <= set(done["output"].splitlines()), done
        _, done = await post(address, "/execute", call("tmux", action="stream"))
        assert "42 80" in done["output"]
        assert (await post(address, "/execute", call("tmux", action="stop")))[1]["success"]
        _, done = await post(address, "/execute", call("tmux", action="start", pane_width=9))
        assert not done["success"]
        for path, expected in (("/etc/passwd", 403), ("nothing", 404), (".", 400)):
            assert (await post(address, "/artifacts/read", {"slot_id": "slot_0", "path": path}))[0] == expected
        many_bytes = {"slot_id": "slot_0", "path": ".", "max_bytes": 1}
        assert (await post(address, "/artifacts/archive", many_bytes))[0] == 413
        status, refused = await post(address, "/execute", call("bash", command="true", allow_network=False))
        assert (status, "slot_0" in refused["error"]) == (409, True)
        assert (await post(address, "/reset", {"slot_id": "slot_0"}))[1]["success"] is True
        _, done = await post(address, "/execute", call("bash", command="ls -A", allow_network=False))
        assert (done["output"], done["metadata"]["network_isolated"]) == ("", True)
        _, slots = await ask(address, TOKEN, "GET", "/slots")
        assert [each["slot_id"] for each in slots["slots"]] == ["slot_0", "slot_1"]
        assert (await post(address, "/execute", {"slot_id": "slot_9", "tool": "bash"}))[0] == 404
        for wrong in (b"{", b"[" * 1_000_000, json.dumps(call("bash") | {"timeout": "soon"}).encode()):
            assert (await ask(address, TOKEN, "POST", "/execute", wrong))[0] == 400
        wrong_calls = [{"slot_id": "slot_1", "timeout": {}}, call("bash", "slot_1", command="true", timeout=[1]), 7]
        _, many = await post(address, "/batch", [*wrong_calls, call("bash", "slot_1", command="true")])
        assert [each["success"] for each in many] == [False, False, False, True]

    run(body)


def test_a_python_without_its_standard_library_is_named(tmp_path: Path) -> None:
    assert_missing_module_is_named(port_launch, tmp_path)
