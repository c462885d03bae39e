"""`palaestra runs`, `palaestra resume`, and the short names of runs."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest

import palaestra
from golden_messages import check_message
from palaestra import open_run
from palaestra.cli.main import main
from palaestra.envs.run.provenance import provenance

ENV = """
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def words(n: int = 2):
    for i in range(n):
        yield Task(id=f"w{i}", prompt="p", solution="true")

@words.score
def right(task): return 1
"""


@pytest.fixture(autouse=True)
def _run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_env.py").write_text(ENV)
    assert (
        main(["run", "my_env.py", "--policy", "oracle", "--group", "2", "--env.seed", "7", "--concurrency", "1"]) == 0
    )
    capsys.readouterr()


def test_runs_are_listed_the_latest_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "my_env.py", "--policy", "noop"]) == 0
    assert capsys.readouterr().out == f"{open_run().path.relative_to(Path.cwd())}\n"
    assert main(["runs", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["model"], row["state"], row["groups"], row["rollouts"]) for row in rows] == [
        ("noop", "done", 2, 2), ("oracle", "done", 2, 4),
    ]  # fmt: skip
    assert main(["runs", "--limit", "1"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(rows[0]["id"])
    assert "1 older run " in shown.err


def test_an_evaluation_is_listed_as_one_and_an_impossible_folder_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "my_env.py", "--policy", "oracle"]) == 0
    capsys.readouterr()
    assert main(["runs", "--json"]) == 0
    assert [row["kind"] for row in json.loads(capsys.readouterr().out)] == ["eval", "run"]
    assert main(["runs", "--root", str(tmp_path / "nope"), "--json"]) == 2
    assert "nope" in json.loads(capsys.readouterr().err)["error"]["message"]


@pytest.mark.parametrize("command", [["status"], ["export", "--to", "table", "--out", "-"], ["replay"], ["verify"]])
def test_every_command_takes_the_short_name_of_a_run(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    codes = {main([command[0], name, *command[1:]]) for name in ("last", open_run().path.name[:16])}
    assert codes == ({2} if command == ["verify"] else {0})  # nothing to prove without tokens
    assert "no run folder" not in capsys.readouterr().err


def test_a_run_is_resumed_with_the_settings_that_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = open_run().path / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    started = [number for number, line in enumerate(lines) if b'"event":"group"' in line]
    journal.write_bytes(b"".join(lines[: started[-1] + 1]))  # killed during its second group
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert main(["resume", str(journal.parent)]) == 0
    said = capsys.readouterr().err
    check_message(said, "1 group with 2 rollouts")
    run = open_run(journal.parent)
    assert [len(group.trajectories) for group in run.groups] == [2, 2]
    assert run.recording.meta.seed == 7


def test_a_resumed_run_can_be_extended(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", "last", "--env.n", "3"]) == 0
    said = capsys.readouterr().err
    assert "2 groups kept" in said
    assert [line.partition(":")[0] for line in said.splitlines() if line.startswith("[")] == ["[3/3] w2"]
    assert [group.task_id for group in open_run().groups] == ["w0", "w1", "w2"]
    assert main(["run", "my_env.py", "--policy", "oracle", "--group", "2", "--env.seed", "7", "--resume", "last"]) == 0
    assert len(list(Path("runs").glob("*/*"))) == 1


def test_a_resumed_run_reports_a_setting_that_differs(caplog: pytest.LogCaptureFixture) -> None:
    assert main(["resume", "last", "--env.n", "1"]) == 0
    assert "n was 2, and is 1" in caplog.text
    assert len(open_run().groups) == 2
    caplog.clear()
    assert main(["resume", "last"]) == 0
    assert "changed setting" not in caplog.text, "the latest settings count"
    assert main(["resume", "last", "--tasks", "1", "--concurrency", "2"]) == 0
    check_message(caplog.messages, "tasks was -1")
    check_message(caplog.messages, "concurrency was 1")


def test_a_run_of_nothing_is_an_error_and_a_command_after_settings_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words, named in (
        (["--tasks", "0"], "tasks is 0"),
        (["--tasks", "0", "--dry-run"], "tasks is 0"),
        (["--env.n", "0"], "words has no task"),
        (["evaluate"], "evaluate is a command; write it before the settings"),
    ):
        assert main(["run", "my_env.py", "--policy", "oracle", *words]) == 2, words
        assert named in capsys.readouterr().err
    assert len(list(Path("runs").glob("*/*"))) == 1


def test_an_unknown_run_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", "nothing"]) == 2
    assert "no run folder nothing" in capsys.readouterr().err


def test_a_runs_record_says_what_it_was_made_with() -> None:
    run = open_run()
    facts = run.recording.meta.config["provenance"]
    assert facts["environment_sha256"] == hashlib.sha256(Path("my_env.py").read_bytes()).hexdigest()
    assert facts["palaestra"] == palaestra.__version__
    assert {"python", "platform", "host", "cpus"} <= facts.keys()
    assert "git_commit" not in facts
    assert json.loads((run.path / "config.json").read_text())["provenance"] == facts


def test_the_commit_of_an_environments_file_is_recorded() -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "my_env.py"], ["commit", "-qm", "Add it"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert provenance("my_env.py:words") | {"git_commit": commit, "git_changed": False} == provenance("my_env.py:words")
    Path("my_env.py").write_text(ENV + "\n")
    assert provenance("my_env.py:words")["git_changed"] is True


@pytest.mark.parametrize("setting", ["core.fsmonitor", "filter.x.clean", "filter.x.process"])
def test_settings_of_the_repository_of_an_environment_start_no_program(tmp_path: Path, setting: str) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "my_env.py"], ["commit", "-qm", "Add it"]):
        subprocess.run([*git, *words], check=True)
    subprocess.run([*git, "config", setting, f"touch {tmp_path / 'started'}; false"], check=True)
    Path(".gitattributes").write_text("*.py filter=x\n")
    Path("my_env.py").write_text(ENV + "\n")
    assert provenance("my_env.py:words")["git_changed"] is True
    assert not (tmp_path / "started").exists()


def test_a_run_that_never_began_leaves_no_folder(capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(Path().rglob("*"))
    Path("my_env.py").write_text(ENV.replace("solution=", "answr="))
    assert main(["run", "my_env.py", "--policy", "oracle"]) == 2
    assert sorted(Path().rglob("*")) == before
    said = capsys.readouterr().err
    assert "'answr'" in said
    assert "--resume" not in said


@pytest.mark.parametrize(
    ("words", "named", "unnamed"),
    [
        (["--env.bogus", "1"], "unknown flag --env.bogus", "Did you mean"),
        (["--jasper"], "unknown flag --jasper", "Did you mean"),
        (["--env.grp", "2"], "--group", "--env.n"),
        (["--policy", "oracle", "-n", "3"], "unknown flag -n", "--policy"),
        (["--policy", "orcale"], "Did you mean oracle?", "--"),
        ([], "--policy oracle", "Traceback"),
    ],
)
def test_a_mistake_names_what_is_wrong(
    words: list[str], named: str, unnamed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "my_env.py", *words]) == 2
    said = capsys.readouterr().err
    assert named in said
    assert unnamed not in said


def test_an_error_names_a_setting_by_the_flag_that_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--base-url", "--openai.base_url"):
        assert main(["run", "my_env.py", flag, "ftp://h", "--model", "m"]) == 2
        said = capsys.readouterr().err
        assert [each for each in ("--base-url", "--openai.base_url") if each in said] == [flag]


def test_a_mistyped_file_is_shown_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "my_envs.py"]) == 2
    assert "Did you mean my_env.py?" in capsys.readouterr().err


def test_only_rollouts_of_a_reward_are_exported(capsys: pytest.CaptureFixture[str]) -> None:
    Path("my_env.py").write_text(ENV.replace("def right(task): return 1", "def right(rollout): return rollout.index"))
    assert main(["run", "my_env.py", "--policy", "noop", "--group", "3"]) == 0
    capsys.readouterr()
    assert main(["export", "last", "--to", "openai", "--min-reward", "2", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["rollouts"], facts["left_out"]) == (2, {"reward below 2, or none": 4})


def test_failures_are_gathered_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    Path("my_env.py").write_text(ENV.replace("return 1", "return 1 / 0"))
    assert main(["run", "my_env.py", "--policy", "noop", "--group", "2"]) == 3
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "4 rollouts failed (grader)" in line]
    assert "ZeroDivisionError" in line


def test_status_and_report_take_the_last_run_when_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run_id"] == open_run().path.name
    assert main(["report"]) == 0
    assert Path(capsys.readouterr().out.strip()).resolve() == open_run().path.resolve() / "report.html"


@pytest.mark.parametrize("name", ["folder", "last", "id", "groups", "export"])
def test_a_run_is_replayed_by_its_folder_its_id_or_a_file_of_it(name: str) -> None:
    first = open_run()
    assert main(["export", "last", "--to", "openai"]) == 0
    export, groups = first.path / "exports/openai.jsonl", first.path / "groups.jsonl"
    assert export.is_file()
    names = {"folder": first.path, "last": "last", "id": first.path.name, "groups": groups, "export": export}
    run = names[name]
    assert main(["run", "my_env.py", "--policy", f"replay:{run}", "--group", "2"]) == 0
    assert [each.messages for each in open_run().trajectories] == [each.messages for each in first.trajectories]


def test_no_description_of_a_setting_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "terminal_test", "--help-all"]) == 0
    text = capsys.readouterr().out
    assert not [line for line in text.splitlines() if line.endswith("...") or len(line) > 160]
    assert "--openai.server_type openai|scripted|sglang|transformers|vllm " in text, "only what works"


def test_a_copy_that_cannot_be_written_is_reported_before_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "my_env.py", "--policy", "oracle", "--out", "/proc/x.jsonl"]) == 2
    said = capsys.readouterr().err
    assert "/proc/x.jsonl" in said
    assert "--out" in said
    assert "kept" not in said
    assert len(list(Path("runs").glob("*/*"))) == 1
