"""Diffs against git itself: what we write, git applies; what git writes, we read, reverse and apply."""

import string
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from palaestra.suites.swe import apply_diff, unified_diff

LINES = st.lists(st.sampled_from(["a\n", "b\n", "\n", "x = 1\n", "  y\r\n", "--- z\n", "+++ q\n", "@@ @@\n", "ü\f\n"]))
TEXTS = st.builds(lambda lines, tail: "".join(lines) + tail, LINES, st.sampled_from(["", "end", "\r", "\\ No"]))
SLOW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def git(*arguments: str, cwd: Path, check: bool = True) -> str:
    done = subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, check=False)
    assert not check or done.returncode == 0, done.stderr
    return done.stdout.decode("utf-8", "surrogateescape")


def git_diff(tmp_path: Path, before: str, after: str) -> str:
    for side, text in (("a", before), ("b", after)):
        (tmp_path / side).mkdir(exist_ok=True)
        (tmp_path / side / "f.txt").write_bytes(text.encode("utf-8", "surrogateescape"))
    return git("diff", "--no-index", "--no-prefix", "a", "b", cwd=tmp_path, check=False)


@SLOW
@given(TEXTS, TEXTS)
def test_reads_and_applies_what_git_writes(tmp_path: Path, before: str, after: str) -> None:
    text = git_diff(tmp_path, before, after)
    if before == after:
        assert text == ""
        return
    (file,) = unified_diff.parse(text)
    assert apply_diff.apply_to_text(file, before) == after
    (back,) = unified_diff.parse(unified_diff.reverse(text))
    assert apply_diff.apply_to_text(back, after) == before


@SLOW
@given(TEXTS, TEXTS)
def test_git_applies_what_we_write(tmp_path: Path, before: str, after: str) -> None:
    text = apply_diff.between("some dir/f.txt", before, after)
    assert (text == "") == (before == after)
    if not text:
        return
    target = tmp_path / "some dir" / "f.txt"
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(before.encode())
    (tmp_path / "p.diff").write_bytes(text.encode())
    git("-c", "core.autocrlf=false", "apply", "--whitespace=nowarn", "p.diff", cwd=tmp_path)
    assert target.read_bytes().decode() == after
    (tmp_path / "r.diff").write_bytes(unified_diff.reverse(text).encode())
    git("apply", "--whitespace=nowarn", "r.diff", cwd=tmp_path)
    assert target.read_bytes().decode() == before


@settings(deadline=None)
@given(TEXTS, TEXTS)
def test_reversing_twice_and_rendering_change_nothing(before: str, after: str) -> None:
    text = apply_diff.between("f", before, after)
    if text:
        assert unified_diff.reverse(unified_diff.reverse(text)) == text
        assert unified_diff.render(unified_diff.parse(text)) == text


@settings(deadline=None)
@given(st.text(alphabet="ab\n", max_size=60), st.text(alphabet="ab\n", max_size=60))
def test_edits_are_unique_at_their_turn_and_make_the_new_text(before: str, after: str) -> None:
    text = apply_diff.between("f", before, after)
    if not text or not before:
        return
    current = before
    for edit in apply_diff.replacements(unified_diff.parse(text)[0], before):
        assert current.count(edit.old_text) == 1
        current = current.replace(edit.old_text, edit.new_text)
    assert current == after


def test_new_deleted_and_renamed_files_round_trip(tmp_path: Path) -> None:
    git("init", "-q", cwd=tmp_path)
    (tmp_path / "gone.txt").write_text("bye\n")
    (tmp_path / "old.txt").write_text("".join(f"{letter}\n" for letter in string.ascii_letters))
    git("add", "-A", cwd=tmp_path)
    git("-c", "user.name=t", "-c", "user.email=t@localhost", "commit", "-q", "-m", "one", cwd=tmp_path)
    (tmp_path / "gone.txt").unlink()
    (tmp_path / "old.txt").rename(tmp_path / "näme with space.txt")
    (tmp_path / "fresh.txt").write_text("hello")
    git("add", "-A", cwd=tmp_path)
    text = git("diff", "--cached", "-M", cwd=tmp_path)
    files = {file.path: file for file in unified_diff.parse(text)}
    assert files["gone.txt"].new_path is None
    assert files["fresh.txt"].old_path is None
    renamed = files["näme with space.txt"]
    assert (renamed.old_path, renamed.renamed) == ("old.txt", True)
    tree = {"gone.txt": "bye\n", "old.txt": (tmp_path / "näme with space.txt").read_text()}
    changed = apply_diff.apply(unified_diff.parse(text), tree)
    assert changed["gone.txt"] is None
    assert changed["old.txt"] is None
    assert changed["fresh.txt"] == "hello"
    after = {path: text for path, text in {**tree, **changed}.items() if text is not None}
    assert apply_diff.apply(unified_diff.parse(unified_diff.reverse(text)), after)["gone.txt"] == "bye\n"


def test_a_diff_that_does_not_fit_is_refused() -> None:
    (file,) = unified_diff.parse(apply_diff.between("f", "a\nb\n", "a\nc\n"))
    with pytest.raises(unified_diff.DiffError, match="does not match the file"):
        apply_diff.apply_to_text(file, "a\nx\n")


@pytest.mark.parametrize(
    ("old", "new", "file"),
    [
        ("1\n2\n3\na\n5\n6\n7\n8\n", "1\n2\n3\nA\n5\n6\n7\n8\n", "0\n{}"),
        ("1\n2\n3\na\n5\n6\n7\n8\n", "1\n2\n3\nA\n5\n6\n7\n8\n", "0\n0\n0\n1\n2\n3\na\n5\n6\n7\n{}"),
        ("0\n0\n0\n0\n1\nx\n3\n", "0\n0\n0\n0\n1\nx\n3\n4\n", "0\n{}"),
        ("0\n0\n0\n0\n1\nx\n3\n", "0\n0\n0\n0\n1\nx\n3\n4\n", "0\n{}0\n"),
        ("a\n2\n3\n4\n5\n", "A\n2\n3\n4\n5\n", "0\n{}"),
    ],
    ids=["one line off", "two places", "at the end", "not at the end", "not at the beginning"],
)
def test_a_hunk_with_another_line_number_applies_where_git_applies_it(
    tmp_path: Path, old: str, new: str, file: str
) -> None:
    """Rows of SWE-bench Verified have such hunks, and their graders run `git apply`."""
    text = file.format(old)
    (tmp_path / "f").write_text(text)
    patch = apply_diff.between("f", old, new)
    (tmp_path / "p").write_text(patch)
    done = subprocess.run(["git", "apply", "p"], cwd=tmp_path, capture_output=True, check=False)
    (diff,) = unified_diff.parse(patch)
    if done.returncode:
        with pytest.raises(unified_diff.DiffError, match="does not match the file"):
            apply_diff.apply_to_text(diff, text)
        return
    after = (tmp_path / "f").read_text()
    assert apply_diff.apply_to_text(diff, text) == after
    for each in apply_diff.replacements(diff, text):
        assert text.count(each.old_text) == 1
        text = text.replace(each.old_text, each.new_text)
    assert text == after


@pytest.mark.parametrize("text", ["", "hello\n", "diff --git a/f b/f\n--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n a\n"])
def test_what_is_no_whole_diff_is_refused(text: str) -> None:
    with pytest.raises(unified_diff.DiffError):
        unified_diff.parse(text)


CONTENTS = st.builds(
    lambda head, part, count, tail: head + part * count + tail,
    st.binary(max_size=40),
    st.binary(max_size=300),
    st.integers(0, 400),
    st.binary(max_size=40),
)


def as_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


@SLOW
@given(CONTENTS, CONTENTS)
def test_binary_changes_round_trip(tmp_path: Path, old: bytes, new: bytes) -> None:
    """Literal changes and deltas, as git makes them, are applied and undone."""
    old, new = b"\0" + old, b"\0" + new
    assume(old != new)
    git("init", "-q", cwd=tmp_path)
    (tmp_path / "f").write_bytes(old)
    git("add", "-A", cwd=tmp_path)
    (tmp_path / "f").write_bytes(new)
    text = git("diff", "--binary", cwd=tmp_path)
    assert apply_diff.apply(unified_diff.parse(text), {"f": as_text(old)}) == {"f": as_text(new)}
    back = unified_diff.reverse(text)
    assert apply_diff.apply(unified_diff.parse(back), {"f": as_text(new)}) == {"f": as_text(old)}
    if "\ndelta" in text.partition("\n\n")[0]:
        with pytest.raises(unified_diff.DiffError, match="does not match the file"):
            apply_diff.apply(unified_diff.parse(text), {"f": as_text(old + b"x")})


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("Binary files a/f and b/f differ", "git diff --binary"),
        ("GIT binary patch", "without data"),
        ("GIT binary patch\nliteral 7\nzzzz", "cannot be read"),
        ("GIT binary patch\nliteral 9999\nHcmV?d00001\n", "incomplete"),
        ("copy from g\ncopy to f", "copies"),
    ],
)
def test_binary_changes_without_their_data_and_copies_are_refused(lines: str, message: str) -> None:
    text = f"diff --git a/f b/f\nindex 1..2 100644\n{lines}\n"
    with pytest.raises(unified_diff.DiffError, match=message):
        apply_diff.apply(unified_diff.parse(text), {"f": ""})
