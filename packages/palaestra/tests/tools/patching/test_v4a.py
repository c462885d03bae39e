"""V4A patches: read whole or refused; applied with certainty or refused."""

from __future__ import annotations

import difflib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from golden_messages import check_message
from palaestra.tools.patching.v4a import PatchError, apply_patch, parse_patch

CODE = "import os\n\nclass A:\n    def run(self):\n        return 1\n\nclass B:\n    def run(self):\n        return 1\n"


def wrap(*lines: str) -> str:
    return "\n".join(["*** Begin Patch", *lines, "*** End Patch"])


def applied(*lines: str, **files: str) -> dict[str, str | None]:
    return apply_patch(parse_patch(wrap(*lines)), files)


def refusal(*lines: str, **files: str) -> str:
    with pytest.raises(PatchError) as caught:
        applied(*lines, **files)
    return str(caught.value)


def test_a_patch_adds_updates_deletes_and_moves() -> None:
    results = applied(
        "*** Add File: new",
        "+one",
        "+",
        "+two",
        "",
        "*** Update File: changed",
        " a",
        "-b",
        "+B",
        "*** Delete File: gone",
        "*** Move File: here -> there",
        "*** Update File: from",
        "*** Move to: to",
        "-x",
        "+y",
        changed="a\nb\nc\n",
        gone="",
        here="text",
        **{"from": "x\n"},
    )
    assert results == {
        "new": "one\n\ntwo\n",
        "changed": "a\nB\nc\n",
        "gone": None,
        "here": None,
        "there": "text",
        "from": None,
        "to": "y\n",
    }


def test_an_anchor_tells_equal_places_apart() -> None:
    results = applied(
        "*** Update File: f", "@@ class B:", "     def run(self):", "-        return 1", "+        return 2", f=CODE
    )
    assert results["f"] == CODE[: CODE.rindex("1")] + "2\n"


def test_anchors_narrow_down_one_after_the_other() -> None:
    results = applied(
        "*** Update File: f", "@@ class B", "@@ def run(self):", "-        return 1", "+        return 2", f=CODE
    )
    assert results["f"] == CODE[: CODE.rindex("1")] + "2\n"


@pytest.mark.parametrize("anchor", [(), ("@@",), ("@@     def run(self):",)])
def test_a_place_that_is_not_certain_is_refused(anchor: tuple[str, ...]) -> None:
    assert "more than once" in refusal("*** Update File: f", *anchor, "-        return 1", "+        return 2", f=CODE)


def test_an_anchor_that_occurs_twice_is_enough_where_the_lines_occur_once() -> None:
    text = CODE.replace("return 1", "return 0", 1)
    results = applied("*** Update File: f", "@@ def run(self):", "-        return 1", "+        return 2", f=text)
    assert results["f"] == text.replace("return 1", "return 2")


def test_added_lines_go_below_their_anchor_or_at_the_end() -> None:
    assert applied("*** Update File: f", "@@ a", "+new", f="a\nb\n")["f"] == "a\nnew\nb\n"
    assert applied("*** Update File: f", "+new", "*** End of File", f="a\nb")["f"] == "a\nb\nnew"
    assert applied("*** Update File: f", "+new", f="")["f"] == "new\n"
    assert "shows where" in refusal("*** Update File: f", "+new", f="a\nb\n")


def test_end_of_file_means_the_last_place() -> None:
    assert applied("*** Update File: f", "-x", "+y", "*** End of File", f="x\nx\n")["f"] == "x\ny\n"


def test_context_is_kept_as_the_file_has_it_and_new_lines_follow_its_indentation() -> None:
    results = applied("*** Update File: f", " if a:", "-    b", "+    c", f="def f():\n\tif a:  \n\t\tb\n")
    assert results["f"] == "def f():\n\tif a:  \n\t\tc\n"


def test_in_a_file_of_mixed_line_ends_new_lines_end_as_those_around_them() -> None:
    patch = "*** Begin Patch\n*** Update File: f\n b\n-c\n+C\n+D\n*** End Patch"
    assert apply_patch(parse_patch(patch), {"f": "a\nb\r\nc\r\nd\n"}) == {"f": "a\nb\r\nC\r\nD\r\nd\n"}


def test_several_changes_of_a_file_are_found_one_below_the_other() -> None:
    results = applied("*** Update File: f", "-one", "+1", "@@ two", "-x", "+y", f="one\nx\ntwo\nx\n")
    assert results["f"] == "1\nx\ntwo\ny\n"
    check_message(refusal("*** Update File: f", "-two", "+2", "@@", "-one", "+1", f="one\ntwo\n"), "file")


def test_unified_diff_ranges_after_at_signs_are_ignored() -> None:
    assert applied("*** Update File: f", "@@ -1,2 +1,2 @@", " a", "-b", "+c", f="a\nb\n")["f"] == "a\nc\n"


@pytest.mark.parametrize(
    ("patch", "part"),
    [
        ("", "must start with"),
        ("--- a/f\n+++ b/f", "must start with the line '*** Begin Patch', got '--- a/f'"),
        ("*** Begin Patch\n*** Update File: f\n-a", "incomplete"),
        (wrap(), "changes no file"),
        (wrap("-a"), "Patch line 2"),
        (wrap("*** Update File: f"), "has no changes"),
        (wrap("*** Update File: f", "no mark"), "must start with ' '"),
        (wrap("*** Add File: f", "no plus"), "must start with '+'"),
        (wrap("*** Rename File: f"), "unknown header"),
        (wrap("*** Move File: a b"), "old path -> new path"),
        (wrap("*** Delete File: f", "-a"), "only the next file may follow"),
        (wrap("*** Delete File: "), "no path"),
        (wrap("*** Delete File: f", "*** Add File: f", "+x"), "appears twice"),
        (wrap("*** Add File: f", "+x", "*** Move to: g"), "belongs directly below"),
    ],
)
def test_what_is_no_patch_is_refused_with_the_reason(patch: str, part: str) -> None:
    with pytest.raises(PatchError) as caught:
        parse_patch(patch)
    assert part in str(caught.value)


def test_files_must_be_as_the_patch_expects() -> None:
    assert "already exists" in refusal("*** Add File: f", "+x", f="")
    assert "does not exist" in refusal("*** Delete File: f")
    assert "already exists" in refusal("*** Move File: f -> g", f="", g="")
    check_message(refusal("*** Update File: f", "-z", "+y", f="a\n"), "file")
    assert "@@ line 'q'" in refusal("*** Update File: f", "@@ q", "-a", "+y", f="a\n")


WORDS = st.lists(st.sampled_from([f"line {n}" for n in range(40)]), unique=True, max_size=15)


@given(before=WORDS, after=WORDS)
def test_a_patch_made_from_two_texts_turns_one_into_the_other(before: list[str], after: list[str]) -> None:
    body = [line[0] + line[2:] for line in difflib.ndiff(before, after) if line[0] in " -+"]
    if not body:
        return
    results = applied("*** Update File: f", *body, f="".join(line + "\n" for line in before))
    assert results["f"] == "".join(line + "\n" for line in after)


@given(
    st.lists(
        st.sampled_from(
            [
                "*** Update File: f",
                "*** Add File: g",
                "@@",
                "@@ a",
                " a",
                "-a",
                "+b",
                "-",
                "",
                "*** End of File",
                "*** Move to: h",
            ]
        )
    )
)
def test_any_lines_give_a_result_or_one_refusal(lines: list[str]) -> None:
    try:
        results = applied(*lines, f="a\nb\na\n")
    except PatchError:
        return
    assert results
