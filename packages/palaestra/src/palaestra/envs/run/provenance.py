"""The provenance of a run, for its record: versions, the environment's file, its commit, and the machine."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from palaestra.envs.discovery import environment_file
from palaestra_slots.core.types import JSON

_GIT_S = 5.0


def provenance(reference: str) -> dict[str, JSON]:
    """Return the provenance of a run of the environment that `reference` names; unavailable facts are left out.
    `git_changed` is true if the environment's file differs from its commit."""
    facts: dict[str, JSON] = {
        "palaestra": version("palaestra"),
        "python": platform.python_version(),
        "platform": _system(),
        "host": socket.gethostname(),
        "cpus": os.cpu_count(),
    }
    if not (code := environment_hash(reference)):
        return facts
    facts["environment_sha256"] = code
    path = Path(reference.partition(":")[0])
    if path.suffix != ".py":  # the commit of an installed environment is that of its package
        return facts
    commit = _git(path.parent, "rev-parse", "HEAD")
    if commit:
        blob = _git(path.parent, "rev-parse", f"HEAD:./{path.name}")
        facts["git_commit"], facts["git_changed"] = commit, blob != _blob_id(path.read_bytes(), len(blob))
    return facts


def _system() -> str:
    """Return `platform.platform()`. On Linux, that function starts a process for a part that it then leaves out."""
    if sys.platform != "linux":
        return platform.platform()
    here, library = os.uname(), platform.libc_ver()
    return "-".join(filter(None, (here.sysname, here.release, here.machine, "with" * any(library), "".join(library))))


def environment_hash(reference: str) -> str:
    """Return the hash of the file with the environment's code; empty if the file is not known."""
    path = environment_file(reference)
    return "" if path is None else hashlib.sha256(path.read_bytes()).hexdigest()


def _blob_id(content: bytes, length: int) -> str:
    """Return git's id of a file's content, in a repository with ids of this length. `git status` would run filters."""
    return hashlib.new("sha256" if length == 64 else "sha1", b"blob %d\0" % len(content) + content).hexdigest()


def _git(folder: Path, *words: str) -> str:
    """Return the output of a git command in the folder; empty if git is not installed or the command fails. Settings of
    the repository, which may be somebody else's, start no program."""
    try:
        done = subprocess.run(
            ["git", "-c", "protocol.allow=never", "-C", folder, *words],  # a missing object is not fetched
            capture_output=True,
            text=True,
            timeout=_GIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
