"""Files that programs make anew from others, such as byte code, caches and installed packages: they stay in a sandbox,
and are not among the changes that a person is asked about.

They are known by their names and, if they are new, by what git ignores in the sandbox. An agent that changes what git
ignores there keeps only its own files back.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from palaestra_slots.sandbox.slot import WORKSPACE, Slot

LEAN = frozenset({"node_modules", ".venv", "venv", ".tox", ".nox", "__pycache__", "site-packages"})
"""Folders that are left out of the copy of a folder that is too large: programs can make them again."""

_TAG = ("CACHEDIR.TAG", b"Signature: 8a477f597d28d172789f06886806bc55")
"""The file with which programs mark a folder that they can make again. Source: https://bford.info/cachedir/"""

_FOLDERS = LEAN | {
    ".cache", ".eggs", ".gradle", ".hypothesis", ".ipynb_checkpoints", ".mypy_cache", ".parcel-cache", ".pytest_cache",
    ".pytype", ".ruff_cache", ".turbo",
}  # fmt: skip
_FILES = frozenset({".coverage", ".DS_Store", ".eslintcache", "Thumbs.db"})
_SUFFIXES = frozenset({".pyc", ".pyo", ".swp", ".tsbuildinfo"})


def generated(path: str) -> bool:
    """Return whether the name of a file, or of a folder that it is in, says that a program makes it anew."""
    *folders, name = PurePosixPath(path).parts
    if ".git" in folders:
        return False
    return (
        not _FOLDERS.isdisjoint(folders)
        or any(folder.endswith(".egg-info") for folder in folders)
        or name in _FILES
        or PurePosixPath(name).suffix in _SUFFIXES
    )


def is_left_out(folder: Path) -> bool:
    """Return whether a folder is left out of the copy of a folder that is too large."""
    name, start = _TAG
    if folder.name in LEAN:
        return True
    try:
        with open(folder / name, "rb") as file:
            return file.read(len(start)) == start
    except OSError:
        return False


async def ignored_by_git(slot: Slot, paths: Sequence[str]) -> set[str]:
    """Return those of the paths in the workspace that its git repository ignores; none if it is no repository."""
    asked = [path for path in paths if ".git" not in path.split("/")]
    if not asked:
        return set()
    stdin = "\0".join(asked).encode(errors="surrogateescape")
    done = await slot.execute(
        ["git", "check-ignore", "-z", "--stdin"], cwd=WORKSPACE, stdin=stdin, timeout_s=60,
        max_output_bytes=len(stdin) + 1024, spill=False, stderr=True,
    )  # fmt: skip
    return set(done.output.split("\0")).intersection(asked) if done.success else set()
