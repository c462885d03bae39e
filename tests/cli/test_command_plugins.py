"""Environments and commands of installed packages, also of broken ones."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from golden_messages import check_message
from palaestra.cli.main import main
from palaestra.envs.discovery import load_environment
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io import plugins

SHIPPED = {"count_lines", "endless_terminals", "hermes_swe", "swe_smith_oracle", "terminal_test", "terminalbench_2"}

MODULE = '''"""Their module."""
import click
from palaestra import Task, environment

@environment(toolsets=["terminal"])
def words(n: int = 1):
    """Write a word."""
    for i in range(n):
        yield Task(id=f"word-{i}", prompt="Write a word to word.txt", solution="echo word > word.txt")

@words.score
async def right(sandbox):
    return (await sandbox.read_text("word.txt", missing="")).strip() == "word"

@click.command()
def command():
    """Make words."""
    click.echo("made words")

number = 3
'''

Install = Callable[[str, str], None]


def run(*argv: str) -> int:
    return main(list(argv))


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a package `theirs` with a module and these entry points, and change to an empty folder."""
    site, empty = tmp_path / "site", tmp_path / "empty"
    (site / "theirs-1.dist-info").mkdir(parents=True)
    empty.mkdir()
    monkeypatch.chdir(empty)
    monkeypatch.syspath_prepend(site)

    def write(module: str, points: str) -> None:
        (site / "theirs_module.py").write_text(module)
        (site / "theirs-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
        (site / "theirs-1.dist-info/entry_points.txt").write_text(points)
        plugins.installed.cache_clear()

    yield write
    sys.modules.pop("theirs_module", None)
    plugins.installed.cache_clear()


def test_shipped_environments_are_found_in_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("env", "list", "--json") == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) >= SHIPPED
    assert rows["count_lines"]["summary"] == "Count the lines of a file: the smallest complete environment."
    for name in SHIPPED:
        assert Path(rows[name]["path"]).is_file()
        assert load_environment(name, tmp_path).reference == name
        assert run("env", "show", name, "--example-config") == 0
        assert "model_name: NAME" in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(SHIPPED - {"terminal_test"}))
def test_a_list_of_tasks_is_played_once(name: str) -> None:
    config, _ = load_environment(name, Path()).defaults()
    fields = load_environment(name, Path()).config_type().model_fields
    assert (config.total_steps if config is not None else fields["total_steps"].default) == -1


def test_an_installed_environment_runs_and_replays_by_its_name(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install(MODULE, "[palaestra.environments]\nwords = theirs_module:words\n")
    assert run("env", "list") == 0
    assert "words                  Write a word." in capsys.readouterr().out
    assert "theirs_module" not in sys.modules
    assert run("run", "words", "--policy", "oracle") == 0
    (journal,) = Path.cwd().glob("runs/*/*/journal.jsonl")
    assert run("replay", str(journal.parent)) == 0


@pytest.mark.parametrize(
    ("module", "point", "listed", "loaded"),
    [
        ("import absent_package\ndef words(): pass\n", "theirs_module:words", "", "No module named 'absent_package'"),
        ("def words(:\n", "theirs_module:words", "invalid syntax", "invalid syntax"),
        ("", "theirs_module:words", "theirs_module has no words", "has no attribute 'words'"),
        ("raise SystemExit(3)\nwords = 1\n", "theirs_module:words", "", "SystemExit: 3"),
        ("", "absent_package.words:words", "No module named 'absent_package'", "No module named 'absent_package'"),
        ("words = 1\n", "theirs_module:words", "", "is not an environment"),
    ],
)
def test_a_broken_environment_is_reported_by_name_and_hides_no_other(
    install: Install, capsys: pytest.CaptureFixture[str], module: str, point: str, listed: str, loaded: str
) -> None:
    install(module, f"[palaestra.environments]\nwords = {point}\n")
    assert run("env", "list", "--json") == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == {*SHIPPED, "words"}
    assert listed in rows["words"]["summary"]
    assert run("run", "words", "--policy", "oracle") == 2
    error = capsys.readouterr().err
    assert f"words of theirs ({point})" in error
    assert loaded in error


def test_a_package_does_not_replace_a_shipped_environment(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install(MODULE, "[palaestra.environments]\ncount_lines = theirs_module:words\n")
    assert run("env", "list", "--json") == 0
    rows = {row["name"]: row["origin"] for row in json.loads(capsys.readouterr().out)}
    assert rows["count_lines"] == "palaestra-suites (palaestra_suites.examples.count_lines:count_lines)"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["count_lines", "terminalbench_2", "batch"])
def test_a_file_of_a_folder_does_not_replace_an_installed_environment(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder may be somebody else's, also that of tasks, which an installed environment plays."""
    (tmp_path / "environments").mkdir()
    for each in (name, "mine"):
        (tmp_path / f"environments/{each}_env.py").write_text('"""My own."""\nraise SystemExit("it was run")\n')
    (tmp_path / "environments/task.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    assert run("env", "list") == 0
    shown = capsys.readouterr().out
    assert "mine                   My own." in shown
    assert (f"{name:<23}My own." in shown) == (name == "batch"), "it is listed, but not by that name"
    assert load_environment(name, tmp_path).name == name
    assert load_environment("./", tmp_path).name == "terminalbench_2"
    with pytest.raises(ConfigError, match="it was run"):
        load_environment(f"environments/{name}_env.py", tmp_path)


def test_a_package_adds_commands_and_a_broken_one_fails_only_when_used(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    points = {
        "tasks.build.words": "theirs_module:command",
        "tasks.build.broken": "absent_package:command",
        "tasks.build.number": "theirs_module:number",
        "env.list": "theirs_module:command",
        "other.words": "theirs_module:command",
    }
    install(MODULE, "[palaestra.commands]\n" + "".join(f"{name} = {point}\n" for name, point in points.items()))
    assert run("tasks", "build", "--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert " words Make words." in shown
    assert " broken (tasks.build.broken of theirs (absent_package:command)" in shown
    assert " terminal Generate terminal tasks from a seed." in shown
    assert "theirs_module" not in sys.modules

    assert run("tasks", "build", "words") == 0
    assert capsys.readouterr().out == "made words\n"
    assert run("tasks", "build", "broken") == 2
    check_message(capsys.readouterr().err, "tasks.build.broken of theirs (absent_package:command)")
    assert run("tasks", "build", "number") == 2
    check_message(capsys.readouterr().err, "tasks.build.number of theirs (theirs_module:number)")
    assert run("env", "list") == 0
    assert "made words" not in capsys.readouterr().out
