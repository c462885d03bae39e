"""The viewer's server over real HTTP: who may read, what it answers, and what hostile texts and names can do."""

from __future__ import annotations

import asyncio
import base64
import csv
import json
import socket
import subprocess
import sys
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from recorded import TWO_CALLS, rollout, sky, write_run

from golden_messages import check_message, raises
from palaestra.cli.main import main
from palaestra.rollouts.events import RolloutEnded
from palaestra.rollouts.journal.journal import Journal
from palaestra.rollouts.observe.status_file import STATUS_NAME, STATUS_SCHEMA, started_ticks
from palaestra.rollouts.records import Group
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON
from palaestra_view.page_file import page_file, page_files
from palaestra_view.rollout_record import CUT
from palaestra_view.runs import open_runs
from palaestra_view.server import POLICY, Viewer, serving_viewer
from palaestra_view.token_texts import TokenTexts

from .fixing import HOSTILE

TOKEN = "secret-token"


class Caller:
    """A client of one viewer. `get` returns the decoded answer of `/api/<name>`, which must succeed."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url = url
        self.http = http

    async def get(self, name: str, **params: JSON) -> JSON:
        status, body = await self.ask(f"/api/{name}", params)
        assert status == 200, body
        return body

    async def ask(self, path: str, params: JSON = None, **headers: str) -> tuple[int, JSON]:
        sent = {"Authorization": f"Bearer {TOKEN}", **{name.replace("_", "-"): each for name, each in headers.items()}}
        async with self.http.get(self.url + path, params=params, headers=sent, allow_redirects=False) as response:
            text = await response.text()
            return response.status, json.loads(text) if response.content_type == "application/json" else text

    async def indexed(self, run: str, rollouts: int) -> JSON:
        """Wait until the run's summary has this many rollouts, and return the summary."""
        for _ in range(500):
            found = (await self.get("run", run=run))["summary"]
            if found["totals"]["rollouts"] >= rollouts:
                return found
            await asyncio.sleep(0.02)
        raise AssertionError("the rollouts are never indexed")


def visit(target: Path, scenario: Callable[[Caller], Awaitable[None]], tokenizer: str | None = None) -> None:
    async def main() -> None:
        runs = open_runs(str(target))
        viewer = Viewer(runs, TOKEN, TokenTexts(runs, tokenizer))
        async with serving_viewer(viewer, TOKEN) as url, aiohttp.ClientSession() as http:
            await scenario(Caller(url, http))

    asyncio.run(main())


def test_only_a_caller_with_the_token_reads_anything(tmp_path: Path) -> None:
    async def scenario(caller: Caller) -> None:
        for path in ("/", "/page/app.js", "/api/runs", "/api/events", "/nothing"):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": "palaestra_view=secret-token"}):
                async with caller.http.get(caller.url + path, headers=headers) as response:
                    assert response.status == 401
                    assert TOKEN not in await response.text()
        assert (await caller.ask("/api/runs", Host="evil.example"))[0] == 403
        for host in ("127.0.0.1:99999999", "127.0.0.1:abc"):
            assert (await caller.ask("/api/runs", Host=host))[0] == 400
        own = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        body = b'{"run": "run", "id": "\xff", "tags": ["x"]}'
        async with caller.http.post(f"{caller.url}/api/annotate", data=body, headers=own) as response:
            assert response.status == 400
        assert (await caller.ask("/api/runs", {"token": "wrong"}, Authorization=""))[0] == 401
        assert (await caller.ask("/nothing"))[0] == 404

    visit(write_run(tmp_path / "run", sky()), scenario)


def test_the_first_address_sets_a_cookie_that_then_opens_everything(tmp_path: Path) -> None:
    async def scenario(caller: Caller) -> None:
        jar = aiohttp.CookieJar(unsafe=True)
        async with aiohttp.ClientSession(cookie_jar=jar) as http:
            async with http.get(f"{caller.url}/?token={TOKEN}", allow_redirects=False) as response:
                assert (response.status, response.headers["Location"]) == (303, "/")
                cookie = response.headers["Set-Cookie"]
                assert "HttpOnly" in cookie
                assert "SameSite=Strict" in cookie
            for path in ("/", "/api/runs", *(f"/page/{name}" for name in page_files())):
                async with http.get(caller.url + path) as response:
                    assert response.status == 200
                    assert response.headers["Content-Security-Policy"] == POLICY
                    assert response.headers["X-Content-Type-Options"] == "nosniff"

    visit(write_run(tmp_path / "run", sky()), scenario)


def test_the_table_of_several_runs_is_the_one_that_the_command_prints(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "runs"
    names = ["env--a/one", "env--b/two"]
    for name in names:
        write_run(root / name, sky(), config={"env": {"group_size": 4}})
    assert main(["runs", "--table", "--format", "csv", *(str(root / name) for name in names)]) == 0
    printed = list(csv.reader(capfd.readouterr().out.splitlines()))

    async def scenario(caller: Caller) -> None:
        found = await caller.get("table", run=names)
        shown = [dict(zip(found["columns"], row["cells"], strict=True)) for row in found["rows"]]
        assert [row["run"] for row in found["rows"]] == names
        assert {"pass@1", "pass@k", "mean reward", "tasks scored", "time", "tokens"} <= {*found["columns"]}
        for row, line in zip(shown, printed[1:], strict=True):
            figures = dict(zip(printed[0], line, strict=True))
            assert row["pass@1"].split()[0] == f"{float(figures['pass_1']):.3f}"
            assert row["tasks scored"] == f"{figures['tasks_scored']} of {figures['tasks']}"
        other = await caller.get("table", run=["env--a/one", "../outside"])
        assert [row["run"] for row in other["rows"]] == ["env--a/one"]
        check_message(other["problems"]["../outside"], "does")
        assert (await caller.get("table"))["rows"] == []

    visit(root, scenario)


def test_nothing_outside_the_runs_is_served(tmp_path: Path) -> None:
    secret = tmp_path / "outside" / "journal.jsonl"
    write_run(secret.parent, sky())
    root = tmp_path / "runs"
    write_run(root / "env--m" / "one", sky())
    (root / "env--m" / "linked").symlink_to(secret.parent)
    linked = root / "env--m" / "file" / "journal.jsonl"
    linked.parent.mkdir()
    linked.symlink_to(secret)

    async def scenario(caller: Caller) -> None:
        found = await caller.get("runs")
        assert [each["name"] for each in found["runs"]] == ["env--m/one"]
        for name in ("../outside", str(secret.parent), "env--m/../../outside", "", "env--m/file", "env--m/linked"):
            status, body = await caller.ask("/api/rollouts", {"run": name})
            assert status == 400
            check_message(str(body))
        for path in (
            "/page/../server.py",
            "/page/%2e%2e%2fserver.py",
            "/page/..%2f..%2fcli%2fmain.py",
            "/page//etc/passwd",
        ):
            assert (await caller.ask(path))[0] in (401, 404)

    visit(root, scenario)


def test_a_real_run_is_shown_with_its_tokens(real: Path) -> None:
    async def scenario(caller: Caller) -> None:
        (run,) = [each["name"] for each in (await caller.get("runs"))["runs"]]
        summary = await caller.indexed(run, 12)
        assert (summary["state"], summary["scored"], summary["groups"]["ended"]) == ("done", 12, 3)
        rows = (await caller.get("rollouts", run=run))["rows"]
        assert [row["task"] for row in rows] == [f"count/{n}" for n in range(3) for _ in range(4)]
        for row in rows[:2]:
            whole = await caller.get("rollout", run=run, id=row["id"])
            assert whole["tokens"]["rows"][0]["tokens"] == row["exact"]
            tokens = await caller.get("tokens", run=run, id=row["id"])
            ids = array("i", base64.b64decode(tokens["ids"]))
            assert tokens["verdict"]["ok"]
            assert len(ids) == row["exact"] == len(base64.b64decode(tokens["mask"])) == tokens["verdict"]["tokens"]
            texts = dict(zip(sorted(set(ids)), tokens["texts"], strict=True))
            assert "Write the number of lines of a.txt" in "".join(texts[each] for each in ids)
        ids = [row["id"] for row in rows[:4]]
        found = await caller.get("siblings", run=run, id=ids)
        assert [each["id"] for each in found["rollouts"]] == ids
        assert (await caller.ask("/api/siblings", {"run": run, "id": ids[0]}))[0] == 400
        details = await caller.get("run", run=run)
        assert details["settings"]["openai.server_type"]["value"] == "vllm"

    visit(real, scenario)


def test_a_run_of_another_person_chooses_no_tokenizer(real: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    copied.mkdir()
    (copied / "journal.jsonl").write_bytes((real / "journal.jsonl").read_bytes())

    async def texts(caller: Caller) -> JSON:
        (run,) = [each["name"] for each in (await caller.get("runs"))["runs"]]
        await caller.indexed(run, 12)
        first = (await caller.get("rollouts", run=run))["rows"][0]["id"]
        return (await caller.get("tokens", run=run, id=first))["texts"]

    async def without(caller: Caller) -> None:
        assert await texts(caller) is None

    async def named(caller: Caller) -> None:
        assert await texts(caller)

    visit(copied, without)
    visit(copied, named, str(real.parents[2] / "model"))
    with pytest.raises(ConfigError, match="no model folder"):
        TokenTexts(open_runs(str(copied)), "./missing")


def test_a_run_that_goes_on_streams_in(tmp_path: Path) -> None:
    group = Group(group_id="000000-sky", number=0, task_id="sky", trajectories=[rollout(0, TWO_CALLS)])
    folder = write_run(tmp_path / "run", group, ended=False)

    async def scenario(caller: Caller) -> None:
        (run,) = [each["name"] for each in (await caller.get("runs"))["runs"]]
        await caller.indexed(run, 1)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with caller.http.get(caller.url + "/api/events", headers=headers) as events:
            journal = Journal(folder / "journal.jsonl")
            journal.append(RolloutEnded(trajectory=rollout(1, TWO_CALLS, 0.0)))
            journal.close()
            line = await asyncio.wait_for(events.content.readline(), 10)
            assert json.loads(line.removeprefix(b"data: ")) == {"run": run}
        assert (await caller.get("rollouts", run=run))["total"] == 2

    visit(folder, scenario)


def test_an_open_page_hears_that_the_process_of_a_run_was_killed(tmp_path: Path) -> None:
    group = Group(group_id="000000-sky", number=0, task_id="sky", trajectories=[rollout(0, TWO_CALLS)])
    folder = write_run(tmp_path / "run", group, ended=False)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    owner = {"host": socket.gethostname(), "pid": process.pid, "started": started_ticks(process.pid)}
    status = {"schema": STATUS_SCHEMA, **owner, "at": 0.0, "stages": {}, "idle": []}
    (folder / STATUS_NAME).write_text(json.dumps(status))

    async def scenario(caller: Caller) -> None:
        (run,) = [each["name"] for each in (await caller.get("runs"))["runs"]]
        assert (await caller.indexed(run, 1))["state"] == "running"
        async with caller.http.get(caller.url + "/api/events", headers={"Authorization": f"Bearer {TOKEN}"}) as events:
            await asyncio.sleep(0.6)  # the viewer has seen the process alive
            process.kill()
            line = await asyncio.wait_for(events.content.readline(), 5)
            assert json.loads(line.removeprefix(b"data: ")) == {"run": run}
        assert (await caller.get("run", run=run))["summary"]["state"] == "killed"

    try:
        visit(folder, scenario)
    finally:
        process.kill()
        process.wait()


def test_hostile_texts_and_names_come_through_as_data(tmp_path: Path) -> None:
    name = "../../etc/passwd?x=<b>#\u202e"
    messages = [
        {"role": "user", "content": HOSTILE},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": HOSTILE}],
            "tool_calls": [{"id": 3, "function": HOSTILE}, None],
        },
        {"role": "tool", "tool_call_id": "x", "content": {"deep": [HOSTILE]}},
        {"role": "user", "content": {"not": {CUT: "/messages/0/content", "head": None, "tail": 3, "chars": 1 << 60}}},
    ]
    shown = json.loads(json.dumps(messages).replace(f'"{CUT}"', f'"{CUT} (recorded)"'))
    one = rollout(
        0, messages, group_id=name, rollout_id=f"{name}/0", task_id=name, error=HOSTILE, detail={HOSTILE: HOSTILE}
    )
    group = Group(
        group_id=name,
        number=0,
        task_id=name,
        trajectories=[one, rollout(1, messages, group_id=name, rollout_id=f"{name}/1")],
    )
    folder = write_run(tmp_path / "a b" / "r#1?", group)

    async def scenario(caller: Caller) -> None:
        (run,) = [each["name"] for each in (await caller.get("runs"))["runs"]]
        await caller.indexed(run, 2)
        whole = await caller.get("rollout", run=run, id=f"{name}/0")
        assert whole["messages"] == shown
        assert whole["detail"] == {HOSTILE: HOSTILE}
        assert (await caller.get("groups", run=run))["groups"][0]["task"] == name
        assert (await caller.get("siblings", run=run, id=[f"{name}/0", f"{name}/1"]))["rollouts"]
        assert len((await caller.get("search", run=run, text=HOSTILE))["found"]) == 2

    visit(folder, scenario)


def test_an_output_of_50_mb_costs_nothing_until_it_is_asked_for(tmp_path: Path) -> None:
    huge = "0123456789" * 5_000_000 + "the end"
    messages = [{"role": "user", "content": "go"}, {"role": "tool", "content": huge}]
    folder = write_run(
        tmp_path / "run", Group(group_id="g", number=0, task_id="t", trajectories=[rollout(0, messages)])
    )

    async def scenario(caller: Caller) -> None:
        (run,) = [each["name"] for each in (await caller.get("runs"))["runs"]]
        await caller.indexed(run, 1)
        one = {"run": run, "id": "000000-sky/0"}
        whole = await caller.get("rollout", **one)
        cut = whole["messages"][1]["content"]
        assert (cut[CUT], cut["chars"]) == ("/messages/1/content", len(huge))
        assert len(json.dumps(whole)) < 100_000
        part = await caller.get("text", **one, path=cut[CUT], start=len(huge) - 100, chars=1000)
        assert part["text"] == huge[-100:]
        assert len((await caller.get("text", **one, path=cut[CUT], start=0, chars=10**9))["text"]) == 1_000_000
        for path in ("/messages/9/content", "/messages/x", "messages", "/outcome/0", ""):
            assert (await caller.ask("/api/text", {**one, "path": path}))[0] == 400

    visit(folder, scenario)


@pytest.mark.parametrize(
    ("path", "params"),
    [
        ("rollouts", {}),
        ("rollouts", {"where": "no json"}),
        ("rollouts", {"where": '[["reward", "<"]]'}),
        ("rollouts", {"where": '[["nothing", "<", 1]]'}),
        ("rollouts", {"offset": "-1"}),
        ("rollouts", {"sort": "1; DROP TABLE rollouts"}),
        ("rollout", {"id": "missing"}),
        ("tokens", {"id": "000000-sky/3"}),
        ("tokens", {"id": "000000-sky/0", "row": "7"}),
        ("compare", {"base": "missing"}),
        ("search", {}),
    ],
)
def test_a_wrong_request_gets_a_reason(tmp_path: Path, path: str, params: JSON) -> None:
    async def scenario(caller: Caller) -> None:
        (run,) = [each["name"] for each in (await caller.get("runs"))["runs"]]
        await caller.indexed(run, 4)
        given = {**({} if (path, params) == ("rollouts", {}) else {"run": run}), **params}
        status, body = await caller.ask(f"/api/{path}", given)
        assert status == 400
        assert len(body["detail"]) > 20

    visit(write_run(tmp_path / "run", sky()), scenario)


async def test_a_failure_of_the_viewer_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken(run: str) -> None:
        raise ZeroDivisionError("a fault\nthat nobody expects")

    with caplog.at_level("WARNING"):
        runs = open_runs(str(write_run(tmp_path / "run", sky())))
        async with serving_viewer(Viewer(runs, TOKEN, broken), TOKEN) as url, aiohttp.ClientSession() as http:
            caller = Caller(url, http)
            await caller.indexed("run", 4)
            status, body = await caller.ask("/api/tokens", {"run": "run", "id": "000000-sky/0"})
            assert status == 500
            assert "ZeroDivisionError: a fault" in body["detail"]
            assert "reload the page" in body["detail"]
    (line,) = [each for each in caplog.records if "/api/tokens failed" in each.getMessage()]
    assert line.exc_info is None
    assert "\n" not in line.getMessage()


def test_a_folder_without_runs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for target in ("empty", "", "nothing"):
        with raises(ConfigError, target):
            open_runs(target)


def test_the_page_is_small_and_puts_no_text_into_markup() -> None:
    files = {name: page_file(name) for name in page_files()}
    assert sum(len(text.encode()) for text in files.values()) <= 300_000
    for name, text in files.items():
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "http://www.google",
        ):
            assert word not in text, (name, word)
