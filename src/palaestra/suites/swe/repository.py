"""Cache bare repositories on the host. Slots get the files of one commit and never see the repositories.

Objects, refs and history stay on the host, because they contain later commits, including the fix. As in the output of
`git archive`, submodules are empty directories, and files in Git LFS are pointer files.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from palaestra.core.errors import ConfigError, TaskError
from palaestra.core.io.file_lock import file_lock
from palaestra.core.io.host_process import check_process, run_process
from palaestra.suites.build_once import build_once
from palaestra.suites.swe.swe_row import SweRow

_LOCAL_TIMEOUT_S = 120.0
_RELEASE = re.compile(r"(?:[A-Za-z][\w.-]*?[-_]?)?\d+(?:\.\d+)+(?:\.?post\d+)?")
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SETTINGS = ("-c", "safe.directory=*", "-c", "gc.auto=0", "-c", "protocol.ext.allow=never", "-c", "core.hooksPath=/")


_SERVE = "GIT_ALLOW_PROTOCOL= GIT_NO_LAZY_FETCH=1 git-upload-pack --strict"
"""Serves a repository that a row names. `--strict`: only this folder, because git would otherwise also try folders such
as `NAME.git`, which nobody checked. The variables: settings of the repository start no program and reach no other
repository to fetch objects that it lacks. Source: git-upload-pack(1), git(1)."""


def git_folder(place: Path) -> Path:
    """Return the folder of a repository's objects: `.git`, or the folder itself for a bare repository."""
    return place / ".git" if os.path.lexists(place / ".git") else place


def check_repository(place: Path) -> None:
    """Raise `TaskError` if a repository that a row names refers to objects, references or settings elsewhere, which may
    be those of a private repository. Source: gitrepository-layout(5)."""
    folder = git_folder(place)
    named = ("objects/info/alternates", "objects/info/http-alternates", "commondir", "gitdir")
    strange = [name for name in named if os.path.lexists(folder / name)]
    strange += [] if folder.is_dir() and not folder.is_symlink() else [folder.name]
    strange += [
        name for at, folders, files in os.walk(folder) for name in (*folders, *files) if os.path.islink(f"{at}/{name}")
    ]
    if strange:
        raise TaskError(f"the repository {place} refers to files outside of it ({', '.join(strange[:3])})")


class RepositoryCache:
    """Bare repositories below `root`, one per source. Safe across tasks and processes.

    `base_url` precedes `owner/name` for rows without `repo_path`: an `https://` or `file://` address, or an absolute
    directory. Methods raise `PrepareError` if the source cannot be reached, and `TaskError` if `repo_path` does not
    exist or the source has no such commit.
    """

    def __init__(self, root: Path, base_url: str = "https://github.com", *, timeout_s: float = 600.0) -> None:
        if not base_url.startswith(("https://", "file://", "/")):
            raise ConfigError(f"repo_base_url must be https://, file:// or an absolute directory, not {base_url!r}")
        self._root = root
        self._base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._located: dict[tuple[str, str, bool], tuple[Path, str]] = {}

    def source(self, row: SweRow) -> str:
        """Return the address or folder of a row's repository."""
        if row.repo_path is None:
            return f"{self._base_url}/{row.repo}"
        if not Path(row.repo_path).is_dir():
            raise TaskError(f"{row.instance_id}: its repository {row.repo_path} does not exist; rebuild the tasks")
        return row.repo_path

    def _address(self, row: SweRow) -> tuple[str, ...]:
        """Return the arguments of git that name the source. Raises `TaskError` for a repository that refers to files
        outside of it."""
        source = self.source(row)
        if row.repo_path is None:
            return (source,)
        check_repository(Path(source))
        return f"--upload-pack={_SERVE}", str(git_folder(Path(source)))

    async def ensure(self, row: SweRow) -> Path:
        """Return the path of the bare repository with the row's commit, which is fetched if necessary."""
        source = self.source(row)
        name = f"{row.repo.replace('/', '__')}-{hashlib.sha256(source.encode()).hexdigest()[:8]}.git"
        path = await build_once(self._root / name, self._create, timeout_s=self._timeout_s)
        async with file_lock(self._root / f"{name}.lock", timeout_s=self._timeout_s):
            if await self._resolve(path, row.base_commit) is None:
                await self._fetch(path, source, row)
        return path

    async def locate(self, row: SweRow) -> tuple[Path, str]:
        """Return the path of the bare repository, and the full hash of the row's commit in it.

        Git is asked only the first time, because grading one rollout needs them a dozen times.
        """
        key = (self.source(row), row.base_commit, row.on_branch)
        if key not in self._located or not self._located[key][0].is_dir():
            path = await self.ensure(row)
            commit = await self._resolve(path, row.base_commit)
            if commit is None:
                raise TaskError(f"{row.instance_id}: {self.source(row)} has no commit {row.base_commit}")
            self._located[key] = path, await self._with_tests(row, path, commit) if row.on_branch else commit
        return self._located[key]

    async def _with_tests(self, row: SweRow, path: Path, tip: str) -> str:
        """Return the tip of a SWE-smith branch, or its parent if the tip is the commit that removes the failing
        tests."""
        if not set(row.test_files) <= set(await self._files(path, tip)):
            parent = await self._resolve(path, f"{tip}^")
            if parent is not None and set(row.test_files) <= set(await self._files(path, parent)):
                return parent
        return tip

    async def _files(self, path: Path, commit: str) -> tuple[str, ...]:
        listing = await self._git(path, "ls-tree", "-r", "-z", "--name-only", commit)
        return tuple(name.decode("utf-8", "surrogateescape") for name in listing.split(b"\0") if name)

    async def export_tree(self, row: SweRow) -> bytes:
        """Return all files of the row's commit as one tar archive."""
        path, commit = await self.locate(row)
        return await self._git(path, "archive", "--format=tar", commit)

    async def read_file(self, row: SweRow, path: str) -> bytes:
        """Return one file of the row's commit. Raises `TaskError` if it does not exist."""
        repository, commit = await self.locate(row)
        result = await run_process(
            ["git", *_SETTINGS, f"--git-dir={repository}", "cat-file", "blob", f"{commit}:{path}"],
            timeout_s=_LOCAL_TIMEOUT_S,
        )
        if result.returncode:
            raise TaskError(f"{row.instance_id}: commit {row.base_commit} has no file {path}")
        return result.stdout

    async def newest_tag(self, row: SweRow) -> str | None:
        """Return the tag of the newest release before the row's commit. If the cache has no such tag, return the tag of
        the source's newest release, or None."""
        path, commit = await self.locate(row)
        tags = ("refs/tags", "refs/fetched/tags")
        listed = await self._git(path, "for-each-ref", f"--merged={commit}", "--sort=-creatordate", *tags)
        if not listed:
            flags = ("--tags", "--refs", "--sort=-version:refname")
            argv = ["git", *_SETTINGS, f"--git-dir={path}", "ls-remote", *flags, *self._address(row)]
            listed = (await run_process(argv, timeout_s=_LOCAL_TIMEOUT_S)).stdout
        names = (
            line.split("/tags/", 1)[1] for line in listed.decode(errors="replace").splitlines() if "/tags/" in line
        )
        return next((name for name in names if _RELEASE.fullmatch(name)), None)

    async def commit_date(self, row: SweRow) -> str:
        """Return the date (YYYY-MM-DD) of the row's commit."""
        path, commit = await self.locate(row)
        shown = await self._git(path, "show", "--no-patch", "--format=%cI", commit)
        return shown.decode("ascii", "replace").strip()[:10]

    async def list_files(self, row: SweRow) -> tuple[str, ...]:
        """Return every file of the row's commit, relative to the repository's root."""
        return await self._files(*await self.locate(row))

    async def _create(self, fresh: Path) -> None:
        """Make an empty bare repository whose archives also contain files marked `export-ignore`, because these are
        often the tests."""
        await self._git(fresh, "init", "--quiet", "--bare", str(fresh))
        (fresh / "info").mkdir(exist_ok=True)
        (fresh / "info" / "attributes").write_text("* -export-ignore -export-subst\n")

    async def _resolve(self, path: Path, revision: str) -> str | None:
        for name in (revision, f"refs/fetched/heads/{revision}", f"refs/fetched/remotes/origin/{revision}"):
            argv = ["git", *_SETTINGS, f"--git-dir={path}", "rev-parse", "--quiet", "--verify", f"{name}^{{commit}}"]
            result = await run_process(argv, timeout_s=_LOCAL_TIMEOUT_S)
            if result.returncode == 0:
                return result.stdout.decode().strip()
        return None

    async def _fetch(self, path: Path, source: str, row: SweRow) -> None:
        """Fetch one commit (for a branch, also the commit's parent). If the server does not allow this, fetch
        everything."""
        address = self._address(row)
        revision = row.base_commit
        flags = ("--quiet", "--no-tags", "--no-auto-gc", "--no-write-fetch-head")
        wanted = revision if _HASH.fullmatch(revision) else f"+refs/heads/{revision}:refs/fetched/heads/{revision}"
        depth = "--depth=2" if row.on_branch else "--depth=1"
        one = [*_SETTINGS, f"--git-dir={path}", "fetch", *flags, depth, *address, wanted]
        result = await run_process(["git", *one], timeout_s=self._timeout_s)
        if result.returncode == 0 and await self._resolve(path, revision) is not None:
            return
        everything = [*_SETTINGS, f"--git-dir={path}", "fetch", *flags, *address, "+refs/*:refs/fetched/*"]
        await check_process(["git", *everything], f"cannot fetch {source}", timeout_s=self._timeout_s, shown=500)

    async def _git(self, git_dir: Path, *arguments: str) -> bytes:
        argv = ["git", *_SETTINGS, f"--git-dir={git_dir}", *arguments]
        problem = f"git {arguments[0]} in {git_dir.name} failed"
        return (await check_process(argv, problem, timeout_s=_LOCAL_TIMEOUT_S, shown=500)).stdout
