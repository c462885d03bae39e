"""The program of docs/trl.md trains, with the real TRL."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

import palaestra
from palaestra_tokens.testing.tiny_model import make_tiny

PAGE = Path(__file__).parents[2] / "docs" / "trl.md"
(PROGRAM,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def test_it_is_ten_lines_of_public_names() -> None:
    assert len(list(filter(None, PROGRAM.splitlines()))) <= 10
    names = set(re.findall(r"palaestra\.([\w.]+)", PROGRAM))
    assert [each for each in names if not each.startswith("integrations.trl") and not hasattr(palaestra, each)] == []


@pytest.mark.torch
@pytest.mark.slots
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs the extra 'trl': make test-torch")
def test_the_program_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_tiny(tmp_path / "tiny", hidden=64, layers=2)
    small = {"/tmp/tiny": str(tmp_path / "tiny"), "n=64": "n=2", "max_steps=20": "max_steps=2", "=64": "=8"}
    program = PROGRAM
    for text, smaller in small.items():
        assert text in program
        program = program.replace(text, smaller)
    names: dict[str, object] = {}
    exec(compile(program.replace("num_generations=8", "num_generations=4"), "docs/trl.md", "exec"), names)
    assert names["trainer"].state.global_step == 2  # type: ignore[attr-defined]
    run = palaestra.open_run("last")
    assert run.status.state == "done"
    assert run.metrics["rollouts"] == 16
