"""Decides which texts may be passed to pip as requirements.

Requirements come from rows of data sets, test scripts and settings. Each must be a name with optional extras, versions
and markers (PEP 508, without its form with an address). pip would also accept an address, a path or an option, and each
of these can run code or read files. For an installation inside a repository's own slot, two further forms are accepted:
the repository with extras (`.[test]`) and a requirements file of the repository (`-rFILE`).

Invariant: the decision is an allow-list over the whole text, so nothing that it does not describe reaches an installer.
Source of the grammar: https://packaging.python.org/specifications/dependency-specifiers/
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from palaestra_slots.core.errors import TaskError

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_SPACE = r"[ \t]*"
_EXTRAS = rf"\[{_SPACE}{_NAME}(?:{_SPACE},{_SPACE}{_NAME})*{_SPACE}\]"
_CLAUSE = rf"(?:===?|~=|!=|[<>]=?){_SPACE}[A-Za-z0-9_.*+!-]+"
_VERSIONS = rf"\(?{_CLAUSE}(?:{_SPACE},{_SPACE}{_CLAUSE})*{_SPACE},?{_SPACE}\)?"
_MARKERS = r""";[ \tA-Za-z0-9_.'"()<>=!~,*+-]*"""  # no `@`, `/` or `:`, which an address or a path would need
_REQUIREMENT = re.compile(rf"{_NAME}{_SPACE}(?:{_EXTRAS})?{_SPACE}(?:{_VERSIONS})?{_SPACE}(?:{_MARKERS})?")
_REPOSITORY = re.compile(rf"\.{_EXTRAS}")
_FILE = re.compile(r"-r[A-Za-z0-9_][\w./-]*\.(?:txt|in|pip)", re.ASCII)
_LONGEST = 1000


def is_requirement(text: str, *, in_repository: bool = False) -> bool:
    """Return whether pip may get this text as a requirement. `in_repository` also accepts `.[extra]` and `-rFILE`."""
    if len(text) > _LONGEST:
        return False
    if _REQUIREMENT.fullmatch(text):
        return True
    return in_repository and (
        _REPOSITORY.fullmatch(text) is not None or (_FILE.fullmatch(text) is not None and ".." not in text.split("/"))
    )


def check_requirements(texts: Iterable[str], *, in_repository: bool = False) -> None:
    """Raise `TaskError` if one of the texts is not a requirement."""
    for text in texts:
        if not is_requirement(text, in_repository=in_repository):
            more = ", `.[extra]` or `-rFILE` of the repository" if in_repository else ""
            raise TaskError(
                f"{text[:200]!r} is not a requirement: write a name with optional extras, versions and markers{more}; "
                "addresses, paths and options are not accepted"
            )


def checked_packages(owner: str, packages: object) -> tuple[str, ...]:
    """Return the requirements that an environment or a task declares. Raises `TaskError` for anything else."""
    if isinstance(packages, str) or not isinstance(packages, Sequence) or not all(isinstance(p, str) for p in packages):
        raise TaskError(f"{owner}: packages must be a list of names, such as ['pandas'], not {packages!r:.100}")
    try:
        check_requirements(packages)
    except TaskError as error:
        raise TaskError(f"{owner}: packages: {error}") from None
    return tuple(packages)
