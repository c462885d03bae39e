"""Whole copies of workspaces: copied, compared, and cut to views as a model says."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palaestra_slots.sandbox.slotd.unprivileged import copy_workspace, landlock, server_directory, users

Tree = Mapping[str, str]
"""Paths and what is there: the text of a file, or `-> ` and the target of a link."""

NAMES = st.sampled_from(["a", "b", "c"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
CONTENT = st.sampled_from(["1", "2", "-> a", "-> /etc"])
TREES = st.dictionaries(PATHS, CONTENT, max_size=6)


def write(root: Path, tree: Tree) -> None:
    """Make a tree; a path below another one's file is left out."""
    root.mkdir()
    for path, content in sorted(tree.items()):
        place = root / path
        if any((root / parent).is_symlink() or (root / parent).is_file() for parent in list(Path(path).parents)[:-1]):
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        if content.startswith("-> "):
            place.symlink_to(content[3:])
        elif not place.is_dir():
            place.write_text(content)


def read(root: Path) -> dict[str, str]:
    """The files and links of a tree, and its empty directories."""
    found: dict[str, str] = {}
    for folder, names, files in os.walk(root):
        for name in [*files, *(name for name in names if (Path(folder) / name).is_symlink())]:
            place = Path(folder) / name
            link = place.is_symlink()
            found[str(place.relative_to(root))] = f"-> {os.readlink(place)}" if link else place.read_text()
    return found


def under(tree: Tree, path: str) -> dict[str, str]:
    """The part of a tree at a path and below it."""
    return {name: content for name, content in tree.items() if name == path or name.startswith(f"{path}/")}


@settings(max_examples=80, deadline=None)
@given(base_tree=TREES, tree=TREES, path=PATHS)
def test_a_path_left_out_shows_the_base(base_tree: Tree, tree: Tree, path: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write(root / "base", base_tree)
        write(root / "tree", tree)
        (root / "trash").mkdir()
        before, agent = read(root / "base"), read(root / "tree")
        copy_workspace.CopyCut(str(root / "tree"), str(root / "base"), str(root / "trash")).leave_out(path)
        after = read(root / "tree")
        assert under(after, path) == under(before, path)
        way = {str(parent) for parent in Path(path).parents}
        others = {name for name in agent if name not in under(agent, path) and name not in way}
        assert {name: after.get(name) for name in others} == {name: agent[name] for name in others}
        assert read(root / "base") == before


@settings(max_examples=80, deadline=None)
@given(base_tree=TREES, tree=TREES, path=PATHS)
def test_a_path_alone_is_the_trees_and_the_rest_the_bases(base_tree: Tree, tree: Tree, path: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write(root / "base", base_tree)
        write(root / "tree", tree)
        (root / "trash").mkdir()
        before, agent = read(root / "base"), read(root / "tree")
        copy_workspace.CopyCut(str(root / "tree"), str(root / "base"), str(root / "trash")).keep_only([path])
        after = read(root / "tree")
        assert under(after, path) == under(agent, path)
        way = {str(parent) for parent in Path(path).parents}
        others = {name for name in before if name not in under(before, path) and name not in way}
        assert {name: after.get(name) for name in others} == {name: before[name] for name in others}
        assert not (set(after) - set(before) - set(under(agent, path)))


@settings(max_examples=60, deadline=None)
@given(base_tree=TREES, tree=TREES)
def test_the_differences_are_what_the_trees_do_not_share(base_tree: Tree, tree: Tree) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write(root / "base", base_tree)
        write(root / "tree", tree)
        before, now = read(root / "base"), read(root / "tree")
        changes = {
            change["path"]: change["kind"]
            for change in copy_workspace.differences(str(root / "tree"), str(root / "base"))
            if change is not None
        }
        for name in before.keys() | now.keys():
            if name in now and before.get(name) != now[name]:
                assert changes[name] == ("symlink" if now[name].startswith("-> ") else "file")
            elif name in now:
                assert name not in changes


def test_only_the_bits_that_let_a_file_run_count(tmp_path: Path) -> None:
    for name in ("base", "tree"):
        write(tmp_path / name, {"a": "x", "b": "x", "c": "x"})
    (tmp_path / "tree/a").chmod(0o600)
    (tmp_path / "tree/b").chmod(0o755)
    os.utime(tmp_path / "tree/c", (1, 1))
    found = [each for each in copy_workspace.differences(str(tmp_path / "tree"), str(tmp_path / "base")) if each]
    assert found == [{"path": "b", "kind": "file", "opaque": False, "content": False}]


def test_a_copy_has_modes_times_and_links_and_nothing_special(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write(source, {"a/f": "x", "l": "-> /etc/passwd", "d/g": "y"})
    (source / "a/f").chmod(0o4751)
    (source / "d").chmod(0o555)
    os.utime(source / "a/f", ns=(1, 2))
    os.utime(source / "a", ns=(3, 4))
    os.mkfifo(source / "fifo")
    (tmp_path / "target").mkdir()
    copy_workspace.copy_for(-1, str(source), str(tmp_path / "target"))
    target = tmp_path / "target"
    assert read(target) == {"a/f": "x", "l": "-> /etc/passwd", "d/g": "y"}
    assert (target / "a/f").stat().st_mode & 0o7777 == 0o751
    assert ((target / "a/f").stat().st_mtime_ns, (target / "a").stat().st_mtime_ns) == (2, 4)
    assert (target / "d").stat().st_mode & 0o777 == 0o555
    assert (target / "a/f").stat().st_ino != (source / "a/f").stat().st_ino
    copy_workspace.duplicate(str(source), str(tmp_path / "twin"))
    assert (tmp_path / "twin/a/f").stat().st_ino == (source / "a/f").stat().st_ino
    server_directory.remove(str(target))
    assert not target.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_copy_has_its_holes_and_one_file_for_all_its_names(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    with open(tmp_path / "old/sparse", "wb") as file:
        file.truncate(64 << 20)
        file.seek(32 << 20)
        file.write(b"data")
    os.link(tmp_path / "old/sparse", tmp_path / "old/again")
    copy_workspace.copy_for(-1, str(tmp_path / "old"), str(tmp_path / "new"))
    sparse, again = (os.stat(tmp_path / "new" / name) for name in ("sparse", "again"))
    assert (sparse.st_ino, sparse.st_size) == (again.st_ino, 64 << 20)
    assert sparse.st_blocks * 512 < 1 << 20
    with open(tmp_path / "new/sparse", "rb") as file:
        file.seek(32 << 20)
        assert file.read(4) == b"data"


def test_a_directory_is_removed_however_deep(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    fd = os.open(top, os.O_RDONLY)
    for _ in range(3000):
        os.close(os.open("f", os.O_CREAT, dir_fd=fd))
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    (top / "out").symlink_to(tmp_path / "kept")
    (tmp_path / "kept").mkdir()
    server_directory.remove(str(top))
    assert os.listdir(tmp_path) == ["kept"]


def test_a_copy_belongs_to_its_user_and_the_original_does_not(tmp_path: Path) -> None:
    write(tmp_path / "source", {"a/f": "x", "l": "-> a"})
    (tmp_path / "target").mkdir()
    copy_workspace.copy_for(70001, str(tmp_path / "source"), str(tmp_path / "target"))
    for name in ("a", "a/f", "l"):
        assert (tmp_path / "target" / name).lstat().st_uid == 70001
        assert (tmp_path / "source" / name).lstat().st_uid == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_ranges_of_users_lie_where_uids_exist_and_people_do_not() -> None:
    found = users.starts()
    assert found
    assert all(start >= 10_000 and start + users.RANGE < 1 << 31 for start in found)
    pool = users.Users(found[0])
    assert pool.take() != pool.take()
    for _ in range(users.RANGE - 3):
        pool.take()
    with pytest.raises(OSError, match="all"):
        pool.take()
    pool.give_back(5)
    assert pool.take() == 5


def test_what_a_process_has_given_up_it_cannot_reach(tmp_path: Path) -> None:
    if landlock.version() < landlock.MINIMUM:
        pytest.skip("no Landlock")
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_text("x")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            from palaestra_slots.sandbox.slotd import syscalls

            syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
            landlock.restrict(
                [(str(tmp_path / "own"), landlock.WRITE), (f"{tmp_path}/missing", landlock.READ)], tcp=False
            )
            (tmp_path / "own/f").rename(tmp_path / "own/g")
            (tmp_path / "own/g").write_text("y")
            for attempt in (lambda: (tmp_path / "other/f").read_text(), lambda: (tmp_path / "new").write_text("x")):
                try:
                    attempt()
                except PermissionError:
                    continue
                raise AssertionError
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (tmp_path / "own/g").read_text() == "y"
    shutil.rmtree(tmp_path / "own")
