"""The miniature tasks of the tests, and copies of them with something else in a file."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

TASKS = Path(__file__).parent / "tasks"
HARBOR, LEGACY = TASKS / "harbor", TASKS / "terminal_bench_1"


def copied(task: Path, folder: Path, files: dict[str, str] | None = None) -> Path:
    """A copy of a task in a folder, some files with other text."""
    target = folder / task.name
    shutil.copytree(task, target)
    return written(target, files or {})


def written(folder: Path, files: Mapping[str, str]) -> Path:
    """The folder, with these texts in its files."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder
