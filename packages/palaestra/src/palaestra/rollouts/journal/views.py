"""Partial views of a journal's lines, for readers that need no whole records.

A view decodes the fields that it declares, and skips all others. A reader that needs more fields extends a view.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from palaestra.rollouts.records import Beside
from palaestra_slots.core.io.durable_files import UNREADABLE, lines_of


class _Duration(msgspec.Struct):
    duration_s: float = 0.0


class PartHead(msgspec.Struct):
    """The names, places and seconds of a group or a rollout."""

    group_id: str = ""
    task_id: str = ""
    number: int = 0
    index: int = 0
    rollout_id: str = ""
    prepare_s: float = 0.0
    beside: _Duration = msgspec.field(default_factory=_Duration)


class LineHead(msgspec.Struct):
    """What a line is about."""

    event: str = ""
    group_id: str = ""
    number: int = 0
    group: PartHead | None = None
    trajectory: PartHead | None = None


class LabelView(msgspec.Struct):
    """A label without its evidence."""

    name: str = ""
    certain: bool = False


class RolloutView(msgspec.Struct):
    """The result and the usage of a rollout, without its messages and tokens."""

    rollout_id: str
    group_id: str
    task_id: str
    index: int
    outcome: str
    reward: float | None
    blame: str | None = None
    error: str = ""
    official: float | None = None
    labels: list[LabelView] = []
    metrics: dict[str, float] = {}
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None
    beside: Beside = msgspec.field(default_factory=Beside)


class GroupView(msgspec.Struct):
    """A group without its tools and rollouts."""

    group_id: str
    number: int = 0
    task_id: str = ""
    asked: str = ""
    blame: str | None = None
    prepare_s: float = 0.0
    from_store: bool = False


class LineView(msgspec.Struct):
    """The fields of any line that show how a run goes."""

    event: str
    at: float = 0.0
    schema: str = ""
    run_id: str = ""
    env: str = ""
    model: str = ""
    group: GroupView | None = None
    trajectory: RolloutView | None = None
    group_id: str = ""
    error: str = ""
    blame: str | None = None
    reason: str = ""
    rollout_id: str = ""
    anew: str = ""
    tokens: tuple[int, int] = (0, 0)
    node: str = ""
    host: str = ""
    level: str = ""
    slots: int = 0
    lost: str = ""


decode_head = msgspec.json.Decoder(LineHead).decode


def line_heads(journal: Path) -> Iterator[LineHead]:
    """Yield the head of each line of a journal that can be read."""
    with journal.open("rb") as file:
        for line in lines_of(file):
            try:
                yield decode_head(line)
            except UNREADABLE:
                continue
