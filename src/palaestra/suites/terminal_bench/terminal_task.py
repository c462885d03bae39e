"""A terminal task as the rest of the package sees it, whichever format it was written in. Does no I/O.

`harbor.py` and `task_yaml.py` make these of the two formats on disk. What a task asks for and slots cannot give is
refused there, as `Unsupported`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from palaestra.core.types import AllowList, Limits, Network
from palaestra.suites.images.image_spec import ImageRecipe

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
    """How a task is checked: `script` of `folder`, as `user`, once the folder is at `TESTS_DIR`.

    `shared` is a folder that lies below it: what both have is the folder's own.
    """

    folder: Path
    script: str
    timeout_s: float | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    shared: Path | None = None

    def files(self) -> dict[str, Path]:
        """Everything of both folders, directories too, by its path at `TESTS_DIR`, sorted."""
        folders = [each for each in (self.shared, self.folder) if each is not None and each.is_dir()]
        found = {str(path.relative_to(each)): path for each in folders for path in each.rglob("*")}
        return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class Solution:
    """The reference solution: `script` of `folder` with the `files` beside it, none of which an agent's slot holds."""

    folder: Path
    script: str
    env: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a task that has several. `workdir` is copied into the task's directory when it begins.

    The next one follows only where every reward that `min_reward` names is at least that.
    """

    name: str
    instruction: str
    verifier: Verifier
    solution: Solution | None = None
    min_reward: Mapping[str, float] = field(default_factory=dict)
    workdir: Path | None = None
    agent_timeout_s: float | None = None


MEAN, FINAL = "mean", "final"


@dataclass(frozen=True, slots=True)
class TerminalTask:
    """One task. Times in seconds; None where the task leaves it to whoever runs it.

    `live` asks for grading in the agent's own slot, for work that is a running service. A task of several `steps` has
    the instruction, the verifier and the solution of its first one; `reward_strategy` makes one reward of theirs.
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
    steps: tuple[Step, ...] = ()
    reward_strategy: str = MEAN

    def of_step(self, step: Step) -> TerminalTask:
        """A step of this task as a task of its own."""
        return replace(
            self,
            instruction=step.instruction,
            verifier=step.verifier,
            solution=step.solution,
            agent_timeout_s=step.agent_timeout_s or self.agent_timeout_s,
            steps=(),
        )

    def is_named(self, wanted: str | None) -> bool:
        """Whether a comma list of names, patterns (`git-*`) and `category:NAME` means this task."""
        words = [word.strip() for word in (wanted or "").split(",") if word.strip()]
        return any(
            self.category == word.partition(":")[2]
            if word.startswith("category:")
            else fnmatch.fnmatchcase(self.name, word)
            for word in words
        )
