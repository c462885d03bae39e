"""A terminal task as the rest of the package sees it, whichever format it was written in. Does no I/O.

`harbor.py` and `task_yaml.py` make these of the two formats on disk. What a task asks for and slots cannot give is
refused there, as `Unsupported`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from palaestra.core.types import AllowList, Limits, Network
from palaestra.envs.images.base import ImageRecipe

TESTS_DIR = "/tests"
"""Where a verifier's files lie, from the moment it runs."""

LOGS_DIR = "/logs"
VERIFIER_LOGS = f"{LOGS_DIR}/verifier"
AGENT_LOGS = f"{LOGS_DIR}/agent"
ARTIFACT_LOGS = f"{LOGS_DIR}/artifacts"


class Format(StrEnum):
    """The format a task is written in; it decides how a verifier says its verdict."""

    HARBOR = "harbor"
    TERMINAL_BENCH_1 = "terminal-bench-1"


@dataclass(frozen=True, slots=True)
class Verifier:
    """How a task is checked: `script` of `folder`, as `user`, once the folder is at `TESTS_DIR`."""

    folder: Path
    script: str
    timeout_s: float | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None


@dataclass(frozen=True, slots=True)
class Solution:
    """The reference solution: `script` of `folder` with the `files` beside it, none of which an agent's slot holds."""

    folder: Path
    script: str
    env: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TerminalTask:
    """One task. Times in seconds; None where the task leaves it to whoever runs it.

    `live` asks for grading in the agent's own slot, for work that is a running service.
    """

    name: str
    format: Format
    path: Path
    instruction: str
    recipe: ImageRecipe
    verifier: Verifier
    solution: Solution | None = None
    category: str = "uncategorized"
    difficulty: str = "unknown"
    tags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    agent_user: str | None = None
    agent_timeout_s: float | None = None
    network: Network | AllowList = Network.ON
    limits: Limits = Limits()
    live: bool = False

    def is_named(self, wanted: str | None) -> bool:
        """Whether a comma list of names, patterns (`git-*`) and `category:NAME` means this task."""
        words = [word.strip() for word in (wanted or "").split(",") if word.strip()]
        return any(
            self.category == word.partition(":")[2]
            if word.startswith("category:")
            else fnmatch.fnmatchcase(self.name, word)
            for word in words
        )
