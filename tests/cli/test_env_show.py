"""`palaestra env show` prints what an environment declares."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from palaestra.cli.main import main

ENV = '''"""Sell tickets."""
from palaestra import Say, Task, environment

@environment(toolsets=["todo"], max_turns=7, packages=["six==1.17.0"])
def tickets(n: int = 1):
    DOC
    yield Task("a", "Hi", solution=[Say("b")])

@tickets.tool
def sell(seat: str) -> str:
    """Sell a seat."""
    return seat

@tickets.user
def traveller():
    return None

@tickets.score
def right():
    return 1
'''


@pytest.mark.parametrize(("docstring", "about"), [("", "Sell tickets."), ('"""For trains."""', "For trains.")])
def test_an_environment_is_shown_with_its_parts(
    docstring: str, about: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tickets_env.py"
    path.write_text(ENV.replace("DOC", docstring))
    assert main(["env", "show", str(path)]) == 0
    shown = capsys.readouterr().out
    for each in (about, "--env.n", "todo", "sell", "max_turns=7", "six==1.17.0", "traveller", "right"):
        assert each in shown
    assert main(["env", "show", str(path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["about"], printed["parts"]["tools"], printed["parts"]["limits"]) == (
        about,
        ["sell"],
        {"max_turns": 7},
    )
