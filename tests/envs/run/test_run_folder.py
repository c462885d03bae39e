"""Where a run writes: a folder for each, however many begin at once."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from golden_messages import raises
from palaestra import open_run
from palaestra.cli.main import main
from palaestra.envs.run.run_folder import claim_folder
from palaestra_slots.core.errors import ConfigError


def test_runs_that_begin_in_the_same_second_have_a_folder_each(tmp_path: Path) -> None:
    """So many that some draw the same id."""
    assert len({claim_folder(tmp_path, "lines", "m").path for _ in range(3000)}) == 3000


def test_a_place_that_takes_no_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "lines--m").touch()
    with raises(ConfigError, "File", "exists"):
        claim_folder(tmp_path, "lines", "m")


ENV = """
from palaestra import Task, environment

@environment(toolsets=[])
def words(n: int = 2):
    for i in range(n):
        yield Task(id=f"w{i}", prompt="p")

@words.score
def right(task): return 1
"""


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("my_env.py")
    path.write_text(ENV)
    return path


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("verb", ["run", "eval"])
def test_everything_of_a_run_lies_in_its_folder(verb: str, words: Path) -> None:
    assert main([verb, str(words), "--policy", "noop"]) == 0
    assert sorted(path.name for path in Path().iterdir()) == ["my_env.py", "runs"]
    own = {"groups.jsonl", "report.html", "journal.jsonl", "config.json", "metrics.jsonl"}
    own |= {"evaluation/metrics.json", "evaluation/samples.jsonl"} if verb == "eval" else set()
    assert own <= files(open_run().path)


def test_a_copy_of_the_results_goes_where_the_user_wants_it(words: Path) -> None:
    for name in ("g.jsonl", "g_1.jsonl"):
        assert main(["run", str(words), "--policy", "noop", "--out", "g.jsonl"]) == 0
        run = open_run().path
        assert Path(name).read_bytes() == (run / "groups.jsonl").read_bytes() != b""
        assert Path(name).with_suffix(".html").read_bytes() == (run / "report.html").read_bytes()
    assert main(["eval", str(words), "--policy", "noop", "--env.data_dir_to_save_evals", "evals"]) == 0
    assert Path("evals/metrics.json").read_bytes() == (open_run().path / "evaluation/metrics.json").read_bytes()


def test_a_resumed_run_writes_its_copy_again(words: Path) -> None:
    assert main(["run", str(words), "--policy", "noop", "--out", "g.jsonl"]) == 0
    assert main(["resume", "last", "--env.n", "3"]) == 0
    assert len(Path("g.jsonl").read_text().splitlines()) == 3
    assert main(["resume", "last", "--env.n", "4", "--out", "h.jsonl"]) == 0
    assert [len(Path(name).read_text().splitlines()) for name in ("g.jsonl", "h.jsonl")] == [3, 4]
    assert (open_run().path / "groups.jsonl").read_bytes() == Path("h.jsonl").read_bytes()


def test_a_run_without_a_score_leaves_no_empty_file(words: Path) -> None:
    words.write_text(ENV.replace("return 1", "return 1 / 0"))
    assert main(["run", str(words), "--policy", "noop", "--out", "g.jsonl"]) == 3
    assert not Path("g.jsonl").exists()
    assert [path for path in open_run().path.rglob("*") if path.is_file() and not path.stat().st_size] == []


@pytest.mark.parametrize(
    ("words_env", "flags"),
    [
        (ENV.replace("prompt=", "promt="), []),
        (ENV, ["--metrics-port", "PORT"]),
        (ENV, ["--out", "taken"]),
    ],
)
def test_a_run_that_never_began_leaves_nothing(words_env: str, flags: list[str], words: Path) -> None:
    words.write_text(words_env)
    Path("taken").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = str(listening.getsockname()[1])
        assert main(["run", str(words), "--policy", "noop", *(port if f == "PORT" else f for f in flags)]) != 0
    assert sorted(path.name for path in Path().iterdir()) == ["my_env.py", "taken"]
