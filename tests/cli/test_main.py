"""The `palaestra` command as a user meets it: help, version, suggestions, exit codes."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
import pytest

from palaestra import __version__
from palaestra.cli.main import COMMANDS, cli, main


def run(*argv: str) -> int:
    return main(list(argv))


def contexts(parent: click.Context, names: Iterable[str]) -> Iterator[click.Context]:
    """The commands of these names and all their subcommands."""
    assert isinstance(parent.command, click.Group)
    for name in names:
        command = parent.command.get_command(parent, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=parent, **command.context_settings)
        yield context
        if isinstance(command, click.Group):
            yield from contexts(context, command.list_commands(context))


EVERY = list(contexts(click.Context(cli, info_name="palaestra", **cli.context_settings), COMMANDS))
HELP = [[], *(context.command_path.split()[1:] for context in EVERY)]


def test_every_option_has_a_description() -> None:
    given = {
        f"{context.command_path} {option.opts[0]}": option.help or ""
        for context in EVERY
        for option in context.command.params
        if isinstance(option, click.Option) and not option.hidden
    }
    assert {name: text for name, text in given.items() if not re.fullmatch(r"[A-Z].*[.\])]", text, re.DOTALL)} == {}


def test_every_help_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    for context in EVERY:  # click keeps the flags with which another test called a command on its own
        context.command._help_option = None
    for command in HELP:
        for flag in ("-h", "--help"):
            assert run(*command, flag) == 0, command
            text = capsys.readouterr().out
            assert len(text.splitlines()) <= 48, command
            assert "palaestra " in text, command


def test_a_training_needs_its_model_before_the_environment_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("one_env.py").write_text(
        "from palaestra import Task, environment\n\n\n"
        "@environment\ndef one():\n    yield Task(id='a', prompt='x')\n\n\n"
        "@one.score\nasync def score(task):\n    return 1\n"
    )
    assert run("train", "one_env.py") == 2
    shown = capsys.readouterr().err
    assert "--model" in shown
    assert "checking" not in shown


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["rnu"], "Did you mean run?"),
        (["doctor", "--jsn"], "unknown flag --jsn. Did you mean --json? See `palaestra doctor --help`"),
        (["list"], "Did you mean runs?"),
        (["xyz"], "there is no command 'xyz'. The commands are"),
        (["run", "count_lines", "--limit", "3"], "Did you mean --tasks?"),
        (["run"], "Missing argument 'ENV'"),
        (["run", "--policy", "oracle"], "Missing argument 'ENV'"),
        (["tasks", "build", "swe"], "--out"),
    ],
)
def test_wrong_usage_is_exit_code_2_with_the_way_out(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*argv) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("group", ["env", "images", "serve", "slots", "tasks", "model"])
def test_a_group_without_its_command_shows_its_help(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(group) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"Usage: palaestra {group}")


def test_a_failure_is_one_message_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("status", str(tmp_path / "absent")) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert len(captured.err.splitlines()) == 1


def test_tools_are_listed_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("tools", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert {"terminal", "read_file", "write_file", "patch", "search_files"} <= {t["name"] for t in listed["tools"]}
    default = next(toolset for toolset in listed["toolsets"] if toolset["name"] == "default")
    assert "terminal" in default["tools"]
    assert run("tools") == 0
    assert "search_files" in capsys.readouterr().out


def test_environments_are_listed_without_running_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "environments"
    folder.mkdir()
    (folder / "toy_env.py").write_text('"""A toy.\n\nMore."""\nraise SystemExit(9)\n')
    (folder / "broken_env.py").write_text("def (\n")
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert run("env", "list", "--json") == 0
    rows = {row["name"]: row["summary"] for row in json.loads(capsys.readouterr().out)}
    assert rows["toy"] == "A toy."
    assert rows["broken"].startswith("(cannot be read")


def cpu_seconds(*argv: str) -> float:
    """CPU seconds of the quickest of three runs; the others may pay for a cold disk."""
    times = []
    for _ in range(3):
        before = os.times()
        subprocess.run([sys.executable, *argv], check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        times.append(after.children_user + after.children_system - before.children_user - before.children_system)
    return min(times)


def test_the_command_and_the_package_start_fast() -> None:
    assert cpu_seconds("-c", "import palaestra") < 0.3
    assert cpu_seconds("-m", "palaestra.cli.main", "--help") < 0.4


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_finds_no_room_is_one_line() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "palaestra", "tools"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (1, "error: cannot write the output: No space left on device\n")


@pytest.mark.parametrize("words", ["env list", "runs", "doctor", "run my_env.py"])
def test_a_command_in_a_deleted_folder_says_so(words: str, tmp_path: Path) -> None:
    script = f'mkdir gone && cd gone && rmdir ../gone && exec {shlex.quote(sys.executable)} -m palaestra "$@"'
    done = subprocess.run(["sh", "-c", script, "sh", *words.split()], cwd=tmp_path, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 2)
    assert done.returncode == 0 or "current folder" in done.stderr
