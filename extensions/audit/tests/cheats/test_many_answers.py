"""A reply that lists many answers earns nothing from a sound score, also if the answer is hexadecimal."""

from __future__ import annotations

from pathlib import Path

import pytest

from auditing.played_audit import audit
from palaestra_audit.cheats.replies import _hexadecimals, is_hexadecimal
from palaestra_audit.mutants import wrong_replies
from palaestra_audit.records import Kind
from palaestra_slots.core.types import Say, Task


@pytest.mark.parametrize(
    ("word", "asked", "hexadecimal"),
    [
        ("0x2f", "", True), ("3fa9", "", True), ("BEEF", "Write 48879 in hexadecimal.", True), ("12", "", False),
        ("12", "Write 18 as 0x…", True), ("beef", "", False), ("0xyz", "", False), ("f", "in base 16", True),
    ],
)  # fmt: skip
def test_a_hexadecimal_number_is_told_by_its_form_or_by_the_prompt(word: str, asked: str, hexadecimal: bool) -> None:
    assert is_hexadecimal(word, asked) is hexadecimal


def test_all_numbers_of_the_form_of_the_answer_are_listed() -> None:
    assert list(_hexadecimals(Task("a", "Write it.", answer="0x2f")))[46:48] == ["0x2e", "0x2f"]
    assert "BEEF" in set(_hexadecimals(Task("a", "In hex?", solution=[Say("BEEF")])))
    assert not list(_hexadecimals(Task("a", "In hex?", answer="3fa9c1d")))
    assert not list(_hexadecimals(Task("a", "How many?", answer=12)))


@pytest.mark.parametrize("reply", ["3fa9c1d", "0x2f", "B", "4260", "Baikal", "-1.5"])
def test_one_of_the_wrong_replies_has_the_right_one_in_its_middle(reply: str) -> None:
    text = dict(wrong_replies(reply))["the reply among others of its form"]
    words = text.split(", ")
    assert words.count(reply) == 1
    assert 0 < words.index(reply) < len(words) - 1
    assert {len(each) for each in words} == {len(reply)}
    assert all(is_hexadecimal(each) for each in words) or not is_hexadecimal(reply)


ANSWERS = """
from palaestra import Task, environment


@environment(toolsets=[])
def numbers():
    for kind in ("sound", "listed"):
        yield Task(id=f"{kind}-short", prompt="Write 48879 in hexadecimal.", answer="beef")
        yield Task(id=f"{kind}-prefixed", prompt="Write 47 as 0x and digits.", answer="0x2f")
        yield Task(id=f"{kind}-long", prompt="Which commit has it?", answer="3fa9c1d")
        yield Task(id=f"{kind}-decimal", prompt="How many minutes do 71 hours have?", answer="4260")
        yield Task(id=f"{kind}-word", prompt="Which lake is the deepest?", answer="Baikal")


@numbers.score
def right(task, rollout):
    said = str(rollout.final_response).strip()
    return task.answer in said if task.id.startswith("listed") else said == task.answer
"""


@pytest.mark.slots
@pytest.mark.slow
def test_a_score_that_looks_for_the_answer_among_many_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("numbers_env.py").write_text(ANSWERS)
    found = {
        task.id: {(each.kind, each.note) for each in task.findings}
        for task in audit("numbers_env.py", "--only", str(Kind.HACKABLE), "--only", str(Kind.WEAK)).tasks
    }
    listed, hacked = (Kind.WEAK, True), (Kind.HACKABLE, False)
    assert {name: each for name, each in found.items() if each} == {
        "listed-short": {listed, hacked},
        "listed-prefixed": {listed, hacked},
        "listed-long": {listed},
        "listed-decimal": {listed},
        "listed-word": {listed},
    }
