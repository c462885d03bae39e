"""A letter or digit is leaked by a text that states it as the answer, and not by one that only has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from auditing.played_audit import audit
from palaestra_audit.records import Kind
from palaestra_audit.stated_answers import single_sign, states, tells


@pytest.mark.parametrize(
    ("answer", "reply", "sign"),
    [
        ("B", None, "B"),
        (7, None, "7"),
        (None, "ANSWER: c", "c"),
        (None, "\\boxed{4}", "4"),
        ("B", "Baikal", "B"),
        ("42", None, None),
        (True, None, None),
        (None, None, None),
        (None, "Answer me", None),
    ],
)
def test_an_answer_of_one_sign_is_read_in_the_usual_forms(answer: object, reply: str | None, sign: str | None) -> None:
    assert single_sign(answer, reply) == sign


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        ("Answer: B", True),
        ("The right answer is B.", True),
        ('{"question": "Which form has it?", "correct": "B", "points": 2}', True),
        ("correct_option = 'B'  # secret", True),
        ("Merge sort (correct answer: B)", True),
        ("ANSWER=B", True),
        ("answer: b\n", True),
        ("Reply with a letter. Which one? (answer: B)", True),
        ("Reply with a letter, e.g. Answer: B", False),
        ("A) one\nB) two\nC) three", False),
        ("Reply in the form `Answer: B`.", False),
        ("'ANSWER: $LETTER' (without quotes) where LETTER is one of A,B,C", False),
        ("Answer: A\n\nAnswer: B", False),
        ("Answer: Baikal", False),
        ("The answer is B or C.", False),
        ("The answer: b is larger than a", False),
        ("option: B", False),
        ("Vitamin B", False),
    ],
)
def test_a_text_states_a_letter_only_as_the_answer(text: str, stated: bool) -> None:
    assert states(text, "B") is stated


def test_solved_examples_do_not_tell_the_answer() -> None:
    assert not tells("Which is even? A) 1 B) 2\nAnswer: B\n\nWhich is odd? A) 2 B) 3\nAnswer:", "B")
    assert tells("Which is odd? A) 2 B) 3\n(the answer is B)", "B")


CHOICES = """
from palaestra import Say, Task, ToolStep, environment

ASKED = "Which of these lakes is the deepest? Reply with a letter only.\\nA) Geneva\\nB) Baikal\\nC) Ness"
ROWS = '{"id": 1, "question": "Which lake is the deepest?", "correct": "B"}'
SETUP = {"file": {"meta/row.json": ROWS}, "key": {"answer.txt": "B"}, "named": {"row.json": ROWS},
         "options": {"notes.txt": "A) Geneva\\nB) Baikal\\nReply in the form Answer: B"},
         "keys": {"all.txt": "Answer: A\\nAnswer: B\\nAnswer: C"}}


@environment(toolsets=["terminal"])
def choices():
    for name in ("sound", "file", "key", "options", "keys"):
        yield Task(id=name, prompt=ASKED, answer="B", files=SETUP.get(name, {}))
    yield Task(id="told", prompt=ASKED + " (correct answer: B)", answer="B")
    yield Task(id="named", prompt="Read row.json.", answer="B", files=SETUP["named"])
    yield Task(id="digit", prompt="How many legs has an insect?", answer=6, files={"a.py": "expected = 6"})


@choices.score
async def right(task, rollout):
    return str(rollout.final_response).strip() == str(task.answer)
"""


@pytest.mark.slots
def test_a_letter_is_leaked_where_the_sandbox_or_the_prompt_states_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("choices_env.py").write_text(CHOICES)
    found = {
        task.id: {each.note for each in task.findings}
        for task in audit("choices_env.py", "--only", str(Kind.LEAKS)).tasks
    }
    assert found == {
        "sound": set(), "file": {False}, "key": {True}, "options": set(), "keys": set(), "told": {True},
        "named": set(), "digit": {True},
    }  # fmt: skip


QUIZ = """
from palaestra import Say, Task, ToolStep, environment

LAKES = {"question": "Which lake is the deepest?", "choices": {"A": "Geneva", "B": "Baikal"}}


@environment(toolsets=[])
def quiz():
    for name in ("sound", "leaky", "graded"):
        calls = [ToolStep("ask", {"name": name})]
        calls += [ToolStep("check", {"letter": "B"})] if name == "graded" else []
        yield Task(name, "Take the question NAME and reply with a letter.".replace("NAME", name), answer="B",
                   solution=[*calls, Say("B")])

@quiz.tool
def ask(name: str) -> dict:
    '''Return a question.'''
    return {**LAKES, "correct": "B"} if name == "leaky" else LAKES

@quiz.tool
def check(letter: str) -> str:
    '''Return whether a letter is right.'''
    return f"correct: {letter}" if letter == "B" else "wrong"

@quiz.score
def right(task, rollout):
    return str(rollout.final_response).strip() == task.answer
"""


@pytest.mark.slots
def test_a_letter_is_leaked_by_a_tool_that_returns_it_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("quiz_env.py").write_text(QUIZ)
    found = {
        task.id: {each.note for each in task.findings} for task in audit("quiz_env.py", "--only", str(Kind.LEAKS)).tasks
    }
    assert found == {"sound": set(), "leaky": {False}, "graded": set()}


@pytest.mark.slots
@pytest.mark.slow
@pytest.mark.parametrize(("variable", "leaks"), [("CORRECT_CHOICE=B", True), ("EDITION=B", False)])
def test_a_letter_is_leaked_by_a_variable_that_is_called_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, leaks: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {
        "task.toml": 'version = "1.0"\n',
        "instruction.md": "Which of these lakes is the deepest: A) Geneva B) Baikal? Write its letter to /app/out.txt.",
        "environment/Dockerfile": f"FROM python:3.11-slim\nWORKDIR /app\nENV {variable}\n",
        "solution/solve.sh": "#!/bin/bash\necho B > /app/out.txt\n",
        "tests/test.sh": "#!/bin/bash\ngrep -qx B /app/out.txt\necho $((! $?)) > /logs/verifier/reward.txt\n",
    }
    for name, content in files.items():
        path = Path("tasks/lake", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    (task,) = audit("tasks", "--only", str(Kind.LEAKS), "--env.base_image", "host").tasks
    assert [(each.what, each.note) for each in task.findings] == (
        [("the variable CORRECT_CHOICE of the sandbox has the answer", False)] if leaks else []
    )
