"""Diffs in replies are real ones: `git apply` takes them, whatever they are of."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra.tools.patching.edit_diff import MAX_DIFF_CHARS, unified_diff

LONG = "".join(f"line {n}\n" for n in range(4000))
CASES = [
    ("a\nb\nc\n", "a\nB\nc\n"),
    ("a\n", "a"),
    ("a", "a\nb"),
    (None, "x\ny\n"),
    ("x\n", None),
    ("x\n", ""),
    (LONG, LONG.replace("line 7\n", "").replace("line 3990\n", "new\n")),
    ("same\n" * 20 + "a\n" + "same\n" * 20, "same\n" * 20 + "b\n" + "same\n" * 21),
    ("form\x0cfeed\u2028and\n", "form\x0cfeed\u2028or\n"),
]


@pytest.mark.parametrize(("before", "after"), CASES, ids=range(len(CASES)))
def test_git_applies_the_diff(before: str | None, after: str | None, tmp_path: Path) -> None:
    file = tmp_path / "f.txt"
    if before is not None:
        file.write_bytes(before.encode())
    diff = unified_diff(before, after, "f.txt")
    subprocess.run(["git", "apply", "--unsafe-paths", "-"], input=diff.encode(), cwd=tmp_path, check=True)
    assert (file.read_bytes().decode() if file.exists() else None) == after


LINES = st.lists(st.sampled_from(["a\n", "b\n", "c\n", "\n"]), max_size=30).map("".join)


@given(before=LINES, after=LINES)
def test_every_diff_says_how_to_get_from_one_text_to_the_other(before: str, after: str) -> None:
    old, new, at = before.splitlines(), [], 0
    for line in unified_diff(before, after, "f").splitlines()[2:]:
        if line.startswith("@@"):
            start, _, size = line.split()[1][1:].partition(",")
            upto = int(start) - (size != "0")
            new += old[at:upto]
            at = upto
            continue
        assert line[0] == "+" or line[1:] == old[at]
        new += [line[1:]] * (line[0] != "-")
        at += line[0] != "+"
    assert new + old[at:] == after.splitlines()


def test_no_change_gives_no_diff() -> None:
    assert unified_diff("a\n", "a\n", "f") == ""


def test_a_long_diff_is_cut_visibly() -> None:
    diff = unified_diff("", LONG, "f")
    assert len(diff) < MAX_DIFF_CHARS + 100
    assert diff.endswith("more characters] ...\n")


def test_an_edit_far_apart_in_a_large_file_shows_only_its_surroundings() -> None:
    assert len(unified_diff(LONG, LONG.replace("line 2000\n", "x\n"), "f").splitlines()) == 11
