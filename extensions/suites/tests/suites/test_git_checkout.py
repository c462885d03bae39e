"""Checkouts of repositories that a file of others names: nothing of them runs, and no path leads out."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from golden_messages import raises
from palaestra_slots.core.errors import TaskError
from palaestra_suites.git_checkout import checked_path, checked_url, git_checkout, inside

OWNER = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main"]


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *OWNER, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> tuple[str, str]:
    """A repository with two commits, and the first of them; a tag `v1` names it."""
    folder = tmp_path / "repository"
    for name in ("tasks/one", "tasks/two", "other"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text(f"{name} at first\n")
    (folder / "tasks/link").symlink_to("/etc")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    git(folder, "tag", "-am", "one", "v1")
    first = git(folder, "rev-parse", "HEAD")
    (folder / "tasks/one/file").write_text("later\n")
    git(folder, "commit", "-qam", "second")
    return folder.as_uri(), first


def checked_out(url: str, ref: str | None, paths: list[str], cache: Path) -> Path:
    return asyncio.run(git_checkout(url, ref, paths, cache))


def test_only_the_paths_at_the_commit_are_checked_out(tmp_path: Path, repository: tuple[str, str]) -> None:
    url, first = repository
    place = checked_out(url, first, ["tasks/one"], tmp_path / "cache")
    assert [str(each.relative_to(place)) for each in place.rglob("*") if each.is_file()] == ["tasks/one/file"]
    assert (place / "tasks/one/file").read_text() == "tasks/one at first\n"
    assert checked_out(url, "v1", ["tasks/one"], tmp_path / "cache") == place, "a tag is the commit that it names"
    latest = checked_out(url, None, ["tasks/one"], tmp_path / "cache")
    assert (latest / "tasks/one/file").read_text() == "later\n"
    assert checked_out(url, "main", ["tasks/one"], tmp_path / "cache") == latest
    (tmp_path / "repository").rename(tmp_path / "gone")
    assert checked_out(url, first, ["tasks/one"], tmp_path / "cache") == place, "a commit is fetched once"
    with pytest.raises(TaskError, match="git fetch failed"):
        checked_out(url, first, ["tasks/two"], tmp_path / "cache")


def test_a_folder_is_not_reached_through_a_link(tmp_path: Path, repository: tuple[str, str]) -> None:
    url, first = repository
    place = checked_out(url, first, ["tasks/link", "tasks/one", "missing"], tmp_path / "cache")
    assert inside(place, "tasks/one").is_dir()
    (place / "tasks/link").unlink(missing_ok=True)
    (place / "tasks/link").symlink_to("/etc")
    with raises(TaskError):
        inside(place, "tasks/link")
    with raises(TaskError, "missing"):
        inside(place, "missing")


@pytest.mark.parametrize("url", [
    "ext::sh -c touch% /tmp/x", "--upload-pack=touch /tmp/x", "http://example.org/a", "git://example.org/a", "/tmp/a",
    "git@example.org:a/b", "ssh://-oProxyCommand=touch/x", "https://user:secret@example.org/a", "https://a/b\n--c",
    "file:///tmp/../etc",
])  # fmt: skip
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(TaskError) as caught:
        checked_url(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("path", ["../a", "a/../../b", "/etc", "", ".", "a/.git/hooks", "a\nb", "a*", "-", "!a"])
def test_other_paths_are_refused(path: str) -> None:
    if path == "-":  # it is not an option, because paths are read from standard input
        assert checked_path(path) == "-"
        return
    with pytest.raises(TaskError, match="relative to its repository"):
        checked_path(path)


@pytest.mark.parametrize("ref", ["--upload-pack=x", "a..b", "HEAD~1", "nothing-like-it"])
def test_other_refs_are_refused(tmp_path: Path, repository: tuple[str, str], ref: str) -> None:
    with raises(TaskError, ref):
        checked_out(repository[0], ref, ["tasks/one"], tmp_path / "cache")
