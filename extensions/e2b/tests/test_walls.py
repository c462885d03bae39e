"""Attacks through the port: one key against another's sandboxes, paths, tokens and headers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from palaestra_e2b import requests
from palaestra_e2b.api_keys import ApiKey
from palaestra_e2b.call_limits import MOST_CALLS, Lanes
from palaestra_e2b.server import RunningE2B

from .conftest import FIRST, SECOND, a_server
from .http_client import Api, Box

pytestmark = pytest.mark.slots


def test_a_key_is_needed(server: object, api: Api) -> None:
    for headers in ({}, {"X-API-Key": ""}, {"X-API-Key": "e2b_wrong"}, {"Authorization": "Bearer nope"}):
        answer = api.send("GET", "/v2/sandboxes", None, headers)
        assert answer.status == 401
        assert api.key not in answer.body.decode()
    huge = api.send("POST", "/v2/sandboxes", b"x", {"X-API-Key": "wrong", "Content-Length": str(10**12)})
    assert huge.status == 401, "it is refused before its body is read"
    assert api.send("POST", "/v2/sandboxes", bytes(2 << 20), {"X-API-Key": api.key}).status == 413


def test_another_keys_sandbox_does_not_exist(api: Api, other: Api, box: Box) -> None:
    alive = {"templateID": "base", "timeout": 60}
    snapshot = api.call("POST", f"/sandboxes/{box.id}/snapshots", {"name": "mine"}).json["snapshotID"]
    assert other.call("GET", "/v2/sandboxes").json == []
    assert other.call("GET", "/snapshots").json == []
    assert "mine" not in str(other.call("GET", "/templates").json)
    for method, path, body in (
        ("GET", "", None), ("DELETE", "", None), ("POST", "/timeout", {"timeout": 0}), ("POST", "/pause", {}),
        ("POST", "/connect", alive), ("POST", "/resume", alive), ("POST", "/fork", {"count": 1}),
        ("POST", "/snapshots", {}), ("GET", "/metrics", None), ("GET", "/logs", None), ("PUT", "/network", {}),
        ("POST", "/refreshes", {}),
    ):  # fmt: skip
        answer = other.call(method, f"/sandboxes/{box.id}{path}", body)
        assert answer.status == 404, path
        assert answer.json["message"].endswith("no such sandbox")
    assert other.call("GET", f"/sandboxes/metrics?sandbox_ids={box.id}").json == {"sandboxes": {}}
    for name in (snapshot, "mine", "mine:default"):
        assert other.call("POST", "/v2/sandboxes", {"templateID": name}).status == 404
        assert other.call("DELETE", f"/templates/{name}").status == 404
    assert other.call("DELETE", "/templates/base").status == 403
    box.kill()
    assert other.call("GET", f"/sandboxes/{box.id}").json["message"].endswith("no such sandbox"), "nor its end"


def test_a_token_opens_one_sandbox(api: Api, other: Api, box: Box) -> None:
    foreign = other.create()
    box.write("secret", b"s")
    for token in ("", foreign.token, api.key, box.token[:-1], box.token + "x"):
        stolen = Box(api, {"sandboxID": box.id, "envdAccessToken": token})
        assert stolen.read("secret").status == 401
        assert stolen.write("secret", b"x").status == 401
        assert stolen.files("Stat", {"path": "secret"}).status == 401
        connection, answer = stolen.stream("process.Process/Start", {"process": {"cmd": "id"}})
        assert answer.status == 401
        connection.close()
    pid = foreign.run("echo $$").pid
    assert box.rpc("process.Process/SendSignal", {"process": {"pid": pid}, "signal": 9}).json["code"] == "not_found"
    unknown = Box(api, {"sandboxID": "i" + "0" * 19, "envdAccessToken": box.token})
    assert unknown.read("x").status == 502
    foreign.kill()


@pytest.mark.parametrize(
    "path",
    ["/../../../../etc/hostname", "../../../../etc/hostname", "/proc/self/environ", "/proc/1/root/etc/hostname",
     "link/hostname", "/dev/mem", "/sys/kernel/notes"],
)  # fmt: skip
def test_no_path_leads_out(box: Box, path: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    box.run(f"ln -sfn /etc link; ln -sfn {secret} out; ln -sfn /proc/1/root root")
    answer = box.read(path)
    if answer.status == 200:  # the sandbox's own file of that name
        assert answer.body == box.run(f"cat {path}").out
    assert box.read("out").status == 404
    assert box.write(f"../../..{secret}", b"x").status == 200
    assert secret.read_text() == "of the host"
    assert str(os.getpid()) != box.run("echo $PPID").out.decode().strip()


def test_nothing_of_a_request_is_run_on_the_host(box: Box, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    evil = f"x; touch {mark}; $(touch {mark}) `touch {mark}`"
    box.files("MakeDir", {"path": evil})
    box.files("Move", {"source": evil, "destination": f"-{evil}"})
    box.write(evil, b"x")
    box.run("true", config={"envs": {"BASH_ENV": f"/tmp/{evil}", "LD_PRELOAD": "/x.so"}, "cwd": "/tmp"})
    box.api.call("POST", f"/sandboxes/{box.id}/snapshots", {"name": evil})
    box.api.call("POST", "/v2/sandboxes", {"templateID": f"../../{tmp_path}", "metadata": {evil: evil}})
    assert not mark.exists()
    assert box.run(f"ls {mark}").code != 0


def test_headers_name_only_sandboxes_and_ports(api: Api, box: Box) -> None:
    for port in ("0", "65536", "-1", "22; id", "1" * 30):
        assert api.send("GET", "/", None, {"E2b-Sandbox-Id": box.id, "E2b-Sandbox-Port": port}).status == 400
    own = api.url.rpartition(":")[2]
    to_server = {"E2b-Sandbox-Id": box.id, "E2b-Sandbox-Port": own, "X-API-Key": api.key}
    assert api.send("GET", "/v2/sandboxes", None, to_server).status == 502, "the port of the sandbox, not of the host"
    for name in ("../x", "", "x" * 1000, "é"):
        answer = api.send("GET", "/health", None, {"E2b-Sandbox-Id": name.encode().decode("latin-1")})
        assert answer.status == 502


def test_processes_and_watchers_have_limits(box: Box) -> None:
    box.run("mkdir w")
    codes = [box.files("CreateWatcher", {"path": "w"}).status for _ in range(33)]
    assert codes == [200] * 32 + [429]
    open_streams = [box.start("sleep 60") for _ in range(64)]
    for _, found in open_streams:
        assert "start" in next(found)[1]["event"]
    connection, answer = box.stream("process.Process/Start", {"process": {"cmd": "true"}})
    assert next(iter([message for _, message in _messages(answer)]))["error"]["code"] == "resource_exhausted"
    for each, _ in [*open_streams, (connection, None)]:
        each.close()


def _messages(answer: object) -> list[tuple[int, dict[str, dict[str, str]]]]:
    from .http_client import messages

    return list(messages(answer))


def test_a_full_server_does_not_name_the_sandboxes_of_another_key() -> None:
    with a_server(ApiKey("first", FIRST), ApiKey("second", SECOND), most_sandboxes=1) as running:
        running.pool.config = running.pool.config.model_copy(update={"acquire_timeout": 0.1})
        held = Api(running.url, FIRST).create()
        refused = Api(running.url, SECOND).call("POST", "/v2/sandboxes", {"templateID": "base"})
        assert (refused.status, refused.headers["Should-Retry"]) == (503, "false")
        assert held.id not in refused.body.decode()
        assert "--sandboxes" in refused.json["message"]
        other = Api(running.url, FIRST).call("POST", f"/sandboxes/{held.id}/fork", {})
        assert other.json[0]["error"]["code"] == 503
        assert held.id not in other.body.decode()
        assert held.kill() == 204


def _slow(url: str, head: str, body: bytes = b"") -> socket.socket:
    """Send a request, and read nothing of the answer. The socket hardly buffers."""
    place = urlsplit(url)
    caller = socket.socket()
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    caller.connect((place.hostname, place.port))
    caller.sendall(f"{head}\r\nHost: x\r\n\r\n".encode() + body)
    caller.settimeout(20)
    return caller


def test_the_transfers_of_one_key_do_not_hold_up_another(server: RunningE2B, box: Box, other: Api) -> None:
    """Neither files that the key does not fetch, nor uploads that it does not finish."""
    box.run("truncate -s 32M big")
    token = f"E2b-Sandbox-Id: {box.id}\r\nX-Access-Token: {box.token}"
    callers = [_slow(server.url, f"GET /files?path=big HTTP/1.1\r\n{token}") for _ in range(5)]
    callers += [
        _slow(server.url, f"POST /files?path=up{each} HTTP/1.1\r\n{token}\r\nContent-Length: 90000000\r\n"
              "Content-Type: application/octet-stream", bytes(9 << 20))
        for each in range(5)
    ]  # fmt: skip
    mine = other.create()
    began = time.monotonic()
    assert mine.write("big", bytes(9 << 20)).status == 200
    assert len(mine.read("big").body) == 9 << 20
    assert time.monotonic() - began < 20
    for caller in callers:
        caller.close()
    assert mine.kill() == 204


async def test_a_key_has_its_own_share_of_transfers() -> None:
    async def run() -> list[str]:
        lanes, order = Lanes(2, 3), list[str]()

        async def transfer(key: str) -> None:
            async with lanes.one(key):
                order.append(key)
                await asyncio.sleep(0 if key == "b" else 0.05)

        await asyncio.gather(*map(transfer, "aaaabb"))
        return order

    assert await run() == ["a", "a", "b", "b", "a", "a"]


def test_a_body_for_a_port_must_arrive(server: RunningE2B, box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    head = f"POST / HTTP/1.1\r\nE2b-Sandbox-Id: {box.id}\r\nE2b-Sandbox-Port: 8000\r\nContent-Length: 100"
    with contextlib.ExitStack() as stack:
        for _ in range(MOST_CALLS):
            stack.enter_context(_slow(server.url, head, b"x"))
        last = stack.enter_context(_slow(server.url, head))
        assert last.recv(100).split(b" ")[1] == b"429"
    monkeypatch.setattr(requests, "_BODY_S", 0.2)
    control = f"POST /v2/sandboxes HTTP/1.1\r\nX-API-Key: {FIRST}\r\nContent-Length: 100"
    for each in (head, control):
        with _slow(server.url, each, b"x") as caller:
            assert caller.recv(100).split(b" ")[1] == b"408"
