"""What is changed through the file system has another identity, however well its times are put back."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from palaestra_slots.sandbox.snapshots import fingerprints


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small root file system."""
    root = tmp_path / "root"
    (root / "etc" / "deep").mkdir(parents=True)
    (root / "etc" / "deep" / "file").write_text("as it was")
    (root / "etc" / "link").symlink_to("deep/file")
    return root


def rewrite(root: Path) -> None:
    path = root / "etc" / "deep" / "file"
    status = path.stat()
    path.write_text("AS IT WAS")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def turn_link(root: Path) -> None:
    (root / "etc" / "link").unlink()
    (root / "etc" / "link").symlink_to("deep/elif")


def move(root: Path) -> None:
    (root / "etc" / "deep" / "file").rename(root / "etc" / "file")


@pytest.mark.parametrize(
    "change",
    [
        rewrite,
        turn_link,
        move,
        lambda root: (root / "etc" / "deep" / "file").chmod(0o600),
        lambda root: (root / "etc" / "deep" / "file").unlink(),
        lambda root: (root / "etc" / "empty").mkdir(),
    ],
)
def test_a_change_deep_in_an_image_is_another_image(tree: Path, change: Callable[[Path], None]) -> None:
    before = fingerprints.of_image(str(tree))
    assert fingerprints.of_image(str(tree)) == before
    change(tree)
    assert fingerprints.of_image(str(tree)) != before


def test_a_tree_that_was_only_read_is_the_same(tree: Path) -> None:
    before = fingerprints.of_tree(str(tree))
    (tree / "etc" / "deep" / "file").read_text()
    (tree / "etc" / "link").readlink()
    assert fingerprints.of_tree(str(tree)) == before
    assert before[1] > 0


def test_the_host_and_an_image_that_is_not_there_have_one_too(tmp_path: Path) -> None:
    assert fingerprints.of_image(None) == fingerprints.of_image(None)
    assert fingerprints.of_image(str(tmp_path / "missing")) != fingerprints.of_image(None)
