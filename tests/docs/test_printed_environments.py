"""The environments of the pages and of the examples run as they are."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from envs.scripts import groups_file
from palaestra.cli.main import main

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = DOCS.parent / "examples"


def written(folder: Path, name: str) -> Path:
    """The environment of a page, or of the examples, in this folder."""
    pages = "".join(page.read_text() for page in sorted(DOCS.glob("*/*.md")))
    block = re.search(rf"```python\n# {name}\n(.*?)```", pages, re.DOTALL)
    path = folder / name
    path.write_text(block[1] if block is not None else (EXAMPLES / name).read_text())
    return path


@pytest.mark.slots
def test_the_printed_class_that_collects_its_rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ["run", str(written(tmp_path, "guess_env.py")), "process", "--policy", "noop"]
    flags = ["--env.ensure_scores_are_not_same", "false"]
    assert main([*argv, *flags]) == 0
    groups = [json.loads(line) for line in groups_file(tmp_path).read_text().splitlines()]
    assert [group["scores"] for group in groups] == [[0.0, 0.0]] * 2
    assert groups[0]["messages"][0][0]["content"] == "Heads or tails?"


@pytest.mark.slots
@pytest.mark.parametrize(
    ("name", "output", "count"),
    [
        ("lines_env.py", "longest_line", 3),
        ("word_env.py", "word", 2),
        ("sum_env.py", "sum", 2),
        ("quiz_env.py", "quiz", 2),
        ("files_env.py", "files", 6),
    ],
)
@pytest.mark.parametrize(("policy", "reward"), [("oracle", 1.0), ("noop", 0.0)])
def test_a_printed_environment_keeps_its_promise(
    name: str, output: str, count: int, policy: str, reward: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ["run", str(written(tmp_path, name)), "process", "--policy", policy, "--tasks", str(count)]
    assert main(argv) == 0
    groups = [json.loads(line) for line in groups_file(tmp_path, output).read_text().splitlines()]
    assert len(groups) == count
    assert all(score == reward for group in groups for score in group["scores"])
    if output == "longest_line":
        metrics = groups[0]["rollouts"][0]["metrics"]
        assert metrics == {"right": reward, "answered": reward}


@pytest.mark.slots
def test_the_printed_evaluation_tells_two_policies_apart(tmp_path: Path) -> None:
    written(tmp_path, "lines_env.py")
    (block,) = re.findall(
        r"```sh\n(palaestra eval .*?)```", (DOCS / "environments/evaluating.md").read_text(), re.DOTALL
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", "-e", "-c", block]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "pass@4 1.000" in done.stderr
    assert "over 3 tasks: better on 3, worse on 0" in done.stdout


@pytest.mark.slots
def test_the_printed_terminal_task_is_good(tmp_path: Path) -> None:
    page = (DOCS / "environments" / "terminalbench_2.md").read_text()
    (block,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    (tmp_path / "environments").symlink_to(DOCS.parent / "environments")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", "-e", "-c", block]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1 of 1 tasks are good" in done.stdout
    assert json.loads((tmp_path / "evals/metrics.json").read_text())["results"]["all"]["pass@2"] == 1.0
