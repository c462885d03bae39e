"""Read the installation of a published Python row, in the schemas of several data sets. Rows in other languages are
read by `row_recipe.py`.

- `install`: Palaestra's object (see `Install`), or text with commands, of which only the `pip install` lines count.
- `install_config` (SWE-rebench and SWE-rebench V2): its `pip_packages` and `reqs_path`, and the `pip install` lines of
  its `install` and `pre_install`.
- `eval_script` (SWE-bench 5): its `pip install` lines.
- `requirements` (SWE-rebench): a list, or the text of a requirements file.

Invariant: no text of a Python row is run as a command. Only its requirements are used, as separate arguments of pip.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping

from palaestra_slots.core.errors import TaskError
from palaestra_slots.core.types import JSON
from palaestra_slots.images.requirements import is_requirement
from palaestra_slots.images.task_files import RowFields
from palaestra_suites.toolchain.toolchain import Install

_PIP = re.compile(r"(?:^|[;&|]\s*)(?:python3?\s+-m\s+)?pip3?\s+install\s+([^;&|\n]*)", re.MULTILINE)


def install_of(row: RowFields) -> Install:
    """Return the installation of a row, or the default for public rows if no column specifies one. Raises
    `TaskError`."""
    given = row.values.get("install")
    if isinstance(given, Mapping) or (isinstance(given, str) and given.lstrip().startswith("{")):
        return Install.parse(row.decoded("install"))
    found = pip_requirements("\n".join(_text_lines(given)))
    recipe = row.decoded("install_config")
    if recipe is not None:
        if not isinstance(recipe, Mapping):
            raise TaskError("column 'install_config' must be an object")
        found += _of_recipe(recipe)
    found += pip_requirements(row.optional("eval_script"))
    if recipe is None:  # with a recipe, the column has the versions resolved for a different Python
        found += [name for line in _text_lines(row.values.get("requirements")) if (name := _requirement(line))]
    return Install(requirements=tuple(dict.fromkeys(found)), editable=True)


def pip_requirements(script: str) -> list[str]:
    """Return the packages that a script's `pip install` commands name: requirements, `.[extra]` and `-r FILE`."""
    found: list[str] = []
    for match in _PIP.finditer(script):
        words = iter(_shell_words(match[1]))
        for word in words:
            if word in ("-r", "--requirement"):
                word = f"-r{next(words, '')}"
            if is_requirement(word, in_repository=True):
                found.append(word)
    return found


def _of_recipe(recipe: Mapping[str, JSON]) -> list[str]:
    found = [name for line in _text_lines(recipe.get("pip_packages")) if (name := _requirement(line))]
    found += [
        f"-r{path}" for path in _text_lines(recipe.get("reqs_path")) if is_requirement(f"-r{path}", in_repository=True)
    ]
    for part in ("install", "pre_install"):
        found += pip_requirements("\n".join(_text_lines(recipe.get(part))))
    return found


def _requirement(line: str) -> str:
    """Return the requirement in a line of a requirements file, or an empty string for a comment, an option or a URL."""
    text = line.partition("#")[0].strip()
    return text if is_requirement(text, in_repository=True) else ""


def _text_lines(value: JSON) -> list[str]:
    if isinstance(value, str):
        return value.splitlines()
    return [str(line) for line in value] if isinstance(value, Iterable) else []


def _shell_words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()
