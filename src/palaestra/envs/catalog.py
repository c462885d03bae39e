"""Which environments there are by name: the files of an `environments` folder.

For: `palaestra env list`, and finding `palaestra run NAME`. Not for: importing environments (`running`). A file
`environments/<name>_env.py` is the environment `<name>`; its docstring's first line is its summary. Invariant: nothing
is imported or run to list it.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

FOLDER = "environments"
_ENDING = "_env.py"


@dataclass(frozen=True, slots=True)
class KnownEnvironment:
    """One environment that can be run by name."""

    name: str
    path: Path
    summary: str


def known_environments(start: Path) -> dict[str, KnownEnvironment]:
    """The environments of the nearest `environments` folder at `start` or above it, by name in order."""
    for folder in (start, *start.parents):
        if (folder / FOLDER).is_dir():
            files = sorted((folder / FOLDER).glob(f"*{_ENDING}"))
            found = (KnownEnvironment(path.name.removesuffix(_ENDING), path, _summary(path)) for path in files)
            return {each.name: each for each in found}
    return {}


def _summary(path: Path) -> str:
    """The first line of the module's docstring, or why there is none."""
    try:
        text = ast.get_docstring(ast.parse(path.read_bytes()))
    except (OSError, SyntaxError, ValueError) as error:
        return f"(cannot be read: {error})"
    return text.splitlines()[0] if text else ""
