"""The control API over plain HTTP, with real slots: lists, leases, limits, pauses, forks and snapshots."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote, urlencode

import pytest

from palaestra_e2b.api_keys import ApiKey
from palaestra_e2b.server import RunningE2B
from palaestra_slots.core.types import Network

from .conftest import FIRST, a_server
from .http_client import Api, Box

pytestmark = pytest.mark.slots


def until(condition: object, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def test_a_sandbox_is_described_and_killed(api: Api) -> None:
    box = api.create(metadata={"run": "7"}, timeout=60)
    detail = api.call("GET", f"/sandboxes/{box.id}").json
    assert detail["state"] == "running"
    assert detail["metadata"] == {"run": "7"}
    assert detail["templateID"] == "base"
    assert detail["lifecycle"] == {"autoResume": False, "onTimeout": "kill"}
    assert box.kill() == 204
    assert box.kill() == 404
    assert api.call("GET", f"/sandboxes/{box.id}").json["message"].endswith("it was killed")


def test_lists_are_paged_and_filtered(api: Api) -> None:
    made = [api.create(metadata={"n": str(number), "odd a&b": "x=y"}).id for number in range(4)]
    first = api.call("GET", "/v2/sandboxes?limit=3")
    token = first.headers["X-Next-Token"]
    second = api.call("GET", f"/v2/sandboxes?limit=3&nextToken={quote(token)}")
    found = [each["sandboxID"] for each in (*first.json, *second.json)]
    assert found == made[::-1], "newest first"
    assert "X-Next-Token" not in second.headers
    ascending = api.call("GET", "/v2/sandboxes?limit=1&order=asc").json
    assert ascending[0]["sandboxID"] == made[0]
    wanted = urlencode({quote("odd a&b"): quote("x=y"), "n": "2"})
    assert [each["sandboxID"] for each in api.call("GET", f"/v2/sandboxes?{urlencode({'metadata': wanted})}").json] == [
        made[2]
    ]
    assert api.call("GET", "/v2/sandboxes?state=paused").json == []
    for number in made:
        since = api.call("GET", f"/sandboxes/{number}").json["startedAt"]
        assert number in [each["sandboxID"] for each in api.call("GET", f"/v2/sandboxes?startedAfter={since}").json]
    assert api.call("GET", "/v2/sandboxes?limit=none").status == 400


def test_a_lease_ends_a_sandbox_and_says_so(api: Api) -> None:
    box = api.create(timeout=1)
    until(lambda: api.call("GET", f"/sandboxes/{box.id}").status == 404)
    inside = box.rpc("filesystem.Filesystem/Stat", {"path": "/"})
    assert inside.status == 502
    assert "its lease ended" in inside.json["message"]


def test_timeouts_are_set_and_connecting_only_lengthens_them(api: Api, box: Box) -> None:
    def ends() -> str:
        return str(api.call("GET", f"/sandboxes/{box.id}").json["endAt"])

    assert api.call("POST", f"/sandboxes/{box.id}/timeout", {"timeout": 1000}).status == 204
    long = ends()
    assert api.call("POST", f"/v2/sandboxes/{box.id}/connect", {"timeout": 5}).status == 200
    assert ends() == long
    assert api.call("POST", f"/sandboxes/{box.id}/timeout", {"timeout": 10}).status == 204
    assert ends() < long
    assert api.call("POST", f"/sandboxes/{box.id}/timeout", {"timeout": 10**9}).status == 400
    assert api.call("POST", f"/sandboxes/{box.id}/timeout", {"timeout": -1}).status == 400


def test_a_pause_with_memory_keeps_processes(api: Api, box: Box) -> None:
    connection, found = box.start("i=0; while true; do i=$((i+1)); echo $i > /tmp/count; sleep 0.02; done")
    next(found)
    until(lambda: box.read("/tmp/count").body.strip().isdigit())
    assert api.call("POST", f"/sandboxes/{box.id}/pause").status == 204
    assert api.call("POST", f"/sandboxes/{box.id}/pause").status == 409
    assert list(found)[-1][1]["error"]["code"] == "unavailable"
    connection.close()
    assert box.read("/tmp/count").status == 502
    assert api.send("GET", "/health", None, box.headers).status == 502
    assert api.call("GET", f"/sandboxes/{box.id}").json["state"] == "paused"
    time.sleep(0.5)
    assert api.call("POST", f"/v2/sandboxes/{box.id}/connect", {"timeout": 60}).status == 201
    before = int(box.read("/tmp/count").body)
    until(lambda: int(box.read("/tmp/count").body or 0) > before)
    processes = box.rpc("process.Process/List", {}).json["processes"]
    assert len(processes) == 1, "it is still known, and can be followed again"
    message = {"process": {"pid": processes[0]["pid"]}, "signal": "SIGNAL_SIGKILL"}
    assert box.rpc("process.Process/SendSignal", message).status == 200


def test_a_pause_without_memory_keeps_files_and_frees_the_slot(api: Api, box: Box, server: RunningE2B) -> None:
    box.write("/root/kept", b"1")
    held = server.pool.acquired_slots
    assert api.call("POST", f"/sandboxes/{box.id}/pause", {"memory": False}).status == 204
    assert server.pool.acquired_slots == held - 1
    assert api.call("POST", f"/sandboxes/{box.id}/resume", {"timeout": 60}).status == 201
    assert box.read("/root/kept").body == b"1"
    assert api.call("POST", f"/sandboxes/{box.id}/resume", {"timeout": 60}).status == 409
    box.write("/root/kept", b"2")
    assert api.call("POST", f"/sandboxes/{box.id}/pause", {"memory": True}).status == 204
    reboot = {"timeout": 60, "memory": False}
    assert api.call("POST", f"/v2/sandboxes/{box.id}/connect", reboot).status == 201
    assert box.read("/root/kept").body == b"2"


def test_a_lease_can_end_in_a_pause_that_a_call_ends(api: Api) -> None:
    box = api.create(timeout=1, autoPause=True, autoResume={"enabled": True})
    until(lambda: api.call("GET", f"/sandboxes/{box.id}").json["state"] == "paused")
    api.call("POST", f"/sandboxes/{box.id}/timeout", {"timeout": 60})
    assert box.run("echo back").out == b"back\n"


def test_forks_have_the_files_and_lives_of_their_own(api: Api, box: Box) -> None:
    box.write("/root/a", b"1")
    answer = api.call("POST", f"/sandboxes/{box.id}/fork", {"count": 3, "timeout": 60})
    assert answer.status == 201
    forks = [Box(api, each["sandbox"]) for each in answer.json]
    assert len({fork.id for fork in (*forks, box)}) == 4
    forks[0].write("/root/a", b"2")
    assert [fork.read("/root/a").body for fork in (*forks, box)] == [b"2", b"1", b"1", b"1"]
    box.kill()
    again = api.call("POST", f"/sandboxes/{forks[0].id}/fork", {})
    assert Box(api, again.json[0]["sandbox"]).read("/root/a").body == b"2", "the first sandbox is not needed for that"


def test_a_fork_beyond_the_limit_fails_alone(api: Api, box: Box) -> None:
    answer = api.call("POST", f"/sandboxes/{box.id}/fork", {"count": 9}).json
    made = [each for each in answer if "sandbox" in each]
    assert len(made) == 7
    assert {each["error"]["code"] for each in answer if "error" in each} == {429}
    refused = api.call("POST", "/v2/sandboxes", {"templateID": "base"})
    assert refused.status == 429
    assert refused.headers["Should-Retry"] == "false"


def test_snapshots_start_sandboxes_until_they_are_deleted(api: Api, box: Box) -> None:
    box.write("/root/a", b"saved")
    saved = api.call("POST", f"/sandboxes/{box.id}/snapshots", {"name": "mine"})
    assert saved.status == 201
    assert saved.json["names"] == ["mine:default"]
    box.write("/root/a", b"changed")
    for name in ("mine", "mine:default", saved.json["snapshotID"]):
        assert api.create(name).read("/root/a").body == b"saved"
    assert api.call("GET", f"/snapshots?sandboxID={box.id}&name=mine").json == [saved.json]
    assert api.call("GET", "/snapshots?name=other").json == []
    assert api.call("DELETE", f"/templates/{quote(saved.json['snapshotID'])}").status == 204
    assert api.call("DELETE", f"/templates/{quote(saved.json['snapshotID'])}").status == 404
    assert api.call("POST", "/v2/sandboxes", {"templateID": "mine"}).status == 404
    assert api.call("POST", f"/sandboxes/{box.id}/snapshots", {"memory": True}).status == 400


def test_a_key_keeps_no_more_than_its_limit(api: Api, box: Box) -> None:
    codes = [api.call("POST", f"/sandboxes/{box.id}/snapshots", {}).status for _ in range(7)]
    assert codes == [201] * 6 + [429]


def test_an_idempotency_key_makes_one_sandbox(api: Api) -> None:
    def create(_: int) -> str:
        answer = api.call("POST", "/v2/sandboxes", {"templateID": "base"}, Idempotency_Key="abc-1")
        return str(answer.json["sandboxID"])

    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(create, range(4)))
    assert len(found) == 1
    assert api.call("DELETE", f"/sandboxes/{found.pop()}").status == 204
    assert create(0) not in found, "a dead sandbox is not handed out again"
    assert api.call("POST", "/v2/sandboxes", {"templateID": "base"}, Idempotency_Key="A B").status == 400


def test_metrics_are_of_the_sandbox(api: Api, box: Box) -> None:
    box.write("/root/big", bytes(4 << 20))
    [found] = api.call("GET", f"/sandboxes/{box.id}/metrics").json
    assert found["diskUsed"] >= 4 << 20
    assert 0 < found["memUsed"] < found["memTotal"]
    several = api.call("GET", f"/sandboxes/metrics?sandbox_ids={box.id},other").json["sandboxes"]
    assert list(several) == [box.id]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"templateID": "nope"}, 404, "the templates are base"),
        ({}, 400, "templateID"),
        ({"templateID": "base", "volumeMounts": [{"name": "v", "path": "/v"}]}, 400, "volumeMounts"),
        ({"templateID": "base", "mcp": {"x": {}}}, 400, "mcp"),
        ({"templateID": "base", "allow_internet_access": True}, 403, "no network"),
        ({"templateID": "base", "network": {"denyOut": ["10.0.0.0/8"]}}, 400, "denyOut"),
        ({"templateID": "base", "envVars": {"A=B": "x"}}, 400, "environment variable"),
        ({"templateID": "base", "timeout": "long"}, 400, "timeout"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(api: Api, body: object, status: int, words: str) -> None:
    answer = api.call("POST", "/v2/sandboxes", body)
    assert answer.status == status
    assert answer.json["code"] == status
    assert words in answer.json["message"]


def test_volumes_secrets_and_unknown_paths_are_refused(api: Api, box: Box) -> None:
    assert api.call("GET", "/volumes").status == 501
    assert api.call("GET", "/nothing").status == 404
    assert api.call("PATCH", f"/sandboxes/{box.id}").status == 405
    assert api.call("PUT", f"/sandboxes/{box.id}/network", {}).status == 400


def test_a_template_of_files_alone_is_prepared_again_when_its_process_died(api: Api) -> None:
    with a_server(ApiKey("k", FIRST), most_sandboxes=4) as running:
        own = Api(running.url, FIRST)
        assert own.create().run("echo 1").out == b"1\n"
        import os
        import signal

        os.kill(running.pool.backend.server_pid, signal.SIGKILL)  # type: ignore[attr-defined]
        until(lambda: own.call("POST", "/v2/sandboxes", {"templateID": "base"}).status == 201)


def test_sandboxes_have_the_network_that_they_ask_for() -> None:
    with a_server(ApiKey("k", FIRST), network=Network.ON) as running:
        api = Api(running.url, FIRST)
        probe = "cat /proc/net/dev | grep -cv -e Inter -e face -e lo:"
        assert api.create(allow_internet_access=False).run(probe).out.strip() == b"0"
        detail = api.call("GET", f"/sandboxes/{api.create().id}").json
        assert detail["allowInternetAccess"] is True
