"""`palaestra export` as a user meets it: files that are whole or not there, and messages that say the way out."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import pytest
from recorded import MALFORMED, TOOL, broken, call, result, rollout, sky, write_run

from golden_messages import check_message
from palaestra.cli.main import main
from palaestra.rollouts.export.exporter import ExportMeta, ExportReport
from palaestra.rollouts.export.formats import FORMATS
from palaestra.rollouts.records import Group, TurnRecord
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.testing.fake_engine import CHATML, toy_tokenizer
from palaestra_tokens.tokenizers import load_tokenizer


def run(*argv: object) -> int:
    return main(["export", *map(str, argv)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", sky(), broken(), order=(1, 0))


def lines(path: Path) -> list[str]:
    return path.read_text("utf-8").splitlines()


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_lands_in_the_run_folder(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--to", name) == 0
    captured = capsys.readouterr()
    path = Path(captured.out.strip())
    assert path.parent == folder / "exports"
    assert path.stem == name
    assert path.stat().st_size > 0
    assert captured.err.startswith(f"{name}: ")
    assert [each.name for each in path.parent.iterdir()] == [path.name], "nothing half-made is left"


def test_nothing_is_overwritten(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine.jsonl"
    out.write_text("precious")
    assert run(folder, "--to", "openai", "--out", out) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'mine_1.jsonl'}\n"
    assert out.read_text() == "precious"
    assert len(lines(tmp_path / "mine_1.jsonl")) == 3


def test_a_folder_gets_the_file_under_its_formats_name(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "--to", "table", "--out", tmp_path) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'table.csv'}\n"


def test_all_takes_the_unscored_ones_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--to", "openai") == 0
    assert "  left out       1  unscored\n" in capsys.readouterr().err
    assert run(folder, "--to", "openai", "--all") == 0
    captured = capsys.readouterr()
    assert "left out" not in captured.err
    rewards = [json.loads(line)["reward"] for line in lines(Path(captured.out.strip()))]
    assert rewards == [1.0, 0.25, 0.0, None]
    assert run(folder, "--to", "table", "--scored-only") == 0
    assert lines(Path(capsys.readouterr().out.strip()))[1].startswith("sky,3,3,")


def test_stdout_is_the_data_alone(folder: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert run(folder, "--to", "sharegpt", "--out", "-", "--json") == 0
    captured = capfdbinary.readouterr()
    assert [json.loads(line)["id"] for line in captured.out.splitlines()] == [f"000000-sky/{n}" for n in range(3)]
    assert json.loads(captured.err.splitlines()[-1])["path"] is None
    assert not (folder / "exports").exists()


def test_the_report_as_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--to", "sharegpt", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "format": "sharegpt",
        "path": str(folder / "exports" / "sharegpt.jsonl"),
        "records": 3,
        "rollouts": 3,
        "left_out": {"unscored": 1},
        "remarks": {"has malformed arguments, kept as text": 1, "without the messages after the last reply": 1},
        "unfinished_groups": 0,
    }


def test_a_refused_export_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    late = Group(group_id="z", number=2, task_id="z", trajectories=[rollout(0, MALFORMED, group_id="z")])
    folder = write_run(tmp_path / "run", sky(), late)
    assert run(folder, "--to", "rows") == 2
    check_message(capsys.readouterr().err, "sampled")
    assert list((folder / "exports").iterdir()) == []


def test_a_run_that_goes_on_is_exported_as_far_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", sky(), broken(), order=(1,), ended=False)
    assert run(folder, "--to", "openai") == 0
    said = capsys.readouterr().err
    assert "left out: 1 unfinished group" in said
    check_message(said, "export")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--to", "sharegtp"], "Did you mean sharegpt?"),
        ([], "--to, as one of atropos, openai"),
        (["--to", "openai", "--out", "/proc/nowhere/x"], "cannot write /proc/nowhere/x"),
        (["--to", ":Name"], "cannot load the export format :Name: Empty module name"),
        (["--to", "pathlib:PurePath"], "pathlib:PurePath is not an export format: it lacks ending, everything, export"),
        (["--to", "shlex:quote"], "cannot load the export format shlex:quote: quote() missing 1 required"),
    ],
)
def test_wrong_usage_says_the_way_out(
    argv: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, *argv) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_no_run_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)  # the message names the latest run of the current folder
    assert run(tmp_path / "none", "--to", "table") == 2
    check_message(capsys.readouterr().err, tmp_path / "none")


def test_a_format_of_ones_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_export_format.py").write_text(
        "from palaestra.rollouts.export.exporter import ExportReport\n"
        "class Ids:\n"
        "    name, ending, everything = 'ids', '.txt', False\n"
        "    def export(self, groups, out, meta):\n"
        "        report = ExportReport()\n"
        "        for group in groups:\n"
        "            for trajectory in report.chosen(group, meta):\n"
        "                out.write(trajectory.rollout_id.encode() + b'\\n')\n"
        "                report.wrote()\n"
        "        return report\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert run(folder, "--to", "my_export_format:Ids") == 0
    assert lines(Path(capsys.readouterr().out.strip())) == [f"000000-sky/{n}" for n in range(3)]


def test_a_reader_that_goes_away_is_no_crash(tmp_path: Path) -> None:
    many = [rollout(n, MALFORMED * 400, group_id="g") for n in range(20)]
    folder = write_run(tmp_path / "run", Group(group_id="g", number=0, task_id="t", trajectories=many))
    argv = [sys.executable, "-m", "palaestra.cli.main", "export", str(folder), "--to", "openai", "--out", "-"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as going:
        assert going.stdout is not None
        assert going.stderr is not None
        going.stdout.read(10)
        going.stdout.close()
        said = going.stderr.read().decode()
    assert "Traceback" not in said


def test_somebody_who_looks_sees_a_bar(folder: Path) -> None:
    """On a terminal, progress is on stderr, and stdout still holds the data alone."""
    looking, terminal = os.openpty()
    argv = [sys.executable, "-m", "palaestra.cli.main", "export", str(folder), "--to", "openai"]
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=terminal, check=True, timeout=60)
    os.close(terminal)
    shown = os.read(looking, 10_000).decode()
    os.close(looking)
    assert "groups" in shown
    assert "100%" in shown
    assert done.stdout.decode() == f"{folder / 'exports' / 'openai.jsonl'}\n"


class Looking:
    """Looks for its own file while it writes it."""

    name, ending, everything = "looking", ".jsonl", True
    place: Path

    def export(self, groups: Iterable[Group], out: IO[bytes], meta: ExportMeta) -> ExportReport:
        out.write(b"half")
        out.flush()
        assert not self.place.exists(), "who is killed now leaves an empty file that looks like an export"
        return ExportReport()


def test_a_file_has_its_name_when_it_is_whole(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Looking.place = tmp_path / "new" / "x.jsonl"
    monkeypatch.syspath_prepend(Path(__file__).parent)
    assert run(folder, "--to", f"{__name__}:Looking", "--out", Looking.place) == 0
    assert Looking.place.read_bytes() == b"half"
    assert [each.name for each in Looking.place.parent.iterdir()] == ["x.jsonl"]


class OnAFullDisk(Looking):
    def export(self, groups: Iterable[Group], out: IO[bytes], meta: ExportMeta) -> ExportReport:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_is_full_is_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    assert run(folder, "--to", f"{__name__}:OnAFullDisk", "--out", tmp_path / "x.jsonl") == 2
    check_message(capsys.readouterr().err, "x.jsonl", "device", "--out")
    assert not (tmp_path / "x.jsonl").exists()


def test_standard_output_on_a_full_disk_is_one_line(folder: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "palaestra", "export", str(folder), "--to", "openai", "--out", "-"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 2
    problem = "cannot write standard output: No space left on device; choose a different file with --out"
    assert done.stderr == f"error: {problem}\n"


def test_a_pipe_is_written_to_and_nothing_made_beside_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    pipe = tmp_path / "out/pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert run(folder, "--to", "openai", "--out", pipe) == 0
        assert os.read(reader, 1 << 16).count(b"\n") == 3
    finally:
        os.close(reader)
    assert capsys.readouterr().out == f"{pipe}\n"
    assert list(pipe.parent.iterdir()) == [pipe]


@pytest.mark.parametrize(
    ("flags", "rewards", "left_out"),
    [
        (["--min-reward", "0.5"], [1.0], {"reward below 0.5, or none": 3}),
        (["--max-reward", "0.5"], [0.25, 0.0], {"reward above 0.5, or none": 2}),
        (["--outcome", "max_turns"], [0.0], {"different outcome": 3}),
        (["--task", "no*", "--task", "other"], [], {"different task": 4}),
    ],
)
def test_rollouts_are_chosen_by_reward_outcome_and_task(
    flags: list[str],
    rewards: list[float],
    left_out: dict[str, int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = write_run(tmp_path / "run", sky())
    assert run(folder, "--to", "table", "--out", tmp_path / "out.csv", *flags, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    rows = [dict(zip(*(line.split(",") for line in (lines(tmp_path / "out.csv")[0], row)), strict=True))
            for row in lines(tmp_path / "out.csv")[1:-1]]  # fmt: skip
    found = [float(reward) for row in rows for reward in row["rewards"].split()]
    assert (found, facts["left_out"]) == (rewards, left_out)


def test_an_unknown_outcome_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--to", "atif", "--outcome", "naturl") == 2
    assert "natural" in capsys.readouterr().err


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    toy_tokenizer(["weather in Oslo"]).save(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": CHATML}))
    return folder


def played(*messages: Message, turns: int, **fields: JSON) -> Group:
    """The group of a rollout without sampled tokens."""
    made = rollout(0, list(messages), turns=[TurnRecord(number=number + 1) for number in range(turns)], **fields)
    return Group(group_id=made.group_id, number=0, task_id=made.task_id, tools=[TOOL], trajectories=[made])


CLOSING: Message = {"role": "assistant", "content": "The reference solution has been carried out."}
ASKED: Message = {"role": "user", "content": "Weather?"}
CALLING: Message = {"role": "assistant", "content": None, "tool_calls": [call(1, '{"city":"Oslo"}')]}


def test_reference_solutions_are_exported_as_rows(tmp_path: Path, tokenizer: Path) -> None:
    folder = write_run(tmp_path / "run", played(ASKED, CALLING, result(1, "rain"), CLOSING, turns=2))
    assert run(folder, "--to", "rows", "--tokenizer", tokenizer) == 0
    (row,) = map(json.loads, lines(folder / "exports" / "rows.jsonl"))
    text = load_tokenizer(str(tokenizer)).decode(row["completion_ids"])
    assert text == '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>'
    assert row["mask"] == [1] * len(row["completion_ids"])
    assert (row["source"], row["logprobs"], row["reward"]) == ("encoded", None, 1.0)


@pytest.mark.parametrize(
    ("group", "options", "message"),
    [
        (played(ASKED, CALLING, turns=1), [], "an export with a tokenizer"),
        (played(ASKED, CALLING, turns=1), ["--tokenizer", "MODEL", "--tool-parser", "mistral"], "--tool-parser"),
        (played(*MALFORMED, turns=1), ["--tokenizer", "MODEL"], "malformed arguments"),
        (played(ASKED, CALLING, turns=1), ["--tokenizer", "/nowhere"], "/nowhere"),
    ],
)
def test_rows_that_cannot_be_made_name_the_reason(
    group: Group,
    options: list[str],
    message: str,
    tmp_path: Path,
    tokenizer: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = write_run(tmp_path / "run", group)
    given = [str(tokenizer) if each == "MODEL" else each for each in options]
    assert run(folder, "--to", "rows", *given) == 2
    assert message in capsys.readouterr().err
    assert not list((folder / "exports").glob("*"))


@pytest.mark.parametrize(
    ("option", "name"),
    [("--tokenizer=x", "openai"), ("--tokenizer=x", "table"), ("--placeholders", "openai"), ("--text-content", "rows")],
)
def test_an_option_of_another_format_is_refused(
    option: str, name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "--to", name, option) == 2
    check_message(capsys.readouterr().err, option.partition("=")[0])
