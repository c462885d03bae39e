"""The cache against real git repositories made here."""

import asyncio
import io
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from golden_messages import raises
from palaestra_slots.core.errors import ConfigError, PrepareError, TaskError
from palaestra_suites.swe.repository import RepositoryCache
from palaestra_suites.swe.swe_row import SweRow, parse_row

Prepare = Callable[[Path, Path], None]


def git(cwd: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@localhost")
    done = subprocess.run(["git", *identity, *arguments], cwd=cwd, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A repository `owner/name` with two commits; tests are marked export-ignore, as some projects do."""
    path = tmp_path / "hub" / "owner" / "name"
    path.mkdir(parents=True)
    git(path, "init", "-q", "-b", "main")
    (path / ".gitattributes").write_text("tests export-ignore\n")
    (path / "tests").mkdir()
    (path / "tests" / "test_a.py").write_text("def test_a(): pass\n")
    (path / "a.py").write_text("x = 1\n")
    git(path, "add", "-A")
    git(path, "commit", "-q", "-m", "one")
    (path / "a.py").write_text("x = 2  # the fix\n")
    git(path, "commit", "-q", "-a", "-m", "two")
    return path


def row(commit: str, **columns: str) -> SweRow:
    base = {"repo": "owner/name", "problem_statement": "p", "instance_id": "i", "FAIL_TO_PASS": ["t.py::t"]}
    return parse_row({**base, "base_commit": commit, **columns})


def names(archive: bytes) -> set[str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {member.name for member in tar if member.isfile()}


async def test_a_tree_has_the_files_of_its_commit_and_the_tests_too(tmp_path: Path, source: Path) -> None:
    cache = RepositoryCache(tmp_path / "cache", str(tmp_path / "hub"))
    first = row(git(source, "rev-parse", "HEAD~1"))
    assert names(await cache.export_tree(first)) == {".gitattributes", "a.py", "tests/test_a.py"}
    assert await cache.read_file(first, "a.py") == b"x = 1\n"
    assert await cache.list_files(first) == (".gitattributes", "a.py", "tests/test_a.py")
    with pytest.raises(TaskError, match="no file"):
        await cache.read_file(first, "b.py")


def test_what_is_there_is_not_fetched_again(tmp_path: Path, source: Path) -> None:
    cache = RepositoryCache(tmp_path / "cache", f"file://{tmp_path}/hub")
    task = row(git(source, "rev-parse", "HEAD"))

    asyncio.run(cache.ensure(task))
    source.rename(source.with_name("moved"))
    assert asyncio.run(cache.read_file(task, "a.py")) == b"x = 2  # the fix\n"


async def test_many_tasks_may_ask_at_once(tmp_path: Path, source: Path) -> None:
    cache = RepositoryCache(tmp_path / "cache", str(tmp_path / "hub"))
    tasks = [row(git(source, "rev-parse", name)) for name in ("HEAD", "HEAD~1")] * 3
    texts = await asyncio.gather(*(cache.read_file(task, "a.py") for task in tasks))
    assert texts == [b"x = 2  # the fix\n", b"x = 1\n"] * 3
    assert len(list((tmp_path / "cache").glob("*.git"))) == 1


def test_a_row_may_bring_its_repository(tmp_path: Path, source: Path) -> None:
    cache = RepositoryCache(tmp_path / "cache", "/nowhere")
    task = row(git(source, "rev-parse", "HEAD"), repo_path=str(source))
    assert asyncio.run(cache.read_file(task, "a.py")) == b"x = 2  # the fix\n"
    with pytest.raises(TaskError, match="rebuild the tasks"):
        asyncio.run(cache.ensure(row("abc", repo_path=str(tmp_path / "gone"))))


async def test_a_branch_can_be_the_commit(tmp_path: Path, source: Path) -> None:
    git(source, "branch", "owner__name.bug__1", "HEAD~1")
    cache = RepositoryCache(tmp_path / "cache", str(tmp_path / "hub"))
    assert (await cache.locate_commit(row("owner__name.bug__1")))[1] == git(source, "rev-parse", "HEAD~1")


def test_an_unknown_commit_is_the_rows_fault_and_an_unreachable_source_the_worlds(tmp_path: Path, source: Path) -> None:
    with pytest.raises(TaskError, match="has no commit"):
        asyncio.run(RepositoryCache(tmp_path / "one", str(tmp_path / "hub")).locate_commit(row("0" * 40)))
    with pytest.raises(PrepareError, match="cannot fetch"):
        asyncio.run(RepositoryCache(tmp_path / "two", str(tmp_path / "none")).locate_commit(row("0" * 40)))


@pytest.mark.parametrize("url", ["ext::sh -c id", "ssh://host", "relative/path", "--upload-pack=x"])
def test_other_transports_are_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match="repo_base_url"):
        RepositoryCache(tmp_path, url)


def _linked_beside(folder: Path, private: Path) -> None:
    (folder / "repo").mkdir()
    (folder / "repo.git").symlink_to(private / ".git")


def _file_beside(folder: Path, private: Path) -> None:
    (folder / "repo").mkdir()
    (folder / "repo.git").write_text(f"gitdir: {private / '.git'}\n")


def _bare_around_an_empty_folder(folder: Path, private: Path) -> None:
    git(folder, "init", "-q", "--bare", "repo")
    _alternates(folder / "repo", private)
    (folder / "repo" / ".git").mkdir()


def _with_alternates(folder: Path, private: Path) -> None:
    git(folder, "init", "-q", "repo")
    _alternates(folder / "repo" / ".git", private)


def _alternates(repository: Path, private: Path) -> None:
    (repository / "objects/info/alternates").write_text(f"{private}/.git/objects\n")
    (repository / "HEAD").write_text("ref: refs/heads/main\n")
    (repository / "refs/heads/main").write_text(git(private, "rev-parse", "HEAD") + "\n")


@pytest.mark.parametrize(
    "prepare",
    [_linked_beside, _file_beside, _bare_around_an_empty_folder, _with_alternates],
    ids=lambda each: each.__name__,
)
async def test_a_rows_repository_cannot_stand_for_a_private_one(tmp_path: Path, source: Path, prepare: Prepare) -> None:
    data = tmp_path / "data"
    data.mkdir()
    prepare(data, source)
    cache = RepositoryCache(tmp_path / "cache")
    with raises((PrepareError, TaskError)):
        await cache.export_tree(row(git(source, "rev-parse", "HEAD"), repo_path=str(data / "repo")))


async def test_settings_of_a_rows_repository_start_no_program(tmp_path: Path, source: Path) -> None:
    commit, started = git(source, "rev-parse", "HEAD"), tmp_path / "started"
    blob = git(source, "rev-parse", "HEAD:a.py")
    (source / ".git/objects" / blob[:2] / blob[2:]).unlink()  # so that git would fetch it from the promisor remote
    for name, value in {
        "core.repositoryformatversion": "1",
        "core.fsmonitor": f"touch {started}",
        "extensions.partialClone": "origin",
        "protocol.ext.allow": "always",
        "remote.origin.promisor": "true",
        "remote.origin.uploadpack": f"touch {started}; git-upload-pack",
        "remote.origin.url": f"ext::touch {started}",
        "uploadpack.packObjectsHook": f"touch {started};",
    }.items():
        git(source, "config", name, value)
    cache = RepositoryCache(tmp_path / "cache")
    with pytest.raises(PrepareError, match="cannot fetch"):
        await cache.export_tree(row(commit, repo_path=str(source)))
    assert not started.exists()
