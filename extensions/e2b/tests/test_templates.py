"""Templates over plain HTTP: images by name, builds from steps, their files, and what outlives the server."""

from __future__ import annotations

import io
import tarfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from palaestra_e2b.api_keys import ApiKey
from palaestra_slots.core.types import JSON
from palaestra_slots.images.dockerfile import ImageConfig

from .conftest import FIRST, SECOND, a_server
from .http_client import Api

pytestmark = pytest.mark.slots
KEYS = (ApiKey("first", FIRST), ApiKey("second", SECOND))
DIGEST = "ab" * 32


def build(api: Api, name: str, *steps: JSON, **more: JSON) -> JSON:
    """Build a template and return the final status."""
    made = api.call("POST", "/v3/templates", {"name": name})
    assert made.status == 202, made.body
    place = f"/templates/{made.json['templateID']}/builds/{made.json['buildID']}"
    started = api.call("POST", f"/v2{place}", {"fromTemplate": "base", "steps": list(steps), **more})
    if started.status != 202:
        return started.json
    while (status := api.call("GET", f"{place}/status").json)["status"] == "building":
        time.sleep(0.02)
    return status


def send_files(api: Api, template: str, **files: str) -> None:
    """Send the files of a COPY step."""
    link = api.call("GET", f"/templates/{template}/files/{DIGEST}")
    assert link.status == 201
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(name.replace("__", "/"))
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    assert api.send("PUT", urlsplit(link.json["url"]).path, packed.getvalue()).status == 200
    assert api.send("PUT", urlsplit(link.json["url"]).path, b"again").status == 403
    assert api.call("GET", f"/templates/{template}/files/{DIGEST}").json["present"] is True


def step(kind: str, *args: str, **more: str) -> JSON:
    return {"type": kind, "args": list(args), **more}


def test_a_build_runs_its_steps_and_outlives_the_server(tmp_path: Path) -> None:
    with a_server(*KEYS, folder=tmp_path) as running:
        api = Api(running.url, FIRST)
        send_files(api, "any", app__f="data", top="t")
        status = build(
            api, "mine", step("ENV", "GREETING", "hello"), step("WORKDIR", "/srv/app"),
            step("COPY", "app", "/srv/app", "", "", filesHash=DIGEST),
            step("COPY", "top", "named", "", "600", filesHash=DIGEST),
            step("RUN", 'echo "$GREETING $(cat f)" > out; cat out'),
        )  # fmt: skip
        assert status["status"] == "ready", status
        assert "hello data" in status["logs"]
        assert api.call("GET", "/templates/aliases/mine").status == 200
        assert api.create("mine").run("pwd; cat out; stat -c %a named; echo $GREETING").out.split() == [
            b"/srv/app", b"hello", b"data", b"600", b"hello",
        ]  # fmt: skip
        assert api.call("POST", "/templates/tags", {"target": "mine", "tags": ["v1", "v2"]}).status == 201
        assert [each["tag"] for each in api.call("GET", "/templates/mine/tags").json] == ["default", "v1", "v2"]
        assert api.create("mine:v2").kill() == 204
        more = [[f"t{each}-{tag}" for tag in range(20)] for each in range(5)]
        added = [api.call("POST", "/templates/tags", {"target": "mine", "tags": tags}).status for tags in more]
        assert added == [201] * 4 + [429]
        for tags in more[:4]:
            assert api.call("DELETE", "/templates/tags", {"name": "mine", "tags": tags}).status == 204
        assert api.call("DELETE", "/templates/tags", {"name": "mine", "tags": ["v1", "v2"]}).status == 204
        assert api.call("POST", "/v2/sandboxes", {"templateID": "mine:v2"}).status == 404
        assert api.call("DELETE", "/templates/tags", {"name": "mine", "tags": ["v1"]}).status == 404
        again = build(api, "over", step("RUN", "echo over > over"), fromTemplate="mine")
        assert again["status"] == "ready"
        other = Api(running.url, SECOND)
        assert other.call("GET", "/templates/aliases/mine").status == 404
        assert other.call("POST", "/v2/sandboxes", {"templateID": "mine"}).status == 404
    with a_server(*KEYS, folder=tmp_path) as running:
        api = Api(running.url, FIRST)
        assert api.create("over").run("cat out over").out == b"hello data\nover\n"
        names = [name for each in api.call("GET", "/templates").json for name in each["names"]]
        assert names == ["base", "mine", "over"]
        assert Api(running.url, SECOND).call("DELETE", "/templates/mine").status == 404
        using = api.create("mine")
        assert api.call("DELETE", "/templates/mine").status == 204
        assert using.run("cat out").out == b"hello data\n", "its files are still in use"
        assert using.kill() == 204
        assert api.create("over").run("cat out").out == b"hello data\n", "what was built on it stays"
    with a_server(*KEYS, folder=tmp_path) as running:
        assert Api(running.url, FIRST).call("GET", "/templates/aliases/mine").status == 404
        assert len([each for each in (tmp_path / "templates").iterdir() if each.name.startswith("t")]) == 1


def test_a_failed_build_says_which_step_and_why(tmp_path: Path) -> None:
    with a_server(*KEYS, folder=tmp_path) as running:
        api = Api(running.url, FIRST)
        status = build(api, "bad", step("RUN", "true"), step("RUN", "echo because; exit 3"))
        assert status["status"] == "error"
        assert status["reason"]["step"] == "2"
        assert "exit code: 3" in status["reason"]["message"]
        assert "because" in status["logs"]
        assert api.call("POST", "/v2/sandboxes", {"templateID": "bad"}).status == 404
        assert "not uploaded" in build(api, "b", step("COPY", "a", "b", filesHash="cd" * 32))["reason"]["message"]
        assert "EXPOSE" in build(api, "b", step("EXPOSE", "80"))["reason"]["message"]
        nobody = build(api, "b", step("USER", "root123"), step("RUN", "whoami"))["reason"]["message"]
        assert "'whoami': command failed: unauthenticated: invalid username: 'root123'" in nobody
        unused = build(api, "b", step("RUN", "true"), step("USER", "root123"))["reason"]["message"]
        assert "the last USER: unauthenticated: invalid username: 'root123'" in unused
        assert "no arguments" in build(api, "b", step("RUN"))["reason"]["message"]
        refused = build(api, "b", fromTemplate="", fromImage="python:3.12")
        assert refused["code"] == 400
        assert "python:3.12" in refused["message"]
        assert build(api, "b", fromImageRegistry={"type": "registry"})["code"] == 400
        for name in ("", "../x", "a b", "x" * 200):
            assert api.call("POST", "/v3/templates", {"name": name}).status == 400
        assert api.call("GET", f"/templates/x/files/{quote_dots()}").status == 400
        assert api.send("PUT", "/template-files/nothing", b"x").status == 403
        assert running.pool.acquired_slots == 0


def quote_dots() -> str:
    return "..%2F..%2Fetc"


def test_a_start_command_runs_in_each_sandbox(tmp_path: Path) -> None:
    with a_server(*KEYS, folder=tmp_path) as running:
        api = Api(running.url, FIRST)
        start = "sleep 0.2; touch /tmp/ready; sleep 600"
        assert build(api, "served", startCmd=start, readyCmd="[ -e /tmp/ready ]")["status"] == "ready"
        box = api.create("served")
        assert box.read("/tmp/ready").status == 200
        assert len(box.rpc("process.Process/List", {}).json["processes"]) == 1


def test_images_are_templates_with_their_settings(tmp_path: Path) -> None:
    config = ImageConfig({"FROM_IMAGE": "yes"}, "/tmp", "")
    with a_server(*KEYS, images={"base": (None, ImageConfig()), "small": (None, config)}) as running:
        api = Api(running.url, FIRST)
        assert api.create("small").run("pwd; echo $FROM_IMAGE").out == b"/tmp\nyes\n"
        described = api.call("GET", "/templates/small").json
        assert described["public"] is True
        assert api.call("PATCH", "/templates/small", {"public": False}).status == 400
        assert api.call("POST", "/templates/tags", {"target": "small", "tags": ["v2"]}).status == 403
        no_folder = api.call("GET", f"/templates/any/files/{DIGEST}")
        assert no_folder.status == 400
