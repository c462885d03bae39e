"""Flags that every command has, in every place: --json, -q, -v, --dry-run, --yes, and one name for each idea."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import pytest

from golden_messages import check_message
from palaestra import open_run
from palaestra.cli.main import COMMANDS, cli, main
from palaestra.envs.config.command_line import CommandLine, Parsed
from palaestra.envs.config.fields import BaseEnvConfig
from palaestra_tokens.config import APIServerConfig

ENV = """
import logging
from palaestra import Task, environment

@environment(toolsets=[])
def words(n: int = 2):
    logging.getLogger("palaestra.words").debug("drawn")
    for i in range(n):
        yield Task(id=f"w{i}", prompt="p", solution="true")

@words.score
def right(task): return 1
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_env.py").write_text(ENV)


def leaves(group: click.Group, *path: str) -> list[tuple[str, ...]]:
    """The names of all commands that do something."""
    context, found = click.Context(group), []
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        found += leaves(command, *path, name) if isinstance(command, click.Group) else [(*path, name)]
    return found


def command_of(path: Sequence[str]) -> click.Command:
    command: click.Command = cli
    for name in path:
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), name)
        assert found is not None
        command = found
    return command


RUNS = [("run",), ("eval",), ("feed",), ("resume",), ("fork",), ("batch",), ("train",), ("chat",)]
"""Their flags are those of the environment's command line."""

OTHER_FORMS = [("completion",), ("gateway", "example"), ("acp",)]
"""They print a script, a configuration, or a protocol of their own."""


@pytest.mark.parametrize("path", [each for each in leaves(cli) if each not in (*RUNS, *OTHER_FORMS)], ids=" ".join)
def test_every_command_prints_its_result_as_json(path: tuple[str, ...]) -> None:
    flags = {flag for each in command_of(path).params for flag in each.opts}
    assert "--json" in flags


@pytest.mark.parametrize(
    "words",
    [
        ["run", "my_env.py", "--policy", "noop"],
        ["run", "--policy", "noop", "my_env.py"],
        ["run", "--json", "--policy=noop", "--env.n", "2", "my_env.py", "process"],
        ["run", "--keep-workspaces", "my_env.py", "--policy", "noop", "--env.save_workspaces", "false"],
        ["eval", "--samples", "1", "my_env.py", "--policy", "noop"],
    ],
)
def test_settings_may_come_before_the_environment(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert len(open_run().groups) == 2


def test_the_result_of_a_run_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "my_env.py", "--policy", "noop", "--json"]) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    run = open_run()
    assert (Path(result["run"]).resolve(), result["id"], result["state"]) == (run.path, run.path.name, "done")
    assert (result["rollouts"], result["mean_reward"], result["exit_code"]) == (2, 1.0, 0)
    assert result["metrics"] == run.metrics
    assert Path(result["groups_file"]).is_file()
    assert "2 groups" in shown.err
    assert main(["resume", "last", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == run.path.name


@pytest.mark.parametrize(
    ("words", "kind", "code"),
    [
        (["run", "my_env.py", "--polcy", "x", "--json"], "ConfigError", 2),
        (["run", "--json"], "ConfigError", 2),
        (["runs", "--jso"], None, 2),
        (["status", "nothing", "--json"], "ConfigError", 2),
        (["run", "my_env.py", "--model", "m", "--base-url", "http://127.0.0.1:1/v1", "--json"], "EngineUnavailable", 4),
    ],
)
def test_an_error_is_json_too(
    words: list[str], kind: str | None, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "-q"]) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    if kind is None:
        assert shown.err.startswith("error: ")
        return
    error = json.loads(shown.err)["error"]
    assert (error["kind"], error["exit_code"]) == (kind, code)
    assert error["message"]


def test_quiet_leaves_the_path_and_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["-q", "run", "my_env.py", "--policy", "noop"], ["run", "my_env.py", "--policy", "noop", "--quiet"]):
        assert main(words) == 0
        assert capsys.readouterr() == (f"{open_run().path.relative_to(Path.cwd())}\n", "")
    assert main(["run", "my_env.py", "--policy", "orcale", "-q"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_verbose_adds_the_log_and_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "my_env.py", "--policy", "noop"]) == 0
    assert "drawn" not in capsys.readouterr().err
    assert main(["-v", "run", "my_env.py", "--policy", "noop"]) == 0
    said = capsys.readouterr().err
    assert "DEBUG palaestra.words: drawn" in said
    assert "000000-w0/0: turn 1: " in said
    assert "000000-w0/0: reward " in said
    assert main(["status", "nothing", "-v"]) == 2
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert said.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize(
    "words",
    [
        ["doctor"],
        ["run", "my_env.py", "--policy", "noop"],
        ["env", "check", "my_env.py", "--only", "git-log-all", "--all"],
    ],
)
def test_no_color_prints_without_colours_on_a_terminal(words: list[str]) -> None:
    def shown(*flags: str, **variables: str) -> bytes:
        ours, terminal = pty.openpty()
        environ = {name: each for name, each in os.environ.items() if name != "NO_COLOR"}
        with subprocess.Popen(
            [sys.executable, "-m", "palaestra", *words, *flags],
            env={**environ, "TERM": "xterm-256color", **variables}, stdout=terminal, stderr=terminal, stdin=terminal,
        ):  # fmt: skip
            os.close(terminal)
            parts = []
            with contextlib.suppress(OSError), os.fdopen(ours, "rb", buffering=0) as reader:
                while part := reader.read(65536):
                    parts.append(part)
        return b"".join(parts)

    colour = re.compile(rb"\x1b\[[\d;]*(?:3[0-8]|9[0-7])[\d;]*m")
    if words[0] != "env":
        assert colour.search(shown())
    for text in (shown("--no-color"), shown(NO_COLOR="1")):
        assert text
        assert not colour.search(text)


def test_a_script_has_these_flags_too() -> None:
    Path("class_env.py").write_text(
        "from palaestra import TerminalTestEnv\n\nif __name__ == '__main__':\n    TerminalTestEnv.cli()\n"
    )
    argv = [sys.executable, "class_env.py", "process", "--policy", "nonsense", "-q", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, json.loads(done.stderr)["error"]["kind"]) == (2, "ConfigError")


@pytest.mark.parametrize("command", ["process", "evaluate", "serve"])
def test_a_dry_run_makes_nothing(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "m", "--base-url", "http://127.0.0.1:1/v1", "--env.n", "5", "--group", "3", "--slots", "7"]
    before = sorted(Path().rglob("*"))
    assert main(["run", "my_env.py", command, *flags, "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert sorted(Path().rglob("*")) == before
    assert (plan["command"], plan["model"], plan["servers"]) == (command, "m", ["http://127.0.0.1:1/v1"])
    assert (plan["tasks"], plan["group_size"], plan["slots"]) == (None if command == "serve" else 5, 3, 7)
    assert plan["folder"] == "runs/words--m/<new>"


def test_a_dry_run_of_a_resumed_run_says_what_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "my_env.py", "--policy", "noop"]) == 0
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    capsys.readouterr()
    assert main(["resume", "last", "--env.n", "6", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in Path().rglob("*")} == before
    assert "6 (w0, w1, w2, …)" in shown
    check_message(shown, open_run().path, 2)


def test_a_check_refuses_a_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "check", "my_env.py", "--dry-run"]) == 2
    assert "--dry-run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "name", "alias"),
    [
        (["doctor"], "--tool-parser", "--parser"),
        (["tasks", "build", "swe"], "--tasks", "--limit"),
        (["tasks", "build", "swe"], "--concurrency", "--parallel"),
        (["tasks", "build", "terminal"], "--tasks", "--n"),
        (["tasks", "build", "terminal"], "--concurrency", "--parallel"),
        (["slots", "list"], "--workspace-store", "--store"),
        (["export"], "--to", "--format"),
    ],
)
def test_one_idea_has_one_name_and_the_old_one_still_works(path: list[str], name: str, alias: str) -> None:
    (option,) = [each for each in command_of(path).params if name in each.opts]
    assert alias in option.opts


@pytest.mark.parametrize(
    ("short", "name"),
    [
        ("--tool-parser", "--openai.tool_parser"),
        ("-m", "--openai.model_name"),
        ("-o", "--env.data_path_to_save_groups"),
        ("--env.group-size", "--env.group_size"),
    ],
)
def test_a_short_name_sets_the_same_setting(short: str, name: str) -> None:
    line = CommandLine("x", BaseEnvConfig, APIServerConfig, command="process")
    value = "7" if "size" in name else "qwen"
    found = [line.parse([flag, value], {}) for flag in (short, name)]
    first, second = [(each.env_config, each.server_configs) for each in found if isinstance(each, Parsed)]
    assert first == second


def test_cleaning_asks_or_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    half = tmp_path / "store" / "new-dead"
    half.mkdir(parents=True)
    places = ["--directory", str(tmp_path / "services"), "--workspace-store", str(tmp_path / "store")]
    assert main(["slots", "clean", "--dry-run", "--json", *places]) == 0
    assert json.loads(capsys.readouterr().out)["workspaces"] == ["1 half-made"]
    argv = [sys.executable, "-m", "palaestra", "slots", "clean", *places]
    refused = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert (refused.returncode, "--yes" in refused.stderr, half.exists()) == (2, True, True)
    for answer, left in (("n", True), ("y", False)):
        terminal, end = pty.openpty()
        os.write(terminal, f"{answer}\n".encode())
        done = subprocess.run(argv, stdin=end, capture_output=True, text=True, check=False)
        os.close(end)
        os.close(terminal)
        assert (done.returncode, half.exists()) == (0, left), done.stderr
        assert "1 half-made" in done.stderr


@pytest.mark.parametrize("dry", [True, False])
def test_a_dry_run_lists_the_workspaces_that_would_be_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dry: bool
) -> None:
    store, names, held = tmp_path / "store", {}, []
    for number, lock in enumerate([None, fcntl.LOCK_SH, fcntl.LOCK_EX]):
        entry, half = store / (f"{number}" * 40), store / f"new-{number}"
        half.mkdir(parents=True)
        (entry / "layers").mkdir(parents=True)
        (entry / "about.json").write_text('{"size_bytes": 1}')
        names[lock] = entry.name[:12]
        for path in (entry / "layers", half) if lock is not None else ():
            held.append(os.open(path, os.O_RDONLY))
            fcntl.flock(held[-1], lock or 0)
    (store / ("3" * 40)).mkdir()  # a damaged entry, which is not listed
    places = ["--directory", str(tmp_path / "services"), "--workspace-store", str(store)]
    assert main(["slots", "clean", "--workspaces", "--json", "--dry-run" if dry else "--yes", *places]) == 0
    assert json.loads(capsys.readouterr().out)["workspaces"] == ["1 half-made", names[None]]
    assert (store / ("0" * 40)).exists() is (store / "new-0").exists() is dry
    for lock in held:
        os.close(lock)


def test_all_commands_are_listed() -> None:
    assert {path[0] for path in leaves(cli)} == set(COMMANDS)
