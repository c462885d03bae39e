"""A terminal task, independent of the format on disk. Does no I/O.

`harbor_task.py` and `terminal_bench_1.py` read the formats, and raise `Unsupported` for a task that slots cannot run.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from palaestra_slots.core.types import AllowList, Limits, Network
from palaestra_slots.images.dockerfile import ImageRecipe
from palaestra_suites.terminal_bench.service import MAIN, HealthCheck, Service

TESTS_DIR = "/tests"
"""The folder of the verifier's files in a slot. It does not exist before the verifier runs."""

LOGS_DIR = "/logs"
VERIFIER_LOGS = f"{LOGS_DIR}/verifier"
AGENT_LOGS = f"{LOGS_DIR}/agent"
ARTIFACT_LOGS = f"{LOGS_DIR}/artifacts"


class Format(StrEnum):
    """The format of a task on disk, which decides how a verifier reports its verdict."""

    HARBOR = "harbor"
    TERMINAL_BENCH_1 = "terminal-bench-1"


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file or directory of a service that a separate verifier gets, at the same path. `exclude` are shell patterns of
    paths below a directory that it does not get."""

    source: str
    exclude: tuple[str, ...] = ()
    service: str = MAIN


@dataclass(frozen=True, slots=True)
class CollectHook:
    """A command that runs in a service after the agent has ended, before the work is sealed. If it fails, the verifier
    runs anyway. `user` None stands for the service's user."""

    command: str
    timeout_s: float = 60.0
    user: str | None = None
    service: str = MAIN


@dataclass(frozen=True, slots=True)
class VerifierEnvironment:
    """The root file system of a verifier that does not share the agent's, and the part of the work that it gets.

    If `has_tests` is false, the root is a fresh copy of the task's own, without the verifier's files.
    """

    recipe: ImageRecipe
    has_tests: bool
    artifacts: tuple[Artifact, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    limits: Limits = Limits()


@dataclass(frozen=True, slots=True)
class Verifier:
    """The check of a task: `folder` is copied to `TESTS_DIR`, and its `script` runs as `user`.

    `shared` is copied first, so files of `folder` replace its files. If `environment` is set, the verifier runs there,
    and not over the agent's files. `collect` runs before.
    """

    folder: Path
    script: str
    timeout_s: float | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    shared: Path | None = None
    environment: VerifierEnvironment | None = None
    collect: tuple[CollectHook, ...] = ()

    def files(self) -> dict[str, Path]:
        """Return the files and directories of `shared` and `folder` by their path below `TESTS_DIR`, sorted."""
        folders = [each for each in (self.shared, self.folder) if each is not None and each.is_dir()]
        found = {str(path.relative_to(each)): path for each in folders for path in each.rglob("*")}
        return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class SolutionScript:
    """The reference solution: the `script` in `folder`, and the other `files` that it needs. An agent's slot contains
    none of them."""

    folder: Path
    script: str
    env: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TaskStep:
    """One step of a task. `workdir` is copied into the task's directory when the step begins, and the agent then waits
    until the command of `health` succeeds.

    The next step follows only if each reward that `min_reward` names reaches its minimum.
    """

    name: str
    instruction: str
    verifier: Verifier
    solution: SolutionScript | None = None
    min_reward: Mapping[str, float] = field(default_factory=dict)
    workdir: Path | None = None
    agent_timeout_s: float | None = None
    health: HealthCheck | None = None


@dataclass(frozen=True, slots=True)
class TaskMetadata:
    """What a task says about itself."""

    category: str = "uncategorized"
    difficulty: str = "unknown"
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TaskServer:
    """An MCP server of a task: the `url` of one that a service runs (streamable HTTP, or the older HTTP with
    server-sent events if `sse`), or the command that starts one in the agent's slot."""

    name: str
    url: str | None = None
    sse: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TaskAgent:
    """What a task sets for its agent: the user, the time limit in seconds, the network, MCP servers, and a directory of
    the image with skills. None stands for the image's user and for the environment's time limit."""

    user: str | None = None
    timeout_s: float | None = None
    network: Network | AllowList = Network.ON
    servers: tuple[TaskServer, ...] = ()
    skills_dir: str | None = None


MEAN, FINAL = "mean", "final"


@dataclass(frozen=True, slots=True)
class TerminalTask:
    """One task. Times are in seconds; if a time is None, the environment's setting applies.

    `services` are those of its compose file, `main` among them; empty without such a file. `live` selects grading in
    the agent's own slot, for tasks about a running service. A task with `steps` has the instruction, verifier and
    solution of its first step; `reward_strategy` combines the rewards of the steps. `ignored` are keys of its settings
    that the format does not have.
    """

    name: str
    format: Format
    path: Path
    instruction: str
    recipe: ImageRecipe
    verifier: Verifier
    solution: SolutionScript | None = None
    metadata: TaskMetadata = TaskMetadata()
    agent: TaskAgent = TaskAgent()
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    limits: Limits = Limits()
    services: tuple[Service, ...] = ()
    live: bool = False
    steps: tuple[TaskStep, ...] = ()
    reward_strategy: str = MEAN
    ignored: tuple[str, ...] = ()

    def of_step(self, step: TaskStep) -> TerminalTask:
        """Return a step of this task as a separate task."""
        return replace(
            self,
            instruction=step.instruction,
            verifier=step.verifier,
            solution=step.solution,
            agent=replace(self.agent, timeout_s=step.agent_timeout_s or self.agent.timeout_s),
            steps=(),
        )

    def is_named(self, wanted: str | None) -> bool:
        """Return whether a comma-separated list of names, patterns (`git-*`) and `category:NAME` matches this task."""
        return is_named(wanted, self.name, self.metadata.category)


def is_named(wanted: str | None, name: str, category: str) -> bool:
    """Return whether a comma-separated list of names, patterns and `category:NAME` matches a task."""
    words = [word.strip() for word in (wanted or "").split(",") if word.strip()]
    return any(
        category == word.partition(":")[2] if word.startswith("category:") else fnmatch.fnmatchcase(name, word)
        for word in words
    )
