"""What the checks of an audit decide without a trial."""

from __future__ import annotations

import pytest

from palaestra_audit import checks
from palaestra_audit.audit import _reworded
from palaestra_audit.checks import _has, _is_told, _names_file


@pytest.mark.parametrize(
    ("solution", "place", "written", "named"),
    [
        ("mv a.txt b.txt", "/workspace/a.txt", "/workspace/b.txt", True),
        ("cp -r template/. out", "/workspace/template/x.py", "/workspace/out/x.py", True),
        ("cat /opt/data/x.csv > x.csv", "/opt/data/x.csv", "/workspace/x.csv", True),
        ("printf 'a fox' > fox.txt", "/workspace/.hidden/fox", "/workspace/fox.txt", False),
        ("printf x > src/a.py", "/workspace/src/old/a.py", "/workspace/src/a.py", False),
        ("cp x a.py", "the history of /workspace", "/workspace/a.py", False),
        ("git -C repo merge --no-ff bridge", "the history of /workspace/repo", "/workspace/repo/a.py", True),
        ("cd repo && git checkout HEAD~2 -- a.py", "the history of /workspace/repo", "/workspace/repo/a.py", True),
        ("git show old:a.py > a.py", "the history of /workspace", "/workspace/a.py", True),
        ("git checkout -b fix && git commit -am fix", "the history of /workspace", "/workspace/a.py", False),
        ("git add a.py; echo reset > b.txt", "the history of /workspace", "/workspace/a.py", False),
    ],
)
def test_a_file_that_the_solution_names_is_no_leak(solution: str, place: str, written: str, named: bool) -> None:
    assert _names_file(solution, place, written) is named


@pytest.mark.parametrize(
    ("text", "asked", "told"),
    [
        ("384", "What is 128 + 256? Reply with the number, for example: 384", True),
        ("b/c.txt", "Write the largest file (expected content: b/c.txt).", True),
        ("Ag", "Which symbol has silver? (answer: Ag)", True),
        ("yes", "Is 17 a prime number? Answer yes or no.", False),
        ("no", "Is 17 a prime number? Answer yes or no.", False),
        ("true", "The result is true/false.", False),
        ("12", "For example, encode(12.5) is 'x'.", False),
        ("12", "Add the 12 numbers of a.txt.", False),
    ],
)
def test_a_short_answer_is_told_only_as_the_answer(text: str, asked: str, told: bool) -> None:
    assert _is_told(text, asked) is told


def test_a_file_has_a_short_text_as_a_word_and_a_long_one_with_all_lines() -> None:
    assert _has("total: 93\n", "93")
    assert not _has("1930 and 93.5", "93")
    code = "def double(value):\n    return value * 2  # twice\n"
    assert _has(f"cat > a.py <<'END'\n{code}END\n", code)
    assert not _has("def double(value):\n    raise NotImplementedError\n", code)


def test_other_words_for_one_task_are_near_duplicates() -> None:
    texts = {
        "a": "What is the height of the tower of Pisa in whole metres?",
        "b": "What's the height, in whole metres, of the tower of Pisa?",
        "other answer": "What's the height, in whole metres, of the tower of Ulm?",
        "three": "Add the 3 numbers of the file in whole metres.",
        "four": "Add the 4 numbers of the file in whole metres.",
        "unknown": "What is the height of the tower of Pisa in metres?",
    }
    solved = {"a": "56", "b": "56", "other answer": "161", "three": "5", "four": "5"}
    assert [each[:2] for each in _reworded(texts, solved)] == [("a", "b")]


@pytest.mark.parametrize(
    ("script", "goes_on"),
    [
        ("python3 server.py &\nsleep 1", True),
        ("nohup ./serve > log 2>&1 &", True),
        ("systemctl start web", True),
        ("make && ./run", False),
        ("make &&\n./run", False),
        ("echo a >& 2", False),
    ],
)
def test_a_program_that_goes_on_is_recognized_by_its_start(script: str, goes_on: bool) -> None:
    assert bool(checks._GOES_ON.search(script)) is goes_on


def test_a_patch_with_the_lines_of_the_solution_is_one_of_its_texts() -> None:
    before = b"def size(n):\n    return n\n"
    after = b"def size(n):\n    if not n:\n        raise ValueError('nothing to measure')\n    return n\n"
    text = checks._added_text(before, after)
    patch = "@@\n def size(n):\n+    if not n:\n+        raise ValueError('nothing to measure')\n     return n\n"
    assert text
    assert checks._has(patch, text)
    assert not checks._has(patch.replace("+    if", "-    if"), text)
    assert not checks._added_text(b"", after)
