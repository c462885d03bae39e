"""Find the paths and words that a published task is about. Does no I/O.

Published tasks do not declare them, so they are read from the task's texts: the instruction, the tests and the
reference solution. What the image brought at such a path may be replaced by the agent. Paths of programs and libraries
count only if the instruction itself names them (`rollouts/grading/tampering.py`), because tests and solutions often
name the programs that they start.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from palaestra.rollouts.grading.tampering import paths_in

_IN_HOME = re.compile(r"(?<![\w./])(?:~|\$HOME|\$\{HOME\})((?:/[\w.+@%-]+)+)")
_GIT_GLOBAL = re.compile(r"\bgit\b[^\n;|&]*\bconfig\b[^\n;|&]*--global")
_WORD = re.compile(r"(?<![\w.-])[A-Za-z][\w.+-]*")
_PROGRAMS = re.compile(r"/(?:usr/(?:local/)?)?(?:s?bin|lib\w*)(?:/.*)?|/etc/ld\.so.*")
_NEVER = ("/proc", "/sys", "/dev/", "/tests", "/solution", "/oracle", "/logs/verifier", "/opt/palaestra")


@dataclass(frozen=True, slots=True)
class TaskScope:
    """The paths and words that a task names."""

    paths: tuple[str, ...]
    words: frozenset[str]


def scope_of(texts: Iterable[str], home: str = "/root") -> TaskScope:
    """Return the paths and words that these texts of a task name."""
    paths: set[str] = set()
    words: set[str] = set()
    for text in texts:
        paths |= {f"{home}/.gitconfig"} if _GIT_GLOBAL.search(text) else set()
        found = paths_in(text) | {f"{home}{path.rstrip('.')}" for path in _IN_HOME.findall(text)}
        paths |= {path for path in found if not _PROGRAMS.fullmatch(path) and not path.startswith(_NEVER)}
        words.update(word.rstrip(".") for word in _WORD.findall(text))
        words.update(path.rpartition("/")[2] for path in found)
    return TaskScope(tuple(sorted(paths)), frozenset(words))
