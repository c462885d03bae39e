"""The commands of the environment's page run as they are printed there, with the rewards that it promises."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from palaestra.cli.main import main
from palaestra_suites.endless_terminals.compose_tasks import AREAS, FAMILIES, HIGHEST_LEVEL

ROOT = Path(__file__).parents[5]
PAGE = (ROOT / "docs" / "environments" / "endless_terminals.md").read_text()


def test_the_page_counts_what_there_is() -> None:
    assert [name for name in AREAS if f"`{name}`" not in PAGE] == []
    assert f"There are {len(FAMILIES)} families in ten areas" in PAGE
    assert len(AREAS) == 10
    assert HIGHEST_LEVEL == 5
    assert "and five levels" in PAGE


@pytest.mark.slow
@pytest.mark.slots
@pytest.mark.timeout(600)
def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands = [shlex.split(line, comments=True) for line in PAGE.splitlines() if line.startswith("palaestra ")]
    assert len(commands) == 5
    # the tests of the environment play every cheat, so one is enough here
    commands = [[*each, "--only", "stale-reward"] if each[1:3] == ["env", "check"] else each for each in commands]
    for command in commands:
        assert main(command[1:]) == 0, command
    found = [
        [score for line in path.read_text().splitlines() for score in json.loads(line)["scores"]]
        for path in sorted(tmp_path.glob("runs/*/*/groups.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    ]
    assert [set(scores) for scores in found] == [{1.0}, {0.0}, {1.0}]
