"""Identifies the code of an environment, whose scores may change without its tasks.

This covers the file that the reference names, the modules that hold the environment's functions and classes, and all
loaded modules below the current directory, such as helpers that the file imports. Other installed packages are not
covered.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from palaestra.envs.form import Form

_CODE = (".py", ".ipynb")
_INSTALLED = {"site-packages", "dist-packages"}


def code_files(reference: str, form: Form) -> set[Path]:
    """Return the files of an environment's code."""
    return {*_referenced_files(reference), *_referenced_files(form.reference), *_modules_of(form), *_below(Path.cwd())}


def code_digests(reference: str, form: Form) -> dict[str, str]:
    """Return the digests of the files of an environment's code, by their paths."""
    found: dict[str, str] = {}
    for path in code_files(reference, form):
        try:
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError:  # such as a module in an archive
            continue
    return found


def _referenced_files(reference: str) -> Iterator[Path]:
    """Yield the files in a reference such as `FILE:NAME` or `inspect:FILE@TASK`."""
    for part in (reference, *re.split("[:@]", reference)):
        if part.endswith(_CODE) and Path(part).is_file():
            yield Path(part).resolve()


def _modules_of(form: Form) -> Iterator[Path]:
    """Yield the files of the modules that define the form's functions and classes, also those of a form in it."""
    waiting: list[object] = [form]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        named = each if hasattr(each, "__module__") and callable(each) else type(each)
        if file := getattr(sys.modules.get(str(getattr(named, "__module__", ""))), "__file__", None):
            yield Path(file).resolve()
        if len(seen) < _MOST and hasattr(each, "__dict__") and not isinstance(each, type):
            waiting += vars(each).values()


_MOST = 100


def _below(folder: Path) -> Iterator[Path]:
    """Yield the files of loaded modules below a folder, except those of installed packages."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and _INSTALLED.isdisjoint(Path(file).parts) and Path(file).resolve().is_relative_to(folder):
            yield Path(file).resolve()
