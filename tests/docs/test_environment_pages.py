"""What every shipped environment has: a script, a configuration file that is read, and a page whose commands run."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from palaestra.cli.main import main
from palaestra.envs.discovery import known_environments
from palaestra.rollouts.journal.reader import Recording

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/environments"
NAMES = sorted(known_environments(ROOT))


def palaestra(*argv: str) -> int:
    return main(list(argv))


def test_the_table_names_them_all() -> None:
    page = (ROOT / "docs/environments.md").read_text()
    assert NAMES == [
        "count_lines", "endless_terminals", "hermes_swe", "swe_smith_oracle", "terminal_test", "terminalbench_2",
    ]  # fmt: skip
    for name in NAMES:
        assert f"| `{name}` |" in page
        assert name == "count_lines" or f"environments/{name}.md" in page


@pytest.mark.parametrize("name", NAMES)
def test_the_configuration_file_is_read(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = ROOT / f"environments/{name}.yaml"
    script = ROOT / f"environments/{name}_env.py"
    assert palaestra("run", str(script), "process", "--config", str(config), "--show-config") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "openai.model_name" in line]
    assert "NAME" in line
    assert f"{name}.yaml" in line


@pytest.mark.parametrize("name", [name for name in NAMES if name != "count_lines"])
def test_the_page_says_what_the_oracle_and_doing_nothing_score(name: str) -> None:
    text = (PAGES / f"{name}.md").read_text()
    assert "1.0" in text
    assert "0.0" in text
    assert f"palaestra env check {name}" in text or f"--tasks 2 {name}" in text


@pytest.mark.slots
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name",
    ["endless_terminals", "hermes_swe", "terminal_test", pytest.param("swe_smith_oracle", marks=pytest.mark.network)],
)
def test_the_commands_of_the_page_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "environments").symlink_to(ROOT / "environments")
    text = (PAGES / f"{name}.md").read_text()
    commands = [shlex.split(line, comments=True) for line in text.splitlines() if line.startswith("palaestra ")]
    assert len(commands) > 3
    # tests of each environment play every cheat, so one is enough here
    commands = [[*each, "--only", "stale-reward"] if each[1:3] == ["env", "check"] else each for each in commands]
    for command in commands:
        assert palaestra(*command[1:]) == 0, (command, capsys.readouterr().err)
    journals = list(tmp_path.glob("runs/*/*/journal.jsonl"))
    assert len(journals) == 3
    for path in journals:
        rewards = {trajectory.reward for group in Recording(path) for trajectory in group.trajectories}
        assert rewards == {0.0 if "--noop" in str(path) else 1.0}
