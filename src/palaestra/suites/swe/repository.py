"""Repositories on the host: a cache of bare ones that no slot can see, and the trees that slots get from them.

A slot gets the files of one commit and nothing else. Objects, refs and history stay here, because a checkout that
shares them shows every later commit, the fix among them.

Submodules and large-file pointers come as git archives them: empty directories and pointer files.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

from palaestra.core.errors import ConfigError, PrepareError, TaskError
from palaestra.suites.swe.host_process import run_process
from palaestra.suites.swe.locked_file import locked
from palaestra.suites.swe.swe_rows import SweRow

_LOCAL_TIMEOUT_S = 120.0
_SETTINGS = ("-c", "safe.directory=*", "-c", "gc.auto=0", "-c", "protocol.ext.allow=never", "-c", "core.hooksPath=/")


class RepositoryCache:
    """Bare repositories below `root`, one per source. Safe across tasks and processes.

    `base_url` is where `owner/name` is looked up for rows that bring no `repo_path`: an `https://` or `file://`
    address, or an absolute directory. Errors: `PrepareError` when the source cannot be reached, `TaskError` when it can
    but has no such commit.
    """

    def __init__(self, root: Path, base_url: str = "https://github.com", *, timeout_s: float = 600.0) -> None:
        if not base_url.startswith(("https://", "file://", "/")):
            raise ConfigError(f"repo_base_url must be https://, file:// or an absolute directory, not {base_url!r}")
        self._root = root
        self._base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s

    def source(self, row: SweRow) -> str:
        """Where the repository of a row comes from."""
        if row.repo_path is None:
            return f"{self._base_url}/{row.repo}"
        if not Path(row.repo_path).is_dir():
            raise TaskError(f"{row.instance_id}: there is no repository at {row.repo_path}; rebuild the tasks")
        return row.repo_path

    async def ensure(self, row: SweRow) -> Path:
        """The bare repository that holds the row's commit, fetched if it does not yet. Returns its path."""
        source = self.source(row)
        name = f"{row.repo.replace('/', '__')}-{hashlib.sha256(source.encode()).hexdigest()[:8]}.git"
        path = self._root / name
        self._root.mkdir(parents=True, exist_ok=True)
        async with locked(self._root / f"{name}.lock", timeout_s=self._timeout_s):
            if not path.is_dir():
                await self._create(path)
            if await self._resolve(path, row.base_commit) is None:
                await self._fetch(path, source, row.base_commit)
        return path

    async def commit(self, row: SweRow) -> str:
        """The full name of the row's commit."""
        path = await self.ensure(row)
        commit = await self._resolve(path, row.base_commit)
        if commit is None:
            raise TaskError(f"{row.instance_id}: {self.source(row)} has no commit {row.base_commit}")
        return commit

    async def export_tree(self, row: SweRow) -> bytes:
        """All files of the row's commit as one tar archive."""
        commit = await self.commit(row)
        return await self._git(await self.ensure(row), "archive", "--format=tar", commit)

    async def read_file(self, row: SweRow, path: str) -> bytes:
        """One file of the row's commit. Raises `TaskError` when it is not there."""
        commit = await self.commit(row)
        result = await run_process(
            ["git", *_SETTINGS, f"--git-dir={await self.ensure(row)}", "cat-file", "blob", f"{commit}:{path}"],
            timeout_s=_LOCAL_TIMEOUT_S,
        )
        if result.returncode:
            raise TaskError(f"{row.instance_id}: commit {row.base_commit} has no file {path}")
        return result.stdout

    async def list_files(self, row: SweRow) -> tuple[str, ...]:
        """Every file of the row's commit, relative to the repository's root."""
        commit = await self.commit(row)
        listing = await self._git(await self.ensure(row), "ls-tree", "-r", "-z", "--name-only", commit)
        return tuple(name.decode("utf-8", "surrogateescape") for name in listing.split(b"\0") if name)

    async def _create(self, path: Path) -> None:
        with tempfile.TemporaryDirectory(dir=self._root, prefix="new-") as temporary:
            fresh = Path(temporary, "bare.git")
            await self._git(fresh, "init", "--quiet", "--bare", str(fresh))
            _finish(fresh, path)

    async def _resolve(self, path: Path, revision: str) -> str | None:
        for name in (revision, f"refs/fetched/heads/{revision}", f"refs/fetched/remotes/origin/{revision}"):
            argv = ["git", *_SETTINGS, f"--git-dir={path}", "rev-parse", "--quiet", "--verify", f"{name}^{{commit}}"]
            result = await run_process(argv, timeout_s=_LOCAL_TIMEOUT_S)
            if result.returncode == 0:
                return result.stdout.decode().strip()
        return None

    async def _fetch(self, path: Path, source: str, revision: str) -> None:
        """One commit if the server gives single commits, else everything."""
        flags = ("--quiet", "--no-tags", "--no-auto-gc", "--no-write-fetch-head")
        one = [*_SETTINGS, f"--git-dir={path}", "fetch", *flags, "--depth=1", source, revision]
        result = await run_process(["git", *one], timeout_s=self._timeout_s)
        if result.returncode == 0 and await self._resolve(path, revision) is not None:
            return
        everything = [*_SETTINGS, f"--git-dir={path}", "fetch", *flags, source, "+refs/*:refs/fetched/*"]
        result = await run_process(["git", *everything], timeout_s=self._timeout_s)
        if result.returncode:
            raise PrepareError(f"cannot fetch {source}: {result.text.strip()[-500:]}")

    async def _git(self, git_dir: Path, *arguments: str) -> bytes:
        argv = ["git", *_SETTINGS, f"--git-dir={git_dir}", *arguments]
        result = await run_process(argv, timeout_s=_LOCAL_TIMEOUT_S)
        if result.returncode:
            raise PrepareError(f"git {arguments[0]} in {git_dir.name} failed: {result.text.strip()[-500:]}")
        return result.stdout


def _finish(fresh: Path, path: Path) -> None:
    """Override attributes in trees that would leave files marked export-ignore (often the tests) out of archives."""
    (fresh / "info").mkdir(exist_ok=True)
    (fresh / "info" / "attributes").write_text("* -export-ignore -export-subst\n")
    fresh.rename(path)
