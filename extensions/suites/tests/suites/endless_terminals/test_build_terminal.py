"""`palaestra tasks build terminal`: equal options give equal files, and a wrong option gives one message."""

from __future__ import annotations

from pathlib import Path

import pytest

from golden_messages import check_message
from palaestra.cli.main import main


def build(out: Path, *argv: str) -> int:
    command = ["tasks", "build", "terminal", "--out", str(out), *argv]
    return main(command)


@pytest.mark.slots
def test_checking_does_not_change_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--n", "4", "--seed", "11", "--area", "text", "--area", "files", "--level", "1", "--level", "2"]
    assert build(tmp_path / "checked.jsonl", *argv) == 0
    assert "4 checked tasks in" in capsys.readouterr().err
    assert build(tmp_path / "plain.jsonl", *argv, "--no-check") == 0
    assert "4 unchecked tasks in" in capsys.readouterr().err
    assert (tmp_path / "checked.jsonl").read_bytes() == (tmp_path / "plain.jsonl").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checked.jsonl", "plain.jsonl"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--n", "0"], "--n"),
        (["--level", "6"], "level 6"),
        (["--family", "git-comit"], "Did you mean git-commit"),
        (["--area", "gits"], "Did you mean git"),
        (["--image", "absent", "--n", "1"], "absent"),
    ],
)
def test_a_wrong_option_gives_one_message(
    argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build(tmp_path / "tasks.jsonl", *argv) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_output_file_in_an_absent_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build(tmp_path / "absent" / "tasks.jsonl") == 2
    check_message(capsys.readouterr().err, "folder")


@pytest.mark.parametrize(
    ("out", "message"),
    [(".", "--out . is a folder: name a file in it"), ("/proc/tasks.jsonl", "/proc is not writable")],
)
def test_an_output_file_that_cannot_be_written_is_refused_before_the_build(
    out: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert build(Path(out), "--n", "1") == 2
    assert message in capsys.readouterr().err
