"""`env check` of conversations: wrong solutions of the author, answers in words, and calls that nobody asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from palaestra.cli.main import main
from palaestra_audit.cheats.proof import Proof, check_environment

pytestmark = pytest.mark.slots

ENV = """
from palaestra import Say, Task, ToolError, ToolStep, environment

@environment(toolsets=[])
def desk():
    ask, cancel = Say("Which booking?"), ToolStep("cancel", {"code": "B1"})
    move = ToolStep("move", {"code": "B1"})
    yield Task("a", "Help me, please. Thanks.", FIELDS solution=[ask, cancel, Say("You get 96.")],
               wrong_solutions=[[ask, Say("You get 96.")], [ask, cancel, move, Say("You get 96.")]])

@desk.state
def bookings():
    return {"B1": "booked", "moved": False, "asked": 0}

@desk.user
def customer(state):
    state["asked"] += 1
    return "Cancel B1. What do I get?" if state["asked"] == 1 else None

@desk.tool
def cancel(code: str, *, state) -> dict:
    '''Cancel a booking.'''
    state[code] = "cancelled"
    return {"paid": 120}

@desk.tool
def move(code: str, *, state) -> str:
    '''Move a booking.'''
    state["moved"] = True
    return "moved"

@desk.score
def right(state, rollout):
    said = str(rollout.final_response)
    done = state["B1"] == "cancelled"
    return SCORE
"""
SOUND = "done and not state['moved'] and said == 'You get 96.'"


def check(tmp_path: Path, score: str, fields: str = "") -> Proof:
    path = tmp_path / "desk_env.py"
    path.write_text(ENV.replace("SCORE", score).replace("FIELDS", fields))
    return check_environment(str(path), [], tasks=1, quiet=True)


def failed(proof: Proof) -> list[str]:
    return [line.policy for line in proof.lines if not line.ok]


def test_wrong_solutions_and_answers_in_words_earn_nothing_from_a_sound_score(tmp_path: Path) -> None:
    proof = check(tmp_path, SOUND)
    assert not failed(proof)
    assert proof.classes["answers in words"] == "closed"
    assert not proof.warnings
    assert not proof.tests_nothing


@pytest.mark.parametrize(
    ("score", "paid"),
    [
        ("not state['moved'] and '96' in said", ["wrong_solutions[0]"]),
        ("done and said == 'You get 96.'", ["wrong_solutions[1]"]),
        ("done and not state['moved'] and '96' in said", ["every-number"]),
        ("(done and not state['moved'] and said == 'You get 96.') or 'Thanks' in said", ["echo-prompt"]),
    ],
)
def test_a_score_that_wrong_work_earns_is_found_out(tmp_path: Path, score: str, paid: list[str]) -> None:
    assert failed(check(tmp_path, score)) == paid


def test_wrong_solutions_may_earn_the_floor(tmp_path: Path) -> None:
    score = f"({SOUND}) or 0.2 * (said == 'You get 96.')"
    assert failed(check(tmp_path, score)) == ["wrong_solutions[0]", "wrong_solutions[1]"]
    assert not failed(check(tmp_path, score, "floor=0.2,"))


def test_a_score_that_reads_no_words_leaves_answers_untested(tmp_path: Path) -> None:
    proof = check(tmp_path, "done and not state['moved']")
    assert not failed(proof)
    assert [line.policy for line in proof.lines if "what the agent says" in line.reason] == ["every-number"]


def test_an_author_is_warned_of_changes_that_the_score_does_not_see(tmp_path: Path) -> None:
    path = tmp_path / "desk_env.py"
    text = ENV.replace("SCORE", "done").replace("FIELDS", "")
    path.write_text(text[: text.index("wrong_solutions")] + text[text.index(")\n\n@desk.state") :])
    (warning,) = check_environment(str(path), [], tasks=1, quiet=True).warnings
    assert "move" in warning


def test_a_check_that_could_test_nothing_does_not_succeed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "desk_env.py"
    text = ENV.replace("SCORE", "done").replace("FIELDS", "")
    path.write_text(text[: text.index("wrong_solutions")] + text[text.index(")\n\n@desk.state") :])
    assert main(["env", "check", str(path), "--only", "conftest-skip"]) == 3
    assert capsys.readouterr().out.splitlines()[1].startswith("incomplete")
    assert main(["env", "check", str(path)]) == 0
