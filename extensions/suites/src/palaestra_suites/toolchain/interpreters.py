"""Find the Python interpreters of this machine, and decide which one a repository can be installed for."""

from __future__ import annotations

import functools
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from palaestra_slots.core.errors import ConfigError
from palaestra_slots.sandbox.slot import Mount

_OLDEST = (3, 8)
"""uv, which installs packages of a date, runs on this version and on newer ones."""
_SYSTEM = ("/usr", "/bin", "/lib")
_VERSION = re.compile(r"3\.\d+(?:\.\d+)?")
_CLAUSE = re.compile(r"\s*(===?|~=|!=|<=|>=|<|>)\s*(\d+(?:\.\d+)*)(\.\*)?[a-z0-9.]*\s*")
_ASK = "import ensurepip, json, sys; print(json.dumps([sys.executable, sys.base_prefix, list(sys.version_info[:3])]))"
_ASK_S = 20.0
_PLACES = ("/usr/bin/python3", "/usr/local/bin/python3", "~/.pyenv/versions/*/bin/python3",
           "~/.local/share/uv/python/*/bin/python3", "/opt/python*/bin/python3")  # fmt: skip
RELEASED = {(3, 8): "2019-10-14", (3, 9): "2020-10-05", (3, 10): "2021-10-04", (3, 11): "2022-10-24",
            (3, 12): "2023-10-02", (3, 13): "2024-10-07", (3, 14): "2025-10-07"}  # fmt: skip
"""The dates of the releases of Python. Source: https://devguide.python.org/versions/"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """An interpreter of this machine, with the mounts that it needs in a slot."""

    path: str
    version: tuple[int, ...]
    mounts: tuple[Mount, ...] = ()

    @property
    def label(self) -> str:
        return ".".join(map(str, self.version))


def this_interpreter() -> Interpreter:
    """Return this Python, outside its virtual environment."""
    base = getattr(sys, "_base_executable", None) or sys.executable  # a virtual environment may have a copy of it
    return _interpreter(str(Path(base).resolve()), sys.base_prefix, tuple(sys.version_info[:3]))


def _interpreter(executable: str, base_prefix: str, version: tuple[int, ...]) -> Interpreter:
    prefix = Path(base_prefix).resolve()
    mounts = () if str(prefix).startswith(_SYSTEM) else (Mount(str(prefix), str(prefix)),)
    return Interpreter(executable, version, mounts)


def places_of_pip(python: Interpreter) -> tuple[str, ...]:
    """Return the directories of this machine from which a slot with this interpreter takes pip and its wheels."""
    tops = ["/usr", "/usr/local", *(mount.source for mount in python.mounts)]
    inside = ("lib/python3*/*-packages/pip", "lib/python3*/ensurepip/_bundled", "share/python-wheels")
    return tuple(sorted({path for top in tops for name in inside for path in glob.glob(f"{top}/{name}")}))


@functools.cache
def modules_in_pip() -> frozenset[str]:
    """Return the names of the modules that pip and setuptools bring copies of, and their own names."""
    wheels = [path for place in places_of_pip(this_interpreter()) for path in glob.glob(f"{place}/*.whl")]
    names = (name.split("_vendor/") for path in wheels for name in zipfile.ZipFile(path).namelist())
    found = {tail[-1].split("/")[0].removesuffix(".py") for tail in names if tail[1:]}
    return frozenset({"pip", "setuptools", *found} - {"__init__"})


def find_interpreter(wanted: str) -> Interpreter:
    """Return the interpreter with this path or version (`3.12`). Raises `ConfigError` if this machine has none."""
    if not _VERSION.fullmatch(wanted):
        found = _queried(os.path.expanduser(wanted))
        if found is None:
            raise ConfigError(
                f"{wanted!r} is not a Python 3 of this machine with the module ensurepip: give the path of one, or a "
                "version such as 3.12"
            )
        return found
    matching = [each for each in installed() if f"{each.label}.".startswith(f"{wanted}.")]
    if not matching:
        here = ", ".join(each.label for each in installed())
        raise ConfigError(f"this machine has no Python {wanted}; it has {here}")
    return matching[0]


@functools.cache
def installed() -> tuple[Interpreter, ...]:
    """Return the interpreters of this machine, newest first: those of PATH, of the system, of pyenv and of uv."""
    found = {each.label: each for path in dict.fromkeys(_paths()) if (each := _queried(path)) is not None}
    own = this_interpreter()
    return tuple(sorted({**found, own.label: own}.values(), key=lambda each: each.version, reverse=True))


def _paths() -> Iterator[str]:
    for minor in range(6, 20):
        if (path := shutil.which(f"python3.{minor}")) is not None:
            yield path
    for place in _PLACES:
        yield from sorted(glob.glob(os.path.expanduser(place)))


def for_row(candidates: Sequence[Interpreter], requires: str, date: str) -> Interpreter | None:
    """Return the interpreter for a row, or None if the repository allows none of these.

    It is the first one that is older than the row, because a repository does not run on a Python that nobody knew then.
    If all are younger, it is the oldest one.
    """
    allowed = [each for each in candidates if allows(requires, each.version)]
    dated = [each for each in allowed if each.version >= _OLDEST]
    older = [each for each in dated if newest_date(date, each.version) in ("", date)]
    return next(iter([*older, *sorted(dated, key=lambda each: each.version), *allowed]), None)


@functools.cache
def _queried(path: str) -> Interpreter | None:
    """Return the interpreter at a path, as it describes itself, or None."""
    try:
        done = subprocess.run([path, "-I", "-S", "-c", _ASK], capture_output=True, timeout=_ASK_S, check=True)
        executable, prefix, version = json.loads(done.stdout)
        return _interpreter(str(Path(executable).resolve()), prefix, tuple(version))
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def allows(requires: str, version: tuple[int, ...]) -> bool:
    """Return whether `requires-python` allows a version. Clauses that are not a specifier are ignored.

    Source: https://packaging.python.org/specifications/version-specifiers/
    """
    return all(_allows(match, version) for part in requires.split(",") if (match := _CLAUSE.fullmatch(part)))


def _allows(clause: re.Match[str], version: tuple[int, ...]) -> bool:
    kind, wanted = clause[1], tuple(map(int, clause[2].split(".")))
    if clause[3] or kind == "~=":
        kept = len(wanted) if clause[3] else max(1, len(wanted) - 1)
        same = version[:kept] == wanted[:kept]
        return not same if kind == "!=" else same and (kind != "~=" or version >= wanted)
    whole = (*wanted, *[0] * (3 - len(wanted)))[:3]
    own = version[:3]
    return {"==": own == whole, "===": own == whole, "!=": own != whole, "<": own < whole, "<=": own <= whole,
            ">": own > whole, ">=": own >= whole}[kind]  # fmt: skip


def newest_date(created_at: str, version: tuple[int, ...]) -> str:
    """Return the date (YYYY-MM-DD) before which the packages of a row must have been released, or an empty string.

    It is the date of the row, or the release of the interpreter plus half a year: older packages cannot run on it.
    """
    date = created_at[:10]
    if not re.fullmatch(r"20\d\d-[01]\d-[0-3]\d", date):
        return ""
    released = RELEASED.get((version[0], version[1]), "")
    if not released:
        return date
    year, month, day = map(int, released.split("-"))
    month += 6
    return max(date, f"{year + (month > 12):04}-{(month - 1) % 12 + 1:02}-{min(day, 28):02}")
