"""Cache bare repositories on the host. Slots get the files of one commit and never see the repositories.

Objects, refs and history stay on the host, because they contain later commits, including the fix. As in the output of
`git archive`, submodules are empty directories, and files in Git LFS are pointer files.

Git applies the patches of rows, to trees in the repository: no file of a patch is written to the host's file system,
and git rejects a path outside the tree or beyond a link.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from palaestra_slots.core.errors import ConfigError, TaskError
from palaestra_slots.core.io.file_lock import file_lock
from palaestra_slots.core.io.host_process import check_process, run_process
from palaestra_slots.images.build_once import build_once
from palaestra_suites.swe.swe_row import SweRow
from palaestra_suites.swe.unified_diff import DiffError

_LOCAL_TIMEOUT_S = 120.0
_RELEASE = re.compile(r"(?:[A-Za-z][\w.-]*?[-_]?)?\d+(?:\.\d+)+(?:\.?post\d+)?")
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SETTINGS = (
    *("--literal-pathspecs", "-c", "safe.directory=*", "-c", "gc.auto=0", "-c", "protocol.ext.allow=never"),
    *("-c", "core.hooksPath=/"),
)
_WITH_SIDES = re.compile(r'^(?:diff --git |(?:---|\+\+\+) "?[ab]/)', re.MULTILINE)
_ENCODING = ("utf-8", "surrogateescape")
_MOST_PATHS = 500
"""The maximum number of paths per command, because the kernel limits a command's arguments."""

REGULAR, EXECUTABLE, LINK, _SUBMODULE, _NONE = "100644", "100755", "120000", "160000", "000000"

_SERVE = "GIT_ALLOW_PROTOCOL= GIT_NO_LAZY_FETCH=1 git-upload-pack --strict"
"""Serves a repository that a row names. `--strict`: only this folder, because git would otherwise also try folders such
as `NAME.git`, which nobody checked. The variables: settings of the repository start no program and reach no other
repository to fetch objects that it lacks. Source: git-upload-pack(1), git(1)."""


@dataclass(frozen=True, slots=True)
class TreeFile:
    """One file of a commit. `mode` is git's: 100644, 100755 for a program, or 120000 for a symbolic link, whose `data`
    is its target."""

    mode: str
    data: bytes

    @property
    def is_link(self) -> bool:
        return self.mode == LINK

    @property
    def text(self) -> str:
        """The data, with surrogate escapes for bytes that are not UTF-8."""
        return self.data.decode(*_ENCODING)


TreeFiles: TypeAlias = Mapping[str, TreeFile | None]
"""Files by their path in a tree, with None for a path without a file."""


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
        self._applied: dict[tuple[Path, str, str, bool], str] = {}

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
        path = await build_once(self._root / name, self._init_bare_repository, timeout_s=self._timeout_s)
        async with file_lock(self._root / f"{name}.lock", timeout_s=self._timeout_s):
            if await self._resolve(path, row.base_commit) is None:
                await self._fetch(path, source, row)
        return path

    async def locate_commit(self, row: SweRow) -> tuple[Path, str]:
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
        if not set(row.test_files) <= set(await self._paths_in_commit(path, tip)):
            parent = await self._resolve(path, f"{tip}^")
            if parent is not None and set(row.test_files) <= set(await self._paths_in_commit(path, parent)):
                return parent
        return tip

    async def _paths_in_commit(self, path: Path, commit: str) -> tuple[str, ...]:
        listing = await self._git(path, "ls-tree", "-r", "-z", "--name-only", commit)
        return tuple(os.fsdecode(name) for name in listing.split(b"\0") if name)

    async def export_tree(self, row: SweRow) -> bytes:
        """Return all files of the row's commit as one tar archive."""
        path, commit = await self.locate_commit(row)
        return await self._git(path, "archive", "--format=tar", commit)

    async def read_file(self, row: SweRow, path: str) -> bytes:
        """Return one file of the row's commit. Raises `TaskError` if it does not exist."""
        found = (await self.read_files(row, [path])).get(path)
        if found is None:
            raise TaskError(f"{row.instance_id}: commit {row.base_commit} has no file {path}")
        return found.data

    async def read_files(self, row: SweRow, paths: Collection[str]) -> dict[str, TreeFile]:
        """Return the files of the row's commit at these paths and, where a path is a directory, below them."""
        path, commit = await self.locate_commit(row)
        entries: dict[str, tuple[str, str]] = {}
        wanted = sorted(paths)
        for start in range(0, len(wanted), _MOST_PATHS):
            some = wanted[start : start + _MOST_PATHS]
            listing = await self._git(path, "ls-tree", "-r", "-z", commit, "--", *some)
            for line in filter(None, listing.split(b"\0")):
                about, _, name = line.partition(b"\t")
                mode, _, blob = about.decode().split()
                entries[os.fsdecode(name)] = mode, blob
        return {name: file for name, file in (await self._read_blobs(path, entries)).items() if file is not None}

    async def apply_patch(self, row: SweRow, tree: str, patch: str, *, backwards: bool = False) -> str:
        """Return the hash of the tree that a patch makes of another tree or, `backwards`, that it was made of. Hunks
        may be some lines away from their line numbers. Raises `DiffError` if the patch does not match."""
        path, _ = await self.locate_commit(row)
        key = path, tree, patch, backwards
        if key not in self._applied:
            ways = [*(["--reverse"] if backwards else ()), *([] if _WITH_SIDES.search(patch) else ["-p0"])]
            text = patch if patch.endswith("\n") else f"{patch}\n"
            with tempfile.TemporaryDirectory() as folder:
                git = ("env", f"GIT_INDEX_FILE={folder}/index", "git", *_SETTINGS, f"--git-dir={path}")
                problem = f"git cannot apply a patch in {path.name}"
                await check_process([*git, "read-tree", tree], problem, timeout_s=_LOCAL_TIMEOUT_S)
                argv = [*git, "apply", "--cached", "--whitespace=nowarn", *ways, "-"]
                done = await run_process(
                    argv, stdin=text.encode("utf-8", "surrogateescape"), timeout_s=_LOCAL_TIMEOUT_S
                )
                if done.returncode:
                    raise DiffError(done.text.strip()[-500:])
                made = await check_process([*git, "write-tree"], problem, timeout_s=_LOCAL_TIMEOUT_S)
                self._applied[key] = made.stdout.decode().strip()
        return self._applied[key]

    async def difference(self, row: SweRow, before: str, after: str) -> TreeFiles:
        """Return the files of the tree `after` that differ in the tree `before`. Raises `DiffError` for a link that
        leads out of the repository."""
        path, _ = await self.locate_commit(row)
        parts = (await self._git(path, "diff-tree", "-r", "-z", "--no-renames", before, after)).split(b"\0")
        entries = {}
        for about, place in zip(parts[:-1:2], parts[1::2], strict=True):
            _, mode, _, blob, _ = about.decode().split()
            entries[os.fsdecode(place)] = mode, blob
        found = await self._read_blobs(path, entries)
        for name, file in found.items():
            if file is not None and file.is_link and _leads_out(name, file.text):
                raise DiffError(f"the link {name} leads out of the repository, to {file.text}")
        return found

    async def _read_blobs(self, path: Path, entries: Mapping[str, tuple[str, str]]) -> dict[str, TreeFile | None]:
        """Return the files with these modes and object names. Submodules are left out."""
        kept = {name: entry for name, entry in entries.items() if entry[0] != _SUBMODULE}
        blobs = list(dict.fromkeys(blob for mode, blob in kept.values() if mode != _NONE))
        data: dict[str, bytes] = {}
        if blobs:
            argv = ["git", *_SETTINGS, f"--git-dir={path}", "cat-file", "--batch"]
            stdin, problem = "".join(f"{blob}\n" for blob in blobs).encode(), f"git cat-file in {path.name} failed"
            rest = (await check_process(argv, problem, stdin=stdin, timeout_s=_LOCAL_TIMEOUT_S)).stdout
            start = 0
            for blob in blobs:
                end = rest.index(b"\n", start)
                size = int(rest[start:end].split()[2])
                data[blob] = rest[end + 1 : end + 1 + size]
                start = end + size + 2
        return {name: None if mode == _NONE else TreeFile(mode, data[blob]) for name, (mode, blob) in kept.items()}

    async def newest_tag(self, row: SweRow) -> str | None:
        """Return the tag of the newest release before the row's commit. If the cache has no such tag, return the tag of
        the source's newest release, or None."""
        path, commit = await self.locate_commit(row)
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
        path, commit = await self.locate_commit(row)
        shown = await self._git(path, "show", "--no-patch", "--format=%cI", commit)
        return shown.decode("ascii", "replace").strip()[:10]

    async def list_files(self, row: SweRow) -> tuple[str, ...]:
        """Return every file of the row's commit, relative to the repository's root."""
        return await self._paths_in_commit(*await self.locate_commit(row))

    async def _init_bare_repository(self, fresh: Path) -> None:
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


def _leads_out(path: str, target: str) -> bool:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), target)).split("/")[0] in ("", "..")
