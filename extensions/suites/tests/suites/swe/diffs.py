"""Diffs of one file, applied and reversed by git."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from palaestra_suites.swe import unified_diff


def applied(patch: str, before: str) -> str:
    """Return the text of the only file of a patch after the patch."""
    (file,) = unified_diff.parse(patch)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, file.path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(before.encode())
        argv = ["git", "apply", "--whitespace=nowarn", "-"]
        subprocess.run(argv, cwd=folder, input=patch.encode(), check=True, capture_output=True)
        return place.read_bytes().decode()


def undoing(patch: str, before: str) -> str:
    """Return the patch that undoes a patch of one file."""
    (file,) = unified_diff.parse(patch)
    return unified_diff.between(file.path, applied(patch, before), before)
