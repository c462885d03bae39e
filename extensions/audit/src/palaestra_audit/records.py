"""The records of an audit, and their file. Does no other I/O."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import msgspec

from palaestra.rollouts.journal.journal import encoded
from palaestra_slots.core.errors import ConfigError
from palaestra_slots.core.io.durable_files import replaced, writing
from palaestra_slots.core.types import JSON, Blame

SCHEMA = "palaestra.audit/1"


class Kind(StrEnum):
    """What is wrong with a task."""

    UNSOLVABLE = "unsolvable"
    """There is a reference solution, and it does not get the full score."""
    PAYS_FOR_NOTHING = "pays_for_nothing"
    """An answer without work earns more than the task's floor."""
    WEAK = "weak"
    """The reference solution with wrong results, or without a part, still gets the full score."""
    HACKABLE = "hackable"
    """A published way of reward hacking earns a reward."""
    FALSE_ZERO = "false_zero"
    """Right work does not get the full score."""
    FLAKY = "flaky"
    """The same work gets different scores."""
    WORLD = "depends_on_the_world"
    """The score of the reference solution depends on the clock, the time zone, the locale, the network or the speed."""
    LEAKS = "leaks"
    """The solution or the answer stands where the agent can read it."""
    DUPLICATE = "duplicate"
    """Another task of the set asks for the same."""
    COSTLY = "costly"
    """Only measured: seconds of each stage, in `TaskAudit.stages`."""


class World(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the machine of a trial differs from the task's own. `env` are environment variables of all commands, `cpus`
    limits the processors, `offline` takes the network away, `clock` is the time at which a trial begins, as `faketime`
    reads it, and `workspace` is where commands begin: a second path of the workspace."""

    name: str = ""
    env: dict[str, str] = {}
    cpus: float | None = None
    offline: bool = False
    clock: str = ""
    workspace: str = ""

    @property
    def fast(self) -> bool:
        """Whether clocks run faster, so that programs measure more time."""
        return " x" in self.clock

    @property
    def slow(self) -> bool:
        """Whether programs get less done in the time that they measure."""
        return self.cpus is not None or self.fast


class Step(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A step of a trial: the task's reference solution (0) or a further solution (from 1), a call of a tool, or an
    answer in text. Text with which the solution ends comes last, whatever follows the step."""

    reference: int | None = None
    tool: str = ""
    arguments: dict[str, JSON] = {}
    say: str | None = None


class Trial(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an agent does in a trial, and where. An empty list of steps is doing nothing. `after` is how often the
    reference solution is played before it in the same process."""

    steps: list[Step] = []
    world: World = World()
    after: int = 0


class Verdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The score of a trial. `reward` is None if it was not scored, and `error` then has the reason. `official` is the
    verdict of the benchmark's own protocol, if the environment computes it. `blame` is the part at fault for a missing
    score."""

    reward: float | None
    blame: Blame | None = None
    official: float | None = None
    labels: list[str] = []
    error: str = ""


class Finding(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A fault of a task. A `note` is what an honest reader could dispute. `trial` and `verdict` are the witness, which
    `palaestra audit replay` plays again; findings without one are seen by reading. `wanted` is what a sound task would
    have scored, and `detail` has a difference of files or other evidence. `places` are the files of the sandbox that
    have the solution, if the finding is a leak."""

    kind: Kind
    what: str
    id: str = ""
    note: bool = False
    wanted: str = ""
    detail: str = ""
    places: list[str] = []
    trial: Trial | None = None
    verdict: Verdict | None = None


class Untried(msgspec.Struct, frozen=True):
    """A check, or a part of it, that was not tried, with the reason."""

    kind: Kind
    why: str


class TaskAudit(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What was found about one task. `digest` identifies what the result depends on. `mutants` and `lived` count the
    changed copies of the reference solution that were played, and those that got the full score and are not known to
    mean the same. `stages` has the seconds that the reference solution took for preparation, grading and the whole,
    `seconds` those of the audit, and `trial_s` those of its trials."""

    id: str
    digest: str
    findings: list[Finding] = []
    untried: list[Untried] = []
    trials: int = 0
    mutants: int = 0
    lived: int = 0
    stages: dict[str, float] = {}
    seconds: float = 0.0
    trial_s: float = 0.0
    complete: bool = True
    """False if an error of this machine, or the budget, ended the audit of the task."""


class Audit(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An audit of an environment, which `reference` and `settings` name as `palaestra run` does."""

    schema: str = SCHEMA
    environment: str
    reference: str
    settings: list[str] = []
    secrets: list[str] = []
    """The flags of the settings that are not kept, because they are secret."""
    kinds: list[Kind] = []
    """The kinds that were looked for; empty in files of older versions."""
    version: str = ""
    started_at: str = ""
    tasks: list[TaskAudit] = []
    left: int = 0
    """The number of tasks without all checks, because the budget was used up."""

    def findings(self) -> Iterator[tuple[TaskAudit, Finding]]:
        """Yield the findings with their tasks, notes last."""
        every = [(task, each) for task in self.tasks for each in task.findings]
        yield from sorted(every, key=lambda pair: pair[1].note)

    @property
    def complete(self) -> bool:
        return not self.left and all(task.complete for task in self.tasks)

    @property
    def sound(self) -> bool:
        """Whether nothing but notes was found."""
        return all(each.note for _, each in self.findings())


def write_audit(audit: Audit, path: Path) -> None:
    """Write the audit to a file in a folder that may be new, in one step. Raises `DiskError`."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path), replaced(path) as file:
        file.write(msgspec.json.format(encoded(audit), indent=1) + b"\n")


def read_audit(path: Path) -> Audit:
    """Read the file of an audit, or that in the folder `path`. Raises `ConfigError`."""
    path = path / "audit.json" if path.is_dir() else path
    try:
        audit = msgspec.json.decode(path.read_bytes(), type=Audit)
    except (OSError, msgspec.MsgspecError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path} is not an audit: {why}. `palaestra audit ENV` writes one") from error
    if audit.schema != SCHEMA:
        raise ConfigError(f"{path} has the schema {audit.schema}, and this version reads {SCHEMA}")
    return audit
