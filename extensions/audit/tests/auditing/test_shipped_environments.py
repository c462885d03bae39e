"""The environments that the project ships stand an audit."""

from __future__ import annotations

from pathlib import Path

import pytest

from auditing.played_audit import audit

ROOT = Path(__file__).parents[4]

pytestmark = [pytest.mark.slow, pytest.mark.slots, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("environment", "tasks"),
    [
        ("count_lines", 2),
        ("terminal_test", 2),
        ("endless_terminals", 4),
        (str(ROOT / "benchmarks/files_env.py"), 5),
        (str(ROOT / "examples/word_env.py"), 2),
    ],
)
def test_an_audit_of_a_shipped_environment_finds_nothing(
    environment: str, tasks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = audit(environment, "--tasks", str(tasks))
    assert len(found.tasks) == tasks
    assert found.complete
    assert [(task.id, each) for task, each in found.findings() if not each.note] == []
