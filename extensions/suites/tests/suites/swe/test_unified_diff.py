"""Diffs against git itself: what we write, git applies; what git writes, we read, and git applies to trees."""

import asyncio
import string
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from palaestra_suites.swe import unified_diff
from palaestra_suites.swe.repository import RepositoryCache, TreeFile, TreeFiles
from palaestra_suites.swe.solution_steps import replacements
from palaestra_suites.swe.swe_row import SweRow, parse_row
from suites.swe.diffs import applied, undoing
from suites.swe.published import Source

LINES = st.lists(st.sampled_from(["a\n", "b\n", "\n", "x = 1\n", "  y\r\n", "--- z\n", "+++ q\n", "@@ @@\n", "ü\f\n"]))
TEXTS = st.builds(lambda lines, tail: "".join(lines) + tail, LINES, st.sampled_from(["", "end", "\r", "\\ No"]))
SLOW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def git(*arguments: str, cwd: Path, check: bool = True) -> str:
    done = subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, check=False)
    assert not check or done.returncode == 0, done.stderr
    return done.stdout.decode("utf-8", "surrogateescape")


@SLOW
@given(TEXTS, TEXTS)
def test_reads_what_git_writes(tmp_path: Path, before: str, after: str) -> None:
    for side, text in (("a", before), ("b", after)):
        (tmp_path / side).mkdir(exist_ok=True)
        (tmp_path / side / "f.txt").write_bytes(text.encode("utf-8", "surrogateescape"))
    text = git("diff", "--no-index", "--no-prefix", "a", "b", cwd=tmp_path, check=False)
    if before != after:
        assert unified_diff.parse(text) == (unified_diff.FileDiff("f.txt", "f.txt"),)


@SLOW
@given(TEXTS, TEXTS)
def test_git_applies_what_we_write(before: str, after: str) -> None:
    text = unified_diff.between("some dir/f.txt", before, after)
    assert (text == "") == (before == after)
    if text:
        assert [file.path for file in unified_diff.parse(text)] == ["some dir/f.txt"]
        assert applied(text, before) == after
        assert applied(undoing(text, before), after) == before


@settings(deadline=None)
@given(st.text(alphabet="ab\n", max_size=60), st.text(alphabet="ab\n", max_size=60))
def test_edits_are_unique_at_their_turn_and_make_the_new_text(before: str, after: str) -> None:
    if not before:
        return
    current = before
    for old_text, new_text in replacements(before, after):
        assert current.count(old_text) == 1
        current = current.replace(old_text, new_text)
    assert current == after


def test_new_deleted_renamed_and_copied_files_are_read(tmp_path: Path) -> None:
    git("init", "-q", cwd=tmp_path)
    (tmp_path / "gone.txt").write_text("bye\n")
    (tmp_path / "old.txt").write_text("".join(f"{letter}\n" for letter in string.ascii_letters))
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    git("add", "-A", cwd=tmp_path)
    git("-c", "user.name=t", "-c", "user.email=t@localhost", "commit", "-q", "-m", "one", cwd=tmp_path)
    (tmp_path / "gone.txt").unlink()
    (tmp_path / "copy.txt").write_text((tmp_path / "old.txt").read_text())
    (tmp_path / "old.txt").rename(tmp_path / "näme with space.txt")
    (tmp_path / "fresh.txt").write_text("hello")
    (tmp_path / "run.sh").chmod(0o755)
    git("add", "-A", cwd=tmp_path)
    text = git("diff", "--cached", "-M", "-C", "--find-copies-harder", cwd=tmp_path)
    assert {(file.old_path, file.new_path) for file in unified_diff.parse(text)} == {
        ("gone.txt", None), (None, "fresh.txt"), ("run.sh", "run.sh"), ("old.txt", "näme with space.txt"),
        ("old.txt", "copy.txt"),
    }  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "", "hello\n", "diff --git a/f b/f\n--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n a\n",
        "diff --git a/f b/f\nindex 1..2 100644\nBinary files a/f and b/f differ\n",
    ],
)  # fmt: skip
def test_what_is_no_whole_diff_is_refused(text: str) -> None:
    with pytest.raises(unified_diff.DiffError):
        unified_diff.parse(text)


class Trees:
    """A repository and the files that patches make of it."""

    def __init__(self, folder: Path) -> None:
        self.source = Source.make(folder / "source", {"run.sh": "#!/bin/sh\n", "f": "1\n2\n3\na\n5\n", "d/g": "x\n"})
        self.cache = RepositoryCache(folder / "cache")
        self.row: SweRow = parse_row(self.source.row(patch=unified_diff.between("f", "a\n", "b\n"), kind="swe-smith"))

    def changed(self, patch: str, *, backwards: bool = False) -> TreeFiles:
        async def made() -> TreeFiles:
            _, commit = await self.cache.locate_commit(self.row)
            tree = await self.cache.apply_patch(self.row, commit, patch, backwards=backwards)
            return await self.cache.difference(self.row, commit, tree)

        return asyncio.run(made())


def new(path: str, mode: str, line: str) -> str:
    return (
        f"diff --git a/{path} b/{path}\nnew file mode {mode}\n--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+{line}\n"
        "\\ No newline at end of file\n"
    )


@pytest.mark.parametrize(
    ("patch", "files"),
    [
        (new("bin/tool", "100755", "echo"), {"bin/tool": TreeFile("100755", b"echo")}),
        (new("plain", "100644", "x"), {"plain": TreeFile("100644", b"x")}),
        (new("d/link", "120000", "../f"), {"d/link": TreeFile("120000", b"../f")}),
        ("diff --git a/run.sh b/run.sh\nold mode 100644\nnew mode 100755\n",
         {"run.sh": TreeFile("100755", b"#!/bin/sh\n")}),
        ("diff --git a/run.sh b/s/run\nold mode 100644\nnew mode 100755\nsimilarity index 100%\n"
         "rename from run.sh\nrename to s/run\n",
         {"run.sh": None, "s/run": TreeFile("100755", b"#!/bin/sh\n")}),
        ("diff --git a/run.sh b/s/run\nsimilarity index 100%\ncopy from run.sh\ncopy to s/run\n",
         {"s/run": TreeFile("100644", b"#!/bin/sh\n")}),
        ("diff --git a/f b/f\ndeleted file mode 100644\n--- a/f\n+++ /dev/null\n@@ -1,5 +0,0 @@\n-1\n-2\n-3\n-a\n-5\n",
         {"f": None}),
        ("--- d/g\n+++ d/g\n@@ -1 +1 @@\n-x\n+y", {"d/g": TreeFile("100644", b"y\n")}),
        ("--- a/f\n+++ b/f\n@@ -1,3 +1,3 @@\n 3\n-a\n+A\n 5\n", None),
        ("--- a/f\n+++ b/f\n@@ -2,3 +2,3 @@\n 3\n-a\n+A\n 5\n", {"f": TreeFile("100644", b"1\n2\n3\nA\n5\n")}),
    ],
    ids=["program", "file", "link", "mode", "rename", "copy", "deletion", "no sides, no last newline", "not at the "
         "beginning", "a line off"],
)  # fmt: skip
def test_git_applies_modes_links_and_hunks_to_a_tree(tmp_path: Path, patch: str, files: TreeFiles | None) -> None:
    """A hunk with another line number applies where `git apply` applies it, as graders of published rows do."""
    if files is None:
        with pytest.raises(unified_diff.DiffError, match="does not apply"):
            Trees(tmp_path).changed(patch)
    else:
        assert Trees(tmp_path).changed(patch) == files


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (new("../out", "100644", "x"), "invalid path"),
        (new("/etc/x", "100644", "x"), "does not exist|invalid path"),
        (new(".git/hooks/post-checkout", "100755", "x"), "invalid path"),
        (new("link", "120000", "/etc/passwd"), "the link link leads out of the repository, to /etc/passwd"),
        (new("d/link", "120000", "../../x"), "leads out"),
        (new("d/link", "120000", "../.."), "leads out"),
        (new("l", "120000", "d") + new("l/x", "100644", "x"), "beyond a symbolic link"),
        (new("f", "100644", "x"), "already exists"),
        ("--- a/f\n+++ b/f\n@@ -1 +1 @@\n-wrong\n+x\n", "does not apply"),
        ("diff --git a/f b/f\nindex 1..2 100644\nGIT binary patch\nliteral 7\nzzzz\n", "corrupt|unrecognized"),
    ],
)
def test_a_patch_stays_in_the_repository_and_matches_it(tmp_path: Path, patch: str, message: str) -> None:
    with pytest.raises(unified_diff.DiffError, match=message):
        Trees(tmp_path).changed(patch)
    assert not list(tmp_path.glob("out"))


CONTENTS = st.builds(
    lambda head, part, count, tail: head + part * count + tail,
    st.binary(max_size=40),
    st.binary(max_size=300),
    st.integers(0, 400),
    st.binary(max_size=40),
)


@pytest.mark.slow
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CONTENTS, CONTENTS)
def test_binary_changes_apply_in_both_directions(tmp_path_factory, old: bytes, new: bytes) -> None:  # type: ignore[no-untyped-def]
    """Literal changes and deltas, as git makes them."""
    old, new = b"\0" + old, b"\0" + new
    assume(old != new)
    trees = Trees(tmp_path_factory.mktemp("binary"))
    base = trees.source.commit({"b": old})
    patch = trees.source.diff({"b": new})
    trees.row = parse_row(trees.source.row(base_commit=base))
    assert trees.changed(patch) == {"b": TreeFile("100644", new)}
    after = trees.source.commit({"b": new})
    trees.row = parse_row(trees.source.row(base_commit=after))
    assert trees.changed(patch, backwards=True) == {"b": TreeFile("100644", old)}
