"""Where lines stand among others: every place, and in files and patches that were made to take hours."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra.tools.patching.edit_diff import MAX_DIFF_CHARS, unified_diff
from palaestra.tools.patching.fuzzy_match import NoMatch, replace
from palaestra.tools.patching.lines import places
from palaestra.tools.patching.v4a import PatchError, apply_patch, parse_patch

LINES = st.lists(st.sampled_from("ab"), max_size=12)


@given(LINES, LINES.filter(bool), st.integers(0, 5))
def test_every_place_is_found(lines: list[str], wanted: list[str], start: int) -> None:
    every = [at for at in range(start, len(lines)) if lines[at : at + len(wanted)] == wanted]
    assert places(lines, wanted, start) == every


def test_a_text_of_one_line_many_times_is_searched_at_once() -> None:
    with pytest.raises(NoMatch):
        replace("a\n" * 300_000, "a \n" * 20_000 + "b\n", "x")
    with pytest.raises(NoMatch):
        replace(("{\n" + "abcdefghij" * 50 + "\n}\n") * 3000, "{\n" + "jihgfedcba" * 50 + "\n}\n", "x")


def test_a_patch_for_such_a_text_too() -> None:
    long = "*** Begin Patch\n*** Update File: f\n" + " a\n" * 20_000 + "-b\n*** End Patch"
    with pytest.raises(PatchError, match="not in the file"):
        apply_patch(parse_patch(long), {"f": "a\n" * 300_000})
    anchored = "*** Begin Patch\n*** Update File: f\n@@ x\n@@ x\n-y\n+z\n*** End Patch"
    assert apply_patch(parse_patch(anchored), {"f": "x\n" * 300_000 + "y\n"}) == {"f": "x\n" * 300_000 + "z\n"}


def test_the_diff_of_lines_that_recur_is_whole_where_few_changed_and_cut_where_all_did() -> None:
    rows = [f"{number % 150}\n" for number in range(22_000)]
    changed = [row if number % 400 else "x\n" for number, row in enumerate(rows)]
    diff = unified_diff("".join(rows), "".join(changed), "f")
    assert diff.count("\n+x\n") == 55
    assert "[diff cut" not in diff
    assert MAX_DIFF_CHARS < len(unified_diff("".join(rows), "".join(rows[::-1]), "f")) < 2 * MAX_DIFF_CHARS
