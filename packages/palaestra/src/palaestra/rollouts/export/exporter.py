"""What the export formats share: the shape of an exporter, the data that it gets, and its report.

Exports can be made from the journal at any time; only the journal is the record. Invariant: nothing is lost silently. A
rollout that is missing from the file is counted in `ExportReport.left_out`; a rollout that is incomplete or changed in
the file is counted in `ExportReport.remarks`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, ClassVar, Protocol

import msgspec

from palaestra.rollouts.annotations import Judgement
from palaestra.rollouts.records import Group, Trajectory
from palaestra.rollouts.regraded import Grade
from palaestra_slots.core.types import JSON, Message
from palaestra_tokens.engines.scripted import without_closing

if TYPE_CHECKING:
    from palaestra_tokens.templates import ChatFormat

UNSCORED = "unscored"
"""The most frequent reason for leaving a rollout out: the rollout has no reward to learn from."""

COUNTERFACTUAL = "counterfactual"
"""The reason for leaving out a rollout that continues a rollout of another run."""

WITHOUT_WORK = "a scripted policy that did nothing"
WITHOUT_CLOSING = "without the sentence with which the scripted policy ended"

DISCARDED = "discarded"
"""The key of a trajectory's `detail` with the reasons why a batch discarded the sample."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """A model's tokenizer and chat template, and the parser that reads its calls."""

    chat_format: ChatFormat
    parser: str


@dataclass(frozen=True, slots=True)
class ExportMeta:
    """The run's data from its journal, and the options of the export.

    `started_at` is in seconds since the epoch. `everything` includes unscored rollouts; `placeholders` includes token
    rows without sampled tokens; `counterfactual` includes rollouts that continue a rollout of another run;
    `text_content` makes the content of a message an empty text instead of null. `encoding` is how the token rows of
    rollouts without sampled tokens are made from their texts; None if they are not.
    `judgements` has the annotations of rollouts by their ids, and `grades` the new scores of `palaestra grade`.
    """

    run_id: str = ""
    env: str = ""
    model: str = ""
    seed: int = 0
    started_at: float = 0.0
    config: Mapping[str, JSON] = field(default_factory=dict)
    everything: bool = False
    placeholders: bool = False
    counterfactual: bool = False
    text_content: bool = False
    encoding: Encoding | None = None
    judgements: Mapping[str, Judgement] = field(default_factory=dict)
    grades: Mapping[str, Grade] = field(default_factory=dict)

    def marks(self, trajectory: Trajectory) -> dict[str, JSON]:
        """Return what a line says about a rollout besides its record: `origin`, if it is counterfactual, and
        `annotations`, if people have said something about it."""
        said = self.judgements.get(trajectory.rollout_id)
        origin = {} if trajectory.origin is None else {"origin": msgspec.to_builtins(trajectory.origin)}
        return origin | ({} if said is None else {"annotations": said.to_dict()})


@dataclass(slots=True)
class ExportReport:
    """The result of an export. `left_out` counts rollouts by reason, and `remarks` by remark; both are written for
    users."""

    records: int = 0
    rollouts: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    remarks: Counter[str] = field(default_factory=Counter)

    def wrote(self, remarks: Iterable[str] = (), *, records: int = 1) -> None:
        """Count one written rollout, its number of lines or rows, and its remarks."""
        self.rollouts += 1
        self.records += records
        self.remarks.update(set(remarks))

    def to_dict(self) -> dict[str, JSON]:
        """Return the report as plain data, without reasons whose count is zero."""
        return {
            "records": self.records,
            "rollouts": self.rollouts,
            # A unary plus leaves out the counts of 0.
            "left_out": dict(+self.left_out),
            "remarks": dict(+self.remarks),
        }

    def chosen(self, group: Group, meta: ExportMeta) -> Iterator[Trajectory]:
        """Yield the group's trajectories to export, in index order, and count the others."""
        for trajectory in sorted(group.trajectories, key=lambda each: each.index):
            if trajectory.origin is not None and not meta.counterfactual:
                self.left_out[COUNTERFACTUAL] += 1
            elif trajectory.scored or meta.everything:
                yield trajectory
            else:
                self.left_out[UNSCORED] += 1


def discarded(trajectory: Trajectory) -> list[str]:
    """Return the reasons why a batch discarded the sample; empty if it was kept."""
    return list(trajectory.detail.get(DISCARDED) or ())


class Exporter(Protocol):
    """One format. `ending` is its file name ending; `everything` is True if the default includes unscored rollouts."""

    name: ClassVar[str]
    ending: ClassVar[str]
    everything: ClassVar[bool]

    def export(self, groups: Iterable[Group], out: IO[bytes], meta: ExportMeta) -> ExportReport:
        """Write the groups, one at a time, in order. The call blocks.

        Raises `ConfigError` if the run lacks data that the format needs.
        """
        ...


def omissions(trajectory: Trajectory) -> list[str]:
    """Return remarks on the work inside tool calls, which conversation formats leave out."""
    remarks = []
    if trajectory.subagents:
        remarks.append("without the conversations of its sub-agents")
    if trajectory.inner_calls:
        remarks.append("without the calls of its programs")
    return remarks


def taught(trajectory: Trajectory, report: ExportReport) -> Sequence[Message]:
    """Return the messages that a model may learn: a conversation without the closing sentence of a scripted policy.
    Returns no message, and counts the rollout as left out, if the sentence was the policy's only turn."""
    messages = trajectory.messages if trajectory.ledger is not None else without_closing(trajectory.messages)
    if len(messages) == len(trajectory.messages):
        return messages
    if len(trajectory.turns) < 2:
        report.left_out[WITHOUT_WORK] += 1
        return ()
    report.remarks[WITHOUT_CLOSING] += 1
    return messages
