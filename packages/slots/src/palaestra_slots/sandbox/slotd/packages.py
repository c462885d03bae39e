"""Finds the packages that the host installed for its Python interpreters, which no slot sees: they could hold a task's
answer, and work that imports them would fail where they are missing.

A slot without an image sees the system directories of a machine, and slots get mounts of whole interpreters. In both,
the directories in which an interpreter looks for packages show only pip. The standard library stays. An image, a mount
of a virtual environment, and what a slot installs by itself keep all their packages.

The scripts that start a hidden package are hidden too, where slots have an overlay of their own: a `pytest` that cannot
import itself would be found before the one that a verifier brings.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import glob
import os
from collections.abc import Iterable, Iterator

_KEPT = ("pip", "pip-*")
_PLACES = ("", "*/", "local/*/")
"""Where interpreters and virtual environments are below a directory: in it, in `/usr/local`, in `/opt/NAME`."""


def sites(top: str) -> list[str]:
    """Return the directories for packages below `top`, relative to it. Links are left out, because they lead to another
    of these directories or to one that slots do not see."""
    found = [path for place in _PLACES for path in glob.glob(f"{place}lib*/python*/*-packages", root_dir=top)]
    real = os.path.realpath(top)
    return sorted(path for path in found if os.path.realpath(f"{top}/{path}") == f"{real}/{path}")


@functools.cache
def is_interpreter(top: str) -> bool:
    """Return whether a directory is that of a Python installation, and not of a virtual environment."""
    return bool(glob.glob("lib*/python3*/os.py", root_dir=top))


def hidden(site: str) -> list[str]:
    """Return the names in a directory for packages that slots do not see."""
    return [name for name in os.listdir(site) if not any(fnmatch.fnmatch(name, kept) for kept in _KEPT)]


def hidden_paths(top: str) -> list[str]:
    """Return the packages below `top` that slots do not see, and the scripts that start them, relative to `top`.
    Source of the scripts' names: the packaging specification "Entry points"."""
    found: dict[str, None] = {}
    for site in sites(top):
        for name in hidden(f"{top}/{site}"):
            found[f"{site}/{name}"] = None
            with contextlib.suppress(OSError, ValueError), open(f"{top}/{site}/{name}/entry_points.txt") as file:
                scripts = [os.path.normpath(f"{site}/../../../bin/{script}") for script in _console_scripts(file)]
                found.update((path, None) for path in scripts if _is_script(f"{top}/{path}"))
    return list(found)


def _console_scripts(lines: Iterable[str]) -> Iterator[str]:
    section = ""
    for line in lines:
        name, equals, _ = line.partition("=")
        if line.startswith("["):
            section = line.strip()
        elif section == "[console_scripts]" and equals and "/" not in name:
            yield name.strip()


def _is_script(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(2) == b"#!"  # other programs need no package
    except OSError:
        return False


def visible(top: str, *, whole: bool) -> Iterator[tuple[str, bool]]:
    """Yield the paths that together show `top`, without its packages unless `whole`. Each comes with whether everything
    below it is shown; of the others, only the names are."""
    ends = {f"{top}/{site}" for site in (() if whole else sites(top))}
    parents = {parent for end in ends for parent in _parents(end, top)}
    if not ends:
        yield top, True
    # Parents before what is below them, because that is the order in which they are mounted.
    for parent in sorted(parents | ends):
        yield parent, False
        unseen = parents | ends | ({f"{parent}/{name}" for name in hidden(parent)} if parent in ends else set())
        yield from ((path, True) for name in os.listdir(parent) if (path := f"{parent}/{name}") not in unseen)


def _parents(path: str, top: str) -> Iterator[str]:
    """Yield `top` and the directories between it and a path."""
    while path != top:
        path = os.path.dirname(path)
        yield path
