"""What of an agent's change would decide its own grade, whatever the check: it changes how the check's programs start.

Left out of the sealed workspace unless an environment says itself what its check sees. Everything else stays, since a
task may be about any of it. Not covered: a program that the agent was to install, and answers falsely; an environment
whose check runs code of the workspace must keep the two apart (`envs/swe/testing.py` does).

Invariant: the path alone decides, never the content. Source: ld.so(8); the names that the POSIX utilities and the
shells have on every system.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from palaestra.sandbox.base import Change

LOADER = frozenset({"/etc/ld.so.preload"})
"""Loaded into every program."""

INTERPRETER = frozenset({"sitecustomize.py", "usercustomize.py"})
"""Run by every Python that finds them, outside of the workspace."""

PROGRAM_DIRECTORIES = frozenset(
    {"/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin", "/root/bin", "/root/.local/bin"}
)

_NAMES = """
[ awk basename bash cat chmod cmp cp cut dash date diff dirname echo egrep env expr false fgrep find grep head id
kill ls md5sum mkdir mktemp mv od printf ps pwd readlink rm sed seq sh sha256sum sleep sort stat tail tee test timeout
touch tr true uname uniq wc which xargs
"""
PROGRAMS = frozenset(_NAMES.split())
"""Programs that every root has. A task installs others."""


def planted(changes: Sequence[Change], workspace: str) -> tuple[str, ...]:
    """The changed paths to leave out, sorted, as they stand in `changes`."""
    return tuple(sorted(change.path for change in changes if _is_plant(PurePosixPath("/", change.path), workspace)))


def _is_plant(path: PurePosixPath, workspace: str) -> bool:
    if str(path) in LOADER:
        return True
    if path.name in INTERPRETER:
        return not path.is_relative_to(workspace)
    return str(path.parent) in PROGRAM_DIRECTORIES and path.name in PROGRAMS
