"""What an exporter is: it writes the groups of a run in the form that another program reads.

Exports are projections of the journal, made after the fact and as often as wanted; none of them is a record to keep.
Not for reading the journal (`recording`), nor for files and flags (`palaestra export`). It keeps: nothing goes missing
in silence. A rollout that is not in the file is counted in `ExportReport.left_out`, one that stands there with less
than, or otherwise than, its record is counted in `ExportReport.remarks`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, ClassVar, Protocol

from palaestra.core.types import JSON
from palaestra.rollouts.records import Group, Trajectory

UNSCORED = "unscored"
"""Why most of what is left out is left out: there is no reward to learn from."""


@dataclass(frozen=True, slots=True)
class ExportMeta:
    """What an exporter is told besides the groups: the run, as its journal begins, and what was asked for.

    `started_at` is in seconds since the epoch. `everything` takes unscored rollouts in as well; `placeholders` takes
    token rows that no engine sampled.
    """

    run_id: str = ""
    env: str = ""
    model: str = ""
    seed: int = 0
    started_at: float = 0.0
    config: Mapping[str, JSON] = field(default_factory=dict)
    everything: bool = False
    placeholders: bool = False


@dataclass(slots=True)
class ExportReport:
    """What an export came to. `left_out` and `remarks` count rollouts by reason, in words for a reader."""

    records: int = 0
    rollouts: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    remarks: Counter[str] = field(default_factory=Counter)

    def wrote(self, remarks: Iterable[str] = (), *, records: int = 1) -> None:
        """Count one rollout that is in the file, as so many lines or rows."""
        self.rollouts += 1
        self.records += records
        self.remarks.update(set(remarks))

    def to_dict(self) -> dict[str, JSON]:
        """The report as plain data; reasons that fit no rollout are not in it."""
        return {
            "records": self.records,
            "rollouts": self.rollouts,
            "left_out": dict(+self.left_out),
            "remarks": dict(+self.remarks),
        }

    def chosen(self, group: Group, meta: ExportMeta) -> Iterator[Trajectory]:
        """The trajectories of the group that are wanted, in index order; the others are counted."""
        for trajectory in sorted(group.trajectories, key=lambda each: each.index):
            if trajectory.scored or meta.everything:
                yield trajectory
            else:
                self.left_out[UNSCORED] += 1


class Exporter(Protocol):
    """One format. `ending` is that of its files; `everything` says whether unscored rollouts are in it by default."""

    name: ClassVar[str]
    ending: ClassVar[str]
    everything: ClassVar[bool]

    def export(self, groups: Iterable[Group], out: IO[bytes], meta: ExportMeta) -> ExportReport:
        """Write the groups, taking them one at a time, in the order they come. Blocks.

        Raises `ConfigError` where the run lacks what the format is made of.
        """
        ...


def apart(trajectory: Trajectory) -> list[str]:
    """What a format of conversations leaves out: what happened inside tool calls."""
    remarks = []
    if trajectory.subagents:
        remarks.append("without the conversations of its sub-agents")
    if trajectory.inner_calls:
        remarks.append("without the calls that its programs made")
    return remarks


def verdict(trajectory: Trajectory) -> dict[str, JSON]:
    """How a rollout ended, as our record names it."""
    return {
        "outcome": trajectory.outcome.value,
        "reward": trajectory.reward,
        "blame": trajectory.blame.value if trajectory.blame else None,
        "error": trajectory.error,
        "metrics": trajectory.metrics,
        "detail": trajectory.detail,
    }
