"""Models of an evaluation set with settings of their own, and the servers to which their keys go."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from palaestra.cli.main import main

SAYS_ENV = """
from palaestra import Say, Task, environment

@environment(toolsets=[])
def says(n: int = 4):
    for number in range(n):
        yield Task(id=f"t{number}", prompt="Say yes.", solution=[Say("yes")])

@says.score
def right():
    return 1
"""


class Provider:
    """A chat server that knows some models, and the keys that it was sent."""

    def __init__(self, *models: str) -> None:
        self.models, self.keys, self.asked = models, list[str | None](), list[str]()
        self.finish_reason = "stop"

    @contextmanager
    def served(self) -> Iterator[str]:
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                provider.keys.append(self.headers.get("Authorization"))
                self._say(200, {"object": "list", "data": [{"id": each} for each in provider.models]})

            def do_POST(self) -> None:
                model = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["model"]
                provider.keys.append(self.headers.get("Authorization"))
                provider.asked.append(model)
                if model not in provider.models:
                    self._say(404, {"error": {"message": f"no model {model}", "code": "model_not_found"}})
                    return
                choice = {"index": 0, "message": {"role": "assistant", "content": "yes"}}
                choice["finish_reason"] = provider.finish_reason
                usage = {"prompt_tokens": 1000, "completion_tokens": 0, "total_tokens": 1000}
                self._say(200, {"id": "1", "model": model, "choices": [choice], "usage": usage})

            def _say(self, status: int, value: object) -> None:
                body = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
            thread = Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
            thread.start()
            try:
                yield f"http://127.0.0.1:{http.server_address[1]}/v1"
            finally:
                http.shutdown()
                thread.join()


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("says_env.py").write_text(SAYS_ENV)


@pytest.fixture
def two() -> Iterator[tuple[Provider, str, Provider, str]]:
    first, other = Provider("m1"), Provider("m2")
    with ExitStack() as stack:
        yield first, stack.enter_context(first.served()), other, stack.enter_context(other.served())


Two = tuple[Provider, str, Provider, str]


def rows(folder: str, capsys: pytest.CaptureFixture[str]) -> list[dict]:
    capsys.readouterr()
    assert main(["runs", folder, "--table", "--json"]) == 0
    found: list[dict] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.slow
def test_each_model_has_its_own_prices_address_and_key(
    two: Two, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, first_url, other, other_url = two
    monkeypatch.setenv("FIRST_KEY", "k-first")
    monkeypatch.setenv("OTHER_KEY", "k-other")
    prices = "--env.prompt_price {} --env.completion_price 1"
    one = f"m1 --base-url {first_url} --openai.api_key_variable FIRST_KEY {prices.format(1000)}"
    another = f"m2 --base-url {other_url} --openai.api_key_variable OTHER_KEY {prices.format(10)}"
    assert main(["eval", "says_env.py", "--model", another, "--model", one]) == 0
    folder = capsys.readouterr().out.strip()
    assert set(first.keys) == {"Bearer k-first"}
    assert set(other.keys) == {"Bearer k-other"}
    assert [(row["model"], row["cost"]) for row in rows(folder, capsys)] == [("m2", 0.04), ("m1", 4.0)]
    written = Path(folder, "set.json").read_text()
    assert "FIRST_KEY" in written
    assert "k-first" not in written
    # A resumed set has the same keys, also after the variable of all servers has another one.
    monkeypatch.setenv("OPENAI_API_KEY", "k-foreign")
    assert main(["resume", folder, "--env.n", "5"]) == 0
    assert set(first.keys) == {"Bearer k-first"}
    assert set(other.keys) == {"Bearer k-other"}


@pytest.mark.parametrize("way", ["variable", "flag", "file", "palaestra"])
def test_one_key_is_not_sent_to_two_addresses(
    way: str, two: Two, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, first_url, other, other_url = two
    words = ["eval", "says_env.py", "--model", "m1", "--base-url", first_url, "--model", "m2", "--base-url", other_url]
    match way:
        case "variable":
            monkeypatch.setenv("OPENAI_API_KEY", "k-first")
        case "palaestra":
            monkeypatch.setenv("PALAESTRA_OPENAI_API_KEY", "k-first")
        case "file":
            Path(".env").write_text("OPENAI_API_KEY=k-first\n")
        case _:
            words += ["--openai.api_key", "k-first"]
    assert main(words) == 2
    assert not Path("runs").exists()
    assert first.keys == other.keys == []
    said = capsys.readouterr().err
    assert first_url.removesuffix("/v1") in said
    assert "k-first" not in said


@pytest.mark.slow
def test_a_key_for_one_model_only_goes_to_its_address(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    first, first_url, other, other_url = two
    monkeypatch.setenv("OPENAI_API_KEY", "k-first")
    local = f"m2 --base-url {other_url} --openai.api_key_variable none"
    assert main(["eval", "says_env.py", "--model", "m1", "--base-url", first_url, "--model", local]) == 0
    assert set(first.keys) == {"Bearer k-first"}
    assert set(other.keys) == {None}


@pytest.mark.slow
def test_two_models_of_one_server_share_its_key(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    first, first_url, _, _ = two
    first.models = ("m1", "m2")
    monkeypatch.setenv("OPENAI_API_KEY", "k-first")
    assert main(["eval", "says_env.py", "--model", "m1", "--model", "m2", "--base-url", first_url]) == 0
    assert set(first.keys) == {"Bearer k-first"}


def test_a_variable_of_a_key_must_be_set(two: Two, capsys: pytest.CaptureFixture[str]) -> None:
    _, first_url, _, _ = two
    words = ["--model", "m1", "--base-url", first_url, "--openai.api_key_variable", "NOT_THERE"]
    assert main(["eval", "says_env.py", *words]) == 2
    assert "NOT_THERE" in capsys.readouterr().err


def test_a_key_of_a_variable_beats_the_key_of_all_servers(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    first, first_url, _, _ = two
    monkeypatch.setenv("OPENAI_API_KEY", "k-foreign")
    monkeypatch.setenv("OWN", "k-own")
    words = ["--model", "m1", "--base-url", first_url, "--openai.api_key_variable", "OWN"]
    assert main(["eval", "says_env.py", *words]) == 0
    assert set(first.keys) == {"Bearer k-own"}


def test_one_model_with_settings_in_its_word(two: Two, capsys: pytest.CaptureFixture[str]) -> None:
    first, first_url, _, _ = two
    assert main(["eval", "says_env.py", "--model", f"m1 --base-url {first_url} --env.n 2"]) == 0
    assert [(row["model"], row["tasks"]) for row in rows(capsys.readouterr().out.strip(), capsys)] == [("m1", 2)]
    assert first.asked == ["m1", "m1"]


def test_a_model_that_the_server_does_not_have_plays_no_task(two: Two, capsys: pytest.CaptureFixture[str]) -> None:
    first, first_url, _, _ = two
    assert main(["eval", "says_env.py", "--model", "m3", "--base-url", first_url]) == 4
    assert first.asked == ["m3"]
    assert not Path("runs").exists()
    assert "m3" in capsys.readouterr().err


def test_a_plan_of_a_set_plays_nothing(two: Two, capsys: pytest.CaptureFixture[str]) -> None:
    first, first_url, other, _ = two
    words = ["--model", "m1", "--base-url", first_url, "--policy", "noop"]
    assert main(["eval", "says_env.py --env.n 2", *words, "--dry-run", "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["runs"]
    assert [(each["model"], each["tasks"]) for each in plans] == [("m1", 2), ("noop", 2)]
    assert not Path("runs").exists()
    assert first.keys == other.keys == []


@pytest.mark.slow
def test_sets_are_compared_shown_and_resumed_as_a_whole(two: Two, capsys: pytest.CaptureFixture[str]) -> None:
    first, first_url, _, _ = two
    first.models = ("m2", "m1", "m3")
    words = ["eval", "says_env.py", "--base-url", first_url, "--model", "m2", "--model", "m1"]
    assert main([*words, "--policy", "noop", "--env.n", "2"]) == 0
    older = capsys.readouterr().out.strip()
    assert [row["model"] for row in rows(older, capsys)] == ["m2", "m1", "noop"]
    # The server has lost a model, so one run of this set does not begin.
    first.models = ("m2",)
    assert main([*words, "--env.n", "3"]) == 4
    capsys.readouterr()
    newer = max(str(each) for each in Path("runs").glob("set--*") if str(each) != older)
    found = rows(newer, capsys)
    assert [(row["model"], row["state"], row["tasks"]) for row in found] == [("m2", "done", 3), ("m1", "not run", 0)]
    assert "m1" in found[1]["reason"]

    assert main(["compare", older, newer, "--json"]) == 0
    pairs = json.loads(capsys.readouterr().out)["sets"]
    assert [[run["model"] for run in each["runs"]] for each in pairs] == [["m2", "m2"]]
    assert main(["compare", newer, f"{older}/says--m1"]) == 2

    assert main(["status", newer, "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert [each["model"] for each in status["runs"]] == ["m2"]
    assert [*status["not_run"]] == ["says--m1"]

    # `last` is the set, of which the other run has not begun yet.
    first.models = ("m1", "m2")
    assert main(["resume", "last"]) == 0
    assert capsys.readouterr().out.strip().endswith(newer)
    assert [(row["model"], row["state"]) for row in rows(newer, capsys)] == [("m2", "done"), ("m1", "done")]


@pytest.mark.slow
def test_the_last_set_is_resumed_even_without_a_run(two: Two, capsys: pytest.CaptureFixture[str]) -> None:
    first, first_url, _, _ = two
    assert main(["eval", "says_env.py", "--policy", "noop", "--env.n", "1"]) == 0
    first.models = ()
    main(["eval", "says_env.py", "--base-url", first_url, "--model", "m1", "--model", "m2", "--env.n", "1"])
    first.models = ("m1", "m2")
    capsys.readouterr()
    assert main(["resume", "last"]) == 0
    folder = capsys.readouterr().out.strip()
    assert [(row["model"], row["state"]) for row in rows(folder, capsys)] == [("m1", "done"), ("m2", "done")]


PRICES = ["--env.prompt_price", "1000", "--env.completion_price", "1", "--concurrency", "1"]


@pytest.mark.slow
def test_withheld_replies_have_a_cost(two: Two, capsys: pytest.CaptureFixture[str]) -> None:
    first, first_url, _, _ = two
    first.finish_reason = "content_filter"
    words = ["eval", "says_env.py", "--model", "m1", "--base-url", first_url, *PRICES, "--env.max_infra_rate", "1"]
    main([*words, "--env.n", "2"])
    assert rows(capsys.readouterr().out.strip(), capsys)[0]["cost"] == 2.0
    # They count for the budget, too.
    main([*words, "--env.n", "20", "--max-cost", "2"])
    (row,) = rows(capsys.readouterr().out.strip(), capsys)
    assert (row["state"], row["cost"]) == ("paused", 2.0)


@pytest.mark.parametrize(
    ("words", "tasks", "total"),
    [
        (["--task", "t1"], (1, True), 4),
        (["--tasks", "3"], (3, True), 4),
        (["--tasks", "4"], (4, False), None),
        (["--tasks", "9"], (4, False), None),
        (["--env.held_out", "0.5", "--env.seed", "1"], (3, True), 4),
        ([], (4, False), None),
    ],
)
def test_a_row_says_that_its_tasks_were_chosen(
    words: list[str], tasks: tuple[int, bool], total: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "says_env.py", "--policy", "oracle", *words]) == 0
    (row,) = rows(capsys.readouterr().out.strip(), capsys)
    assert (row["tasks"], row["chosen"], row["tasks_total"]) == (*tasks, total)


REFUSES_ENV = """
from palaestra import Say, Task, environment

@environment(toolsets=[])
def says():
    for number in range(4):
        yield Task(id=f"t{number}", prompt="Say yes.", solution=[Say("yes")])

@says.score
def right(task, rollout):
    if task.id != "t0" and rollout.rollout_id.endswith("/0"):
        raise RuntimeError("down")
    return task.id == "t0"
"""


def test_each_figure_of_a_row_says_what_it_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    Path("says_env.py").write_text(REFUSES_ENV)
    assert main(["eval", "says_env.py", "--policy", "oracle", "--samples", "2"]) == 3
    folder = capsys.readouterr().out.strip()
    (row,) = rows(folder, capsys)
    assert (row["pass_1"], row["tasks_scored"], row["pass_k"], row["pass_k_tasks"]) == (0.25, 4, 1.0, 1)
    assert (row["rollouts_scored"], row["rollouts"]) == (5, 8)
    assert row["pass_k_interval"][0] < row["pass_k"]
    for form in ("text", "markdown", "latex", "html"):
        main(["runs", folder, "--table", "--format", form])
        text = capsys.readouterr().out
        assert "k=2, only 1 of 4 tasks" in text
        assert "5 of 8" in text
    main(["runs", folder, "--table", "--format", "csv"])
    (line,) = csv.DictReader(capsys.readouterr().out.splitlines())
    assert (line["pass_k_tasks"], line["rollouts_scored"], line["pass_k_high"]) == ("1", "5", "1.0")


@pytest.mark.slow
def test_a_set_has_one_page_with_its_table_and_one_for_each_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "says_env.py", "--policy", "oracle", "--policy", "noop"]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert main(["report", str(folder)]) == 0
    assert main(["view", str(folder), "--html", "page.html"]) == 0
    for page in (folder / "report.html", Path("page.html")):
        for run in ("says--oracle", "says--noop"):
            own = page.with_name(f"{page.stem}-{run}.html")
            assert f'href="{own.name}"' in page.read_text()
            assert own.stat().st_size > 10_000


def test_a_table_shows_what_a_run_plans_while_it_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "says_env.py", "--policy", "oracle", "--env.n", "4", "--concurrency", "1"]) == 0
    folder = Path(capsys.readouterr().out.strip())
    lines = (folder / "journal.jsonl").read_bytes().splitlines(keepends=True)
    ended = [place for place, line in enumerate(lines) if b'"event":"group_end"' in line]
    (folder / "journal.jsonl").write_bytes(b"".join(lines[: ended[1] + 1]))
    (folder / "metrics.jsonl").unlink()
    (row,) = rows(str(folder), capsys)
    assert (row["state"], row["tasks_scored"], row["tasks"], row["rollouts"]) == ("running", 2, 4, 4)
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps(status | {"planned": None}))
    (row,) = rows(str(folder), capsys)
    assert (row["tasks"], row["tasks_known"]) == (2, False)


@pytest.mark.slow
def test_the_servers_of_one_model_share_its_key(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    first, first_url, other, other_url = two
    first.models = other.models = ("m",)
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    servers = [{"base_url": each, "model_name": "m"} for each in (first_url, other_url)]
    Path("servers.yaml").write_text(json.dumps({"openai": servers}))
    assert main(["eval", "says_env.py", "says_env.py --env.n 1", "--config", "servers.yaml"]) == 0
    assert set(first.keys) == set(other.keys) == {"Bearer k"}
