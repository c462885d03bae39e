"""Calls into a sandbox over plain HTTP: commands, streams, terminals, files, watches, users and ports."""

from __future__ import annotations

import base64
import gzip
import http.client
import json
import time
from urllib.parse import quote, urlsplit

import pytest

from palaestra_e2b.api_keys import ApiKey
from palaestra_e2b.file_transfer import signature

from .conftest import FIRST, a_server
from .http_client import Api, Box, Ran, envelope, messages

pytestmark = pytest.mark.slots


def test_a_command_has_streams_code_directory_and_variables(api: Api) -> None:
    box = api.create(envVars={"OUTER": "o", "BOTH": "outer"})
    ran = box.run(
        "echo out; echo err >&2; pwd; echo $OUTER $BOTH $E2B_SANDBOX_ID; exit 3", config={"envs": {"BOTH": "inner"}}
    )
    assert ran.out.decode().split() == ["out", "/home/user", "o", "inner", box.id]
    assert ran.err == b"err\n"
    assert ran.end == {"exitCode": 3, "exited": True, "status": "exit status 3", "error": "exit status 3"}
    assert ran.error is None
    assert box.run("pwd", config={"cwd": "/tmp"}).out == b"/tmp\n"
    connection, answer = box.stream("process.Process/Start", {"process": {"cmd": "ls", "cwd": "/none"}})
    [(flags, message)] = messages(answer)
    connection.close()
    assert flags == 2
    assert message["error"] == {"code": "invalid_argument", "message": "cwd '/none' does not exist"}


def test_long_output_arrives_whole(box: Box) -> None:
    ran = box.run("seq 1 300000; seq 1 100000 >&2")
    assert ran.out == "".join(f"{n}\n" for n in range(1, 300001)).encode()
    assert ran.err == "".join(f"{n}\n" for n in range(1, 100001)).encode()


def test_a_slow_reader_makes_the_process_wait_and_loses_nothing(box: Box) -> None:
    connection, found = box.start("head -c 8000000 /dev/zero; echo done > /tmp/done")
    next(found)
    time.sleep(1)
    assert box.read("/tmp/done").status == 404
    ran = Ran()
    for flags, message in found:
        ran.take(flags, message)
    connection.close()
    assert len(ran.out) == 8_000_000
    assert ran.code == 0


def test_input_is_written_and_closed(box: Box) -> None:
    connection, found = box.start("cat; echo end", stdin=True)
    ran = Ran()
    ran.take(*next(found))
    process = {"pid": ran.pid}
    data = base64.b64encode(b"abc\n").decode()
    assert box.rpc("process.Process/SendInput", {"process": process, "input": {"stdin": data}}).status == 200
    _, answer = box.api.open(
        "POST", "/process.Process/StreamInput",
        envelope({"start": {"process": process}}) + envelope({"data": {"input": {"stdin": data}}}),
        {**box.headers, "Content-Type": "application/connect+json"},
    )  # fmt: skip
    assert [message for _, message in messages(answer)] == [{}, {}]
    assert box.rpc("process.Process/CloseStdin", {"process": process}).status == 200
    for each in found:
        ran.take(*each)
    connection.close()
    assert ran.out == b"abc\nabc\nend\n"
    gone = box.rpc("process.Process/SendInput", {"process": process, "input": {"stdin": data}})
    assert gone.json["code"] == "not_found"


def test_processes_are_listed_followed_and_killed(box: Box) -> None:
    connection, found = box.start("echo first; read x; echo second; sleep 100", stdin=True, tag="mine")
    ran = Ran()
    ran.take(*next(found))
    ran.take(*next(found))
    connection.close()  # the process runs on
    [listed] = box.rpc("process.Process/List", {}).json["processes"]
    assert (listed["pid"], listed["tag"], listed["config"]["cmd"]) == (ran.pid, "mine", "/bin/bash")
    connection, answer = box.stream("process.Process/Connect", {"process": {"tag": "mine"}})
    found = messages(answer)
    assert next(found)[1] == {"event": {"start": {"pid": ran.pid}}}
    data = base64.b64encode(b"\n").decode()
    box.rpc("process.Process/SendInput", {"process": {"pid": ran.pid}, "input": {"stdin": data}})
    assert base64.b64decode(next(found)[1]["event"]["data"]["stdout"]) == b"second\n"
    kill = {"process": {"pid": ran.pid}, "signal": "SIGNAL_SIGKILL"}
    assert box.rpc("process.Process/SendSignal", kill).status == 200
    assert next(found)[1]["event"]["end"]["status"] == "signal: killed"
    connection.close()
    assert box.rpc("process.Process/List", {}).json == {"processes": []}
    assert box.rpc("process.Process/SendSignal", kill).json["code"] == "not_found"


def test_a_time_limit_kills_the_whole_tree(box: Box) -> None:
    ran = box.run("sleep 300 & sleep 300", headers={"Connect-Timeout-Ms": "300"})
    assert ran.error["code"] == "deadline_exceeded"
    assert b"sleep 300" not in box.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '").out.replace(b"cat", b"")


def test_a_terminal_has_a_size_that_changes(box: Box) -> None:
    message = {"process": {"cmd": "/bin/bash", "args": ["-i"]}, "pty": {"size": {"rows": 30, "cols": 100}}}
    connection, answer = box.stream("process.Process/Start", message)
    found, ran = messages(answer), Ran()
    ran.take(*next(found))
    process = {"pid": ran.pid}

    def type_in(text: str) -> None:
        data = base64.b64encode(text.encode()).decode()
        assert box.rpc("process.Process/SendInput", {"process": process, "input": {"pty": data}}).status == 200

    type_in("stty size\n")
    while b"30 100" not in ran.pty:
        ran.take(*next(found))
    resized = {"process": process, "pty": {"size": {"rows": 40, "cols": 90}}}
    assert box.rpc("process.Process/Update", resized).status == 200
    type_in("stty size; exit 4\n")
    for each in found:
        ran.take(*each)
    connection.close()
    assert b"40 90" in ran.pty
    assert ran.code == 4


def test_files_are_written_read_listed_moved_and_removed(box: Box) -> None:
    assert box.write("d/a.txt", b"hello").json == [{"path": "/home/user/d/a.txt", "name": "a.txt", "type": "file"}]
    assert box.read("~/d/a.txt").body == b"hello"
    assert box.read("nope").status == 404
    assert box.read("/home/user/d").status == 400
    entry = box.files("Stat", {"path": "d/a.txt"}).json["entry"]
    assert (entry["type"], entry["size"], entry["permissions"]) == ("FILE_TYPE_FILE", "5", "-rw-r--r--")
    assert (entry["owner"], entry["group"], entry["path"]) == ("user", "user", "/home/user/d/a.txt")
    box.run("ln -s a.txt d/link; mkdir -p d/x/y; ln -s x d/dirlink; chown 1234:99 d/a.txt")
    listed = {each["name"]: each for each in box.files("ListDir", {"path": "d"}).json["entries"]}
    assert set(listed) == {"a.txt", "link", "x", "dirlink"}
    assert (listed["link"]["symlinkTarget"], listed["link"]["type"]) == ("/home/user/d/a.txt", "FILE_TYPE_FILE")
    assert listed["dirlink"]["type"] == "FILE_TYPE_DIRECTORY"
    assert (listed["a.txt"]["owner"], listed["a.txt"]["group"]) == ("1234", "99")
    deep = box.files("ListDir", {"path": "d", "depth": 2}).json["entries"]
    assert "/home/user/d/x/y" in [each["path"] for each in deep]
    assert box.files("ListDir", {"path": "d/a.txt"}).json["code"] == "invalid_argument"
    assert box.files("ListDir", {"path": "none"}).json["code"] == "not_found"
    assert box.files("MakeDir", {"path": "d/new"}).json["entry"]["type"] == "FILE_TYPE_DIRECTORY"
    assert box.files("MakeDir", {"path": "d/new"}).status == 409
    moved = box.files("Move", {"source": "d/a.txt", "destination": "far/away/b.txt"}).json["entry"]
    assert moved["path"] == "/home/user/far/away/b.txt"
    assert box.files("Move", {"source": "none", "destination": "x"}).json["code"] == "not_found"
    assert box.files("Remove", {"path": "d"}).status == 200
    assert box.files("Remove", {"path": "d"}).status == 200
    assert box.files("Stat", {"path": "d"}).json["code"] == "not_found"


def test_large_files_pass_through_a_file(box: Box) -> None:
    data = bytes(range(256)) * 40_000  # 10 MB
    box.run("touch big; chmod 600 big")
    assert box.write("big", data).status == 200
    assert box.files("Stat", {"path": "big"}).json["entry"]["permissions"] == "-rw-------"
    assert box.read("big").body == data


def test_several_files_and_compressed_files_are_uploaded(box: Box) -> None:
    boundary = "x" * 30
    parts = [("one", b"1"), ("/tmp/two", b"2" * 100_000)]
    body = b"".join(
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'.encode()
        + data
        + b"\r\n"
        for name, data in parts
    )
    headers = {**box.headers, "Content-Type": f"multipart/form-data; boundary={boundary}"}
    answer = box.api.send("POST", "/files", body + f"--{boundary}--\r\n".encode(), headers)
    assert [each["path"] for each in answer.json] == ["/home/user/one", "/tmp/two"]
    assert box.read("/tmp/two").body == b"2" * 100_000
    assert box.write("z", gzip.compress(b"packed"), **{"Content-Encoding": "gzip"}).status == 200
    assert box.read("z").body == b"packed"
    assert box.write("z", b"broken", **{"Content-Encoding": "gzip"}).status == 400
    assert box.write("z", b"x", **{"X-Metadata-A": "b"}).status == 400
    assert box.api.send("POST", "/files", b"x", {**box.headers, "Content-Type": "text/plain"}).status == 400


def test_signed_addresses_need_no_header_and_expire(box: Box) -> None:
    box.write("s", b"signed")
    own = {"E2b-Sandbox-Id": box.id}

    def get(path: str, signed: str, headers: dict[str, str], more: str = "") -> int:
        return box.api.send("GET", f"/files?path={path}&signature={quote(signed)}{more}", None, headers).status

    good = signature("s", "read", "", box.token)
    assert get("s", good, own) == 200
    assert get("s", good, {}) == 200, "E2B_SANDBOX_URL gives an address without the sandbox"
    assert get("t", good, own) == 401
    assert get("s", signature("s", "write", "", box.token), own) == 401
    assert get("s", good, own, "&username=root") == 401
    later, past = str(int(time.time()) + 60), str(int(time.time()) - 1)
    assert get("s", signature("s", "read", "", box.token, later), own, f"&signature_expiration={later}") == 200
    assert get("s", signature("s", "read", "", box.token, past), own, f"&signature_expiration={past}") == 401


def test_changes_of_a_directory_are_seen(box: Box) -> None:
    box.run("mkdir -p w/sub")
    watcher = box.files("CreateWatcher", {"path": "w", "recursive": True, "includeEntry": True}).json["watcherId"]

    def events() -> set[tuple[str, str]]:
        found = box.files("GetWatcherEvents", {"watcherId": watcher}).json["events"]
        return {(each["type"].removeprefix("EVENT_TYPE_"), each["name"]) for each in found}

    box.write("w/sub/new", b"x")
    assert events() == {("CREATE", "sub/new"), ("WRITE", "sub/new")} | (events() & {("WRITE", "sub")})
    box.run("chmod 700 w/sub/new; echo more >> w/sub/new")
    assert {("CHMOD", "sub/new"), ("WRITE", "sub/new")} <= events()
    box.run("rm w/sub/new")
    assert ("REMOVE", "sub/new") in events()
    assert box.files("RemoveWatcher", {"watcherId": watcher}).status == 200
    assert box.files("GetWatcherEvents", {"watcherId": watcher}).json["code"] == "not_found"
    assert box.files("CreateWatcher", {"path": "none"}).json["code"] == "not_found"

    connection, answer = box.stream("filesystem.Filesystem/WatchDir", {"path": "w"})
    found = messages(answer)
    assert next(found)[1] == {"start": {}}
    box.write("w/streamed", b"x")
    assert next(found)[1]["filesystem"] == {"name": "streamed", "type": "EVENT_TYPE_CREATE"}
    connection.close()


def test_users_are_root_with_their_homes_or_accounts_of_the_image(box: Box) -> None:
    def as_user(name: str) -> dict[str, str]:
        return {"Authorization": "Basic " + base64.b64encode(f"{name}:".encode()).decode()}

    script = "id -u; echo $HOME $USER; pwd"
    assert box.run(script, headers=as_user("root")).out.decode().split() == ["0", "/root", "root", "/root"]
    assert box.run(script, headers=as_user("user")).out.decode().split() == ["0", "/home/user", "user", "/home/user"]
    connection, answer = box.stream("process.Process/Start", {"process": {"cmd": "id"}}, **as_user("nobody-here"))
    assert next(messages(answer))[1]["error"]["code"] == "unauthenticated"
    connection.close()
    for wrong in ("-x", "a b", "$(id)", "../root"):
        assert box.files("Stat", {"path": "/"}, **as_user(wrong)).json["code"] == "unauthenticated"
    box.run("echo 'ann:x:1500:1500::/srv/ann:/bin/bash' >> /etc/passwd; mkdir /srv/ann; chown 1500:1500 /srv/ann")
    assert box.run(script, headers=as_user("ann")).out.decode().split() == ["1500", "/srv/ann", "ann", "/srv/ann"]
    box.run("echo secret > /root/s; chmod 600 /root/s")
    refused = box.api.send("GET", "/files?path=/root/s&username=ann", None, box.headers)
    assert refused.status == 403
    assert box.run("sudo -u root -E A=b sh -c 'id -u; echo $A'").out == b"0\nb\n"


def test_a_port_of_a_sandbox_is_reached(box: Box) -> None:
    box.write("page/index.html", b"a page")
    connection, found = box.start("cd page && exec python3 -m http.server 8000 --bind 127.0.0.1")
    next(found)
    port = {"E2b-Sandbox-Id": box.id, "E2b-Sandbox-Port": "8000"}
    for _ in range(100):
        answer = box.api.send("GET", "/", None, port)
        if answer.status == 200:
            break
        assert "port is not open" in answer.json["message"]
        time.sleep(0.05)
    assert answer.body == b"a page"
    assert answer.headers["Content-Type"].startswith("text/html")
    assert box.api.send("GET", "/none", None, port).status == 404
    host = {"Host": f"8000-{box.id}.e2b.localhost"}
    assert box.api.send("GET", "/", None, host).body == b"a page"
    connection.close()


def test_a_closed_port_can_need_a_token(api: Api) -> None:
    box = api.create(network={"allowPublicTraffic": False})
    port = {"E2b-Sandbox-Id": box.id, "E2b-Sandbox-Port": "8000"}
    assert api.send("GET", "/", None, port).status == 403
    with_token = {**port, "E2b-Traffic-Access-Token": box.created["trafficAccessToken"]}
    assert api.send("GET", "/", None, with_token).status == 502


def test_a_stream_without_output_is_kept_alive(box: Box) -> None:
    connection, found = box.start("sleep 2.5", headers={"Keepalive-Ping-Interval": "1"})
    kinds = [next(iter(message["event"])) for flags, message in found if not flags]
    connection.close()
    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    assert "keepalive" in kinds


def test_uploads_have_a_limit() -> None:
    with a_server(ApiKey("k", FIRST), most_upload_bytes=9 << 20) as running:
        box = Api(running.url, FIRST).create()
        assert box.write("big", bytes(10 << 20)).status == 413
        assert box.read("big").status == 404
        packed = gzip.compress(bytes(200 << 20))
        assert box.write("bomb", packed, **{"Content-Encoding": "gzip"}).status in (400, 413)


def test_broken_calls_are_refused(box: Box) -> None:
    api, headers = box.api, {**box.headers, "Content-Type": "application/json"}
    assert api.send("POST", "/process.Process/List", b"[", headers).json["code"] == "invalid_argument"
    assert api.send("POST", "/process.Process/List", b"[1]", headers).json["code"] == "invalid_argument"
    proto = {**box.headers, "Content-Type": "application/proto"}
    assert api.send("POST", "/process.Process/List", b"", proto).status == 415
    assert api.send("POST", "/process.Process/Nothing", b"{}", headers).status == 404
    stream = {**box.headers, "Content-Type": "application/connect+json"}
    for body in (b"\1\0\0\0\2{}", b"\0\xff\xff\xff\xff", b"\0\0\0\0\x09{", envelope({"process": {"cmd": ""}})):
        _, answer = api.open("POST", "/process.Process/Start", body, stream)
        assert "error" in list(messages(answer))[-1][1], body
    for path in ("a\0b", "x" * 5000, "\ud800"):
        assert box.files("Stat", {"path": path}).json["code"] in ("invalid_argument", "not_found")
    assert box.files("Stat", {"path": 7}).json["code"] == "invalid_argument"
    assert box.files("Remove", {"path": "/"}).json["code"] == "invalid_argument"
    deep = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    assert api.send("POST", "/process.Process/List", deep, headers).json["code"] == "invalid_argument"
    place = urlsplit(api.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=10)
    connection.request("POST", "/v2/sandboxes", body=b"x", headers={"X-API-Key": api.key, "Content-Length": "1"})
    assert json.loads(connection.getresponse().read())["code"] == 400
    connection.close()
