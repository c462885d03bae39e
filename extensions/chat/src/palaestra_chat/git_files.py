"""The files of a `.git` folder that a sandbox changes: which of them are history, bookkeeping, or dangerous.

Only history is written back: commits, branches, tags and stashes, with everything that belongs to them, or nothing of
it. If no history has changed, the rest is git's own bookkeeping, which stays in the sandbox: an index whose times were
refreshed, what is staged, and objects that no branch has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from pathlib import PurePosixPath

_GIT_DATA = frozenset({
    "HEAD", "ORIG_HEAD", "FETCH_HEAD", "MERGE_HEAD", "MERGE_MSG", "MERGE_MODE", "CHERRY_PICK_HEAD", "REVERT_HEAD",
    "COMMIT_EDITMSG", "AUTO_MERGE", "index", "packed-refs", "shallow", "objects", "refs", "logs",
})  # fmt: skip
"""The files that commits, branches and merges write in a `.git` folder. Git runs none of them."""

HISTORY = frozenset({"HEAD", "packed-refs", "refs"})
OF_A_COMMIT = HISTORY | {"index"}


_RUN = frozenset({"config", "config.worktree", "hooks", "info", "commondir", "gitdir"})
"""The files and folders of a repository that say what git runs, and where. A submodule may have a name with slashes,
so a file of a submodule with one of these in its path counts as one of them."""


def split(path: str) -> tuple[str | None, str]:
    """Return the `.git` folder that a file is in, and the name of the file or folder in it that leads to the file. The
    folder is None for other files. A submodule, `.git/modules/NAME`, belongs to the repository that has it, because a
    commit names the commits of its submodules."""
    parts = PurePosixPath(path).parts
    for place, part in enumerate(parts[:-1]):
        if part == ".git":
            return "/".join(parts[: place + 1]), _within(parts[place + 1 :])
    return None, ""


def _within(parts: Sequence[str]) -> str:
    """Return the name of the file or folder in a `.git` folder, or in that of a submodule, that leads to a file."""
    if parts[0] != "modules":
        return parts[0]
    name = next((part for part in parts[2:] if part in _GIT_DATA), "modules")
    runs = not _RUN.isdisjoint(part for part in parts[2:] if name != "objects" or part != "info")
    return "modules" if runs else name


def history_of(path: str) -> str | None:
    """Return the `.git` folder to whose history or bookkeeping a file belongs. None for other files."""
    repository, name = split(path)
    return repository if name in _GIT_DATA else None


def fingerprint(path: str, data: bytes | None) -> str:
    """Return a hash of a file's content, and nothing if there is no file. The times and places in git's index do not
    count, because every `git status` may refresh them."""
    if data is None:
        return ""
    if split(path)[1] == "index" and (entries := _index_entries(data)) is not None:
        data = entries
    return hashlib.sha256(data).hexdigest()


def _index_entries(index: bytes) -> bytes | None:
    """Return the modes, hashes, flags and names in an index. None for an index of another version than 2 and 3, or of a
    repository with SHA-256.

    Source: https://git-scm.com/docs/index-format
    """
    version, count = int.from_bytes(index[4:8]), int.from_bytes(index[8:12])
    if index[:4] != b"DIRC" or version not in (2, 3):
        return None
    found, at = [], 12
    for _ in range(count):
        extended = 2 if index[at + 60 : at + 61] >= b"\x40" and index[at + 60] & 0x40 else 0
        end = index.find(b"\0", at + 62 + extended)
        if end < 0:
            return None
        found.append(index[at + 24 : at + 28] + index[at + 40 : end])
        at += (end - at + 8) // 8 * 8
    return b"\0".join(found)


def makes_git_run(path: str, repositories: Collection[str] = ()) -> bool:
    """Return whether a file at this path can make git run commands on this machine. Examples are a hook, a
    configuration (aliases, filters, `core.fsmonitor`), the todo list of a rebase, and a `.git` file that names another
    repository. In a `.git` folder, every file counts except those that commits write (`_GIT_DATA`). In the bare
    `repositories`, hooks and configuration files count.

    Source: https://git-scm.com/docs/gitrepository-layout
    """
    parts = PurePosixPath(path).parts
    for place, part in enumerate(parts):
        if part.lower() == ".git":
            return len(parts) == place + 1 or _within(parts[place + 1 :]) not in _GIT_DATA
        if "/".join(parts[:place]) in repositories and part in ("config", "config.worktree", "hooks"):
            return True
    return False


def bare_repositories(paths: Collection[str]) -> set[str]:
    """Return the folders of these files that git would treat as repositories although they are not named `.git`."""
    heads = {path.rpartition("/")[0] for path in paths if path.rpartition("/")[2] == "HEAD"}
    inner = {folder for path in paths for folder in PurePosixPath(path).parents}
    return {
        folder for folder in heads
        if all(PurePosixPath(folder, name) in inner for name in ("objects", "refs"))
    }  # fmt: skip
