"""Check out folders of git repositories that a file of others names, once, into the cache.

The URL and the paths are data: only `https`, `ssh` and `file` URLs are fetched, nothing of the repository runs (no
hooks, no submodules), and the checkout has no `.git` folder. Its place is named by the URL, the commit and the paths.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from palaestra_slots.core.errors import TaskError
from palaestra_slots.core.io.host_process import ProcessResult, run_process
from palaestra_slots.images.build_once import build_once

_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_REF = re.compile(r"[A-Za-z0-9][\w./+-]{0,200}")
_URL = re.compile(r"(https|ssh|file)://[^\s\x00-\x1f\x7f-]\S{0,1000}", re.ASCII)
_PATH = re.compile(r"[\w.+@=, -]+(/[\w.+@=, -]+)*")
_FETCH_S = 1800.0
_OPTIONS = {
    "core.hooksPath": os.devnull,
    "core.fsmonitor": "false",
    "submodule.recurse": "false",
    "fetch.recurseSubmodules": "false",
    "advice.detachedHead": "false",
}
_ALLOWED = {"GIT_ALLOW_PROTOCOL": "https:ssh:file", "GIT_TERMINAL_PROMPT": "0"}


def checked_url(url: str) -> str:
    """Return the URL of a repository. Raises `TaskError` for anything but an `https`, `ssh` or `file` URL without a
    password."""
    if not _URL.fullmatch(url) or ".." in url.split("/"):
        raise TaskError(
            f"the git URL {url!r:.200} is not used: write https://HOST/PATH, ssh://HOST/PATH or file:///PATH"
        )
    if urlsplit(url).password is not None:
        raise TaskError("a git URL contains a password, which is not used: configure git's credential helper instead")
    return url


def checked_path(path: str) -> str:
    """Return a path relative to a repository, with `/`. Raises `TaskError` if it is absolute, leads out, or has unusual
    characters."""
    parts = PurePosixPath(path).parts
    if not _PATH.fullmatch("/".join(parts)) or ".." in parts or ".git" in [part.lower() for part in parts]:
        raise TaskError(f"the path {path!r:.200} is not used: it must be relative to its repository and stay in it")
    return "/".join(parts)


async def git_checkout(url: str, ref: str | None, paths: Sequence[str], cache: Path) -> Path:
    """Return a folder with these paths of a repository at a commit, a branch or a tag; None stands for the default
    branch. Raises `TaskError` if it cannot be fetched."""
    url, wanted = checked_url(url), sorted({checked_path(path) for path in paths})
    commit = ref if ref is not None and _COMMIT.fullmatch(ref) else await _resolved(url, ref)
    digest = hashlib.sha256("\0".join([url, commit, *wanted]).encode()).hexdigest()[:32]

    async def fetch_into(folder: Path) -> None:
        await _fetch(url, commit, wanted, folder)

    return await build_once(cache / "git" / digest, fetch_into, timeout_s=_FETCH_S)


def inside(checkout: Path, path: str) -> Path:
    """Return the folder at a path of a checkout. Raises `TaskError` if it is missing, or if a link is on the way."""
    place = checkout
    for part in checked_path(path).split("/"):
        place /= part
        if place.is_symlink():
            raise TaskError(f"the path {path} of the repository leads through a link")
    if not place.is_dir():
        raise TaskError(f"the repository has no folder {path}")
    return place


async def _resolved(url: str, ref: str | None) -> str:
    if ref is not None and (not _REF.fullmatch(ref) or ".." in ref):
        raise TaskError(f"{ref!r:.100} is not the name of a commit, a branch or a tag")
    name = ref or "HEAD"
    listed = await _git(["ls-remote", "--", url, name, f"{name}^{{}}"])
    lines = [line.split("\t") for line in listed.stdout.decode(errors="replace").splitlines() if "\t" in line]
    found = {at: commit for commit, at in lines}
    for at in (f"refs/tags/{name}^{{}}", f"refs/tags/{name}", f"refs/heads/{name}", "HEAD" if ref is None else ""):
        if _COMMIT.fullmatch(found.get(at, "")):
            return found[at]
    raise TaskError(f"the repository {url} has no commit, branch or tag {name}")


async def _fetch(url: str, commit: str, paths: list[str], folder: Path) -> None:
    await _git(["init", "--quiet", "."], folder)
    await _git(["config", "remote.origin.url", url], folder)
    await _git(["sparse-checkout", "set", "--no-cone", "--stdin"], folder, "".join(f"/{path}/\n" for path in paths))
    fetch = ["fetch", "--quiet", "--no-tags", "--depth", "1"]
    try:
        await _git([*fetch, "--filter=blob:none", "origin", commit], folder)
        await _git(["checkout", "--quiet", "--detach", commit], folder)
    except TaskError:  # a server without partial clones
        await _git([*fetch, "--refetch", "--no-filter", "origin", commit], folder)
        await _git(["checkout", "--quiet", "--detach", commit], folder)
    shutil.rmtree(folder / ".git")


async def _git(arguments: list[str], folder: Path = Path("/"), stdin: str = "") -> ProcessResult:
    """Run git in a folder that is not the current one, whose repository could name programs. Raises `TaskError`."""
    options = [word for name, value in _OPTIONS.items() for word in ("-c", f"{name}={value}")]
    variables = [f"{name}={value}" for name, value in _ALLOWED.items()]
    command = ["env", *variables, "git", *options, *arguments]
    try:
        done = await run_process(command, cwd=folder, stdin=stdin.encode(), timeout_s=_FETCH_S)
    except OSError as error:
        raise TaskError(f"git cannot be started: {error}") from None
    if done.returncode:
        raise TaskError(f"git {arguments[0]} failed: {done.text.strip()[-500:]}")
    return done
