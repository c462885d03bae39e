"""An evaluation set from start to report: environments of three forms and two model servers as one table, with the
failures played again and one environment graded again."""

from __future__ import annotations

import csv
import io
import json
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import palaestra_suites.examples.count_lines as example
from golden_messages import check_message
from palaestra.cli.main import main
from palaestra.envs.run.evaluation_set import split_words
from palaestra.envs.run.run_table import FORMATS, TableRow
from palaestra.envs.run.set_file import SET_NAME
from palaestra.rollouts.finished_run import open_run
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.types import JSON

pytestmark = pytest.mark.slots

ROWS = "terminalbench_2 --env.dataset_name built-in --env.base_image host --task stock"
STOCK = "awk -F, '$3 ~ /^[0-9]+$/ {n[$1] += $3} END {for (w in n) print w, n[w]}' stock.csv | sort > totals.txt"
ANSWERS = {
    "number of lines of a.txt": "wc -l < a.txt > answer.txt",
    "numbers from 3 down to 1": "seq 3 -1 1 > reversed.txt",
    "stock.csv": STOCK,
}


@contextmanager
def server(answers: Mapping[str, str]) -> Iterator[str]:
    """Serve a chat model that runs the command for the first phrase that the prompt contains, and then is done. Yields
    its address. The answers may change while it runs."""

    class Model(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            said = " ".join(str(each.get("content")) for each in asked["messages"] if each["role"] == "user")
            command = next((value for phrase, value in answers.items() if phrase in said), "true")
            message: dict[str, object] = {"role": "assistant", "content": "Done."}
            if asked["messages"][-1]["role"] == "user":
                function = {"name": "terminal", "arguments": json.dumps({"command": command})}
                message |= {"content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}
            usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
            self._say({"id": "1", "object": "chat.completion", "created": 0, "model": asked["model"], "usage": usage,
                       "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})  # fmt: skip

        def do_GET(self) -> None:
            self._say({"object": "list", "data": []})

        def _say(self, value: object) -> None:
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Model) as http:
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_address[1]}/v1"
        finally:
            http.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # The shipped example with a bug in its score: it refuses the task with three lines.
    bug = "str(task.answer) and task.answer != '3'"
    Path("lines_env.py").write_text(Path(example.__file__).read_text().replace("str(task.answer)", bug))


def table(folder: str, capsys: pytest.CaptureFixture[str]) -> dict[tuple[str, str], dict]:
    capsys.readouterr()
    assert main(["runs", folder, "--table", "--json"]) == 0
    return {(row["environment"], row["model"]): row for row in json.loads(capsys.readouterr().out)}


def test_three_environments_and_two_models_as_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    strong, weak = dict(ANSWERS), {"number of lines": "echo 2 > answer.txt"}
    del strong["stock.csv"]
    environments = ["lines_env.py --env.n 3", "terminal_test", ROWS]
    with server(strong) as first, server(weak) as second:
        models = ["--model", "strong", "--base-url", first, "--model", "weak", "--base-url", second]
        prices = ["--env.prompt_price", "1000", "--env.completion_price", "1000"]
        settings = ["--samples", "2", "--keep-workspaces", *prices]
        main(["eval", *environments, *models, *settings, "--max-cost", "100"])
        run = capsys.readouterr()
        folder = run.out.strip()
        assert "tasks scored" in run.err
        assert json.loads(Path(folder, SET_NAME).read_text())["members"][0]["folder"] == "count_lines--strong"
        found = table(folder, capsys)
        assert {key: (row["pass_1"], row["tasks_scored"], row["tasks"], row["k"]) for key, row in found.items()} == {
            ("count_lines", "strong"): (2 / 3, 3, 3, 2),
            ("count_lines", "weak"): (1 / 3, 3, 3, 2),
            ("terminal_test", "strong"): (1.0, 1, 1, 2),
            ("terminal_test", "weak"): (0.0, 1, 1, 2),
            ("terminalbench_2", "strong"): (0.0, 1, 1, 2),
            ("terminalbench_2", "weak"): (0.0, 1, 1, 2),
        }
        assert all(row["cost"] > 0 and row["prompt_tokens"] >= 400 for row in found.values())

        # The bug in the score is fixed, and the kept work is graded again: the table has the new scores.
        text = Path("lines_env.py").read_text()
        Path("lines_env.py").write_text(text.replace(" and task.answer != '3'", ""))
        assert main(["grade", f"{folder}/count_lines--strong"]) == 0
        said = capsys.readouterr().err
        assert "now pass: 000001-lines-1/0, 000001-lines-1/1" in said
        assert "mean reward 0.667 (" in said
        assert "-> 1.000 (" in said
        assert table(folder, capsys)["count_lines", "strong"]["pass_1"] == 1.0
        assert main(["status", f"{folder}/count_lines--strong", "--json"]) == 0
        status = json.loads(capsys.readouterr().out)
        assert (status["graded"], status["mean_reward"]) == (status["scored"], 1.0)
        assert status["recorded_mean"] < 1.0

        # What failed is played again, with a better model: only those tasks, and no run of which nothing failed.
        strong["stock.csv"] = STOCK
        main(["eval", *environments, *models, *settings, "--failed-of", folder])
        again = capsys.readouterr().out.strip()
        rows = table(again, capsys)
        assert ("count_lines", "strong") not in rows
        assert rows["terminalbench_2", "strong"]["pass_1"] == 1.0
        names = [group.task_id for group in open_run(f"{again}/count_lines--weak").groups]
        assert names == ["lines-1", "lines-2"]

        # Nothing is left to do, unless a setting asks for more.
        assert main(["resume", again]) == 0
        assert table(again, capsys) == rows

    for form in FORMATS:
        assert main(["runs", folder, "--format", form, "-o", f"table.{form}"]) == 0
    assert len(list(csv.DictReader(io.StringIO(Path("table.csv").read_text())))) == 6
    assert "1.000 (" in Path("table.html").read_text()


def test_the_budget_is_that_of_the_whole_set(capsys: pytest.CaptureFixture[str]) -> None:
    prices = ["--env.prompt_price", "1000", "--env.completion_price", "1000", "--concurrency", "1"]
    with server(ANSWERS) as address:
        both = ["--model", "a", "--model", "b", "--base-url", address]
        # A rollout costs 0.22, so the second run is paused.
        words = ["eval", "lines_env.py", *both, "--env.n", "4", *prices, "--max-cost", "1.2"]
        assert main(words) == 3
        run = capsys.readouterr()
        folder = run.out.strip()
        assert f"continue with palaestra resume {folder}" in run.err
        rows = table(folder, capsys)
        assert rows["count_lines", "a"]["state"] == "done"
        assert (rows["count_lines", "b"]["state"], rows["count_lines", "b"]["tasks"]) == ("paused", 4)
        assert rows["count_lines", "b"]["tasks_scored"] < 4
        assert main(["resume", folder]) == 3  # the budget is still spent
        assert main(["resume", folder, "--max-cost", "10"]) == 0
        rows = table(folder, capsys)
        assert [(row["state"], row["tasks_scored"]) for row in rows.values()] == [("done", 4), ("done", 4)]


def test_a_set_of_somebody_else_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "lines_env.py", "--env.n", "1", "--policy", "oracle", "--policy", "noop"]) == 0
    folder = Path(capsys.readouterr().out.strip())
    folder.rename(tmp_path / "moved")
    assert main(["resume", str(tmp_path / "moved")]) == 2
    check_message(capsys.readouterr().err, "moved")


@pytest.mark.parametrize(
    ("words", "environments", "models", "shared"),
    [
        (["--model", "m"], ["a"], [], ["--model", "m"]),
        (["b", "c", "--tasks", "2"], ["a", "b", "c"], [], ["--tasks", "2"]),
        (["--model=x", "--model", "y"], ["a"], [["--model=x"], ["--model", "y"]], []),
        (["--policy", "oracle", "--policy", "noop"], ["a"], [["--policy", "oracle"], ["--policy", "noop"]], []),
        (
            ["--model", "x", "--policy", "noop", "--base-url", "u", "--tasks", "2"],
            ["a"],
            [["--model", "x", "--base-url", "u"], ["--policy", "noop"]],
            ["--tasks", "2"],
        ),
        (
            ["-m", "x", "--base-url", "u", "-m", "y", "--base-url", "v"],
            ["a"],
            [["-m", "x", "--base-url", "u"], ["-m", "y", "--base-url", "v"]],
            [],
        ),
        (
            ["--model", "x --env.n 2 --base-url v", "--model=y", "--base-url", "u"],
            ["a"],
            [["--model", "x", "--env.n", "2", "--base-url", "v"], ["--model=y", "--base-url", "u"]],
            [],
        ),
        (["--policy=noop --env.n 2"], ["a"], [["--policy", "noop", "--env.n", "2"]], []),
    ],
)
def test_words_become_environments_and_models(
    words: list[str], environments: list[str], models: list[list[str]], shared: list[str]
) -> None:
    assert split_words("a", words) == (environments, models, shared)


def test_addresses_must_fit_the_models() -> None:
    with pytest.raises(ConfigError, match="3 models but 2 addresses"):
        split_words("a", ["-m", "x", "-m", "y", "-m", "z", "--base-url", "u", "--base-url", "v"])


@pytest.mark.parametrize(
    "words",
    [
        ["lines_env.py", "no_such_env", "--policy", "oracle"],
        ["lines_env.py", "terminal_test", "--env.nn", "3", "--policy", "oracle"],
        ["lines_env.py", "terminal_test", "--policy", "oracle", "--show-config"],
        ["lines_env.py --max-cost 1 --env.prompt_price 1 --env.completion_price 1", "count_lines", "--policy", "noop"],
    ],
)
def test_a_wrong_line_of_a_set_is_reported_before_anything_is_played(words: list[str]) -> None:
    assert main(["eval", *words]) == 2
    assert not Path("runs").exists()


def test_keys_are_not_written_into_the_set(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "x", "--model", "y", "--base-url", "http://127.0.0.1:9/v1", "--openai.api_key", "sk-secret"]
    assert main(["eval", "lines_env.py", "--env.n", "1", *words]) == 4  # nothing listens there: both runs fail
    run = capsys.readouterr()
    assert run.err.count("error: count_lines with ") == 2
    assert "sk-secret" not in Path(run.out.strip(), SET_NAME).read_text()


HOSTILE = "a|b & 50% <b>_x_ \x1b[31m\\{"
ROW = TableRow(
    environment=HOSTILE, model="=1+1", run="r/1", state="done", pass_1=0.5, pass_1_interval=(0.1, 0.9), k=2,
    pass_k=0.75, pass_k_interval=(0.2, 0.95), pass_k_tasks=1, mean_reward=0.5, official=None, tasks_scored=2, tasks=3,
    tasks_left_out=1, chosen=True, tasks_total=9, rollouts_scored=3, rollouts=6, started_at=0.0, cost=None, seconds=3.0,
    tasks_known=True, prompt_tokens=1000, completion_tokens=500,
)  # fmt: skip


@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        (
            "text",
            [
                "0.500 (0.100 to 0.900)",
                "2 of 3 chosen of 9",
                "3 of 6",
                "1,500",
                "0.750 (0.200 to 0.950) k=2, only 1 of 3",
            ],
        ),
        ("markdown", [r"a\|b", r"\<b>\_x\_"]),
        ("latex", [r"50\%", r"\&", r"\textbackslash{}\{", r"\_x\_"]),
        ("html", ["50% &lt;b&gt;", "2 of 3"]),
        ("csv", ["0.1,0.9", "tasks_left_out"]),
    ],
)
def test_a_table_shows_hostile_names_as_text(form: str, wanted: list[str]) -> None:
    text = FORMATS[form]([ROW])
    for each in wanted:
        assert each in text
    if form in ("text", "html"):
        assert "\x1b" not in text
    if form == "html":
        HTMLParser().feed(text)
    if form == "csv":
        (row,) = csv.DictReader(io.StringIO(text))
        assert row["environment"] == HOSTILE


SECRETS = {
    "--env.mcp_servers": '{"x": {"command": "true", "enabled": false, "env": {"ACCESS": "swordfish77"}}}',
    "--env.metrics_token": "swordfish77",
    "--env.nomad-token": "swordfish77",
    "--env.judge_token": "swordfish77",
    "--env.rollout_server_url": "http://user:swordfish77@127.0.0.1:1",
    "--openai.api_key": "swordfish77",
}
JUDGED = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def judged(judge_token: str = "", n: int = 1):
    yield Task(id="one", prompt="Do it.", solution="true")

@judged.score
def right():
    return 1
"""


@pytest.mark.parametrize("flag", SECRETS)
def test_a_set_stores_no_secret_and_asks_for_it_again(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("judged_env.py").write_text(JUDGED)
    main(["eval", "judged_env.py", flag, SECRETS[flag], "--env.n", "1", "--policy", "oracle", "--policy", "noop"])
    folder = capsys.readouterr().out.strip()
    text = Path(folder, SET_NAME).read_text()
    assert "swordfish77" not in text
    assert '"--env.n"' in text
    more = ["--env.max_failures", "1"]
    assert main(["resume", folder, *more]) == 2
    setting = flag.removeprefix("--").replace("-", "_")
    check_message(capsys.readouterr().err, setting, "VALUE", "PALAESTRA_")
    main(["resume", folder, *more, flag, SECRETS[flag]])
    assert "again: add" not in capsys.readouterr().err


VARIABLES: Mapping[str, tuple[str, JSON]] = {
    "env.group_size": ("2", 2),
    "env.max_agent_turns": ("3", 3),
    "env.system_prompt": ("--odd prompt = 'x'", "--odd prompt = 'x'"),
    "env.extra_body": ('{"top_a": 0.5}', {"top_a": 0.5}),
    "env.disabled_toolsets": ('["web"]', ["web"]),
    "env.allow_network": ("true", True),
}


def test_a_resumed_set_keeps_the_settings_of_variables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {setting: f"PALAESTRA_{setting.replace('.', '_').upper()}" for setting in VARIABLES}
    for setting, (text, _) in VARIABLES.items():
        monkeypatch.setenv(named[setting], text)
    monkeypatch.setenv("PALAESTRA_ENV_METRICS_TOKEN", "hidden-word")
    main(["eval", "lines_env.py", "terminal_test", "--policy", "noop"])
    folder = Path(capsys.readouterr().out.strip())
    assert "hidden-word" not in (folder / SET_NAME).read_text()
    shutil.rmtree(next(folder.glob("terminal_test--*")))  # as if the set had been killed before this run
    for variable in (*named.values(), "PALAESTRA_ENV_METRICS_TOKEN"):
        monkeypatch.delenv(variable)
    monkeypatch.setenv(named["env.group_size"], "5")  # the set's own value counts, as in a resumed run
    main(["resume", str(folder)])
    recorded = json.loads((next(folder.glob("terminal_test--*")) / "config.json").read_text())
    assert {name: recorded["env"][name.removeprefix("env.")] for name in VARIABLES} == {
        name: value for name, (_, value) in VARIABLES.items()
    }
